"""Quantized formats: equal to compressed-tensors and to loops written from the definitions, for hostile weights too."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from furlong.quantization.fp8 import E4M3, Fp8Blocks, Fp8Scaled
from furlong.quantization.int4 import SHRINKS, Int4Groups, packed, unpacked
from furlong.quantization.weight_format import QuantizationError, WeightFormat

GOLDEN = Path(__file__).parents[2] / "golden" / "quantized.safetensors"
SLICE = Fp8Blocks((8, 4))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def golden_formats(dtype: torch.dtype) -> dict[str, WeightFormat]:
    return {
        **{f"int4-{size}": Int4Groups(size, scale_dtype=dtype) for size in (32, 128)},
        **{f"fp8-{per}": Fp8Scaled(per, scale_dtype=dtype) for per in ("channel", "tensor")},
    }


def test_results_equal_those_of_compressed_tensors_bit_for_bit():
    with safe_open(GOLDEN, framework="pt") as file:
        assert file.metadata() == {"compressed-tensors": "0.20.0"}
        names = list(file.keys())
        weights = [name for name in names if name.count("/") == 2]
        compared = 0
        for name in weights:
            weight = file.get_tensor(name)
            for label, form in golden_formats(weight.dtype).items():
                base = f"{name.removesuffix('/weight')}/{label}"
                for part, value in form.quantize(weight).items():
                    if part != "weight_shape":
                        expected = file.get_tensor(f"{base}/{part}")
                        assert value.numel() == expected.numel()
                        assert torch.equal(bits(value).flatten(), bits(expected).flatten()), f"{base}/{part}"
                        compared += 1
    assert compared == len(names) - len(weights)


def loop_over_blocks(weight: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """DeepSeek's definition: each block divided by its largest magnitude / 448."""
    rows, columns = weight.shape
    quantized = torch.empty(rows, columns, dtype=E4M3)
    scales = torch.empty(math.ceil(rows / height), math.ceil(columns / width))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            block = weight[place].float()
            scale = max(float(block.abs().max()), 1e-12)
            scales[i, j] = torch.tensor(scale) / 448
            quantized[place] = (block / scales[i, j]).clamp(-448, 448).to(E4M3)
    return quantized, scales


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 20), columns=st.integers(1, 20), seed=st.integers(0, 999), magnitude=st.integers(-20, 20))
def test_blocks_equal_a_loop_for_any_shape(rows: int, columns: int, seed: int, magnitude: int):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2.0**magnitude
    weight[0, 0] = 0
    parts = SLICE.quantize(weight)
    quantized, scales = loop_over_blocks(weight, 8, 4)
    assert torch.equal(bits(parts["weight"]), bits(quantized))
    assert torch.equal(parts["weight_scale_inv"], scales)


@settings(max_examples=30, deadline=None)
@given(exponent=st.integers(-30, 30), fraction=st.floats(1, 2, exclude_max=True))
def test_power_of_two_scales_are_the_smallest_that_fit(exponent: int, fraction: float):
    weight = torch.full((2, 2), fraction * 2.0**exponent)
    form = Fp8Blocks((2, 2), is_power_of_two=True)
    scale = float(form.quantize(weight)["weight_scale_inv"])
    assert math.frexp(scale)[0] == 0.5
    assert scale >= float(weight[0, 0] / 448) > scale / 2


