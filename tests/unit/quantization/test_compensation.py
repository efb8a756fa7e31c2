"""Calibrated weights: products with the inputs change less than with rounded weights, in the same stored format."""

from __future__ import annotations

import pytest
import torch

from furlong.quantization.compensation import Compensable, compensated
from furlong.quantization.fp8 import Fp8Blocks, Fp8Scaled
from furlong.quantization.int4 import Int4Groups

FORMS = (
    Int4Groups(8, scale_dtype=torch.float32),
    Int4Groups(8),
    Fp8Blocks((16, 32)),
    Fp8Blocks((16, 32), is_power_of_two=True),
    Fp8Scaled("channel", torch.bfloat16),
    Fp8Scaled("tensor"),
)


@pytest.mark.parametrize("columns", [32, 96, 136])
@pytest.mark.parametrize("form", FORMS, ids=repr)
def test_products_with_correlated_inputs_change_less(form: Compensable, columns: int):
    generator = torch.Generator().manual_seed(columns)
    mixing = torch.randn(columns // 4, columns, generator=generator)
    inputs = torch.randn(500, columns // 4, generator=generator) @ mixing
    inputs += 0.1 * torch.randn(500, columns, generator=generator)
    weight = torch.randn(24, columns, generator=generator)
    parts = compensated(form, weight, inputs.T @ inputs)
    assert {name: (tuple(t.shape), t.dtype) for name, t in parts.items()} == form.parts((24, columns))

    def error(quantized: torch.Tensor) -> float:
        return float(((quantized - weight) @ inputs.T).square().mean())

    rounded = form.dequantize(form.quantize(weight), torch.float32)
    assert error(form.dequantize(parts, torch.float32)) < error(rounded) / 4


def test_columns_without_inputs_and_weights_of_zero_are_kept_in_range():
    weight = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    weight[1] = 0
    form = Int4Groups(8, scale_dtype=torch.float32)
    moment = torch.zeros(16, 16)
    unused = form.dequantize(compensated(form, weight, moment), torch.float32)  # all columns count alike
    assert (unused - weight).square().sum() <= (form.rounded(weight) - weight).square().sum()
    moment[0, 0] = 1.0
    used = form.dequantize(compensated(form, weight, moment), torch.float32)
    assert bool(used.isfinite().all())
    assert not used[1].any()
