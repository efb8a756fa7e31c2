"""Trainer checkpoints and the file formats they are read from and written to."""
