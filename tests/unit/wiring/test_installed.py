"""What a run starts its engines with is looked for before the model is loaded."""

from __future__ import annotations

import importlib.util

import pytest

from furlong.config.command_line import examine, parse
from furlong.diagnosis.preflight.context import PreflightContext
from furlong.diagnosis.preflight.machine_checks import tracker_packages
from furlong.errors import ConfigError
from furlong.inference.supervisor.launch import check_startable
from furlong.wiring import build
from runs import flags, write_model, write_prompts


@pytest.mark.parametrize(
    ("missing", "words", "says"),
    [
        ("sglang", ["--engine", "sglang"], r"SGLang is not installed; pip install 'furlong-rl\[sglang\]'"),
        (
            "sglang_router",
            ["--sglang-router-strategy", "cache_aware"],
            "--sglang-router-strategy cache_aware, but sglang-router is not installed; pip install sglang-router, or",
        ),
    ],
)
def test_a_missing_package_is_named(monkeypatch, missing, words, says):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == missing else find(name, *more))
    config = parse(["--rollout-num-gpus", "1", *words]).config
    with pytest.raises(ConfigError, match=says):
        check_startable(config, "cuda")


def test_a_tracker_without_its_package_is_reported_before_the_start(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    context = PreflightContext(parse(["--use-wandb", "--use-mlflow"]).config)
    found = [(each.finding.split()[0], each.remedy) for each in tracker_packages(context)]
    install = "pip install 'furlong-rl[{}]'"
    assert found == [("--use-wandb", install.format("wandb")), ("--use-mlflow", install.format("mlflow"))]


def test_a_missing_package_is_reported_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "build_trainer", lambda *_: pytest.fail("the model was loaded"))
    model, prompts = write_model(tmp_path / "m"), write_prompts(tmp_path / "p.jsonl")
    words = flags(model, prompts, tmp_path / "run", rollout_num_gpus=1, engine="sglang")
    with pytest.raises(ConfigError, match="--engine sglang"):
        build.build(examine(words)[0], tmp_path / "run")
