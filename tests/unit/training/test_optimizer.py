from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from furlong.config.sections import OptimFlags
from furlong.errors import CheckpointError, ConfigError, TrainerError
from furlong.training.checkpoint.tensor_reader import open_reader
from furlong.training.optimizer import MasterOptimizer, Schedule


def test_constant_with_warmup_starts_at_its_initial_rate():
    schedule = Schedule(OptimFlags(lr=1.0, lr_warmup_iters=4, lr_warmup_init=0.2))
    assert [schedule.lr(k) for k in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


@settings(max_examples=200, deadline=None)
@given(
    style=st.sampled_from(["constant", "linear", "cosine", "inverse-square-root"]),
    warmup=st.one_of(st.integers(0, 9), st.floats(0.001, 0.9)),
    decay=st.integers(10, 60),
    min_lr=st.floats(0, 0.5),
    init_lr=st.floats(0, 1),
    samples=st.integers(1, 256),
)
def test_the_schedule_is_megatrons(style, warmup, decay, min_lr, init_lr, samples):
    """Megatron's formulas, in its own unit: warm-up, decay and position are counted in samples."""
    length = {"lr_warmup_iters": warmup} if isinstance(warmup, int) else {"lr_warmup_fraction": warmup}
    flags = OptimFlags(lr=1.0, min_lr=min_lr, lr_warmup_init=init_lr, lr_decay_style=style, **length)
    schedule = Schedule(flags, total_steps=decay, samples_per_step=samples)
    decay_samples = decay * samples
    warmup_samples = warmup * (samples if isinstance(warmup, int) else decay_samples)
    for step in range(decay + 3):
        n = step * samples
        if warmup_samples > 0 and n <= warmup_samples:
            expected = init_lr + (1 - init_lr) * n / warmup_samples
        elif style == "constant":
            expected = 1.0
        elif n > decay_samples:
            expected = min_lr
        elif style == "inverse-square-root":
            expected = max(min_lr, max(warmup_samples, 1) ** 0.5 / max(n, 1) ** 0.5)
        else:
            done = (n - warmup_samples) / (decay_samples - warmup_samples)
            left = 1 - done if style == "linear" else (1 + math.cos(math.pi * done)) / 2
            expected = min_lr + left * (1 - min_lr)
        assert schedule.lr(step) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("flags", "total_steps", "message"),
    [
        ({"lr_decay_style": "linear"}, None, "--lr-decay-iters"),
        ({"lr_warmup_fraction": 0.1}, None, "--lr-decay-iters"),
        ({"lr_warmup_fraction": 0.1, "lr_warmup_iters": 3}, 10, "--lr-warmup-fraction 0.1 .*--lr-warmup-iters 3"),
        ({"lr_decay_style": "cosine", "lr_warmup_iters": 10}, 10, "shorter"),
    ],
)
def test_an_impossible_schedule_is_an_error(flags, total_steps, message):
    with pytest.raises(ConfigError, match=message):
        Schedule(OptimFlags(**flags), total_steps=total_steps)


def params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 3, generator=generator).to(dtype))
    bias = nn.Parameter(torch.randn(3, generator=generator).to(dtype))
    return [("weight", weight), ("bias", bias)]


FLAGS = OptimFlags(lr=0.1, clip_grad=0.0)


def build(named, **flags):
    flags = OptimFlags(**{"lr": 0.1, "clip_grad": 0.0, **flags})
    return MasterOptimizer(named, flags, Schedule(flags))


def test_adamw_equals_the_formula_and_decays_matrices_only():
    named = params()
    optimizer = build(named, weight_decay=0.5, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-3)
    want = {name: p.detach().clone() for name, p in named}
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in want.items()}
    for step in range(1, 4):
        for name, p in named:
            grad = torch.sin(torch.arange(p.numel(), dtype=torch.float32).view_as(p) + step)
            p.grad = grad.clone()
            m, v = moments[name]
            m.mul_(0.8).add_(0.2 * grad)
            v.mul_(0.9).add_(0.1 * grad * grad)
            decay = 0.5 if p.ndim > 1 else 0.0
            update = (m / (1 - 0.8**step)) / ((v / (1 - 0.9**step)).sqrt() + 1e-3)
            want[name] = want[name] * (1 - 0.1 * decay) - 0.1 * update
        optimizer.step(skip_not_finite=False)
    for name, p in named:
        torch.testing.assert_close(p.detach(), want[name], rtol=1e-5, atol=1e-6)


def test_gradients_are_clipped_by_their_global_norm():
    named = params()
    optimizer = build(named, optimizer="sgd", clip_grad=1.0, weight_decay=0.0)
    before = [p.detach().clone() for _, p in named]
    for _, p in named:
        p.grad = torch.full_like(p, 2.0)
    norm = math.sqrt(15 * 4.0)
    report = optimizer.step(skip_not_finite=False)
    assert report.grad_norm == pytest.approx(norm)
    for (_, p), old in zip(named, before, strict=True):
        torch.testing.assert_close(p.detach(), old - 0.1 * 2.0 / norm, rtol=1e-5, atol=1e-6)


