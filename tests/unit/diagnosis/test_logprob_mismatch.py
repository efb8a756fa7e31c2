"""Each cause of a log-prob gap between engine and trainer is injected, and found with its share."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from furlong.core.batch import RolloutBatch
from furlong.diagnosis.self_test import CAUSES, ROUNDINGS, LogProbSelfTest, attribute, rounding_limit, transforms
from furlong.interfaces import SamplingParams, TokenStats
from models_zoo import random_batch

RNG = np.random.default_rng(0)
TRAINER_R = -RNG.random(40) * 3


def some(count: int) -> np.ndarray:
    flags = np.zeros(40, bool)
    flags[:count] = True
    return flags


def test_log_probs_that_agree_have_no_cause() -> None:
    assert attribute(TRAINER_R + 1e-6, TRAINER_R, is_stale_R=some(40)).shares == {}


def test_a_gap_on_flagged_tokens_is_attributed_to_their_cause() -> None:
    engine_R = TRAINER_R + np.where(some(10), 0.5, 0.0)
    for cause, argument in (("stale_version", "is_stale_R"), ("routing", "is_rerouted_R")):
        assert attribute(engine_R, TRAINER_R, **{argument: some(10)}).shares[cause] == pytest.approx(1)
        assert attribute(engine_R, TRAINER_R, **{argument: some(4)}).shares[cause] == pytest.approx(0.4)


def test_log_probs_that_are_all_the_same_are_flat() -> None:
    engine_R = np.full(40, -np.log(56))
    assert attribute(engine_R, TRAINER_R).shares["flat"] == pytest.approx(1)
    assert attribute(engine_R[:7], TRAINER_R[:7]).shares["flat"] == 0  # too few to tell
    colder = attribute(np.zeros(40), TRAINER_R, transformed_R={"temperature 0.5": np.full(40, -1e-3)})
    assert colder.shares["sampling_transform"] == pytest.approx(1)


def test_log_probs_of_the_neighboring_tokens_are_shifted() -> None:
    padded = np.pad(TRAINER_R, 1, constant_values=np.nan)
    neighbors = padded[:-2], padded[2:]
    for neighbor_R in neighbors:
        engine_R = np.nan_to_num(neighbor_R)
        assert attribute(engine_R, TRAINER_R, shifted_R=neighbors).shares["shifted"] == pytest.approx(1)
    assert attribute(TRAINER_R - 0.2, TRAINER_R, shifted_R=neighbors).shares["shifted"] == 0


def test_shares_add_up_to_one_with_all_causes_at_once() -> None:
    engine_R = TRAINER_R + RNG.normal(size=40)
    flags = {name: RNG.random(40) < 0.4 for name in ("is_stale_R", "is_rerouted_R")}
    transformed = {"temperature 1": np.where(some(30), engine_R, TRAINER_R)}
    found = attribute(engine_R, TRAINER_R, **flags, transformed_R=transformed)
    assert set(found.shares) == set(CAUSES)
    assert sum(found.shares.values()) == pytest.approx(1)
    assert all(0 <= share <= 1 for share in found.shares.values())


def test_a_gap_without_a_cause_is_unexplained_unless_bfloat16_explains_its_mean() -> None:
    found = attribute(TRAINER_R + 0.02 * RNG.normal(size=40), TRAINER_R, transformed_R={"x": TRAINER_R + 0.5})
    assert (found.shares["unexplained"], found.transform) == (pytest.approx(1), "")
    engine_R = -np.arange(100.0) / 50
    trainer_R = engine_R - np.where(np.arange(100) < 3, 1.5, 0)  # 0.045 on average
    assert attribute(engine_R, trainer_R, rounding_limit=0.05).shares["numerics"] == 1
    assert attribute(engine_R, trainer_R, rounding_limit=0.04).shares["unexplained"] == 1


LOGITS_RV = torch.from_numpy(RNG.normal(size=(40, 12)) * 2)
TOKENS_R = torch.from_numpy(RNG.integers(0, 12, 40))


def picked(logits_RV: torch.Tensor) -> np.ndarray:
    return logits_RV.log_softmax(-1).gather(1, TOKENS_R[:, None])[:, 0].numpy()


def test_another_temperature_of_the_engine_is_found() -> None:
    trainer_R, engine_R = picked(LOGITS_RV / 0.7), picked(LOGITS_RV)
    others = transforms(LOGITS_RV / 0.7, TOKENS_R, SamplingParams(temperature=0.7))
    found = attribute(engine_R, trainer_R, transformed_R=others)
    assert (found.shares["sampling_transform"], found.transform) == (pytest.approx(1), "temperature 1")
    mixed_R = np.where(some(10), trainer_R + 0.7, engine_R)
    found = attribute(mixed_R, trainer_R, transformed_R=others, is_stale_R=some(10))
    assert found.shares["stale_version"] + found.shares["sampling_transform"] == pytest.approx(1)


@pytest.mark.parametrize("cut", [{"top_p": 0.6}, {"top_k": 3}, {"min_p": 0.3}])
def test_log_probs_after_the_filters_are_found(cut: dict[str, float]) -> None:
    others = transforms(LOGITS_RV, TOKENS_R, SamplingParams(**cut))
    engine_R = others["after top-p, top-k, min-p"]
    kept = engine_R > picked(LOGITS_RV) + 1e-9
    assert kept.any()
    probs_RV = LOGITS_RV.softmax(-1)
    for row in np.flatnonzero(kept)[:5]:
        order = probs_RV[row].sort(descending=True).values
        size = {
            "top_p": lambda order=order: int((order.cumsum(0) - order < 0.6).sum()),
            "top_k": lambda: 3,
            "min_p": lambda order=order: int((order >= 0.3 * order[0]).sum()),
        }[next(iter(cut))]()
        want = float(probs_RV[row, TOKENS_R[row]] / order[:size].sum())
        assert np.exp(engine_R[row]) == pytest.approx(want)
    found = attribute(engine_R, picked(LOGITS_RV), transformed_R=others)
    assert found.shares["sampling_transform"] == pytest.approx(1)


def batch_of(version: int, rollout_id: int) -> RolloutBatch:
    batch = random_batch(prompts=[3, 4], responses=[[5, 0], [7, 6]], rollout_id=rollout_id, masked=0.2)
    return batch.with_columns(token_versions=np.full(18, version))


def test_gaps_that_the_engines_quantized_weights_explain_are_quantization() -> None:
    engine_R = np.linspace(-4.0, -1.0, 40)
    trainer_R = engine_R + 0.05
    found = attribute(engine_R, trainer_R, quantized_R=engine_R + np.where(np.arange(40) < 30, 1e-3, 0.04))
    assert found.shares["quantization"] == pytest.approx(0.75)
    assert found.shares["unexplained"] == pytest.approx(0.25)


def test_the_first_batch_and_the_first_of_new_weights_are_compared() -> None:
    test = LogProbSelfTest(SamplingParams())
    batches = [(0, 0), (0, 1), (1, 2), (2, 3)]
    assert [test.due(batch_of(*each)) for each in batches] == [True, False, True, False]
    assert not LogProbSelfTest(SamplingParams()).due(random_batch(prompts=[2], responses=[[3]], masked=1.1))


def test_the_report_has_the_gap_and_its_shares() -> None:
    batch = batch_of(0, 1).with_columns(ref_log_probs=np.full(18, -0.5, np.float32))
    test = LogProbSelfTest(SamplingParams(temperature=0.5))
    log_probs_R = batch.columns["rollout_log_probs"] + 0.3
    log_probs_R[:5] = np.nan  # a micro-batch of a later step
    seen: list[list[int]] = []

    def look(rows: np.ndarray) -> TokenStats:
        seen.append(rows.tolist())
        return TokenStats(torch.zeros(13), None, torch.zeros(13, 40))

    metrics = test.report(batch, log_probs_R, look)
    assert seen == [[2, 3]]
    assert metrics["selftest/logp_max_diff"].value == pytest.approx(0.3, abs=1e-5)
    assert metrics["selftest/logp_p99_diff"].value == pytest.approx(0.3, abs=1e-5)
    assert metrics["selftest/share/stale_version"].value == 1  # version 0 in rollout 1
    difference = -0.5 - log_probs_R[5:][batch.loss_masks[5:] > 0]
    assert metrics["selftest/ref_kl"].value == pytest.approx(
        float(np.mean(np.exp(difference) - 1 - difference)), rel=1e-4
    )
    calm = test.report(batch, batch.columns["rollout_log_probs"], look)
    assert not [name for name in calm if "share" in name]
    assert len(seen) == 1


def test_bfloat16_explains_gaps_in_proportion_to_the_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_RV = torch.randn(64, 200, generator=generator, dtype=torch.float64)
    tokens_R = torch.multinomial(logits_RV.softmax(-1), 1, generator=generator)[:, 0]
    assert rounding_limit(logits_RV, tokens_R) == pytest.approx(
        ROUNDINGS * 2**-8, rel=0.05
    )  # spread 1, unlikely tokens
    assert rounding_limit(3 * logits_RV, tokens_R) > 2 * rounding_limit(logits_RV, tokens_R)
    certain_RV = torch.zeros(4, 10)
    certain_RV[:, 2] = 200.0
    assert rounding_limit(certain_RV, torch.full((4,), 2)) < 1e-6  # certain tokens do not change


def test_the_report_has_the_limit_of_rounding_in_bfloat16() -> None:
    batch = batch_of(1, 1)
    log_probs_R = batch.columns["rollout_log_probs"] + 0.02

    def look(rows: np.ndarray) -> TokenStats:
        return TokenStats(torch.zeros(18), None, 3 * torch.randn(18, 40))

    for is_bfloat16 in (False, True):
        metrics = LogProbSelfTest(SamplingParams(), is_bfloat16=is_bfloat16).report(batch, log_probs_R, look)
        assert ("selftest/logp_rounding_limit" in metrics) == is_bfloat16
