from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from furlong.algo.policy_loss import CustomLoss, PolicyLoss, SftLoss
from furlong.core.batch import MicroBatch
from furlong.core.metric import total
from furlong.errors import DataError, HookError
from furlong.interfaces import TokenStats
from furlong.training.hook_adapters import reducer_from_hook
from oracles.cases import flags, near_model, random_batch, run_step

GOLDEN = Path(__file__).parents[2] / "oracles" / "golden_losses.json"
EVERYTHING = {
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "kl_loss_type": "k3",
    "entropy_coef": 0.01,
    "use_tis": True,
    "use_opsm": True,
    "tis_veto": 0.5,
}


def _micro(log_probs=(-1.0, -2.0, -0.5), *, mask=(1, 1, 1), weight=None, **columns) -> tuple[MicroBatch, TokenStats]:
    """One sequence of a one-token prompt and three response tokens."""
    mask_R = torch.tensor(mask, dtype=torch.float32)
    columns = {"advantages": (1.0, 1.0, 1.0), **columns}
    micro = MicroBatch(
        tokens_T=torch.arange(4),
        position_ids_T=torch.arange(4),
        cu_seqlens_S1=torch.tensor([0, 4], dtype=torch.int32),
        max_seqlen=4,
        response_pos_R=torch.arange(1, 4),
        seq_of_R=torch.zeros(3, dtype=torch.int64),
        mask_R=mask_R,
        weight_R=mask_R / 3 if weight is None else torch.tensor(weight),
        rows=np.array([0]),
        columns={k: torch.tensor(v) for k, v in columns.items()},
    )
    return micro, TokenStats(torch.tensor(log_probs, requires_grad=True), torch.tensor([1.0, 2.0, 3.0]))


def test_without_old_log_probs_the_ratio_is_exactly_one():
    micro, stats = _micro(advantages=(1.0, -2.0, 0.5))
    loss, metrics = PolicyLoss(flags())(micro, stats)
    loss.backward()
    assert metrics["ppo_kl"].value == 0.0
    assert metrics["ois"].value == pytest.approx(1.0, abs=1e-7)
    assert metrics["pg_clipfrac"].value == 0.0
    torch.testing.assert_close(stats.log_probs_R.grad, -micro.columns["advantages"] / 3)  # REINFORCE


def test_rollout_log_probs_can_be_the_old_policy():
    micro, stats = _micro(old_log_probs=(-1.0, -2.0, -0.5), rollout_log_probs=(-1.0, -1.0, -0.5))
    _, metrics = PolicyLoss(flags(use_rollout_logprobs=True))(micro, stats)
    assert metrics["ppo_kl"].value == pytest.approx(1 / 3)
    assert metrics["train_rollout_logprob_abs_diff"].value == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("values", "column"),
    [
        ({"use_tis": True}, "rollout_log_probs"),
        ({"use_rollout_logprobs": True}, "rollout_log_probs"),
        ({"use_kl_loss": True}, "ref_log_probs"),
    ],
)
def test_missing_column_is_named(values, column):
    micro, stats = _micro()
    with pytest.raises(DataError, match=f"column {column}, but the micro-batch has"):
        PolicyLoss(flags(**values))(micro, stats)


def test_unknown_algorithm_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="choose from"):
        PolicyLoss(flags("grpoo"))


def test_masked_tokens_may_hold_anything_and_get_no_gradient():
    bad = (1.0, torch.nan, 1.0)
    columns = dict.fromkeys(("old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages"), bad)
    micro, _ = _micro(mask=(1, 0, 1), **columns)
    stats = TokenStats(
        torch.tensor([-1.0, -torch.inf, -0.5], requires_grad=True),
        torch.tensor([1.0, torch.nan, 1.0], requires_grad=True),
    )
    for name in ("grpo", "gspo", "cispo"):
        loss, metrics = PolicyLoss(flags(name, **EVERYTHING))(micro, stats)
        loss.backward()
        assert torch.isfinite(loss)
        assert all(np.isfinite(m.total) for m in metrics.values())
    assert stats.log_probs_R.grad[1] == 0.0
    assert stats.entropy_R.grad[1] == 0.0
    assert torch.isfinite(stats.log_probs_R.grad).all()


