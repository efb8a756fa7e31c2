"""Rollouts that do not wait for the slowest: what is cut off is accounted for, continued or started anew."""

from __future__ import annotations

import numpy as np
import pytest

from furlong.data.audit import audit
from furlong.files.batch_file import load_batch
from furlong.files.sample_file import load_samples
from runs import flags, is_finite, ledger_events, rows, train, write_prompts

NUM = 8


@pytest.fixture
def go(model, tmp_path):
    """Responses end at a digit, so their lengths differ a lot; more groups are started than a rollout takes."""

    def run(**changes):
        data = write_prompts(tmp_path / "prompts.jsonl", 40)
        options = {
            "num_rollout": NUM, "rollout_batch_size": 3, "n_samples_per_prompt": 2, "over_sampling_batch_size": 9,
            "rollout_max_response_len": 60, "rollout_stop_token_ids": list(range(31, 36)),
            "save_debug_train_data": tmp_path / "batch_{rollout_id}",
            "save_debug_rollout_data": tmp_path / "dump_{rollout_id}",
        }  # fmt: skip
        argv = flags(model, data, tmp_path / "run", **options | changes)
        assert train(argv) == NUM
        found = rows(tmp_path / "run")
        assert all(is_finite(row) for row in found)
        result = audit(tmp_path / "run" / "ledger.jsonl", finished=True)
        assert result.ok, result.summary()
        assert result.num_trained == NUM * 3
        return found, [load_batch(tmp_path / f"batch_{i}") for i in range(NUM)]

    return run


def versions_of(batch):
    starts = batch.response_starts
    column = batch.columns["token_versions"]
    return [column[starts[i] : starts[i + 1]] for i in range(len(batch))]


def test_groups_that_are_cut_off_start_anew(go, tmp_path):
    found, batches = go()
    assert any(e["e"] == "returned" for e in ledger_events(tmp_path / "run"))
    for i, batch in enumerate(batches):
        assert set(batch.columns["token_versions"].tolist()) == {i}
    assert {row["rollout/staleness/max"] for row in found} == {0.0}


def test_groups_that_are_cut_off_are_continued_with_newer_weights(go, tmp_path):
    found, batches = go(partial_rollout=True)
    mixed = [v for batch in batches for v in versions_of(batch) if len(set(v.tolist())) > 1]
    assert mixed, "no response was continued"
    assert all((np.diff(v) >= 0).all() for v in mixed)
    assert max(row["rollout/staleness/max"] for row in found) > 0
    assert all(batch.loss_masks.all() for batch in batches)
    for i in range(NUM):
        for sample in (s for g in load_samples(tmp_path / f"dump_{i}").groups for s in g.samples):
            body = sample.tokens[-sample.response_length :]
            assert not set(body[:-1]) & set(range(31, 36)), "a response that had ended was continued"
            began = min(sample.token_versions)
            assert sample.metadata.get("start_rollout_id", i) == began, "not the rollout that began the response"


def test_tokens_of_earlier_weights_can_be_left_out_of_the_loss(go):
    _, batches = go(partial_rollout=True, mask_offpolicy_in_partial_rollout=True)
    for i, batch in enumerate(batches):
        old = batch.columns["token_versions"] < i
        assert not batch.loss_masks[old].any()
        assert batch.loss_masks[~old].all()


@pytest.mark.parametrize(
    "changes", [{"async_buffer_size": 1}, {"async_buffer_size": 2, "pause_mode": "abort"}], ids=str
)
def test_partial_rollouts_during_training(changes, go):
    go(partial_rollout=True, **changes)


def test_partial_rollouts_are_resumed_with_their_tokens(model, tmp_path):
    data = write_prompts(tmp_path / "prompts.jsonl", 40)

    def argv(num_rollout, *more):
        return flags(
            model, data, tmp_path / "run", *more, num_rollout=num_rollout, rollout_batch_size=3,
            n_samples_per_prompt=2, over_sampling_batch_size=9, rollout_max_response_len=60, partial_rollout=True,
            rollout_stop_token_ids=list(range(31, 36)), save=tmp_path / "save", save_interval=1,
            save_debug_train_data=tmp_path / "batch_{rollout_id}",
        )  # fmt: skip

    for num_rollout in range(1, 7):
        assert train(argv(num_rollout, "--load", tmp_path / "save")) == num_rollout
    result = audit(tmp_path / "run" / "ledger.jsonl", finished=True)
    assert result.ok, result.summary()
    assert result.num_trained == 18
    mixed = [v for i in range(6) for v in versions_of(load_batch(tmp_path / f"batch_{i}")) if len(set(v.tolist())) > 1]
    assert mixed, "no response was continued over a restart"
