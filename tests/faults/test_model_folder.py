"""Faults of a model folder (shards, layers, quantization): each is injected, found, fixed, and gone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from faults_marker import fault
from furlong.catalogue import Diagnosis
from furlong.tools import model_folder as checkpoint
from furlong.tools.model_folder import read_model
from stored_models import dense_layer, expert_layer, write_safetensors, write_stored_model

NUM_LAYERS = 4
EMBEDDING = {"model.embed_tokens.weight": ("BF16", (16, 8))}
IGNORE = ["lm_head", "model.embed_tokens", "re:.*mlp\\.gate(\\.weight)?$"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    layers = [dense_layer(n) for n in range(NUM_LAYERS)]
    return write_stored_model(
        tmp_path / "model", [EMBEDDING, *layers], num_hidden_layers=NUM_LAYERS, quantization_config=None
    )


def check_model(folder: Path, **named: str) -> list[Diagnosis]:
    return checkpoint.check_model(folder, **named)


def quantized(folder: Path, *, ignore: list[str], dropped: str = "") -> Path:
    layers = [expert_layer(n) for n in range(2)]
    for layer in layers:
        for name in [name for name in layer if dropped and name.endswith(dropped)]:
            del layer[name]
    settings = {"quant_method": "compressed-tensors", "ignore": ignore}
    return write_stored_model(folder, [EMBEDDING, *layers], num_hidden_layers=2, quantization_config=settings)


def shard(folder: Path, number: int) -> Path:
    return folder / f"model-{number:05d}-of-{NUM_LAYERS + 1:05d}.safetensors"


@fault("CKPT04")
def test_a_missing_shard_is_named_with_what_it_held(folder: Path) -> None:
    content = shard(folder, 3).read_bytes()
    shard(folder, 3).unlink()
    (found,) = check_model(folder)
    assert (found.id, found.severity) == ("CKPT04", "error")
    assert (found.evidence["num_shards"], len(found.evidence["missing"])) == (5, 1)
    assert shard(folder, 3).name in found.finding
    assert found.evidence["num_tensors_lost"] == len(dense_layer(0))
    assert f"furlong check {folder}" in found.remedy
    shard(folder, 3).write_bytes(content)
    assert check_model(folder) == []


@fault("CKPT04")
def test_a_truncated_shard_is_named(folder: Path) -> None:
    path, content = shard(folder, 2), shard(folder, 2).read_bytes()
    path.write_bytes(content[:-100])
    (found,) = check_model(folder)
    assert found.id == "CKPT04"
    assert (str(path) in found.finding, "cut off" in found.finding) == (True, True)
    path.write_bytes(content)
    assert check_model(folder) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "Git LFS pointer"),
        (b"", "0 bytes"),
        (b"<html>not found</html>", "safetensors"),
        (b"\x10" + bytes(7) + b"{broken", "15 bytes"),
        (b"\x07" + bytes(7) + b"{broken", "invalid JSON"),
    ],
)
def test_a_file_that_is_not_a_shard_is_described(folder: Path, content: bytes, message: str) -> None:
    shard(folder, 1).write_bytes(content)
    (found,) = check_model(folder)
    assert found.id == "CKPT04"
    assert message in found.finding


@fault("CKPT04")
def test_entries_of_the_index_without_a_tensor_are_counted(folder: Path) -> None:
    write_safetensors(shard(folder, 2), dict(list(dense_layer(0).items())[1:]))
    (found,) = check_model(folder)
    assert found.evidence["tensors"] == ["model.layers.0.self_attn.q_proj.weight"]
    assert found.evidence["num_tensors"] == 1


@fault("CKPT04")
def test_layers_that_the_index_lacks_are_named(tmp_path: Path) -> None:
    kept = [0, 1, 4]
    folder = write_stored_model(tmp_path / "model", [dense_layer(n) for n in kept], num_hidden_layers=6)
    (found,) = check_model(folder)
    assert "2-3, 5 of 6" in found.finding
    assert found.evidence["layers"] == [2, 3, 5]


def test_layers_of_several_kinds_are_healthy(tmp_path: Path) -> None:
    dense_then_experts = [dense_layer(0), *(expert_layer(n) for n in range(1, 4))]
    next_token = {**dense_layer(4), "model.layers.4.eh_proj.weight": ("BF16", (8, 16))}  # an extra head, as a layer
    folder = write_stored_model(tmp_path / "a", [*dense_then_experts, next_token], num_hidden_layers=4)
    assert check_model(folder) == []
    shared_keys = [dense_layer(n) for n in range(4)]
    del shared_keys[3]["model.layers.3.self_attn.q_proj.weight"]
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    folder = write_stored_model(tmp_path / "b", shared_keys, num_hidden_layers=4, layer_types=kinds)
    assert check_model(folder) == []


def test_an_index_that_points_outside_its_folder_is_refused(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    (found,) = check_model(folder)
    assert "../secret.safetensors" in found.finding


@fault("QNT01")
def test_a_router_that_would_be_quantized_is_found_and_the_pattern_fixes_it(tmp_path: Path) -> None:
    folder = quantized(tmp_path / "model", ignore=["lm_head"])
    (found,) = check_model(folder)
    assert (found.id, found.severity) == ("QNT01", "error")
    assert len(found.evidence["weights"]) == 3
    assert "model.layers.0.mlp.gate.weight" in found.finding
    pasted = json.loads("[" + found.remedy[found.remedy.index('"') :] + "]")
    assert pasted == found.evidence["patterns"]
    assert len(pasted) == 2
    quantized(folder, ignore=["lm_head", *pasted])
    assert check_model(folder) == []


@fault("QNT02")
def test_a_packed_weight_without_its_scale_is_an_incomplete_conversion(tmp_path: Path) -> None:
    folder = quantized(tmp_path / "model", ignore=IGNORE, dropped="experts.1.up_proj.weight_scale")
    (found,) = check_model(folder)
    assert (found.id, found.severity) == ("QNT02", "error")
    assert found.evidence["num_tensors"] == 2
    assert "model.layers.1.mlp.experts.1.up_proj.weight_scale" in found.finding
    quantized(folder, ignore=IGNORE)
    assert check_model(folder) == []


@fault("QNT02")
def test_a_conversion_that_lost_a_shard_is_reported_as_one(tmp_path: Path) -> None:
    folder = quantized(tmp_path / "model", ignore=IGNORE)
    (folder / "model-00002-of-00003.safetensors").unlink()
    ids = [found.id for found in check_model(folder, id="QNT02")]
    assert ids == ["QNT02"]


def test_parameters_are_counted_from_headers(folder: Path) -> None:
    assert read_model(folder).num_parameters == 16 * 8 + NUM_LAYERS * (5 * 64 + 8)
