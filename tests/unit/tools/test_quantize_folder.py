"""Conversion of folders: what is quantized, what is refused by name, and what a killed or failed conversion leaves."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from furlong.cli import main
from furlong.errors import CheckpointError, ConfigError
from furlong.models.hf_model import build_model, load_model, save_model
from furlong.models.quantized_folder import folder_scheme
from furlong.models.stored_tensors import open_tensors
from furlong.quantization.fp8 import Fp8Blocks
from furlong.quantization.int4 import Int4Groups
from furlong.tools.model_folder import check_model
from furlong.tools.quantize_folder import quantize_folder
from models_zoo import family_config

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_model(build_model(family_config("qwen3_moe"), seed=0, dtype=torch.bfloat16), tmp_path / "model")
    return tmp_path / "model"


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}


@pytest.mark.parametrize(
    "words", [["hf-to-fp8"], ["hf-to-fp8", "--strategy", "channel"], ["hf-to-fp8", "--strategy", "tensor"],
              ["hf-to-fp8", "--scale-fmt", "ue8m0"], ["hf-to-int4", "--group-size", "8"]],
    ids=["blocks", "channel", "tensor", "powers of two", "int4"],
)  # fmt: skip
def test_a_converted_folder_passes_its_check_and_comes_back(model: Path, tmp_path: Path, words: list[str]) -> None:
    target, back = tmp_path / "target", tmp_path / "back"
    assert main(["convert", *words, str(model), str(target)]) == 0
    assert check_model(target) == []
    scheme = folder_scheme(target)
    assert scheme is not None
    assert not [n for n in scheme.names if "norm" in n or "embed" in n or "lm_head" in n or ".gate." in n]
    assert any(".experts." in name for name in scheme.names)
    assert main(["convert", "dequantize", str(target), str(back)]) == 0
    whole, original = tensors_of(back), tensors_of(model)
    assert whole.keys() == original.keys()
    for name, tensor in original.items():
        assert whole[name].dtype == tensor.dtype
        limit = float(tensor.abs().max()) / 6 if name in scheme.names else 0.0
        assert float((whole[name].float() - tensor.float()).abs().max()) <= limit
    with open_tensors(target) as opened:
        assert opened.names == original.keys()
        assert all(torch.equal(opened.read(name), whole[name]) for name in opened.names)
    loaded, same = load_model(target).state_dict(), load_model(back).state_dict()
    assert all(torch.equal(tensor, same[name]) for name, tensor in loaded.items())


def test_updates_choose_scales_as_the_conversion_did(model: Path, tmp_path: Path) -> None:
    whole = tensors_of(model)
    stored = {}
    for observer in ("minmax", "mse"):
        target = tmp_path / observer
        words = ["hf-to-int4", "--group-size", "8", "--observer", observer]
        assert main(["convert", *words, str(model), str(target)]) == 0
        scheme, stored[observer] = folder_scheme(target), tensors_of(target)
        assert scheme is not None
        for name in scheme.names:
            for part, value in scheme.quantize(name, whole[name]):
                assert torch.equal(value, stored[observer][part]), part
    assert stored["minmax"].keys() == stored["mse"].keys()
    assert any(not torch.equal(value, stored["mse"][name]) for name, value in stored["minmax"].items())


def test_ignored_weights_stay_and_are_listed(model: Path, tmp_path: Path) -> None:
    for number, command in enumerate(("hf-to-fp8", "hf-to-int4 --group-size 8")):
        target = tmp_path / str(number)
        words = ["convert", *command.split(), str(model), str(target), "--ignore", r"re:.*self_attn.*"]
        assert main(words) == 0
        scheme = folder_scheme(target)
        assert scheme is not None
        assert not [name for name in scheme.names if "self_attn" in name]
        assert check_model(target) == []


def test_values_that_are_not_finite_are_refused_with_the_name(model: Path, tmp_path: Path) -> None:
    path = next(model.glob("*.safetensors"))
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[name][0, 0] = float("inf")
    save_file(tensors, path, {"format": "pt"})
    (tmp_path / "target").mkdir()
    with pytest.raises(CheckpointError, match=f"{name} cannot be stored .* inf or nan"):
        quantize_folder(model, tmp_path / "target", Fp8Blocks())


def test_a_group_size_that_does_not_divide_names_the_weight(model: Path, tmp_path: Path, capsys) -> None:
    assert main(["convert", "hf-to-int4", str(model), str(tmp_path / "target"), "--group-size", "128"]) == 1
    said = capsys.readouterr().err
    assert ".weight cannot be stored" in said
    assert "not a multiple of the group size 128" in said
    assert not (tmp_path / "target").exists()


def test_a_quantized_router_fails_the_check_and_nothing_is_written(model: Path, tmp_path: Path) -> None:
    words = ["convert", "hf-to-int4", str(model), str(tmp_path / "target"), "--group-size", "8"]
    assert main([*words, "--ignore-rules", "lm_head", "re:.*embed.*"]) == 1
    assert not (tmp_path / "target").exists()


def test_a_quantized_source_and_an_existing_target_are_refused(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    quantize_folder(model, target, Int4Groups(8))
    with pytest.raises(ConfigError, match="is quantized"):
        quantize_folder(target, tmp_path, Int4Groups(8))
    assert main(["convert", "hf-to-fp8", str(model), str(target)]) == 2
    assert main(["convert", "dequantize", str(model), str(tmp_path / "back")]) == 2


def test_a_folder_without_config_json_does_not_load(model: Path, tmp_path: Path, monkeypatch) -> None:
    """config.json is written last, so whatever a killed conversion leaves is not a model."""
    target = tmp_path / "target"
    target.mkdir()
    monkeypatch.setattr("furlong.tools.quantize_folder._verify", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        quantize_folder(model, target, Fp8Blocks())
    assert list(target.glob("*.safetensors"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model(target)


@pytest.mark.parametrize("tool", ["convert_hf_to_fp8", "convert_hf_to_int4_direct", "fp8_cast_bf16"])
def test_the_names_of_slimes_tools_run(model: Path, tmp_path: Path, monkeypatch, tool: str) -> None:
    quantized, target = tmp_path / "fp8", tmp_path / "target"
    quantized.mkdir()
    quantize_folder(model, quantized, Fp8Blocks())
    words = {
        "convert_hf_to_fp8": [
            "--model-dir",
            model,
            "--save-dir",
            target,
            "--strategy",
            "block",
            "--block-size",
            128,
            128,
        ],
        "convert_hf_to_int4_direct": ["--model-dir", model, "--save-dir", target, "--group-size", 8, "--is-symmetric"],
        "fp8_cast_bf16": ["--input-fp8-hf-path", quantized, "--output-bf16-hf-path", target],
    }[tool]
    script = str(REPOSITORY / "tools" / f"{tool}.py")
    monkeypatch.setattr(sys, "argv", [script, *map(str, words)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script, run_name="__main__")
    assert end.value.code == 0
    settings = json.loads((target / "config.json").read_text()).get("quantization_config", {})
    assert settings.get("quant_method") == {"convert_hf_to_fp8": "fp8", "fp8_cast_bf16": None}.get(
        tool, "compressed-tensors"
    )
    with safe_open(next(target.glob("*.safetensors")), framework="pt") as file:
        names = list(file.keys())
    if tool == "convert_hf_to_int4_direct":
        assert {name.rpartition(".")[2] for name in names if ".experts." in name} == {
            *("weight_packed", "weight_scale", "weight_shape")
        }
        assert not [name for name in names if "self_attn" in name and "packed" in name]
