"""Matmuls in oneDNN's blocked layout."""

from __future__ import annotations

import pytest
import torch

from furlong.inference.embedded import decode_steps
from furlong.inference.embedded.decode_steps import DecodeLinear, supports_blocks
from furlong.machine import has_amx

SHAPES = [(96, 32), (104, 64), (768, 256), (384, 1120)]


def linears(out_features, in_features, dtype):
    """A plain and a blocked layer; skips if the CPU does not support blocks."""
    torch.manual_seed(0)
    weight, bias = torch.randn(out_features, in_features).to(dtype), torch.randn(out_features).to(dtype)
    if not supports_blocks([weight]):
        pytest.skip(f"no oneDNN products in {dtype} here")
    plain, blocked = DecodeLinear(weight, bias), DecodeLinear(weight, bias)
    blocked.block()
    return plain, blocked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocked_weights_give_the_same_result_up_to_rounding(shape, dtype):
    plain, blocked = linears(*shape, dtype)
    x, rest = torch.randn(12, shape[1]).to(dtype), torch.randn(12, shape[0]).to(dtype)
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 0.5}
    torch.testing.assert_close(blocked(x), plain(x), **tolerance)
    torch.testing.assert_close(blocked.added_to(rest, x), plain.added_to(rest, x), **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_do_not_depend_on_the_number_of_rows(shape, dtype):
    _, blocked = linears(*shape, dtype)
    x, rest = torch.randn(130, shape[1]).to(dtype), torch.randn(130, shape[0]).to(dtype)
    whole, added = blocked(x), blocked.added_to(rest, x)
    is_close = dtype == torch.bfloat16 and has_amx()
    tolerance = {"rtol": 1e-2, "atol": 0.5} if is_close else {"rtol": 0.0, "atol": 0.0}
    for count in (4, 8, 12, 28, 32, 64, 128):
        few, rows = x[2 : 2 + count], slice(2, 2 + count)
        torch.testing.assert_close(blocked(few), whole[rows], **tolerance)
        torch.testing.assert_close(blocked.added_to(rest[rows], few), added[rows], **tolerance)


def test_large_and_double_precision_weights_have_no_blocked_copy(monkeypatch):
    assert not supports_blocks([torch.zeros(8, 8, dtype=torch.float64)])
    monkeypatch.setattr(decode_steps, "MAX_BLOCKED_BYTES", 255)
    assert not supports_blocks([torch.zeros(8, 8)])
