"""Pure tensor functions: log-probs, advantages, losses, corrections, reductions.

Per-token in, per-token out; only `reduce` sums, with global denominators. No process groups: the sum over ranks that
whitening needs is passed in as `reduce`.
"""
