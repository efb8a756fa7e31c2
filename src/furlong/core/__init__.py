"""What every layer speaks of: samples, batches, metrics, weights, outcomes, algorithms. No process groups, no I/O."""
