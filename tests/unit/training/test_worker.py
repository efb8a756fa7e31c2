from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from backends import fsdp_backend
from fakes_trainer import FakeBackend
from furlong.algo.log_ratio import kl_estimate
from furlong.algo.policy_loss import PolicyLoss, SftLoss
from furlong.config.sections import AlgoFlags, OptimFlags
from furlong.core.batch import FlopsModel
from furlong.core.metric import merge
from furlong.errors import TrainerError
from furlong.models import hf_model as hf
from furlong.training.backend_interface import MicroBatchTooLargeError
from furlong.training.hook_adapters import rollout_data
from furlong.training.packing import Packing
from furlong.training.ranks import Ranks
from furlong.training.round_metrics import Clock, perf_metrics
from furlong.training.worker import RoleLoss, RoundHooks, RoundWorker
from models_zoo import family_config, random_batch

BATCH = random_batch(prompts=[5, 3], responses=[[6, 2], [4, 7]], masked=0.2, vocab=12)


def build(
    backend=None,
    *,
    loss=None,
    packing=None,
    hooks=None,
    flags=None,
    flops=None,
    ranks=None,
    reset_optimizer=False,
    **more,
):
    settings = AlgoFlags(**(flags or {}), **more)
    return RoundWorker(
        backend or FakeBackend(),
        algo=settings,
        losses=[RoleLoss("actor", loss or PolicyLoss(settings))],
        packing=packing or Packing(micro_batch_size=2),
        hooks=hooks,
        reset_optimizer=reset_optimizer,
        flops=flops,
        ranks=ranks,
    )


def train(worker, batch=BATCH):
    return {name: metric.value for name, metric in worker.train(batch).items()}


def test_a_single_step_runs_no_log_prob_pass():
    worker = build()
    metrics = train(worker)
    assert worker.backend.calls == ["forward_backward", "forward_backward", "optim_step"]
    assert metrics["train/ppo_kl"] == 0.0
    assert metrics["train/pg_clipfrac"] == 0.0
    assert "perf/log_probs_time" not in metrics
    assert metrics["rollout/log_probs"] < 0.0


def test_several_steps_take_old_log_probs_before_the_first():
    worker = build(packing=Packing(micro_batch_size=2, global_batch_size=2))
    metrics = train(worker)
    assert worker.backend.calls == ["log_probs:actor"] * 2 + ["forward_backward", "optim_step"] * 2
    assert metrics["train/ppo_kl"] != 0.0
    assert metrics["train/global_batch_size"] == 2
    assert metrics["train/num_steps"] == len(BATCH.rewards) / 2