def test_fully_masked_micro_batch_adds_nothing_but_keeps_the_graph():
    micro, stats = _micro(mask=(0, 0, 0))
    loss, metrics = PolicyLoss(flags(entropy_coef=0.1))(micro, stats)
    loss.backward()
    assert loss.item() == 0.0
    assert stats.log_probs_R.grad.abs().sum() == 0
    assert metrics["ppo_kl"].weight == 0.0


def test_loss_is_the_sum_of_its_terms():
    values = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k2", "entropy_coef": 0.2}
    micro, stats = _micro(ref_log_probs=(-1.5, -2.0, -0.5))
    loss, metrics = PolicyLoss(flags(**values))(micro, stats)
    m = {k: v.value for k, v in metrics.items()}
    assert m["entropy_loss"] == pytest.approx(2.0)
    assert m["kl_loss"] == pytest.approx(0.125 / 3)
    assert loss.item() == pytest.approx(m["pg_loss"] - 0.2 * m["entropy_loss"] + 0.3 * m["kl_loss"])
    assert m["loss"] == pytest.approx(loss.item())


def test_metrics_have_the_documented_names():
    micro, stats = _micro(ref_log_probs=(-1.0,) * 3, rollout_log_probs=(-1.0,) * 3)
    assert set(PolicyLoss(flags(**EVERYTHING))(micro, stats)[1]) == {
        "loss", "pg_loss", "entropy_loss", "kl_loss", "pg_clipfrac", "ppo_kl", "ois", "opsm_clipfrac",
        "tis", "tis_abs", "tis_clipfrac", "tis_vetofrac", "train_rollout_logprob_abs_diff", "train_rollout_kl",
    }  # fmt: skip
    micro, stats = _micro()
    assert set(PolicyLoss(flags())(micro, stats)[1]) == {
        "loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl", "ois",
    }  # fmt: skip


def test_mismatch_metrics_are_the_gap_and_k3_of_the_engines_samples():
    micro, stats = _micro(rollout_log_probs=(-1.5, -2.0, -0.5))
    _, metrics = PolicyLoss(flags())(micro, stats)
    w = np.exp(0.5)  # trainer over engine
    assert metrics["train_rollout_logprob_abs_diff"].value == pytest.approx(0.5 / 3)
    assert metrics["train_rollout_kl"].value == pytest.approx((w - 1 - np.log(w)) / 3)


def test_custom_correction_replaces_tis_and_keeps_the_denominator():
    micro, stats = _micro(old_log_probs=(-1.0, -2.0, -0.5), rollout_log_probs=(-1.0, -2.0, -0.5))
    seen = []

    def keep_first(micro, *, pg_loss_R, train_log_probs_R):
        seen.append(train_log_probs_R.tolist())
        mask = torch.tensor([1.0, 0.0, 0.0])
        return 2 * pg_loss_R, mask, {"mine": mask}

    loss, metrics = PolicyLoss(flags(use_tis=True), correction=keep_first)(micro, stats)
    assert loss.item() == pytest.approx(-2 / 3)
    assert metrics["mine"].value == pytest.approx(1 / 3)
    assert "tis" not in metrics
    assert seen == [[-1.0, -2.0, -0.5]]


def test_an_error_of_the_function_that_a_reducer_hook_returned_names_the_flag_and_the_line():
    def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
        return lambda values: values.split([])

    adapted = reducer_from_hook(reducer, per_token=False, rollouts_per_step=1)
    micro, stats = _micro()
    with pytest.raises(HookError, match=r"--custom-pg-loss-reducer-function-path returned raised RuntimeError") as told:
        PolicyLoss(flags(), pg_reducer=adapted)(micro, stats)
    assert f"{__file__}:{reducer.__code__.co_firstlineno + 1}" in str(told.value)


