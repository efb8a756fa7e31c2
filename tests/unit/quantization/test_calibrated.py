"""AWQ and GPTQ: weights equal those of SGLang's functions, and of loops written from the formats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from calibrated_folders import calibrated_parts
from furlong.errors import ConfigError
from furlong.quantization.calibrated import AwqGroups, GptqGroups
from furlong.quantization.scheme import format_of, read_scheme
from furlong.quantization.weight_format import QuantizationError

GOLDEN = Path(__file__).parents[2] / "golden" / "calibrated.safetensors"


def test_weights_equal_those_of_sglang_bit_for_bit():
    forms = {"awq": AwqGroups(32), "gptq-4": GptqGroups(4, 32), "gptq-8": GptqGroups(8, 32)}
    forms |= {"gptq-4-act-order": GptqGroups(4, 32), "gptq-4-one-group": GptqGroups(4, -1)}
    with safe_open(GOLDEN, framework="pt") as file:
        assert file.metadata() == {"sglang": "0.5.16"}
        names = set(file.keys())
        assert names == {f"{case}/{part}" for case, form in forms.items() for part in (*form.part_names, "weight")}
        for case, form in forms.items():
            parts = {part: file.get_tensor(f"{case}/{part}") for part in form.part_names}
            weight = file.get_tensor(f"{case}/weight")  # [rows, columns]
            assert {part: (tuple(t.shape), t.dtype) for part, t in parts.items()} == form.parts(tuple(weight.shape))
            assert torch.equal(form.dequantize(parts, torch.float16), weight), case


CASES = [("awq", 4), ("gptq", 4), ("gptq", 8), ("gptq_v2", 4)]


@pytest.mark.parametrize(("method", "bits"), CASES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), scale=st.sampled_from([0.02, 1.0, 300.0]), act_order=st.booleans())
def test_weights_equal_a_loop_over_integers(method, bits, seed, scale, act_order):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(16, 64, generator=generator) * scale
    order = torch.randperm(64, generator=generator) if act_order and method != "awq" else None
    parts, whole = calibrated_parts(weight, method, bits=bits, order=order)
    settings = {"quant_method": method[:4].rstrip("_"), "bits": bits, "group_size": 16, "checkpoint_format": method}
    form = format_of(settings)
    assert {part: (tuple(t.shape), t.dtype) for part, t in parts.items()} == form.parts((16, 64))
    assert form.whole_shape({part: tuple(t.shape) for part, t in parts.items()}) == (16, 64)
    assert torch.equal(form.dequantize(parts, torch.float16), whole)
    error = (form.dequantize(parts, torch.float32) - weight).abs()
    assert float(error.max()) <= float(weight.abs().max()) * 2.2 / (2**bits - 1)


def test_a_word_with_its_highest_bit_set_is_unpacked_without_its_sign():
    parts, _ = calibrated_parts(torch.linspace(-1, 1, 128).view(8, 16), "awq")
    parts["qweight"] = torch.full_like(parts["qweight"], -1)  # eight times 15
    parts["qzeros"] = torch.zeros_like(parts["qzeros"])
    parts["scales"] = torch.ones_like(parts["scales"])
    assert AwqGroups(16).dequantize(parts, torch.float32).unique().tolist() == [15.0]


def test_version_1_of_gptq_wraps_a_zero_point_of_zero():
    parts, whole = calibrated_parts(torch.rand(8, 16), "gptq")  # not negative: all zero points are 0
    assert parts["qzeros"].tolist() == [[-1]]
    assert torch.equal(GptqGroups(4, 16).dequantize(parts, torch.float16), whole)


def test_groups_that_do_not_exist_are_refused():
    parts, _ = calibrated_parts(torch.randn(8, 32), "gptq")
    parts["g_idx"][5] = 2
    with pytest.raises(QuantizationError, match=r"g_idx has groups 0 \.\. 2, but there are 2"):
        GptqGroups(4, 16).dequantize(parts, torch.float32)


def test_no_weight_is_stored_in_them():
    for form in (AwqGroups(16), GptqGroups(4, 16)):
        with pytest.raises(QuantizationError, match="calibration"):
            form.quantize(torch.randn(8, 16))


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"bits": 3}, "`bits` is 3"),
        ({"group_size": 0}, "`group_size` is 0"),
        ({"group_size": None}, "`group_size` is None"),
        ({"quant_method": "awq", "version": "gemv"}, "'gemv'"),
        ({"quant_method": "awq", "zero_point": False}, "`zero_point` False"),
        ({"checkpoint_format": "marlin"}, "'marlin'"),
        ({"dynamic": {"-:.*lm_head": {}}}, "`dynamic`"),
    ],
)
def test_other_layouts_are_refused_with_their_settings(changes, seen):
    with pytest.raises(ConfigError, match=seen):
        format_of({"quant_method": "gptq", "bits": 4, "group_size": 16} | changes)


def test_a_scheme_reads_names_and_the_precision_of_scales():
    stored = {"x.qweight": "I32", "x.qzeros": "I32", "x.scales": "BF16", "x.g_idx": "I32", "norm.weight": "BF16"}
    settings = {"quant_method": "gptq", "bits": 8, "group_size": -1}
    scheme = read_scheme({"quantization_config": settings, "dtype": "bfloat16"}, stored)
    assert scheme.names == {"x.weight"}
    assert scheme.form == GptqGroups(8, -1, scale_dtype=torch.bfloat16)
    assert scheme.is_fixed
    del stored["x.qzeros"]
    with pytest.raises(ConfigError, match=r"missing: x\.qzeros"):
        read_scheme({"quantization_config": settings}, stored)