def test_reference_log_probs_come_with_the_kl_loss_only():
    worker = build(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")
    metrics = train(worker)
    assert worker.backend.calls[:2] == ["log_probs:ref"] * 2
    assert metrics["rollout/ref_log_probs"] == pytest.approx(metrics["rollout/log_probs"], rel=1e-5)
    assert metrics["train/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert "perf/ref_log_probs_time" in metrics


def test_live_and_measured_log_probs_are_reported_alike():
    live = train(build())["rollout/log_probs"]
    measured = train(build(use_rollout_entropy=True))
    assert measured["rollout/log_probs"] == pytest.approx(live, rel=1e-5)
    assert measured["rollout/entropy"] == pytest.approx(measured["train/entropy_loss"], rel=1e-5)


def test_batch_metrics_weigh_tokens_like_the_loss_and_samples_plainly():
    metrics = train(build())
    starts = BATCH.response_starts
    means = []
    for i in range(len(BATCH)):
        mask = BATCH.loss_masks[starts[i] : starts[i + 1]]
        means.append((BATCH.columns["rollout_log_probs"][starts[i] : starts[i + 1]] * mask).sum() / max(mask.sum(), 1))
    assert metrics["rollout/rollout_log_probs"] == pytest.approx(np.mean(means), rel=1e-5)
    assert metrics["rollout/advantages"] == pytest.approx(BATCH.rewards.mean(), rel=1e-5)
    assert metrics["rollout/response_lengths"] == BATCH.response_lengths.mean()
    assert metrics["rollout/total_lengths"] == BATCH.lengths.mean()
    assert metrics["rollout/raw_reward"] == pytest.approx(float(BATCH.raw_rewards.mean()), rel=1e-5)


def test_metric_names_of_a_round_are_slimes():
    flags = {"use_kl_loss": True, "kl_loss_coef": 0.1}
    metrics = train(build(**flags, packing=Packing(global_batch_size=2), flops=FlopsModel(10.0, 1.0)))
    train_names = (
        "loss pg_loss entropy_loss pg_clipfrac ppo_kl kl_loss train_rollout_logprob_abs_diff grad_norm lr-pg_0"
    )
    rollout_names = "log_probs ref_log_probs rollout_log_probs advantages returns kl rewards raw_reward truncated"
    perf_names = "data_preprocess_time ref_log_probs_time log_probs_time actor_train_time actor_train_tok_per_s"
    wanted = (
        {f"train/{n}" for n in (*train_names.split(), "global_batch_size", "train_rollout_logprob_abs_diff")}
        | {f"rollout/{n}" for n in (*rollout_names.split(), "response_lengths", "total_lengths")}
        | {f"perf/{n}" for n in (*perf_names.split(), "actor_train_tflops", "log_probs_tflops")}
    )
    assert wanted <= metrics.keys()
    assert all(math.isfinite(v) for v in metrics.values())


def test_the_kl_of_the_batch_is_between_old_policy_and_reference():
    backend = FakeBackend()
    backend.frozen["ref"] = torch.zeros_like(backend.frozen["ref"])
    flags = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"}
    worker = build(backend, **flags, packing=Packing(global_batch_size=2, micro_batch_size=4))
    seen = {}

    def spy(rollout_id, data):
        seen.update(data)

    worker.hooks = RoundHooks(postprocess=spy)
    metrics = train(worker)
    masks = torch.cat(seen["loss_masks"])
    kl = kl_estimate(torch.cat(seen["log_probs"]), torch.cat(seen["ref_log_probs"]), "k3")
    sizes = BATCH.response_lengths.tolist()
    means = [(k * m).sum() / m.sum() for k, m in zip(kl.split(sizes), masks.split(sizes), strict=True) if m.sum()]
    assert metrics["rollout/kl"] == pytest.approx(float(sum(means) / len(means)), rel=1e-4)


def test_an_advantage_hook_replaces_the_advantages():
    def hook(data):
        data["advantages"] = [torch.full((n,), 2.0) for n in data["response_lengths"]]

    metrics = train(build(hooks=RoundHooks(advantages=hook)))
    assert metrics["rollout/advantages"] == pytest.approx(2.0)
    assert metrics["train/pg_loss"] == pytest.approx(-2.0, rel=1e-5)


def test_an_advantage_hook_that_sets_nothing_or_the_wrong_lengths_is_an_error():
    def nothing(data):
        pass

    def short(data):
        data["advantages"] = [torch.zeros(1) for _ in data["response_lengths"]]

    with pytest.raises(TrainerError, match=r"\bnothing .*advantages"):
        train(build(hooks=RoundHooks(advantages=nothing)))
    with pytest.raises(TrainerError, match=r"\bshort .*advantages .*\[1, 1, 1, 1\]"):
        train(build(hooks=RoundHooks(advantages=short)))


def test_a_postprocess_hook_may_clear_masks_but_not_set_them():
    def clear(rollout_id, data):
        data["loss_masks"][0].zero_()

    def fill(rollout_id, data):
        data["loss_masks"] = [torch.ones(n) for n in data["response_lengths"]]

    want = train(build())["train/entropy_loss"]
    assert train(build(hooks=RoundHooks(postprocess=clear)))["train/entropy_loss"] != want
    with pytest.raises(TrainerError, match="fill set loss masks"):
        train(build(hooks=RoundHooks(postprocess=fill)))


def test_rollout_data_has_one_entry_per_sample_and_copies():
    data = rollout_data(BATCH)
    assert [len(t) for t in data["tokens"]] == BATCH.lengths.tolist()
    assert data["sample_indices"] == BATCH.sample_ids.tolist()
    assert all(len(v) == len(BATCH) for v in data.values())
    data["rollout_log_probs"][0].fill_(5.0)
    assert BATCH.columns["rollout_log_probs"].max() <= 0


def test_demonstrations_need_no_advantages():
    worker = build(loss=SftLoss(), compute_advantages_and_returns=False)
    metrics = train(worker)
    assert worker.backend.calls == ["forward_backward", "forward_backward", "optim_step"]
    assert metrics["train/loss"] == pytest.approx(metrics["train/nll"], rel=1e-5)
    assert "rollout/advantages" not in metrics


def test_the_reference_is_updated_at_its_interval_and_moments_can_be_reset():
    worker = build(ref_update_interval=2, reset_optimizer=True)
    for rollout_id in range(4):
        train(worker, dataclasses.replace(BATCH, rollout_id=rollout_id))
    calls = [c for c in worker.backend.calls if c in ("copy:actor->ref", "optim_step", "reset_optimizer")]
    step = ["reset_optimizer", "optim_step"]
    assert calls == (step * 2 + ["copy:actor->ref"]) * 2


def versioned(rollout_id, version):
    versions = np.full(len(BATCH.loss_masks), version)
    return dataclasses.replace(BATCH.with_columns(token_versions=versions), rollout_id=rollout_id)


def test_the_old_actor_is_the_one_that_generated_the_batch():
    worker = build(keep_old_actor=True)
    train(worker, versioned(0, 0))
    train(worker, versioned(1, 0))
    assert "log_probs:old_actor" in worker.backend.calls
    with pytest.raises(TrainerError, match=r"rollout 2 was generated by weight versions \[0\]"):
        train(worker, versioned(2, 0))
    with pytest.raises(TrainerError, match="weight version of each token"):
        train(worker, BATCH)


def test_the_version_of_the_old_actor_survives_a_restart(tmp_path):
    worker, again = build(keep_old_actor=True), build(keep_old_actor=True)
    train(worker, versioned(0, 0))
    worker.save(tmp_path)
    again.load(tmp_path)
    again.backend.copy_weights("actor", "old_actor")
    train(again, versioned(1, 0))
    assert "log_probs:old_actor" in again.backend.calls


def test_two_ranks_equal_one():
    """Losses and weights of the parts add up; each rank sees its samples only."""
    packing = Packing(micro_batch_size=1)
    whole = build(packing=packing).train(BATCH)
    parts = [build(packing=packing, ranks=Ranks(rank, 2)).train(BATCH) for rank in range(2)]
    loss = merge(parts)["train/loss"].value
    assert loss == pytest.approx(whole["train/loss"].value, rel=1e-5)
    merged = parts[0]["train/entropy_loss"] + parts[1]["train/entropy_loss"]
    assert merged.value == pytest.approx(whole["train/entropy_loss"].value, rel=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    hf.save_model(hf.build_model(family_config("qwen3"), seed=0), path)
    return path


def test_a_loss_that_is_not_finite_names_the_samples(folder):
    backend = fsdp_backend(folder)
    rewards = BATCH.rewards.copy()
    rewards[3] = np.inf
    worker = build(backend, packing=Packing(micro_batch_size=1, balance="none"))
    with pytest.raises(
        TrainerError,
        match=r"(?s)all parameters are finite.*samples \[103\].*advantages, returns.*--no-check-for-nan",
    ):
        train(worker, dataclasses.replace(BATCH, rewards=rewards))


def test_skipped_steps_are_counted(folder):
    backend = fsdp_backend(folder, check_finite=False)
    rewards = BATCH.rewards.copy()
    rewards[0] = np.nan
    worker = build(backend, packing=Packing(micro_batch_size=1, global_batch_size=2, balance="none"))
    metrics = train(worker, dataclasses.replace(BATCH, rewards=rewards))
    assert metrics["train/skipped_steps"] == 1
    assert math.isfinite(metrics["train/grad_norm"])
    assert backend.optimizer.num_steps == 1


def test_the_same_round_gives_the_same_bits(folder):
    def run():
        backend = fsdp_backend(folder, optim=OptimFlags(lr=1e-2))
        worker = build(backend, packing=Packing(max_tokens=12, global_batch_size=2), entropy_coef=0.01)
        metrics = [worker.train(BATCH) for _ in range(2)]
        values = [{k: m.value for k, m in part.items() if not k.startswith("perf/")} for part in metrics]
        return values, [t.clone() for _, t in backend.named_weights()]

    first, second = run(), run()
    assert first[0] == second[0]
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


def test_a_micro_batch_that_does_not_fit_into_memory_runs_in_halves_with_the_same_gradient(folder, monkeypatch, caplog):
    def run(most_samples):
        backend, sizes = fsdp_backend(folder, optim=OptimFlags(lr=1e-2)), []
        whole = backend.forward_backward

        def forward_backward(micro, loss_fn, **role):
            if len(micro.rows) > most_samples:
                raise MicroBatchTooLargeError("CUDA out of memory")
            sizes.append(len(micro.rows))
            return whole(micro, loss_fn, **role)

        monkeypatch.setattr(backend, "forward_backward", forward_backward)
        metrics = train(build(backend, packing=Packing(micro_batch_size=4)))
        return metrics, sizes, [tensor.clone() for _, tensor in backend.named_weights()]

    whole, split = run(4), run(1)
    assert (whole[1], split[1]) == ([4], [1, 1, 1, 1])
    assert "running its halves" in caplog.text
    assert split[0]["train/loss"] == pytest.approx(whole[0]["train/loss"], abs=1e-6)
    assert split[0]["train/grad_norm"] == pytest.approx(whole[0]["train/grad_norm"], rel=1e-5)
    for one, other in zip(whole[2], split[2], strict=True):
        torch.testing.assert_close(one, other, atol=5e-4, rtol=1e-2)


def test_a_single_sample_that_does_not_fit_into_memory_is_an_error(folder, monkeypatch):
    backend = fsdp_backend(folder)

    def forward_backward(*_, **__):
        raise MicroBatchTooLargeError("CUDA out of memory")

    monkeypatch.setattr(backend, "forward_backward", forward_backward)
    with pytest.raises(torch.OutOfMemoryError):
        train(build(backend))


def test_tflops_are_of_one_gpu_and_tokens_of_all():
    flops, clock = FlopsModel(1e12, 0.0), Clock({"actor_train": 2.0, "log_probs": 4.0})
    part = BATCH.select(np.arange(4))
    num_tokens = int(part.lengths.sum())
    merged = merge([perf_metrics(part, clock, flops, num_sharers=2)] * 3)  # 3 data-parallel parts, 6 GPUs
    found = {name: metric.value for name, metric in merged.items()}
    assert found["perf/actor_train_tok_per_s"] == pytest.approx(3 * num_tokens / 2)
    assert found["perf/actor_train_tflops"] == pytest.approx(3 * num_tokens / 2 / 2)
    assert found["perf/log_probs_tflops"] == pytest.approx(num_tokens / 2 / 4)
