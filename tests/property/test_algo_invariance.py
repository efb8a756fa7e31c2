"""Loss, gradient and metrics do not depend on the packing of a step."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.core.algorithms import ALGORITHMS
from furlong.training.packing import Packing, plan
from oracles.cases import flags, near_model, random_batch, run_step

EVERYTHING = {
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "kl_loss_type": "k3",
    "use_unbiased_kl": True,
    "entropy_coef": 0.01,
    "use_tis": True,
    "tis_mode": "clip",
    "tis_clip_low": 0.8,
    "tis_clip": 1.3,
    "tis_veto": 0.6,
    "use_opsm": True,
    "opsm_delta": 0.02,
}
NAMES = st.sampled_from(sorted(ALGORITHMS))
SEEDS = st.integers(0, 10_000)
GROUPS = st.lists(st.integers(1, 4), min_size=1, max_size=4)
QUICK = settings(max_examples=40, deadline=None)


def _same(have, want):
    assert have.loss == pytest.approx(want.loss, rel=1e-9, abs=1e-12)
    for a, b in zip(have.grads, want.grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert set(have.metrics) == set(want.metrics)
    for name, metric in want.metrics.items():
        assert have.metrics[name].value == pytest.approx(metric.value, rel=1e-9, abs=1e-12), name


@st.composite
def _batches(draw):
    seed = draw(SEEDS)
    batch = random_batch(seed, groups=draw(GROUPS), fan_out=draw(st.booleans()), masked=draw(st.sampled_from([0, 0.5])))
    return near_model(batch, noise=draw(st.sampled_from([0.0, 0.3])))


@QUICK
@given(name=NAMES, batch=_batches(), level=st.sampled_from(["token", "sequence", "geometric"]), data=st.data())
def test_any_split_into_micro_batches_and_ranks_gives_the_same_step(name, batch, level, data):
    flag = flags(name, tis_level=level, **EVERYTHING)
    n = len(batch)
    whole = run_step(batch, flag, [np.arange(n)])
    num_ranks = data.draw(st.sampled_from([r for r in (1, 2, 3) if n % r == 0]))
    balance = data.draw(st.sampled_from(["none", "tokens"]))
    max_tokens = data.draw(st.sampled_from([None, 8, 20, 10_000]))
    step = plan(batch.lengths, batch.sample_ids, Packing(max_tokens=max_tokens, balance=balance), num_ranks=num_ranks)[
        0
    ]
    _same(run_step(batch, flag, [rows for rank in step.micro_batches for rows in rank]), whole)


@QUICK
@given(name=NAMES, batch=_batches(), data=st.data())
def test_any_order_of_samples_gives_the_same_step(name, batch, data):
    flag = flags(name, **EVERYTHING)
    order = np.array(data.draw(st.permutations(range(len(batch)))))
    whole = run_step(batch, flag, [np.arange(len(batch))])
    _same(run_step(batch, flag, [order]), whole)
    _same(run_step(batch.select(order), flag, [np.arange(len(batch))]), whole)


@QUICK
@given(name=NAMES, batch=_batches(), chunk_size=st.integers(-1, 40))
def test_any_chunk_size_gives_the_same_step(name, batch, chunk_size):
    flag = flags(name, **EVERYTHING)
    rows = [np.arange(len(batch))]
    _same(run_step(batch, flag, rows, chunk_size=chunk_size), run_step(batch, flag, rows))


@QUICK
@given(name=NAMES, batch=_batches(), content=st.sampled_from([0.0, -50.0, np.nan, np.inf]))
def test_content_of_masked_tokens_does_not_matter(name, batch, content):
    flag = flags(name, **EVERYTHING)
    masked = batch.loss_masks == 0
    columns = {k: np.where(masked, content, v) for k, v in batch.columns.items()}
    rows = [np.arange(len(batch))]
    _same(run_step(dataclasses.replace(batch, columns=columns), flag, rows), run_step(batch, flag, rows))


@QUICK
@given(seed=SEEDS, groups=GROUPS, low=st.floats(0.05, 0.3), high=st.floats(0.05, 0.3))
def test_gspo_equals_ppo_on_responses_of_length_one(seed, groups, low, high):
    batch = near_model(random_batch(seed, groups=groups, max_response=1))
    rows = [np.arange(len(batch))]
    bounds = {"eps_clip": low, "eps_clip_high": high}
    _same(run_step(batch, flags("gspo", **bounds), rows), run_step(batch, flags("grpo", **bounds), rows))


@QUICK
@given(batch=_batches(), name=st.sampled_from(["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"]))
def test_at_ratio_one_every_algorithm_has_reinforces_gradient(batch, name):
    """Compare with the gradient of -sum of w A log pi, with one advantage per response."""
    constant = np.repeat(batch.rewards.astype(np.float64), batch.response_lengths)
    columns = {k: v for k, v in batch.columns.items() if k != "old_log_probs"}
    batch = dataclasses.replace(batch, columns=columns).with_columns(advantages=constant)

    class Reinforce:
        needs_entropy = entropy_grad = needs_logits = False

        def __call__(self, micro, stats):
            return -(stats.log_probs_R * micro.columns["advantages"] * micro.weight_R).sum(), {}

    rows = [np.arange(len(batch))]
    have = run_step(batch, flags(name), rows)
    want = run_step(batch, flags(name), rows, loss_fn=Reinforce())
    for a, b in zip(have.grads, want.grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@QUICK
@given(batch=_batches(), factor=st.floats(0.1, 10))
def test_gradient_is_linear_in_the_advantages(batch, factor):
    scaled = batch.with_columns(advantages=batch.columns["advantages"] * factor)
    rows = [np.arange(len(batch))]
    have, want = run_step(scaled, flags("dapo"), rows), run_step(batch, flags("dapo"), rows)
    for a, b in zip(have.grads, want.grads, strict=True):
        torch.testing.assert_close(a, b * factor, rtol=1e-8, atol=1e-12)
