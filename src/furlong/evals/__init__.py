"""Evaluation of models and endpoints outside of a run: `furlong eval`."""
