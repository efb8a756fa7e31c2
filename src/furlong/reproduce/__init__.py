"""Reproduces the rows of the results page: training runs over several seeds, with held-out accuracy and intervals."""
