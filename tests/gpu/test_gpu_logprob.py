"""The output layer on CUDA: values and gradients compared with float64, and memory use."""

from __future__ import annotations

import pytest
import torch

from furlong.algo import logprob_compiled
from furlong.algo.logprob import stats_from_logits, token_stats
from furlong.models.model_facts import logits_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # the compiler raises warnings that it filters itself
]
R, V, D = 400, 151_936, 64
GIB = 2**30


def inputs(dtype, rows=R, width=D):
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(rows, width, device="cuda", generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(V, width, device="cuda", generator=generator) * 0.2).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (rows,), device="cuda", generator=generator)
    return hidden, weight, targets


def gradients(stats, tensors):
    upstream = torch.linspace(-1, 2, len(stats.log_probs_R), device="cuda", dtype=stats.log_probs_R.dtype)
    total = (stats.log_probs_R * upstream).sum()
    if stats.entropy_R is not None and stats.entropy_R.requires_grad:
        total = total + 0.3 * (stats.entropy_R * upstream).sum()
    return torch.autograd.grad(total, tensors)


def distance(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("chunk_size", [-1, 150])
@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_entropy_and_gradients_equal_float64(dtype, softcap, entropy_grad, chunk_size):
    hidden, weight, targets = inputs(dtype)
    assert logprob_compiled.is_large(hidden, weight)
    stats = token_stats(
        hidden,
        weight,
        targets,
        temperature=0.7,
        chunk_size=chunk_size,
        entropy=True,
        entropy_grad=entropy_grad,
        softcap=softcap,
    )
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    logits = exact[0] @ exact[1].T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    want = stats_from_logits(logits, targets, temperature=0.7, entropy=True, entropy_grad=entropy_grad)
    tolerance = 1e-4 if dtype is torch.float32 else 0.15  # logits up to 8 / 0.7, rounded to bfloat16
    assert (stats.log_probs_R - want.log_probs_R).abs().max() < tolerance
    assert (stats.entropy_R - want.entropy_R).abs().max() < tolerance
    for got, exact_grad in zip(gradients(stats, (hidden, weight)), gradients(want, exact), strict=True):
        assert distance(got, exact_grad) < (1e-4 if dtype is torch.float32 else 0.03)


def test_the_plain_and_the_compiled_output_layer_agree(monkeypatch):
    hidden, weight, targets = inputs(torch.bfloat16)
    args = {"temperature": 1.0, "chunk_size": 128, "entropy": True, "entropy_grad": False}
    compiled = token_stats(hidden, weight, targets, **args)
    monkeypatch.setattr(logprob_compiled, "MIN_LOGITS", 10**18)
    plain = token_stats(hidden, weight, targets, **args)
    torch.testing.assert_close(compiled.log_probs_R, plain.log_probs_R, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(compiled.entropy_R, plain.entropy_R, rtol=1e-4, atol=1e-4)
    for got, want in zip(gradients(compiled, (hidden, weight)), gradients(plain, (hidden, weight)), strict=True):
        assert distance(got, want) < 0.01


def test_full_float32_logits_never_exist():
    rows, width = 32_768, 2560
    hidden, weight, targets = inputs(torch.bfloat16, rows, width)
    chunk_size = logits_bytes(on_cpu=False) // (4 * V)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    stats = token_stats(
        hidden, weight, targets, temperature=1.0, chunk_size=chunk_size, entropy=True, entropy_grad=False
    )
    gradients(stats, (hidden, weight))
    peak = torch.cuda.max_memory_allocated() - before
    full_table = 4 * rows * V
    weight_gradients = (4 + 2) * V * width
    assert full_table > 18 * GIB
    assert peak - weight_gradients < 0.1 * full_table
