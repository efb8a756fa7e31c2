"""Faults of converted folders: each is made in a folder that the converter wrote, and named before a run starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig

from furlong.cli import main
from furlong.errors import CheckpointError
from furlong.quantization.fp8 import Fp8Blocks
from furlong.quantization.int4 import Int4Groups
from furlong.tools.quantize_folder import quantize_folder
from runs import flags, write_model, write_prompts

Tensors = dict[str, torch.Tensor]
EXPERT = "model.layers.0.mlp.experts.1.up_proj"
MOE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("original") / "model", config_class=Qwen3MoeConfig, **MOE)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    (tmp_path / "int4").mkdir()
    quantize_folder(original, tmp_path / "int4", Int4Groups(8))
    return tmp_path / "int4"


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def change_settings(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))


def quantize_router(tensors: Tensors) -> None:
    name = "model.layers.1.mlp.gate"
    parts = Int4Groups(8, scale_dtype=torch.float32).quantize(tensors.pop(f"{name}.weight"))
    tensors.update({f"{name}.{part}": tensor for part, tensor in parts.items()})


def drop_experts(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("model.layers.1.mlp.experts.")]:
        del tensors[name]


FAULTS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a quantized router": (
        "QNT01", lambda folder: change_tensors(folder, quantize_router), "model.layers.1.mlp.gate.weight",
    ),
    "an ignore list without routers": (
        "QNT01", lambda folder: change_settings(folder, lambda q: q.update(ignore=["lm_head", "re:.*embed.*"])),
        "model.layers.0.mlp.gate.weight",
    ),
    "an ignore list of another conversion": (
        "QNT01", lambda folder: change_settings(folder, lambda q: q["ignore"].append("re:.*k_proj.*")),
        "model.layers.0.self_attn.k_proj.weight",
    ),
    "experts that were left out": (
        "CKPT04", lambda folder: change_tensors(folder, drop_experts), "model.layers.1.mlp.experts.0.down_proj.weight",
    ),
    "a part that was left out": (
        "QNT02", lambda folder: change_tensors(folder, lambda t: t.pop(f"{EXPERT}.weight_scale")),
        f"{EXPERT}.weight_scale",
    ),
    "a group size of another conversion": (
        "CKPT04", lambda folder: change_settings(
            folder, lambda q: q["config_groups"]["group_0"]["weights"].update(group_size=16)
        ), "model.layers.0.mlp.experts.0.down_proj.weight",
    ),
}  # fmt: skip


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    capsys.readouterr()
    return main(list(words)), capsys.readouterr().out


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_conversion_are_named_by_check_and_by_doctor(fault, original, folder, tmp_path, capsys) -> None:
    data = write_prompts(tmp_path / "prompts.jsonl")
    id, make, name = FAULTS[fault]
    assert printed(capsys, "check", str(folder))[0] == 0
    make(folder)
    by_doctor = ["doctor", *flags(folder, data, tmp_path / "run", ref_load=original)]
    for words in (["check", str(folder)], *([by_doctor] if id != "CKPT04" else ())):  # which loading refuses
        code, text = printed(capsys, *words)
        assert code == 1, text
        assert f"[{id}]" in text
        assert name in text
        assert text.count("error ") == 1, text


def test_fp8_blocks_of_another_size_are_named(original, tmp_path, capsys) -> None:
    data, folder = write_prompts(tmp_path / "prompts.jsonl"), tmp_path / "fp8"
    folder.mkdir()
    quantize_folder(original, folder, Fp8Blocks((16, 16)))
    words = ["doctor", *flags(folder, data, tmp_path / "run", dequantize=True)]
    assert printed(capsys, *words)[0] == 0
    change_settings(folder, lambda q: q.update(weight_block_size=[8, 16]))
    code, text = printed(capsys, *words)
    assert (code, text.count("error ")) == (1, 1)
    assert "[QNT03]" in text
    assert (
        "FP8 E4M3 in blocks of 8 x 16: model.layers.0.mlp.experts.0.down_proj.weight_scale_inv is [2, 1], not" in text
    )


def test_a_parameter_of_zeros_is_named(folder, capsys) -> None:
    def clear(tensors: Tensors) -> None:
        tensors[f"{EXPERT}.weight_scale"].zero_()

    change_tensors(folder, clear)
    code, text = printed(capsys, "check", str(folder))
    assert code == 1
    assert f"1 matrices are all zero: {EXPERT}.weight_scale" in text


def test_a_tokenizer_that_was_not_copied_is_named(original, folder, tmp_path, capsys) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    data = write_prompts(tmp_path / "prompts.jsonl")
    code, text = printed(capsys, "doctor", *flags(folder, data, tmp_path / "run", ref_load=original))
    assert code == 1
    assert "[CKPT07]" in text
    assert "tokenizer.json" in text


def test_a_group_size_that_does_not_divide_is_refused_with_the_weight(original, tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"experts\.0\.down_proj\.weight.*16 columns.*group size 12"):
        quantize_folder(original, tmp_path, Int4Groups(12))
