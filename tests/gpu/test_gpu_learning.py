"""Training on CUDA: precision, compiled layers, checkpoints, and the quickstart in one process."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from backends import fsdp_backend
from furlong.algo.policy_loss import PolicyLoss
from furlong.config.command_line import load
from furlong.config.sections import AlgoFlags, OptimFlags
from furlong.core.batch import pack_micro_batch
from furlong.machine import deterministic_kernels
from furlong.models import hf_model as hf
from furlong.quickstart.quickstart import quickstart_flags
from furlong.run.launch import run
from models_zoo import family_config, random_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BATCH = random_batch(prompts=[9, 4, 30], responses=[[5, 12, 1], [40, 3], [2, 2]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    config = family_config("qwen3")
    config.head_dim = 16
    hf.save_model(hf.build_model(config, seed=0), path)
    return path


def build(folder, **options):
    options = {"optim": OptimFlags(lr=3e-3), "device": "cuda", "dtype": torch.bfloat16} | options
    return fsdp_backend(folder, **options)


def micro(batch=BATCH):
    count = len(batch.loss_masks)
    weights = np.full(count, 1 / count, np.float32)
    part = pack_micro_batch(batch, range(len(batch)), weights, device="cuda")
    return part.with_columns(advantages=torch.ones(count, device="cuda"))


def test_bfloat16_with_float32_masters_learns_like_float32(folder):
    curves = {}
    for dtype in (torch.float32, torch.bfloat16):
        backend = build(folder, dtype=dtype)
        curves[dtype] = []
        for _ in range(25):
            curves[dtype].append(-float(backend.log_probs(micro()).log_probs_R.mean()))
            backend.forward_backward(micro(), PolicyLoss(AlgoFlags()))
            backend.optim_step()
    exact, half = (np.array(curve) for curve in curves.values())
    assert exact[-1] < exact[0] - 0.5
    assert np.abs(half - exact).max() < 0.05 * (exact[0] - exact[-1])


@pytest.fixture
def exact():
    """Use deterministic kernels: FlashAttention's backward pass otherwise accumulates in any order."""
    with deterministic_kernels():
        yield


@pytest.mark.usefixtures("exact")
def test_a_checkpoint_continues_bit_for_bit(folder, tmp_path):
    straight, saved = build(folder), build(folder)
    for backend in (straight, saved):
        backend.forward_backward(micro(), PolicyLoss(AlgoFlags()))
        backend.optim_step()
    saved.save(tmp_path)
    resumed = build(folder)
    resumed.load(tmp_path)
    for backend in (straight, resumed):
        backend.forward_backward(micro(), PolicyLoss(AlgoFlags()))
        backend.optim_step()
    for (name, want), (_, got) in zip(straight.named_weights(), resumed.named_weights(), strict=True):
        assert torch.equal(got, want), name
    for want, got in zip(straight.optimizer.master_weights, resumed.optimizer.master_weights, strict=True):
        assert torch.equal(got, want)


@pytest.mark.filterwarnings("default")  # the compiler raises warnings that it filters itself
@pytest.mark.parametrize("share_prompts", [False, True])
def test_compiled_layers_agree_with_plain_ones(tmp_path, share_prompts):
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    hf.save_model(hf.build_model(config, seed=0), tmp_path)
    batches = [
        random_batch(prompts=[400, 90], responses=[[300, 2600], [2800, 60, 7]], vocab=512),
        random_batch(prompts=[50, 60], responses=[[30, 90], [120, 60]], vocab=512, seed=1),
    ]
    plain, compiled = (
        build(tmp_path, compile_layers=compile_layers, share_prompts=share_prompts) for compile_layers in ("off", "on")
    )
    layers = compiled.actor.layers
    for i, batch in enumerate([*batches, batches[0]]):
        want, got = (backend.log_probs(micro(batch)).log_probs_R for backend in (plain, compiled))
        assert (got - want).abs().mean() < 0.01
        for backend in (plain, compiled):
            backend.forward_backward(micro(batch), PolicyLoss(AlgoFlags()))
        assert layers.num_recomputed == (3 if i == 0 else 0)  # only the measuring pass recomputes
    for want, got in zip(plain.optimizer.weights, compiled.optimizer.weights, strict=True):
        difference = got.master.grad - want.master.grad
        assert float(difference.norm() / want.master.grad.norm()) < 0.05, want.name


@pytest.mark.usefixtures("exact")
def test_less_memory_recomputes_more_layers_and_gives_the_same_gradients(folder, monkeypatch):
    from furlong.models import compiled_layers

    grads, recomputed = [], []
    for free in (2**40, 0):
        monkeypatch.setattr(compiled_layers, "_free_bytes", lambda *_, free=free: free)
        backend = build(folder, dtype=torch.bfloat16)
        for _ in range(2):
            backend.forward_backward(micro(), PolicyLoss(AlgoFlags()))
        recomputed.append(backend.actor.layers.num_recomputed)
        grads.append([m.grad.clone() for m in backend.optimizer.master_weights])
    assert recomputed == [0, 2]
    for want, got in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_the_quickstart_learns_to_carry_in_one_process_on_one_gpu(tmp_path):
    num_rollout = 60
    run(load(quickstart_flags(tmp_path, seed=42, num_rollout=num_rollout, is_async=False)))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    accuracy = {row["step"]: row["eval/held_out"] for row in rows if "eval/held_out" in row}
    first = next(row for row in rows if "train/train_rollout_logprob_abs_diff" in row)
    assert "cuda" in (tmp_path / "run.log").read_text()
    assert first["train/train_rollout_logprob_abs_diff"] < 0.01
    assert accuracy[num_rollout] >= accuracy[0] + 0.4
