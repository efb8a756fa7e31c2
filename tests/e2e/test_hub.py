"""A run of a model on the Hub, here a hub on loopback, resumes with the commit that it began with."""

from __future__ import annotations

import json

from furlong.tracking.run_files import read_flags
from loopback_hub import loopback_hub, use_hub
from runs import flags, train, write_model, write_prompts


def test_a_run_resumes_with_the_commit_of_its_start(tmp_path, monkeypatch):
    data, saved = write_prompts(tmp_path / "prompts.jsonl", 8), tmp_path / "saved"
    with loopback_hub() as hub:
        use_hub(monkeypatch, hub, tmp_path / "home")
        first = hub.add("models", "tiny/model", write_model(tmp_path / "first"))
        assert train(flags("tiny/model", data, tmp_path / "run", num_rollout=1, save=saved)) == 1
        record = json.loads((tmp_path / "run/config.json").read_text())
        assert record["hub"] == {"model tiny/model@main": first}
        assert record["config"]["rollout"]["hf_checkpoint"].endswith(f"/snapshots/{first}")
        second = hub.add("models", "tiny/model", write_model(tmp_path / "second", seed=1))
        use_hub(monkeypatch, hub, tmp_path / "another machine")
        resumed = flags("tiny/model", data, tmp_path / "run", num_rollout=2, save=saved, load=saved)
        assert train(resumed) == 2
        assert read_flags(tmp_path / "run")["hf_checkpoint"].endswith(f"/snapshots/{first}")
        assert train(flags("tiny/model", data, tmp_path / "new", num_rollout=1)) == 1
        assert read_flags(tmp_path / "new")["hf_checkpoint"].endswith(f"/snapshots/{second}")
