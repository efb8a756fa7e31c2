"""Metric sinks: console, metrics.jsonl, TensorBoard, Weights & Biases; the event log, rollout dumps."""
