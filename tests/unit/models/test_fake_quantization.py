"""Models that compute with INT4 values: the engine's, with the gradient of the rounded weights."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.errors import ConfigError
from furlong.models.fake_quantization import is_rounded, quantized_values, round_model
from furlong.models.hf_config import load_config
from furlong.models.hf_model import build_model, load_model, named_tensors, save_model
from furlong.models.quantized_folder import (
    QAT_GROUP_SIZE,
    QAT_VARIABLE,
    check_qat,
    folder_scheme,
    qat_source,
    trained_scheme,
)
from furlong.quantization.fp8 import Fp8Blocks, Fp8Scaled
from furlong.quantization.int4 import Int4Groups
from furlong.quantization.weight_format import WeightFormat
from furlong.tools.quantize_folder import quantize_folder
from models_zoo import VOCAB, family_config

INT4 = Int4Groups(8)


def folders(tmp_path: Path, family: str, form: WeightFormat = INT4) -> tuple[Path, Path]:
    """Return a model in bfloat16 and its quantized copy."""
    save_model(build_model(family_config(family), seed=0, dtype=torch.bfloat16), tmp_path / "model")
    (tmp_path / "quantized").mkdir()
    quantize_folder(tmp_path / "model", tmp_path / "quantized", form)
    return tmp_path / "model", tmp_path / "quantized"


def loaded(folder: Path, dtype: torch.dtype):
    model = load_model(folder, dtype=dtype).eval()
    model.set_attn_implementation("eager")
    return model


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4)),
    st.integers(0, 10**6),
    st.sampled_from([0.0, 1e-30, 1.0, 1e30]),
    st.sampled_from(["minmax", "mse"]),
)
def test_rounded_values_are_those_of_the_stored_parts(dtype, scale_dtype, shape, seed, size, observer):
    form = Int4Groups(8, scale_dtype=scale_dtype, observer=observer)
    experts, rows, groups = shape
    weight = (torch.randn(experts, rows, groups * 8, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)
    weight[0, 0, :8] = 0.0
    stored = torch.stack([form.dequantize(form.quantize(each), dtype) for each in weight])
    assert torch.equal(form.rounded(weight), stored)


@pytest.mark.parametrize("family", ["qwen3", "qwen2-sliding", "qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rounded_model_computes_as_the_engine_and_keeps_its_weights(tmp_path: Path, family, dtype) -> None:
    plain, quantized = folders(tmp_path, family)
    scheme = trained_scheme(quantized, load_config(quantized))
    assert scheme is not None
    model, engine = loaded(plain, dtype), loaded(quantized, dtype)
    before = {name: tensor.clone() for name, tensor in named_tensors(model)}
    assert round_model(model, scheme) > 0
    ids = torch.randint(2, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    outputs = [each(ids).logits for each in (model, engine)]
    assert torch.equal(*outputs)
    assert (outputs[0] != loaded(plain, dtype)(ids).logits).any()
    for each in outputs:
        each.float().log_softmax(-1)[..., 3].sum().backward()
    gradients = {name: parameter.grad for name, parameter in engine.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
        assert (parameter.grad is None) == (gradients[name] is None), name
        assert parameter.grad is None or torch.equal(parameter.grad, gradients[name]), name
    copied = copy.deepcopy(model)
    assert torch.equal(copied(ids).logits, outputs[0])


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize(
    "form", [Int4Groups(8), Fp8Blocks((16, 16)), Fp8Scaled("tensor")], ids=["int4", "fp8", "tensor"]
)
def test_values_of_the_engine_are_set_and_restored(tmp_path: Path, family, form) -> None:
    plain, quantized = folders(tmp_path, family, form=form)
    scheme = folder_scheme(quantized)
    assert scheme is not None
    model, engine = loaded(plain, torch.float32), loaded(quantized, torch.float32)
    before = {name: tensor.clone() for name, tensor in named_tensors(model)}
    with quantized_values(model, scheme):
        assert all(torch.equal(tensor, dict(named_tensors(engine))[name]) for name, tensor in named_tensors(model))
    assert all(torch.equal(tensor, before[name]) for name, tensor in named_tensors(model))


def test_parameters_of_which_one_part_is_quantized_and_other_column_counts_are_refused(tmp_path: Path) -> None:
    _, quantized = folders(tmp_path, "qwen3_moe")
    scheme = folder_scheme(quantized)
    assert scheme is not None
    gate = "model.layers.0.mlp.experts.0.gate_proj.weight"
    assert is_rounded("fc1", [gate], 32, scheme)
    assert not is_rounded("norm", ["model.norm.weight"], 7, scheme)
    with pytest.raises(ConfigError, match=r"gate_proj.*quantized and model\.norm"):
        is_rounded("fc1", [gate, "model.norm.weight"], 32, scheme)
    with pytest.raises(ConfigError, match=r"12 columns.*group size 8"):
        is_rounded("fc2", [gate], 12, scheme)


def test_flag_and_variables_need_an_int4_folder_with_that_group_size(tmp_path: Path) -> None:
    plain, quantized = folders(tmp_path, "qwen3")
    unquantized, int4 = folder_scheme(plain), folder_scheme(quantized)
    assert qat_source(flag=False, environment={}) is None
    assert qat_source(flag=False, environment={QAT_VARIABLE: "0", QAT_GROUP_SIZE: "128"}) is None
    for flag, environment in ((True, {}), (False, {QAT_VARIABLE: "1"})):
        source = qat_source(flag=flag, environment=environment)
        assert source is not None
        with pytest.raises(ConfigError, match=rf"{source}.*not quantized.*hf-to-int4"):
            check_qat(source, plain, unquantized, environment)
        with pytest.raises(ConfigError, match=r"GROUP_SIZE=128.*groups of 8"):
            check_qat(source, quantized, int4, environment | {QAT_GROUP_SIZE: "128"})
        check_qat(source, quantized, int4, environment | {QAT_GROUP_SIZE: "8"})
