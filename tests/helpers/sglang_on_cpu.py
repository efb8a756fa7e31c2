"""SGLang on a CPU for tests: its location and the options of its servers.

`make sglang-cpu` installs it outside this environment, whose package versions differ. Only the servers import it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from forked_sglang import fork_servers
from furlong.inference.sglang.server import ServerInfo
from runs import REPOSITORY

SITE = REPOSITORY / ".sglang-cpu"
STAND_INS = REPOSITORY / "tests" / "real_sglang" / "standins"
OPTIONS: dict[str, Any] = {  # under SGLang's names
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "max_total_tokens": 1 << 15,
    "disable_overlap_schedule": True,
    "sleep_on_idle": True,  # schedulers poll otherwise, which takes a core each
}
FLAGS: dict[str, Any] = {
    "engine": "sglang",
    "sglang_server_start_timeout": 400,
    **{f"sglang_{name}": value for name, value in OPTIONS.items()},
}


def skip_without_it() -> None:
    """Skip a test if SGLang for CPUs is not installed, or if there is a GPU, where tests/gpu covers it."""
    if torch.cuda.is_available():
        pytest.skip("tests/gpu has runs with SGLang for this machine")
    if not (SITE / ".installed").exists():
        pytest.skip("SGLang for CPUs is not installed: make sglang-cpu")


@contextlib.contextmanager
def visible() -> Iterator[pytest.MonkeyPatch]:
    """Make SGLang importable in engines of this process, and verify their weights like those of a CUDA server."""
    read = ServerInfo.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(SITE)])  # after the packages of this process
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, [STAND_INS, SITE, REPOSITORY / "src"])))
        patch.setenv("OMP_NUM_THREADS", "1")  # of servers, of which several compute at a time
        patch.setattr(ServerInfo, "read", staticmethod(lambda answer, *rest: read({**answer, "device": "cuda"}, *rest)))
        fork_servers(patch)
        yield patch