def test_half_precision_updates_below_the_rounding_are_not_lost():
    named = [("weight", nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16)))]
    optimizer = build(named, optimizer="sgd", lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        named[0][1].grad = torch.ones(8, 8, dtype=torch.bfloat16)
        optimizer.fold_gradients()
        assert named[0][1].grad is None
        optimizer.step(skip_not_finite=False)
    assert named[0][1].detach().float().max() < 0.98  # momentum 0.9: about 100 * 1e-4 * 10 less the start


def test_half_precision_gradients_add_up_in_float32():
    named = [("weight", nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16)))]
    optimizer = build(named)
    for value in [256.0] + [1.0] * 8:
        named[0][1].grad = torch.full((1, 1), value, dtype=torch.bfloat16)
        optimizer.fold_gradients()
    assert optimizer.step(skip_not_finite=False).grad_norm == 264.0


def test_a_gradient_that_is_not_finite_is_named_and_changes_nothing():
    for skip in (False, True):
        named = params()
        optimizer = build(named)
        before = [p.detach().clone() for _, p in named]
        named[0][1].grad, named[1][1].grad = torch.ones(4, 3), torch.tensor([0.0, math.nan, 1.0])
        if skip:
            assert "bias" in optimizer.step(skip_not_finite=True).skipped
        else:
            with pytest.raises(TrainerError, match="bias"):
                optimizer.step(skip_not_finite=False)
        assert optimizer.num_steps == 0
        assert all(torch.equal(p.detach(), old) for (_, p), old in zip(named, before, strict=True))
        assert all(p.grad is None for _, p in named)


def test_stateless_adam_keeps_no_moments_and_reset_clears_them():
    named = params()
    stateless, kept = build(named, use_stateless_adam=True), build(params())
    for optimizer in (stateless, kept):
        for weight in optimizer.weights:
            weight.parameter.grad = torch.ones_like(weight.parameter)
        optimizer.step(skip_not_finite=False)
    assert not list(stateless.state_tensors())
    assert {k for k, _ in kept.state_tensors()} == {
        f"{name}/{m}" for name in ("weight", "bias") for m in ("exp_avg", "exp_avg_sq", "step")
    }
    kept.reset()
    assert not list(kept.state_tensors())
    assert kept.num_steps == 1


@pytest.mark.parametrize(("saved", "now"), [("adam", "sgd"), ("sgd", "adam")])
def test_moments_of_another_optimizer_are_refused(saved, now, tmp_path):
    trained, other = build(params(), optimizer=saved), build(params(), optimizer=now)
    for weight in trained.weights:
        weight.parameter.grad = torch.ones_like(weight.parameter)
    trained.step(skip_not_finite=False)
    save_file({n: t.clone() for n, t in trained.state_tensors()}, tmp_path / "moments.safetensors")
    with (
        pytest.raises(CheckpointError, match=f"not those of {now};.*--optimizer .*--no-load-optim"),
        open_reader(tmp_path, ["moments.safetensors"]) as reader,
    ):
        other.restore(reader)


def test_newly_trained_parameters_are_logged(tmp_path, caplog):
    save_file({f"bias/{m}": torch.zeros(3) for m in ("exp_avg", "exp_avg_sq")}, tmp_path / "moments.safetensors")
    with open_reader(tmp_path, ["moments.safetensors"]) as reader:
        build(params()).restore(reader)
    [message] = caplog.messages
    assert message.startswith(f"{tmp_path}/moments.safetensors has no moments of weight")


def test_moments_of_another_model_are_refused(tmp_path):
    optimizer = build(params())
    for name in ("head", "weight"):
        moments = {f"{name}/{moment}": torch.zeros(2) for moment in ("exp_avg", "exp_avg_sq")}
        save_file(moments, tmp_path / "moments.safetensors")
        with (
            pytest.raises(CheckpointError, match=name),
            open_reader(tmp_path, ["moments.safetensors"]) as reader,
        ):
            optimizer.restore(reader)


@pytest.mark.parametrize("offload", ["moments", "all"])
def test_offloaded_states_step_bit_identically(offload):
    stayed, moved = ([(name, torch.nn.Parameter(p.bfloat16())) for name, p in params()] for _ in "sm")
    optimizers = [build(stayed), MasterOptimizer(moved, FLAGS, Schedule(FLAGS), offload=offload)]
    for step in range(3):
        for named, optimizer in zip((stayed, moved), optimizers, strict=True):
            for _, p in named:
                p.grad = torch.full_like(p, 0.5 + step)
            optimizer.fold_gradients()
            optimizer.step(skip_not_finite=False)
    there = [master.untyped_storage().size() for master in optimizers[1].master_weights]
    assert any(there) == (offload == "moments")
    assert all(moment.untyped_storage().size() == 0 for moment in optimizers[1].moments())
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(stayed, moved, strict=True))
    want, got = ([tensor.clone() for _, tensor in optimizer.state_tensors()] for optimizer in optimizers)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    optimizers[1].reset()
    assert not list(optimizers[1].moments())
