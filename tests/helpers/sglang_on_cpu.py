"""SGLang itself on a CPU, for tests: where it is, and what its servers are started with.

`make sglang-cpu` installs it beside this environment, whose packages have other versions. Only the servers see it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from furlong.inference.sglang.server_info import ServerInfo
from runs import REPOSITORY

SITE = REPOSITORY / ".sglang-cpu"
STAND_INS = REPOSITORY / "tests" / "real_sglang" / "standins"
OPTIONS: dict[str, Any] = {  # by the names of SGLang's own
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "max_total_tokens": 1 << 15,
    "disable_overlap_schedule": True,
}
FLAGS: dict[str, Any] = {
    "engine": "sglang",
    "sglang_server_start_timeout": 400,
    **{f"sglang_{name}": value for name, value in OPTIONS.items()},
}


def skip_without_it() -> None:
    """Skip a test where there is no SGLang for CPUs, or a GPU that runs what it runs."""
    if torch.cuda.is_available():
        pytest.skip("tests/gpu has runs with SGLang for this machine")
    if not (SITE / ".installed").exists():
        pytest.skip("SGLang for CPUs is not installed: make sglang-cpu")


@contextlib.contextmanager
def visible() -> Iterator[pytest.MonkeyPatch]:
    """Have engines that this process starts find SGLang, and check their weights as those of a server on CUDA."""
    read = ServerInfo.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(SITE)])  # after all that this process has of its own
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, [STAND_INS, SITE, REPOSITORY / "src"])))
        patch.setattr(ServerInfo, "read", staticmethod(lambda answer: read({**answer, "device": "cuda"})))
        yield patch
