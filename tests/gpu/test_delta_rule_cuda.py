"""The gated delta rule of flash-linear-attention on CUDA: values and gradients of PyTorch's operations."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from furlong.models.delta_rule import PackedSequences, chunked_delta_rule, delta_kernel, gated_delta_rule

HEADS, WIDTH = 4, 64
LENGTHS = (1, 63, 64, 65, 200, 7)
NAMES = ("output", "q", "k", "v", "g", "beta")
has_kernel = torch.cuda.is_available() and importlib.util.find_spec("fla") is not None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_kernel, reason="needs a CUDA device and flash-linear-attention"),
]


def packed(lengths: tuple[int, ...]) -> PackedSequences:
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return PackedSequences.of(offsets, torch.device("cuda"))


def inputs(num_tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values, logarithms of decays, and betas."""
    torch.manual_seed(0)
    columns = [torch.randn(num_tokens, HEADS, WIDTH, device="cuda", dtype=dtype) for _ in range(3)]
    decays = -torch.rand(num_tokens, HEADS, device="cuda")
    betas = torch.rand(num_tokens, HEADS, device="cuda", dtype=dtype)
    return [*columns, decays, betas]


def values_and_gradients(rule, values: list[Tensor], sequences: PackedSequences) -> list[Tensor]:
    leaves = [value.detach().clone().requires_grad_() for value in values]
    out = rule(*leaves, sequences)
    torch.manual_seed(1)
    out.float().backward(torch.randn(out.shape, device="cuda"))
    return [out.detach().float(), *(leaf.grad.float() for leaf in leaves if leaf.grad is not None)]


def gaps(actual: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """Relative differences by name."""
    pairs = zip(NAMES, actual, expected, strict=True)
    return {name: float((a - e).norm() / e.norm()) for name, a, e in pairs}


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 5e-3), (torch.bfloat16, 2e-2)])
def test_values_and_gradients_are_those_of_torch(dtype, limit):
    values, sequences = inputs(sum(LENGTHS), dtype), packed(LENGTHS)
    assert delta_kernel("cuda") == "flash-linear-attention"
    expected = values_and_gradients(chunked_delta_rule, [value.float() for value in values], sequences)
    actual = values_and_gradients(gated_delta_rule, values, sequences)
    by_name = gaps(actual, expected)
    assert {name: gap for name, gap in by_name.items() if not gap < limit} == {}


def test_no_state_reaches_the_next_sequence():
    values, sequences = inputs(sum(LENGTHS), torch.bfloat16), packed(LENGTHS)
    together = gated_delta_rule(*values, sequences)
    start = 0
    for length in LENGTHS:
        alone = gated_delta_rule(*(value[start : start + length] for value in values), packed((length,)))
        torch.testing.assert_close(together[start : start + length], alone, rtol=0, atol=1e-2)
        start += length
