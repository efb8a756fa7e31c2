"""Files of runs and checkpoints: manifests, tensors, samples, atomic writes."""
