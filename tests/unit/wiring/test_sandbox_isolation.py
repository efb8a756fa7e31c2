from __future__ import annotations

import os
from pathlib import Path

import torch

from furlong.config.args_view import Args
from furlong.config.hooks import Hooks
from furlong.config.sections import Config, SessionFlags
from furlong.sandboxes.code_sandbox import ISOLATION
from furlong.tracking.rollout_dump import RolloutDumps
from furlong.wiring.context import RunContext


def test_the_flag_decides_for_this_process_and_for_those_that_inherit_its_variables(monkeypatch):
    monkeypatch.setenv(ISOLATION, "")
    for isolation in ("none", "required"):
        config = Config(session=SessionFlags(sandbox_isolation=isolation))
        RunContext(
            config=config, hooks=Hooks(), args=Args(config), folder=Path(), model_dir=Path(), tokenizer=None,
            context_len=8, vocab_size=8, device="cpu", dtype=torch.float32, dumps=RolloutDumps(None),
        )  # fmt: skip
        assert os.environ[ISOLATION] == isolation
