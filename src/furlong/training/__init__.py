"""Training: the round that every backend shares, and the backends."""
