"""The gated delta rule and its convolution over packed sequences, against a loop over the tokens of each sequence."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the usual name

from furlong.models import delta_rule
from furlong.models.delta_rule import PackedSequences, causal_conv, chunked_delta_rule, delta_kernel, gated_delta_rule

CU = torch.tensor([0, 5, 135, 136, 200, 264], dtype=torch.int32)  # one token; a chunk; more than two chunks
SEQUENCES = PackedSequences.of(CU, torch.device("cpu"))


def drawn(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(264, *shape, generator=generator) for shape in shapes]


def inputs():
    query, key, value, decay, beta = drawn((3, 8), (3, 8), (3, 6), (3,), (3,))
    return [each.requires_grad_() for each in (query, key, value, -decay.abs(), beta.sigmoid())]


def token_by_token(query, key, value, decay, beta):
    """Return the outputs of one sequence, as the rule is defined."""
    state, outputs = value.new_zeros(query.shape[1], query.shape[2], value.shape[2]), []
    for q, k, v, g, b in zip(F.normalize(query, dim=-1), F.normalize(key, dim=-1), value, decay, beta, strict=True):
        state = state * g.exp()[:, None, None]
        written = (v - torch.einsum("hef,he->hf", state, k)) * b[:, None]
        state = state + torch.einsum("he,hf->hef", k, written)
        outputs.append(torch.einsum("hef,he->hf", state, q) * query.shape[2] ** -0.5)
    return torch.stack(outputs)


def test_chunks_compute_the_rule_of_each_sequence_and_its_gradients():
    ours, theirs = inputs(), inputs()
    out = chunked_delta_rule(*ours, SEQUENCES)
    parts = [token_by_token(*(each[a:b] for each in theirs)) for a, b in pairwise(CU.tolist())]
    torch.testing.assert_close(out, torch.cat(parts), rtol=1e-4, atol=1e-5)
    (weights,) = drawn((3, 6), seed=1)
    for result in (out, torch.cat(parts)):
        (result * weights).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4)


def test_the_convolution_starts_anew_in_each_sequence():
    (x,), weight = drawn((10,)), torch.randn(10, 4, generator=torch.Generator().manual_seed(2))
    parts = [F.conv1d(F.pad(x[a:b].t(), (3, 0)), weight[:, None], groups=10).t() for a, b in pairwise(CU.tolist())]
    torch.testing.assert_close(causal_conv(x, weight, SEQUENCES), F.silu(torch.cat(parts)))


@pytest.fixture
def kernels(monkeypatch):
    """Forget which kernel was chosen, before and after a test."""
    caches = (delta_kernel, delta_rule._flash_linear_attention)
    for cache in caches:
        cache.cache_clear()
    yield monkeypatch
    for cache in caches:
        cache.cache_clear()


def test_flash_linear_attention_is_called_with_the_offsets_of_the_sequences(kernels, caplog):
    calls = []

    def rule(query, key, value, **options):
        calls.append(options)
        assert query.shape == key.shape == (1, 264, 3, 8)
        return value + 1, None

    package, module = ModuleType("fla"), ModuleType("fla.ops.gated_delta_rule")
    package.ops, module.chunk_gated_delta_rule = ModuleType("fla.ops"), rule
    for name, each in (("fla", package), ("fla.ops", package.ops), (module.__name__, module)):
        kernels.setitem(sys.modules, name, each)
    kernels.setattr(delta_rule.importlib.metadata, "version", {"flash-linear-attention": "0.6", "triton": "3.7.1"}.get)
    kernels.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    caplog.set_level("INFO")
    assert delta_kernel("cuda", torch.bfloat16) == "flash-linear-attention"
    assert "kernels of flash-linear-attention" in caplog.text
    assert delta_kernel("cuda", torch.float32) == "torch"
    assert "TF32" in caplog.text
    assert delta_kernel("cpu", torch.bfloat16) == "torch"
    kernels.setattr(delta_rule, "delta_kernel", lambda *_: "flash-linear-attention")
    values = inputs()
    torch.testing.assert_close(gated_delta_rule(*values, SEQUENCES), values[2] + 1)
    (options,) = calls
    assert options["cu_seqlens"].tolist() == CU.tolist()
    assert options["cu_seqlens"].dtype == torch.int64
    assert options["use_qk_l2norm_in_kernel"]
    assert options["g"].shape == options["beta"].shape == (1, 264, 3)


def test_without_the_package_torch_computes_on_a_gpu_and_the_log_says_so(kernels, caplog):
    kernels.setitem(sys.modules, "fla", None)
    assert delta_kernel("cuda", torch.bfloat16) == "torch"
    assert "pip install flash-linear-attention" in caplog.text


@pytest.mark.parametrize(
    ("triton", "capability", "kernel"),
    [
        ("3.3.1", (9, 0), "flash-linear-attention"),
        ("3.6.0", (9, 0), "torch"),
        ("3.6.0", (8, 0), "flash-linear-attention"),
        ("3.7.1", (9, 0), "flash-linear-attention"),
    ],
)
def test_kernels_with_wrong_gradients_are_not_used(triton, capability, kernel, kernels, caplog):
    kernels.setattr(delta_rule, "_flash_linear_attention", lambda: object())
    kernels.setattr(delta_rule.importlib.metadata, "version", {"flash-linear-attention": "0.6", "triton": triton}.get)
    kernels.setattr(torch.cuda, "get_device_capability", lambda: capability)
    caplog.set_level("INFO")
    assert delta_kernel("cuda", torch.bfloat16) == kernel
    assert (f"Triton {triton}" in caplog.text) == (kernel == "torch")