FORMATS: dict[str, WeightFormat] = {
    "blocks": Fp8Blocks((32, 32)),
    "blocks, bfloat16 scales": Fp8Blocks((32, 32), scale_dtype=torch.bfloat16),
    "channel": Fp8Scaled("channel"),
    "tensor": Fp8Scaled("tensor"),
    "int4": Int4Groups(32, scale_dtype=torch.float32),
    "int4 of 128": Int4Groups(128, scale_dtype=torch.bfloat16),
    "int4, least error": Int4Groups(32, scale_dtype=torch.bfloat16, observer="mse"),
}
STEP = {
    "int4": 1 / 7.5,
    "int4 of 128": 1 / 7.4,
    "int4, least error": 1 - 6.9 / 7.5 * min(SHRINKS),
}  # of the largest magnitude; FP8 rounds to 1/16 of the value


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), scale=st.sampled_from([1e-4, 1.0, 300.0]))
def test_what_is_stored_has_the_declared_parts_and_is_near_the_weight(name: str, seed: int, scale: float):
    weight = torch.randn(12, 256, generator=torch.Generator().manual_seed(seed)) * scale
    form = FORMATS[name]
    parts = form.quantize(weight)
    assert {part: (tuple(t.shape), t.dtype) for part, t in parts.items()} == form.parts((12, 256))
    back = form.dequantize(parts, torch.float32)
    tolerance = STEP[name] * weight.abs().max() if name in STEP else weight.abs() / 15 + weight.abs().max() / 2**9
    assert ((back - weight).abs() <= tolerance).all()


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_zeros_stay_zeros(form: WeightFormat):
    parts = form.quantize(torch.zeros(12, 256, dtype=torch.bfloat16))
    assert not form.dequantize(parts, torch.float32).any()


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_are_refused(form: WeightFormat, value: float):
    weight = torch.ones(12, 256)
    weight[3, 200] = value
    with pytest.raises(QuantizationError, match="inf or nan"):
        form.quantize(weight)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shape", [(256,), (2, 4, 256), (0, 256)])
def test_only_matrices_are_quantized(form: WeightFormat, shape: tuple[int, ...]):
    with pytest.raises(QuantizationError, match="only matrices"):
        form.quantize(torch.ones(shape))


def test_a_group_size_that_does_not_divide_is_refused_with_both_numbers():
    with pytest.raises(QuantizationError, match=r"192 columns .* group size 128"):
        Int4Groups(128).quantize(torch.ones(4, 192))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 999), size=st.sampled_from([1e-30, 1e-4, 1.0, 1e30]), spread=st.sampled_from([0.1, 1.0, 3.0])
)
def test_the_scale_of_mse_is_the_tried_one_with_the_least_error(seed: int, size: float, spread: float):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(6, 64, generator=generator) * (torch.randn(6, 64, generator=generator) * spread).exp() * size
    form = Int4Groups(32, scale_dtype=torch.float32, observer="mse")
    groups = (weight.double() / size).unflatten(1, (-1, 32))
    plain = groups.abs().amax(2) / 7.5
    errors = []
    for shrink in (1.0, *SHRINKS):
        scale = (plain * shrink)[:, :, None]
        errors.append((((groups / scale).clamp(-8, 7).round() * scale - groups) ** 2).sum(2))
    least = torch.stack(errors).amin(0)
    rounded = (form.rounded(weight).double() / size).unflatten(1, (-1, 32))
    assert torch.allclose(((rounded - groups) ** 2).sum(2), least, rtol=1e-3)
    assert bool((least < errors[0]).any())


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.lists(st.integers(-8, 7), min_size=13, max_size=13), min_size=1, max_size=4))
def test_packing_is_lossless_and_fills_the_last_word(values: list[list[int]]):
    matrix = torch.tensor(values, dtype=torch.int8)
    words = packed(matrix)
    assert words.dtype == torch.int32
    assert words.shape == (len(values), 2)
    assert torch.equal(unpacked(words, 13), matrix)
    assert [(int(words[0, 0]) >> 4 * i) & 0xF for i in range(8)] == [value + 8 for value in values[0][:8]]


def test_a_scale_of_another_shape_is_an_error():
    parts = Fp8Scaled("channel").quantize(torch.ones(4, 8))
    with pytest.raises(QuantizationError, match=r"\[3, 1\]"):
        Fp8Scaled("channel").dequantize(parts | {"weight_scale": torch.ones(3, 1)}, torch.float32)
