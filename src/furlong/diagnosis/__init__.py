"""Diagnoses of runs: checks before the start, monitors while running, and post-mortem."""
