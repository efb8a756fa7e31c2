"""Where metrics go: console, metrics.jsonl, TensorBoard, Weights & Biases; the event log, rollout dumps."""
