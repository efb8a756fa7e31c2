"""Runs with one thread."""

from __future__ import annotations

import json

from runs import flags, train, write_prompts


def test_deterministic_mode_trains_with_one_thread(model, tmp_path):
    data = write_prompts(tmp_path / "prompts.jsonl", 8)
    argv = flags(model, data, tmp_path / "run", num_rollout=1, num_threads=None, deterministic_mode=True)
    assert train(argv) == 1
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["config"]["cluster"]["num_threads"] == 1
    assert "--deterministic-mode" in config["sources"]["num_threads"]
