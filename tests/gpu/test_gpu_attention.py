"""Packed attention on CUDA compared with plain float64 attention, one sequence at a time."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

from furlong.core.batch import pack_micro_batch
from furlong.models import packed_attention, varlen_attention
from furlong.models.hf_model import build_model
from furlong.models.packed_model import PackedModel
from models_zoo import FAMILIES, family_config, packed_log_probs, plain_log_probs, random_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHORT = [5, 1, 130, 64, 17]
LONG = [3000, 3, 2050, 700, 1, 1025]  # long enough for cuDNN
BATCH = random_batch(prompts=[9, 4, 30], responses=[[5, 12, 1], [40, 3], [2, 2]])


def written_out(q, k, v, lengths, *, scale, window, sinks):
    """Compute plain attention for each sequence in the precision of the inputs."""
    parts = []
    for q_THE, k_TKE, v_TKE in zip(*(tensor.split(lengths) for tensor in (q, k, v)), strict=True):
        repeats, size = q_THE.shape[1] // k_TKE.shape[1], len(q_THE)
        k_HTE, v_HTE = (tensor.repeat_interleave(repeats, 1).transpose(0, 1) for tensor in (k_TKE, v_TKE))
        scores = q_THE.transpose(0, 1) @ k_HTE.transpose(1, 2) * scale
        seen = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
        if window is not None:
            seen = seen.triu(1 - window)
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, size, 1)], -1)
        probs = scores.softmax(-1)
        parts.append((probs[..., :size] @ v_HTE).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("lengths", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_and_their_gradients_equal_attention_in_float64(lengths, window, has_sinks, dtype):
    heads, kv_heads, width = 8, 2, 64
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(sum(lengths), n, width) for n in (heads, kv_heads, kv_heads)] + [(heads,)] * has_sinks
    inputs = [torch.randn(shape, generator=generator, device="cuda").to(dtype).requires_grad_() for shape in shapes]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    upstream = torch.randn(shapes[0], generator=generator, device="cuda").to(dtype)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()

    sinks, exact_sinks = (tensors[3] if has_sinks else None for tensors in (inputs, exact))
    got = varlen_attention.varlen_attention(
        *inputs[:3], offsets.cuda(), offsets, max(lengths), scale=0.1, window=window, sinks_H=sinks
    )
    want = written_out(*exact[:3], lengths, scale=0.1, window=window, sinks=exact_sinks)
    got.backward(upstream)
    want.backward(upstream.double())

    assert distance(got, want) < 0.01
    for tensor, other in zip(inputs, exact, strict=True):
        assert distance(tensor.grad, other.grad) < 0.01


def distance(got, want):
    """Return the norm of the difference, relative to the norm of `want`."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


@pytest.mark.skipif(
    not torch.cuda.is_available() or not varlen_attention.has_cudnn(torch.device("cuda")),
    reason="needs cuDNN's kernels",
)
def test_both_kernels_give_the_same_log_denominators_so_that_either_can_go_backward():
    inputs = [torch.randn(sum(LONG), n, 64, device="cuda", dtype=torch.bfloat16) for n in (8, 2, 2, 8)]
    offsets = torch.tensor([0, *LONG]).cumsum(0).int()
    options = (offsets.cuda(), offsets, max(LONG), 0.1, 0)
    grads, stats = [], []
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            out, lse = varlen_attention._forward(*inputs[:3], *options, None)
            grads.append(varlen_attention._backward(inputs[3], *inputs[:3], out, lse, *options, False))
        finally:
            torch.use_deterministic_algorithms(False)
        stats.append(lse)
    torch.testing.assert_close(*stats, rtol=1e-4, atol=1e-4)
    for got, want in zip(*grads, strict=True):
        assert not torch.equal(got, want)  # the two kernels differ
        assert distance(got, want) < 0.01


def randomized(family):
    config = family_config(family)
    config.head_dim = 16
    model = build_model(config, seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_log_probs_and_gradients_equal_one_sequence_at_a_time(family, dtype):
    model = randomized(family)
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    weights = torch.linspace(-1, 1, len(BATCH.loss_masks))

    want = plain_log_probs(twin, BATCH)
    (want * weights).sum().backward()
    model.to("cuda", dtype)
    got = packed_log_probs(PackedModel(model), pack_micro_batch(BATCH, range(len(BATCH)), device="cuda"))
    (got * weights.cuda()).sum().backward()

    log_prob_tolerance, grad_tolerance = (1e-4, 1e-3) if dtype is torch.float32 else (0.1, 0.1)
    assert (got.cpu().float() - want).abs().mean() < log_prob_tolerance
    for (name, parameter), (_, other) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if parameter.grad is not None and ".experts." not in name:  # bf16 may route a token to another expert
            assert distance(parameter.grad.cpu(), other.grad) < grad_tolerance or other.grad.norm() < 1e-3, name


def test_padding_on_cuda_is_said(caplog):
    config = family_config("qwen3")
    config.attn_logit_softcapping = 50.0
    packed_attention._why_padded.cache_clear()
    with caplog.at_level(logging.INFO, logger="furlong"):
        assert packed_attention.needs_padding(torch.device("cuda"), torch.bfloat16, config)
    assert "pads sequences" in caplog.text
    assert "soft cap" in caplog.text
