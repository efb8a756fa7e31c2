"""The training loop, evaluation and checkpoints. Depends on interfaces only."""