def test_custom_reducer_reduces_the_policy_loss_alone():
    micro, stats = _micro()
    settings = flags(entropy_coef=0.5)
    loss, metrics = PolicyLoss(settings, pg_reducer=lambda pg_R, micro: (pg_R * micro.mask_R).sum() / 100)(micro, stats)
    assert metrics["pg_loss"].value == pytest.approx(-0.03)
    assert loss.item() == pytest.approx(-0.03 - 0.5 * 2.0)


def test_custom_loss_gets_requested_stats_and_its_loss_is_reported():
    fn = CustomLoss(lambda micro, stats: ((stats.log_probs_R * micro.weight_R).sum(), {"mine": total(3.0)}),
                    needs_entropy=True, needs_logits=True)  # fmt: skip
    micro, stats = _micro()
    loss, metrics = fn(micro, stats)
    assert (fn.needs_entropy, fn.entropy_grad, fn.needs_logits) == (True, False, True)
    assert metrics["loss"].value == pytest.approx(loss.item())
    assert metrics["mine"].value == 3.0


def test_sft_loss_is_the_mean_negative_log_likelihood():
    micro, stats = _micro(mask=(1, 0, 1), weight=(0.5, 0.0, 0.5))
    loss, metrics = SftLoss()(micro, stats)
    loss.backward()
    assert loss.item() == pytest.approx(0.75)
    assert metrics["loss"].value == metrics["nll"].value == pytest.approx(0.75)
    assert stats.log_probs_R.grad.tolist() == [-0.5, 0.0, -0.5]


def test_metrics_take_one_host_copy(monkeypatch):
    micro, stats = _micro(ref_log_probs=(-1.0,) * 3, rollout_log_probs=(-1.0,) * 3)
    calls = []
    for name in ("tolist", "item", "__float__", "__bool__"):
        original = getattr(torch.Tensor, name)

        def counted(self, *args, _original=original, _name=name):
            calls.append(_name)
            return _original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, counted)
    PolicyLoss(flags("gspo", **EVERYTHING))(micro, stats)
    assert calls == ["tolist"]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"])
def test_losses_and_gradients_are_those_recorded(name):
    batch = near_model(random_batch(11), noise=0.5)
    result = run_step(batch, flags(name, **EVERYTHING), [np.arange(5), np.arange(5, 9)])
    have = {
        "loss": result.loss,
        "grad_norms": [g.norm().item() for g in result.grads],
        "metrics": {k: m.value for k, m in sorted(result.metrics.items())},
    }
    want = json.loads(GOLDEN.read_text())[name]
    assert have["loss"] == pytest.approx(want["loss"], rel=1e-9)
    assert have["grad_norms"] == pytest.approx(want["grad_norms"], rel=1e-9)
    assert have["metrics"] == pytest.approx(want["metrics"], rel=1e-9)


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("advantages", [(1.0, -1.0, 0.0), (0.0, 0.0, 0.0), (-1.0, -1.0, 1.0)])
@pytest.mark.parametrize("distance", [90.0, -90.0, 1000.0, -1000.0])
def test_log_ratios_beyond_the_range_of_exp_leave_the_step_finite(estimator, advantages, distance):
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "use_unbiased_kl": True}
    settings = flags(estimator, use_tis=True, **kl)
    live = (-1.0, -2.0, -0.5)
    far = tuple(each - distance for each in live)
    columns = {"old_log_probs": far, "ref_log_probs": tuple(reversed(far)), "rollout_log_probs": (-1.0, -2.0, -700.0)}
    micro, stats = _micro(live, advantages=advantages, **columns)
    loss, metrics = PolicyLoss(settings)(micro, stats)
    loss.backward()
    assert loss.isfinite()
    assert stats.log_probs_R.grad.isfinite().all()
    assert all(np.isfinite(metric.value) for metric in metrics.values())
