"""What a run starts its engines with is looked for before anything is built."""

from __future__ import annotations

import importlib.util

import pytest

from furlong import build
from furlong.config.flags import examine
from furlong.errors import ConfigError
from runs import flags, write_model, write_prompts


@pytest.mark.parametrize(
    ("missing", "changes", "says"),
    [
        ("sglang", {"engine": "sglang"}, r"SGLang is not installed; pip install 'furlong\[sglang\]'"),
        (
            "sglang_router",
            {"sglang_router_strategy": "cache_aware"},
            "--sglang-router-strategy cache_aware, but sglang-router is not installed; pip install sglang-router, or",
        ),
    ],
)
def test_a_missing_package_is_told_before_the_model_is_loaded(tmp_path, monkeypatch, missing, changes, says):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == missing else find(name, *more))
    monkeypatch.setattr(build, "build_trainer", lambda *_: pytest.fail("a trainer was built"))
    model, prompts = write_model(tmp_path / "m"), write_prompts(tmp_path / "p.jsonl")
    words = flags(model, prompts, tmp_path / "run", rollout_num_gpus=1, **changes)
    with pytest.raises(ConfigError, match=says):
        build.build(examine(words)[0], tmp_path / "run")
