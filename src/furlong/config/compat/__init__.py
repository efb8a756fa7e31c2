"""Compatibility with slime and Miles, as data."""
