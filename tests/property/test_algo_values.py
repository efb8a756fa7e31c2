from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.algo.advantage import discounted_returns, normalize_rewards, overlong_penalty, whiten
from furlong.algo.log_ratio import importance_weights, kl_estimate
from oracles.cases import flags
from oracles.papers import Response, group_advantage

QUICK = settings(max_examples=60, deadline=None)
NEAR = st.tuples(st.floats(-20, 0), st.floats(-2e-3, 2e-3)).map(lambda pair: (pair[0], pair[0] + pair[1]))
LOG_PROBS = st.lists(st.tuples(st.floats(-20, 0), st.floats(-20, 0)), min_size=1, max_size=20)
SCORED = st.lists(st.tuples(st.integers(0, 4), st.floats(-100, 100, width=32)), min_size=1, max_size=30)


@QUICK
@given(LOG_PROBS | st.lists(NEAR, min_size=1, max_size=20), st.sampled_from([torch.float32, torch.float64]))
def test_k3_is_never_negative_and_zero_iff_equal(pairs, dtype):
    live, ref = torch.tensor(pairs, dtype=dtype).T
    k3 = kl_estimate(live, ref, "k3")
    assert (k3 >= 0).all()
    apart = (live - ref).abs() > 1e-15  # the square of a smaller value underflows in float32
    assert (k3[apart] > 0).all()
    assert (kl_estimate(live, live, "k3") == 0).all()


@QUICK
@given(SCORED, st.sampled_from(["group_mean_std", "group_mean", "leave_one_out"]))
def test_advantages_sum_to_zero_in_each_group_of_any_size(scored, how):
    groups, rewards = np.array([g for g, _ in scored]), np.array([r for _, r in scored])
    have = normalize_rewards(rewards, groups, baseline=how)
    for g in np.unique(groups):
        of_group = have[groups == g].astype(np.float64)
        assert abs(of_group.sum()) <= 1e-5 * max(1.0, np.abs(of_group).sum())


@QUICK
@given(SCORED, st.sampled_from(["group_mean_std", "group_mean", "leave_one_out"]), st.randoms())
def test_advantages_equal_the_slow_loop_in_any_order(scored, how, random):
    random.shuffle(scored)
    groups, rewards = np.array([g for g, _ in scored]), np.array([r for _, r in scored])
    responses = [Response([], [], [], [], [], r, g) for g, r in scored]
    have = normalize_rewards(rewards, groups, baseline=how)
    for i, response in enumerate(responses):
        group = [x for x in responses if x.group == response.group]
        flat = len({x.reward for x in group}) == 1
        want = 0.0 if flat else group_advantage(response, group, how=how)
        assert have[i] == pytest.approx(want, rel=1e-5, abs=1e-5)


@QUICK
@given(SCORED, st.floats(-50, 50), st.floats(0.5, 4))
def test_grpo_advantages_ignore_shift_and_scale_of_rewards(scored, shift, scale):
    groups, rewards = np.array([g for g, _ in scored]), np.array([round(r, 1) for _, r in scored])
    plain = normalize_rewards(rewards, groups, baseline="group_mean_std", eps=0.0)
    moved = normalize_rewards(rewards * scale + shift, groups, baseline="group_mean_std", eps=0.0)
    flat = np.array([len(set(rewards[groups == g])) == 1 for g in groups])
    np.testing.assert_allclose(moved[~flat], plain[~flat], rtol=1e-4, atol=1e-4)


@QUICK
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.floats(0, 1), st.integers(0, 99))
def test_returns_satisfy_the_bellman_recursion_within_each_sequence(lengths, gamma, seed):
    seq = np.repeat(np.arange(len(lengths)), lengths)
    rewards = np.random.default_rng(seed).normal(size=len(seq))
    have = discounted_returns(torch.from_numpy(rewards), torch.from_numpy(seq), gamma=gamma).numpy()
    follows = np.append(have[1:], 0.0) * np.append(seq[1:] == seq[:-1], False)[: len(seq)]
    np.testing.assert_allclose(have, rewards + gamma * follows[: len(seq)], atol=1e-9)


@QUICK
@given(st.lists(st.tuples(st.floats(-9, 9), st.booleans()), min_size=2, max_size=30))
def test_whitening_twice_changes_nothing(pairs):
    values = torch.tensor([v for v, _ in pairs], dtype=torch.float64)
    mask = torch.tensor([m for _, m in pairs], dtype=torch.float64)
    if mask.sum() < 2 or values[mask > 0].std() < 1e-2:
        return
    once = whiten(values, mask)
    torch.testing.assert_close(whiten(once, mask), once, atol=1e-3, rtol=1e-3)


@QUICK
@given(st.lists(st.integers(0, 64), min_size=1, max_size=9), st.integers(1, 32), st.floats(0, 3))
def test_overlong_penalty_is_monotone_and_bounded(lengths, buffer_len, factor):
    have = overlong_penalty(np.sort(lengths), max_len=32, buffer_len=buffer_len, factor=factor)
    assert (np.diff(have) <= 0).all()
    assert ((have <= 0) & (have >= -np.float32(factor))).all()


