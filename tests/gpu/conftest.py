"""Settings for all GPU tests: cuBLAS reads this variable on first use; only `--deterministic-mode` needs it."""

from __future__ import annotations

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
