"""Types shared by all layers: samples, batches, metrics, weights, outcomes, algorithms. No process groups, no I/O."""
