"""Models train and generate with the version of transformers that SGLang requires, which is older than the newest."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from runs import REPOSITORY
from sglang_on_cpu import SITE, skip_without_it

pytestmark = pytest.mark.nightly

FILES = ("models/test_recurrent_layers.py", "inference/test_recurrent_states.py", "training/test_routing_replay.py")
FAMILIES = "qwen3_next or qwen3_5 or glm4_moe"  # their modules changed since


def test_recurrent_states_and_routers_are_found():
    skip_without_it()
    words = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "-k", FAMILIES]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "pytest", *words, *(f"tests/unit/{name}" for name in FILES)],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (SITE, REPOSITORY / "src")))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
