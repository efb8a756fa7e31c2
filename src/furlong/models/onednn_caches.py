"""Limits the memory of oneDNN's caches of matmuls on a CPU."""

from __future__ import annotations

import os

# oneDNN's cache and that of PyTorch's layer above it. Each number of rows needs another entry, and
# by default each cache has 1,024 entries: 2,000 sizes of one weight took 2.1 GB, and take 0.3 GB with this limit.
VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
MAX_PRODUCTS = 128  # enough for the matmuls of eight micro-batches


def bound_onednn_caches() -> None:
    """Limit the number of matmuls that oneDNN caches. Call this before the first matmul.

    Environment variables that are already set take precedence.
    """
    for name in VARIABLES:
        os.environ.setdefault(name, str(MAX_PRODUCTS))
