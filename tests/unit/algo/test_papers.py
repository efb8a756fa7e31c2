"""Each algorithm, from raw rewards to gradient, equals the loop written from its paper."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from furlong.algo.advantage import token_advantages, training_rewards
from oracles import papers
from oracles.cases import TinyModel, flags, near_model, random_batch, responses_of, run_step


def _with_advantages(batch, settings):
    """What the trainer does before the steps: rewards to advantages, over the whole batch."""
    rewards = training_rewards(
        settings,
        batch.raw_rewards,
        group_ids_N=batch.group_ids,
        rollout_ids_N=batch.rollout_ids,
        response_lengths_N=batch.response_lengths,
        max_response_len=6,
    )
    advantages, _ = token_advantages(
        settings,
        rewards_S=torch.from_numpy(rewards.astype(np.float64)),
        mask_R=torch.from_numpy(batch.loss_masks.astype(np.float64)),
        seq_of_R=torch.from_numpy(np.repeat(np.arange(len(batch)), batch.response_lengths)),
        old_log_probs_R=torch.from_numpy(batch.columns["old_log_probs"]),
        ref_log_probs_R=torch.from_numpy(batch.columns["ref_log_probs"]),
    )
    return dataclasses.replace(batch, rewards=rewards).with_columns(advantages=advantages.numpy())


def _compare(name, objective, **values):
    for seed in range(3):
        settings = flags(name, **values)
        batch = _with_advantages(near_model(random_batch(seed), seed), settings)
        have = run_step(batch, settings, [np.arange(len(batch))], model_seed=seed)
        model = TinyModel.random(seed)
        loss = -objective(responses_of(batch, model))
        loss.backward()
        assert have.loss == pytest.approx(loss.item(), abs=1e-6)
        for mine, parameter in zip(have.grads, model.parameters, strict=True):
            torch.testing.assert_close(mine, parameter.grad, atol=1e-6, rtol=1e-5)
        assert have.metrics["loss"].value == pytest.approx(have.loss, abs=1e-6)


def test_grpo_is_equation_3_with_kl():
    _compare(
        "grpo",
        lambda r: papers.grpo(r, eps=0.2, beta=0.05),
        use_kl_loss=True,
        kl_loss_coef=0.05,
        kl_loss_type="k3",
    )


def test_grpo_without_std_is_grpo_with_the_mean_only():
    _compare("grpo", lambda r: papers.grpo(r, eps=0.1, how="group_mean"), grpo_std_normalization=False, eps_clip=0.1)


def test_dr_grpo_divides_by_a_constant_and_not_by_the_std():
    _compare("dr_grpo", lambda r: papers.dr_grpo(r, eps=0.2, constant_len=16), loss_constant_len=16)
    _compare("dr_grpo", lambda r: papers.dr_grpo(r, eps=0.2, constant_len=8))  # the response limit of run_step


def test_dapo_averages_over_tokens_and_clips_higher_by_default():
    _compare("dapo", lambda r: papers.dapo(r, low=0.2, high=0.28))
    _compare("dapo", lambda r: papers.dapo(r, low=0.1, high=0.15), eps_clip=0.1, eps_clip_high=0.15)


def test_gspo_clips_the_sequence_ratio():
    _compare("gspo", lambda r: papers.gspo(r, eps=0.05), eps_clip=0.05)


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    _compare(
        "cispo", lambda r: papers.cispo(r, low=1.0, high=0.1), eps_clip=1.0, eps_clip_high=0.1,
        calculate_per_token_loss=True,
    )  # fmt: skip


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_is_whitened_return_to_go_with_token_kl(gamma):
    _compare(
        "reinforce_plus_plus",
        lambda r: papers.reinforce_plus_plus(r, eps=0.2, kl_coef=0.1, gamma=gamma, baseline=False),
        kl_coef=0.1,
        gamma=gamma,
        normalize_advantages=True,
    )


def test_reinforce_plus_plus_baseline_subtracts_group_mean_and_token_kl():
    _compare(
        "reinforce_plus_plus_baseline",
        lambda r: papers.reinforce_plus_plus(r, eps=0.2, kl_coef=0.1, gamma=1.0, baseline=True),
        kl_coef=0.1,
        normalize_advantages=True,
    )


def test_rloo_at_ratio_one_has_the_gradient_of_equation_8():
    settings = flags("rloo", loss_constant_len=1)  # eq. 8 sums over tokens
    batch = near_model(random_batch(4), noise=0.0)
    batch = _with_advantages(batch, settings)
    have = run_step(batch, settings, [np.arange(len(batch))])
    model = TinyModel.random(0)
    (-papers.rloo(responses_of(batch, model))).backward()
    for mine, parameter in zip(have.grads, model.parameters, strict=True):
        torch.testing.assert_close(mine, parameter.grad, atol=1e-6, rtol=1e-5)


def test_dual_clip_bounds_the_loss_of_negative_advantages():
    batch = near_model(random_batch(6, groups=(4, 4)), noise=1.5)
    settings = flags("grpo", eps_clip_c=1.5)
    have = run_step(batch, settings, [np.arange(8)])
    model = TinyModel.random(0)
    objective = torch.zeros((), dtype=torch.float64)
    num_bounded = 0
    for r in responses_of(batch, model):
        for t in r.trained:
            term = papers.surrogate(papers.ratio(r, t), r.advantages[t], 0.2, 0.2, dual=1.5)
            num_bounded += r.advantages[t] < 0 and papers.ratio(r, t).item() > 1.5
            objective = objective + term / len(r.trained) / 8
    (-objective).backward()
    assert num_bounded > 2
    assert have.loss == pytest.approx(-objective.item(), abs=1e-6)
    for mine, parameter in zip(have.grads, model.parameters, strict=True):
        torch.testing.assert_close(mine, parameter.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("veto", [None, 0.75])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_mismatch_correction_weights_the_numerator_only(level, mode, veto):
    batch = near_model(random_batch(7), noise=0.3)
    bounds = {"low": 0.8, "high": 1.25}
    settings = flags(
        "grpo", use_tis=True, tis_level=level, tis_mode=mode, tis_clip_low=0.8, tis_clip=1.25, tis_veto=veto
    )
    have = run_step(batch, settings, [np.arange(len(batch))])
    model = TinyModel.random(0)
    objective, changed = torch.zeros((), dtype=torch.float64), 0.0
    responses = responses_of(batch, model)
    for r in responses:
        weights = papers.tis_weights(r, level=level, mode=mode, veto=veto, **bounds)
        raw = papers.tis_weights(r, level=level, mode="truncate", low=0, high=1e9, veto=None)
        for t in r.trained:
            term = weights[t] * papers.surrogate(papers.ratio(r, t), r.advantages[t], 0.2, 0.2)
            objective = objective + term / len(r.trained) / len(responses)
            changed += (weights[t] != raw[t]) / len(r.trained) / len(responses)
    (-objective).backward()
    assert have.loss == pytest.approx(-objective.item(), abs=1e-6)
    assert have.metrics["tis_clipfrac"].value == pytest.approx(changed, abs=1e-6)
    assert 0 < changed < 1
    for mine, parameter in zip(have.grads, model.parameters, strict=True):
        torch.testing.assert_close(mine, parameter.grad, atol=1e-6, rtol=1e-5)


def test_opsm_drops_drifted_sequences_with_negative_advantage():
    batch = near_model(random_batch(8), noise=0.5)
    batch.columns["advantages"][::3] = 0.0  # which is not negative, however the sequence drifted
    settings = flags("grpo", use_opsm=True, opsm_delta=0.05)
    have = run_step(batch, settings, [np.arange(len(batch))])
    model = TinyModel.random(0)
    objective, dropped = 0.0, 0.0
    responses = responses_of(batch, model)
    for r in responses:
        for t in r.trained:
            if papers.is_dropped_by_opsm(r, r.advantages[t], delta=0.05):
                dropped += 1 / len(r.trained) / len(responses)
                continue
            term = papers.surrogate(papers.ratio(r, t), r.advantages[t], 0.2, 0.2).item()
            objective += term / len(r.trained) / len(responses)
    assert 0 < dropped < 1
    assert have.loss == pytest.approx(-objective, abs=1e-6)
    assert have.metrics["opsm_clipfrac"].value == pytest.approx(dropped, abs=1e-6)
