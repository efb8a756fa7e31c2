"""Generalized advantage estimates and the value loss against float64 loops written from the papers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.algo.advantage import token_advantages
from furlong.algo.passes import needed_passes
from furlong.algo.policy_loss import PolicyInputs, PolicyLoss, masked_weight_loss
from furlong.algo.reduce import loss_weights
from furlong.algo.value_loss import ValueLoss, explained_variance
from furlong.config.sections import AlgoFlags
from furlong.core.batch import pack_micro_batch
from furlong.core.metric import merge
from furlong.errors import DataError, TrainerError
from furlong.interfaces import TokenStats
from furlong.training.packing import Packing, split_batch
from oracles.cases import flags, random_batch

PPO = {"gamma": 0.97, "lambd": 0.9, "kl_coef": 0.05, "kl_loss_type": "k1"}


def gae_loop(rewards, values, mask, kl, *, gamma=0.97, lambd=0.9, kl_coef=0.05, by_turn=False, earned=None):
    """One sample: from the last trained token to the first, skipping the others.

    by_turn: gamma and lambda count between turns only; earned: rewards of turns, each at a token.
    """
    advantages, returns = np.zeros(len(mask)), np.zeros(len(mask))
    trained = [t for t in range(len(mask)) if mask[t]]
    next_value = next_advantage = 0.0
    for t in reversed(trained):
        reward = -kl_coef * kl[t] + (rewards if t == trained[-1] else 0.0) + (0.0 if earned is None else earned[t])
        is_step = not by_turn or t + 1 == len(mask) or not mask[t + 1]
        discount, decay = (gamma, lambd) if is_step else (1.0, 1.0)
        delta = reward + discount * next_value - values[t]
        advantages[t] = next_advantage = delta + discount * decay * next_advantage
        returns[t] = advantages[t] + values[t]
        next_value = values[t]
    return advantages, returns


def estimate(samples, **more):
    """Advantages and returns of samples (reward, values, mask, kl), concatenated."""
    rewards, values, masks, kls = zip(*samples, strict=True)
    lengths = torch.tensor([len(mask) for mask in masks])
    flat = [torch.tensor(np.concatenate(column), dtype=torch.float64) for column in (values, masks, kls)]
    earned = more.pop("earned", None)
    advantages, returns = token_advantages(
        flags(more.pop("name", "ppo"), **PPO, **more),
        rewards_S=torch.tensor(rewards, dtype=torch.float64),
        mask_R=flat[1],
        seq_of_R=torch.repeat_interleave(torch.arange(len(samples)), lengths),
        old_log_probs_R=flat[2],
        ref_log_probs_R=torch.zeros_like(flat[2]),
        values_R=flat[0],
        turn_rewards_R=None if earned is None else torch.tensor(np.concatenate(earned), dtype=torch.float64),
    )
    return advantages.split(lengths.tolist()), returns.split(lengths.tolist())


numbers = st.floats(-3, 3, allow_nan=False, width=32)


@st.composite
def one_sample(draw):
    size = draw(st.integers(1, 40))
    columns = [draw(st.lists(kind, min_size=size, max_size=size)) for kind in (numbers, st.integers(0, 1), numbers)]
    return draw(numbers), *(np.array(column, dtype=np.float64) for column in columns)


@settings(max_examples=60, deadline=None)
@given(st.lists(one_sample(), min_size=1, max_size=6), st.randoms())
def test_the_estimate_is_the_loop_over_trained_tokens_in_any_packing_and_order(samples, random):
    order = list(range(len(samples)))
    random.shuffle(order)
    cut = random.randrange(len(order) + 1)
    for part in (order[:cut], order[cut:]):  # what two ranks, or two micro-batches, would compute
        if not part:
            continue
        advantages, returns = estimate([samples[i] for i in part])
        for place, i in enumerate(part):
            reward, values, mask, kl = samples[i]
            loop = gae_loop(reward, values, mask, kl)
            for have, want in zip((advantages[place], returns[place]), loop, strict=True):
                np.testing.assert_allclose(have.numpy(), want, rtol=1e-12, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.lists(one_sample(), min_size=1, max_size=4))
def test_policy_and_critic_may_have_lambdas_of_their_own_and_the_policys_grows_with_the_length(samples):
    advantages, returns = estimate(samples, lambd_length_alpha=0.4, critic_lambd=1.0)
    for place, (reward, values, mask, kl) in enumerate(samples):
        policy = max(0.0, 1 - 1 / (0.4 * max(mask.sum(), 1)))
        want, _ = gae_loop(reward, values, mask, kl, lambd=policy)
        _, targets = gae_loop(reward, values, mask, kl, lambd=1.0)
        np.testing.assert_allclose(advantages[place].numpy(), want, rtol=1e-11, atol=1e-11)
        np.testing.assert_allclose(returns[place].numpy(), targets, rtol=1e-11, atol=1e-11)


@settings(max_examples=40, deadline=None)
@given(st.lists(one_sample(), min_size=1, max_size=5), st.randoms())
def test_by_turn_the_estimate_is_the_loop_over_turns_in_any_packing_and_order(samples, random):
    random.shuffle(samples)
    rng = np.random.default_rng(len(samples))
    earned = [rng.normal(size=len(mask)) * mask for _, _, mask, _ in samples]
    cut = random.randrange(len(samples) + 1)
    for rows in (range(cut), range(cut, len(samples))):
        if not rows:
            continue
        part, paid = [samples[i] for i in rows], [earned[i] for i in rows]
        have = estimate(part, return_level="turn", earned=paid)
        for place, (sample, rewards) in enumerate(zip(part, paid, strict=True)):
            for got, want in zip(have, gae_loop(*sample, by_turn=True, earned=rewards), strict=True):
                np.testing.assert_allclose(got[place].numpy(), want, rtol=1e-11, atol=1e-11)


def test_the_advantage_at_the_start_of_a_turn_is_that_of_steps_that_are_turns():
    # three turns of 2, 3 and 1 tokens with tool output in between; values matter where turns begin only
    mask = np.array([1, 1, 0, 1, 1, 1, 0, 0, 1.0])
    values, earned = np.arange(9) / 7, np.array([0, 0.5, 0, 0, 0, -0.25, 0, 0, 0])
    (have,), _ = estimate([(1.0, values, mask, np.zeros(9))], return_level="turn", earned=[earned])
    v0, v1, v2 = values[[0, 3, 8]]
    a2 = 1.0 - v2
    a1 = -0.25 + 0.97 * v2 - v1 + 0.97 * 0.9 * a2
    a0 = 0.5 + 0.97 * v1 - v0 + 0.97 * 0.9 * a1
    np.testing.assert_allclose(have[[0, 3, 8]].numpy(), [a0, a1, a2], rtol=1e-12)


def test_by_turn_a_length_adaptive_lambda_stays_one_of_tokens_and_reinforce_has_returns_of_turns():
    sample = (1.0, np.array([0.3, 0.1, 0.5, 0.2]), np.array([1, 1, 0, 1.0]), np.zeros(4))
    (have,), _ = estimate([sample], return_level="turn", lambd_length_alpha=0.5)
    lambd = 1 - 1 / (0.5 * 3)
    a3 = 1.0 - 0.2
    a1 = 0.97 * 0.2 - 0.1 + 0.97 * lambd * a3
    a0 = 0.1 - 0.3 + lambd * a1
    np.testing.assert_allclose(have[[0, 1, 3]].numpy(), [a0, a1, a3], rtol=1e-12)
    (returns,), _ = estimate([sample], name="reinforce_plus_plus", return_level="turn")
    assert returns.tolist() == [0.97, 0.97, 1.0, 1.0]


def test_what_masked_tokens_contain_does_not_matter():
    reward, values, mask, kl = 1.0, np.array([0.1, np.nan, 0.3]), np.array([1.0, 0, 1]), np.array([0.2, np.nan, 0.1])
    (with_tool,), (returns,) = estimate([(reward, values, mask, kl)])
    kept = mask > 0
    (alone,), _ = estimate([(reward, values[kept], mask[kept], kl[kept])])
    assert torch.equal(with_tool[torch.tensor(kept)], alone)  # no discount over the tool's tokens
    assert with_tool[1] == returns[1] == 0


def test_whitening_changes_advantages_but_not_the_targets_of_the_critic():
    sample = (1.0, np.array([0.3, 0.1, 0.5]), np.ones(3), np.zeros(3))
    (plain,), (targets,) = estimate([sample])
    (white,), (same,) = estimate([sample], normalize_advantages=True)
    assert torch.equal(targets, same)
    assert white.mean().item() == pytest.approx(0.0, abs=1e-9)
    assert not torch.equal(plain, white)


def test_advantages_without_values_are_refused():
    with pytest.raises(DataError, match="critic's values"):
        token_advantages(flags("ppo"), rewards_S=torch.ones(1), mask_R=torch.ones(1), seq_of_R=torch.zeros(1).long())


def test_the_row_runs_the_critic_and_the_log_probs_that_its_kl_needs():
    assert [each.column for each in needed_passes(flags("ppo"), 1)] == ["values"]
    passes = needed_passes(flags("ppo", kl_coef=0.1), 1)
    assert [(each.role, each.column) for each in passes] == [
        ("ref", "ref_log_probs"), ("actor", "old_log_probs"), ("critic", "values")
    ]  # fmt: skip


def test_tokens_far_from_the_policy_that_sampled_them_are_masked_and_others_weigh_by_their_ratio():
    ratio = torch.tensor([0.1, 0.3, 1.0, 3.9, 4.1], dtype=torch.float64)
    live = ratio.log().requires_grad_()
    advantages = torch.tensor([1.0, -2.0, 1.0, 0.5, 1.0], dtype=torch.float64)
    terms = masked_weight_loss(PolicyInputs(live, live, advantages, eps_low=0.8, eps_high=3.0, eps_dual=None))
    terms.loss_R.sum().backward()
    kept = torch.tensor([0.0, 1, 1, 1, 0], dtype=torch.float64)
    torch.testing.assert_close(live.grad, -ratio * advantages * kept)
    assert terms.clipped_R.tolist() == (1 - kept).tolist()


def test_positive_samples_add_their_mean_negative_log_likelihood(batch):
    batch = replace(batch, raw_rewards=np.array([1, 0, 1, -1, 0, 0, 2, 0, 0], np.float32))
    log_probs = torch.tensor(batch.columns["old_log_probs"])
    loss = {}
    for coef in (0.0, 0.1):
        algo = AlgoFlags(positive_nll_coef=coef)
        (part,) = split_batch(batch, algo=algo, packing=Packing(), num_ranks=1)
        micros = [
            pack_micro_batch(part.batch, rows, part.batch.columns["loss_weights"])
            for rows in ([0, 3], range(4, 9), [1, 2])
        ]
        index = [torch.from_numpy(batch.response_positions(micro.rows)) for micro in micros]
        parts = [PolicyLoss(algo)(m, TokenStats(log_probs[i].float())) for m, i in zip(micros, index, strict=True)]
        loss[coef] = sum(float(each) for each, _ in parts)
    kept = (batch.loss_masks > 0) & (np.repeat(batch.raw_rewards, batch.response_lengths) > 0)
    assert loss[0.1] - loss[0.0] == pytest.approx(-0.1 * log_probs.numpy()[kept].mean(), rel=1e-5)


def value_step(batch, values, splits, clip=0.2):
    """Loss, gradient w.r.t. the values and metrics of one optimizer step over micro-batches."""
    weights = loss_weights(batch, [np.arange(len(batch))], mode="token", constant_len=None)
    live = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    loss, parts = torch.zeros((), dtype=torch.float64), []
    for rows in splits:
        micro = pack_micro_batch(batch, rows, weights)
        index = torch.from_numpy(batch.response_positions(np.asarray(rows)))
        part, metrics = ValueLoss(clip)(micro, TokenStats(live.new_empty(0), values_R=live[index]))
        loss, parts = loss + part, [*parts, metrics]
    loss.backward()
    return loss.item(), live.grad, merge(parts)


@pytest.fixture
def batch():
    drawn = random_batch(3)
    rng = np.random.default_rng(0)
    old = rng.normal(size=len(drawn.loss_masks)).astype(np.float32)
    return drawn.with_columns(values=old, returns=old + rng.normal(size=len(old)).astype(np.float32))


def test_the_value_loss_is_that_of_slime_over_the_tokens_of_the_whole_step(batch):
    rng = np.random.default_rng(1)
    old, returns = (batch.columns[name].astype(np.float64) for name in ("values", "returns"))
    live = old + 0.3 * rng.normal(size=len(old))
    clipped = old + np.clip(live - old, -0.2, 0.2)
    terms = np.maximum((clipped - returns) ** 2, (live - returns) ** 2)[batch.loss_masks > 0]
    whole = value_step(batch, live, [np.arange(len(batch))])
    assert whole[0] == pytest.approx(terms.mean(), rel=1e-6)
    assert whole[2]["value_loss"].value == pytest.approx(whole[0], rel=1e-6)
    moved = np.abs(live - old)[batch.loss_masks > 0] > 0.2
    assert whole[2]["value_clipfrac"].value == pytest.approx(moved.mean(), rel=1e-5)
    split = value_step(batch, live, [np.array([4, 1]), np.array([0, 2, 3, 8]), np.array([5, 6, 7])])
    assert split[0] == pytest.approx(whole[0], rel=1e-6)
    torch.testing.assert_close(split[1], whole[1], rtol=1e-6, atol=1e-9)
    assert not whole[1][torch.from_numpy(batch.loss_masks == 0)].any()


def test_the_gradient_of_the_value_loss_is_its_derivative(batch):
    rng = np.random.default_rng(2)
    live = batch.columns["values"].astype(np.float64) + 0.3 * rng.normal(size=len(batch.loss_masks))
    whole = [np.arange(len(batch))]
    _, gradient, _ = value_step(batch, live, whole)
    for index in rng.choice(len(live), 8, replace=False):
        nudge = np.zeros_like(live)
        nudge[index] = 1e-5
        slope = (value_step(batch, live + nudge, whole)[0] - value_step(batch, live - nudge, whole)[0]) / 2e-5
        assert gradient[index].item() == pytest.approx(slope, abs=1e-6)


def test_a_policy_cannot_be_trained_by_the_value_loss(batch):
    with pytest.raises(TrainerError, match="statistics of a policy"):
        ValueLoss(0.2)(pack_micro_batch(batch, [0]), TokenStats(torch.zeros(1)))


def test_the_explained_variance_is_of_trained_tokens_and_adds_up_over_ranks():
    returns, mask = torch.tensor([1.0, 2.0, 3.0, 9.0]), torch.tensor([1, 1, 1, 0])
    assert explained_variance(returns + 5, returns, mask) == pytest.approx(1.0)
    assert explained_variance(torch.zeros(4), returns, mask) == pytest.approx(0.0)
    assert math.isnan(explained_variance(returns, torch.ones(4), mask))
    assert math.isnan(explained_variance(returns, torch.tensor([1.0, 1.0000001, 1.0, 9.0]), mask))  # rounding
    assert explained_variance(torch.zeros(4), returns, mask, reduce=lambda part: 2 * part) == pytest.approx(0.0)
