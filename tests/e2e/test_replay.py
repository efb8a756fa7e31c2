"""Runs that depend on the order in which requests come back are repeated bit for bit with --replay."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from furlong.errors import ConfigError, RolloutError
from furlong.inference.embedded.engine import EmbeddedEngine
from furlong.tools.run_diff import compare_runs
from runs import flags, train, write_prompts

OVERSAMPLED = {"over_sampling_batch_size": 8}
CASES = {
    "over-sampling": OVERSAMPLED,
    "partial": {**OVERSAMPLED, "partial_rollout": True},
    "partial, ahead": {**OVERSAMPLED, "partial_rollout": True, "async_buffer_size": 1},
    "two ahead, filtered": {
        "async_buffer_size": 2,
        "dynamic_sampling_filter_path": "hooks_zoo.filter_by_index",
    },
}  # fmt: skip


@pytest.fixture
def go(model, tmp_path, monkeypatch):
    """Run with requests that are late by chance; the seed of the chance is the run's name."""
    data = write_prompts(tmp_path / "prompts.jsonl", 40)

    def run(name, **changes):
        late = random.Random(name)
        generate = EmbeddedEngine.generate

        async def slow(self, *args, **kwargs):
            await asyncio.sleep(0.01 * late.random())
            return await generate(self, *args, **kwargs)

        options = {
            "num_rollout": 4, "rollout_batch_size": 3, "n_samples_per_prompt": 2, "rollout_max_response_len": 40,
            "rollout_stop_token_ids": list(range(31, 36)), "debug_determinism": True,
        }  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(EmbeddedEngine, "generate", slow)
            train(flags(model, data, tmp_path / name, **options | changes))
        return tmp_path / name

    return run


@pytest.mark.parametrize("case", CASES)
def test_replay_repeats_a_run_bit_for_bit(go, case):
    settings = CASES[case]
    recorded = go("recorded", **settings)
    other = go("other", **settings)
    replayed = go("replayed", replay=recorded, **settings)
    if "partial" in case:  # what is cut off depends on time: there is something to follow
        assert not compare_runs(recorded, other).is_same
    found = compare_runs(recorded, replayed)
    assert found.is_same, found
    if "partial" in case:  # else it does not matter where a response was cut off: it starts anew
        assert (recorded / "order.jsonl").read_bytes() == (replayed / "order.jsonl").read_bytes()


def test_fewer_rollouts_may_be_replayed_and_more_are_an_error(go):
    recorded = go("recorded", num_rollout=2, **CASES["partial"])
    go("fewer", num_rollout=1, replay=recorded, **CASES["partial"])
    with pytest.raises(RolloutError, match=r"--replay .* rollout 2 \(step 3\): no groups were issued"):
        go("more", num_rollout=3, replay=recorded, **CASES["partial"])


def test_record_of_another_run_is_not_followed(go):
    recorded = go("recorded", num_rollout=2, **OVERSAMPLED)
    with pytest.raises(ConfigError, match=r"--replay .*\(--lr was 0.01, is 0.5\)"):
        go("a", num_rollout=2, replay=recorded, lr=0.5, **OVERSAMPLED)
    lines = [json.loads(line) for line in (recorded / "order.jsonl").read_text().splitlines()]
    assert lines[0]["event"] == "issued"
    lines[0]["groups"][0] = 77
    (recorded / "order.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(RolloutError, match=r"groups \[77, 1, .* were issued .* \[0, 1, "):
        go("b", num_rollout=2, replay=recorded, **OVERSAMPLED)


def test_replay_of_what_is_not_recorded_is_refused(go, tmp_path):
    with pytest.raises(ConfigError, match=r"no order\.jsonl"):
        go("a", replay=tmp_path)
    (tmp_path / "order.jsonl").touch()
    with pytest.raises(ConfigError, match="--replay with --pause-mode hold"):
        go("b", replay=tmp_path, async_buffer_size=1, pause_mode="hold")


def test_deterministic_mode_trains_with_one_thread(model, tmp_path):
    data = write_prompts(tmp_path / "prompts.jsonl", 8)
    argv = flags(model, data, tmp_path / "run", num_rollout=1, num_threads=None, deterministic_mode=True)
    assert train(argv) == 1
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["config"]["cluster"]["num_threads"] == 1
    assert "--deterministic-mode" in config["sources"]["num_threads"]
