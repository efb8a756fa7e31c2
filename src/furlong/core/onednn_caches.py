"""Limits the memory of oneDNN's caches of matrix products on a CPU."""

from __future__ import annotations

import os

# oneDNN's cache and that of PyTorch's layer above it. Each number of rows is another product with an entry of its own,
# and by default each cache has 1,024 entries: 2,000 sizes took 2.1 GB, with this limit 0.3 GB.
VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
MAX_PRODUCTS = 128  # enough for the products of eight micro-batches


def bound_onednn_caches() -> None:
    """Limit the number of products that oneDNN keeps. Call it before the first one.

    Environment variables that are already set take precedence.
    """
    for name in VARIABLES:
        os.environ.setdefault(name, str(MAX_PRODUCTS))
