"""Explains why a run failed, from an exception and from the run's folder."""
