"""Calibrated INT4: products with the inputs change less than with rounded weights, in the same stored format."""

from __future__ import annotations

import pytest
import torch

from furlong.core.quantization.compensation import compensated
from furlong.core.quantization.int4 import Int4Groups


@pytest.mark.parametrize("columns", [32, 96, 136])
def test_products_with_correlated_inputs_change_less(columns: int):
    generator = torch.Generator().manual_seed(columns)
    mixing = torch.randn(columns // 4, columns, generator=generator)
    inputs = torch.randn(500, columns // 4, generator=generator) @ mixing
    inputs += 0.1 * torch.randn(500, columns, generator=generator)
    weight = torch.randn(24, columns, generator=generator)
    form = Int4Groups(8, scale_dtype=torch.float32)
    parts = compensated(form, weight, inputs.T @ inputs)
    assert {name: (tuple(t.shape), t.dtype) for name, t in parts.items()} == form.parts((24, columns))

    def error(quantized: torch.Tensor) -> float:
        return float(((quantized - weight) @ inputs.T).square().mean())

    assert error(form.dequantize(parts, torch.float32)) < error(form.rounded(weight)) / 3


def test_columns_without_inputs_and_weights_of_zero_are_kept_in_range():
    weight = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    weight[1] = 0
    form = Int4Groups(8, scale_dtype=torch.float32)
    moment = torch.zeros(16, 16)
    rounded = form.dequantize(compensated(form, weight, moment), torch.float32)  # no column was ever used
    assert torch.equal(rounded, form.rounded(weight))
    moment[0, 0] = 1.0
    used = form.dequantize(compensated(form, weight, moment), torch.float32)
    assert bool(used.isfinite().all())
    assert not used[1].any()
