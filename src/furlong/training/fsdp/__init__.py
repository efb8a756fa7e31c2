"""Training with FSDP2."""
