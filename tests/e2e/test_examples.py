"""The examples run as they stand, small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from furlong.cli import main
from furlong.data.audit import audit
from furlong.tracking.rollout_dump import load_samples

RUN = Path(__file__).parents[2] / "examples/arithmetic/run.sh"
SMALL = ["--num-rollout", "1", "--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--eval-interval", "1"]


# Stands in for the command `furlong`: it writes the words down that the script gives it.
FURLONG = """#!/usr/bin/env bash
printf '%s\\0' "$@" > "$WORDS"
"""


def run_script(variant: str, folder: Path, *flags: str, before: Path) -> None:
    """Run the script with the commands of the folder `before`, and this Python's after them."""
    path = f"{before}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"OUT": str(folder), "PATH": path, "WORDS": str(before / "words")}
    done = subprocess.run(
        ["bash", str(RUN), variant, *SMALL, *flags], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def last_record(folder: Path) -> dict[str, float]:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


def run_example(variant: str, folder: Path, *flags: str) -> dict[str, float]:
    """Run one variant for one rollout, the training in this process; returns its last record."""
    before = folder.parent / "commands"
    before.mkdir()
    (before / "furlong").write_text(FURLONG)
    (before / "furlong").chmod(0o755)
    run_script(variant, folder, *flags, before=before)
    assert main((before / "words").read_text().rstrip("\0").split("\0")) == 0
    return last_record(folder)


def test_math_example_trains_and_evaluates(tmp_path):
    run_script("math", tmp_path / "run", before=tmp_path)
    last = last_record(tmp_path / "run")
    assert last["step"] == 1
    assert last["train/grad_norm"] > 0
    assert 0.2 < last["eval/held_out"] < 0.6  # the model as shipped is right on about a third
    assert audit(tmp_path / "run/ledger.jsonl", finished=True).ok


def test_reward_example_counts_every_answer_under_one_kind(tmp_path):
    last = run_example("reward", tmp_path / "run")
    kinds = {name: share for name, share in last.items() if name.startswith("rollout/error_cat/")}
    assert sum(kinds.values()) == pytest.approx(1.0)
    assert kinds["rollout/error_cat/forgot_carry"] > 0.2
    # digits give credit, so the score that is trained on is above the share of right answers
    assert last["rollout/raw_reward"] > kinds["rollout/error_cat/right"]


def test_tool_use_example_trains_on_what_the_model_wrote_only(tmp_path):
    dump = str(tmp_path / "{rollout_id}.safetensors")
    last = run_example("tool_use", tmp_path / "run", "--save-debug-rollout-data", dump)
    assert last["train/train_rollout_logprob_abs_diff"] < 1e-4
    samples = [s for group in load_samples(dump.format(rollout_id=0)).groups for s in group.samples]
    twice = [s for s in samples if s.metadata["round_number"] == 2]
    assert twice
    for sample in twice:
        a, b = (int(number) for number in str(sample.prompt).rstrip("=").split("+"))
        said = f"{a % 10}+{b % 10}={a % 10 + b % 10} {sample.prompt}"
        assert said in sample.response
        assert sample.loss_mask is not None
        assert sample.loss_mask.count(0) == len(said)  # the tokenizer has one token per character
        assert sample.rollout_log_probs is not None
        masked = [p for p, kept in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if not kept]
        assert set(masked) == {0.0}
