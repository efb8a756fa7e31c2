"""Settings for all GPU tests: cuBLAS reads this variable on first use; only `--deterministic-mode` needs it.

References are computed on the CPU. Workers of pytest-xdist that each have a thread for every core wait for one another:
on 32 cores, four workers took 50 s with 8 threads each, and had not ended after 229 s with 32.
"""

from __future__ import annotations

import os

import torch

MAX_THREADS = 8

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
if torch.get_num_threads() > MAX_THREADS:
    torch.set_num_threads(MAX_THREADS)
