"""The memory of oneDNN's caches is bounded."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

MANY_PRODUCTS = """
import psutil, torch
from furlong.models.onednn_caches import bound_onednn_caches
bound_onednn_caches()
torch.set_num_threads(1)
weight, used = torch.randn(256, 128), []
for rows in range(8, 1600):
    torch.ops.mkldnn._linear_pointwise(torch.randn(rows, 128), weight, None, "none", [], "")
    if rows in (420, 1599):
        used.append(psutil.Process().memory_info().rss)
print((used[1] - used[0]) >> 20)
"""


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="oneDNN is used on x86")
def test_matrix_products_of_ever_new_sizes_do_not_take_ever_more_memory():
    code = subprocess.run(
        [sys.executable, "-c", MANY_PRODUCTS], capture_output=True, text=True, check=True, timeout=100
    )
    assert int(code.stdout) < 300  # MiB; 1,000 without the limit
