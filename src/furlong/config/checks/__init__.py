"""Validation of a configuration before anything starts."""