@QUICK
@given(
    LOG_PROBS,
    st.sampled_from(["token", "sequence", "geometric"]),
    st.sampled_from(["truncate", "clip", "mask"]),
    st.floats(0, 0.9),
    st.floats(1.1, 5),
)
def test_correction_weights_stay_in_their_bounds_and_are_one_where_policies_agree(pairs, level, mode, low, high):
    train, rollout = torch.tensor(pairs, dtype=torch.float64).T
    mask, seq = torch.ones(len(pairs)), torch.arange(len(pairs)) // 3
    args = (mask, seq, int(seq[-1]) + 1)
    settings = flags(tis_level=level, tis_mode=mode, tis_clip_low=low, tis_clip=high)
    weight, _ = importance_weights(settings, train, rollout, *args)
    assert (weight <= high).all()
    inside = weight >= (0.0 if mode == "truncate" else low)
    assert (inside | ((weight == 0) & torch.tensor(mode == "mask"))).all()
    assert (importance_weights(settings, train, train, *args)[0] == 1).all()


def by_sequence(values, mask, seq):
    """Return the values and the mask of each sequence as lists of numbers."""
    rows = [(values[seq == s].tolist(), mask[seq == s].tolist()) for s in range(int(seq.max()) + 1)]
    return [list(zip(*row, strict=True)) for row in rows]


def weights_one_by_one(settings, train, rollout, mask, seq):
    """Compute weights with rejection as the definition says: a Python loop over sequences and tokens."""

    def ratios(rows, level):
        logs = [value for value, kept in rows if kept]
        mean = sum(logs) / max(len(logs), 1)
        by_level = {"sequence": sum(logs), "geometric": mean}
        bounded = [min(max(by_level.get(level, value if kept else 0.0), -20.0), 20.0) for value, kept in rows]
        return [math.exp(value) for value in bounded]

    low, high = settings.tis_clip_low, settings.tis_clip
    rs_low, rs_high = settings.rejection_bounds
    weights, keeps, means, kept_weights = [], [], [], []
    for rows in by_sequence(train - rollout, mask, seq):
        raw, rejecting = ratios(rows, settings.tis_level), ratios(rows, settings.rs_level)
        bounded = {
            "truncate": [min(w, high) for w in raw],
            "clip": [min(max(w, low), high) for w in raw],
            "mask": raw,
        }[settings.tis_mode]
        keep = [settings.tis_mode != "mask" or low <= w <= high for w in raw]
        keep = [ok and rs_low <= r <= rs_high for ok, r in zip(keep, rejecting, strict=True)]
        if settings.tis_veto is not None and any(kept and math.exp(v) < settings.tis_veto for v, kept in rows):
            keep = [False] * len(keep)
        of_sequence = [w for w, (_, kept) in zip(bounded, rows, strict=True) if kept]
        means.append(sum(of_sequence) / max(len(of_sequence), 1))
        kept_weights += of_sequence
        weights += bounded
        keeps += keep
    token_mean = sum(kept_weights) / max(len(kept_weights), 1)
    mean = token_mean if settings.tis_level == "token" else sum(means) / len(means)
    scale = mean if settings.tis_batch_normalize and mean > 1e-8 else 1.0
    return [w / scale if keep else 0.0 for w, keep in zip(weights, keeps, strict=True)]


LEVELS = st.sampled_from(["token", "sequence", "geometric"])


@given(
    LOG_PROBS,
    st.integers(0, 2**20),
    st.sampled_from([("token", True), ("sequence", True), ("token", False), ("sequence", False), ("geometric", False)]),
    st.sampled_from(["truncate", "clip", "mask"]),
    LEVELS,
    st.one_of(st.none(), st.floats(0.3, 0.9)),
    st.one_of(st.none(), st.floats(1.1, 3)),
    st.one_of(st.none(), st.floats(0.01, 0.9)),
)
def test_rejection_and_normalization_are_those_of_the_definition(
    pairs, masked, level, mode, rs_level, rs_low, rs_high, veto
):
    train, rollout = torch.tensor(pairs, dtype=torch.float64).T
    mask = torch.tensor([float(not masked >> i & 1) for i in range(len(pairs))], dtype=torch.float64)
    seq = torch.arange(len(pairs)) // 3
    settings = flags(
        tis_level=level[0],
        tis_batch_normalize=level[1],
        tis_mode=mode,
        tis_clip=1.8,
        tis_clip_low=0.5,
        use_tis=True,
        use_rs=True,
        rs_level=rs_level,
        rs_lower_bound=rs_low,
        rs_upper_bound=rs_high,
        tis_veto=veto,
    )
    weight, _ = importance_weights(settings, train, rollout, mask, seq, int(seq[-1]) + 1)
    want = torch.tensor(weights_one_by_one(settings, train, rollout, mask, seq), dtype=torch.float64)
    torch.testing.assert_close(weight * mask, want * mask, rtol=1e-9, atol=1e-12)
