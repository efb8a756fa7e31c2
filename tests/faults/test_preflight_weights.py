"""Faults of the folders whose weights a run loads: found before the start, each with its fix."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from calibrated_folders import write_calibrated
from faults.world import names, only
from faults_marker import fault
from furlong.errors import ConfigError
from furlong.files.checkpoint_folder import TRACKER
from furlong.models.hf_model import load_model
from furlong.quantization.fp8 import Fp8Blocks
from furlong.quantization.int4 import Int4Groups
from furlong.tools.quantize_folder import quantize_folder
from runs import write_model
from stored_models import dense_layer, write_safetensors, write_stored_model

INT4 = Int4Groups(16)
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.fixture(scope="module")
def complete(tmp_path_factory) -> Path:
    """A model folder of transformers, with everything that config.json needs."""
    return write_model(tmp_path_factory.mktemp("complete") / "model")


@pytest.fixture
def own(world, complete) -> Path:
    """A copy of it that a test may change."""
    return shutil.copytree(complete, world.folder / "own")


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_complete_model_has_no_diagnosis(world, own):
    assert world.look(hf_checkpoint=own) == []
    assert world.look(hf_checkpoint=own, load=own)[0].severity == "info"


@fault("QNT03")
@pytest.mark.parametrize("flag", ["hf_checkpoint", "load", "ref_load"])
def test_quantized_weights_are_refused_by_doctor_and_loading_alike(world, own, flag):
    asked = {"hf_checkpoint": own} | ({"use_kl_loss": True} if flag == "ref_load" else {})
    other = shutil.copytree(own, world.folder / "quantized")
    healthy = [each for each in world.look(**asked | {flag: other}) if each.severity == "error"]
    edit(other, quantization_config=FP8)
    found = [each for each in world.look(**asked | {flag: other}) if each.severity == "error"]
    assert ([each.id for each in found], healthy) == (["QNT03"], [])
    assert names(found[0].finding, f"--{flag.replace('_', '-')} {other}", "fp8")
    assert "bfloat16" in found[0].remedy
    with pytest.raises(ConfigError) as refused:
        load_model(other)
    assert f"--{flag.replace('_', '-')} {refused.value}" == f"{found[0].finding}; {found[0].remedy}"


def quantized_copy(world, own, form=INT4):
    target = world.folder / "quantized"
    target.mkdir()
    quantize_folder(own, target, form)
    return target


@fault("QNT03")
@pytest.mark.parametrize("form", [INT4, Fp8Blocks()], ids=["int4", "fp8"])
def test_a_quantized_folder_alone_names_the_two_ways_to_train(world, own, form):
    folder = quantized_copy(world, own, form)
    found = only(world.look(hf_checkpoint=folder), "QNT03")
    assert names(found.finding, f"--hf-checkpoint {folder}", "quant")
    assert names(found.remedy, "--ref-load", "--dequantize")
    assert world.look(hf_checkpoint=folder, dequantize=True) == []
    assert [each.severity for each in world.look(hf_checkpoint=folder, ref_load=own)] == ["info"]  # it is the start
    assert [each.id for each in world.look(hf_checkpoint=folder, ref_load=own, use_kl_loss=True)] == []


@fault("QNT03")
def test_a_quantized_reference_needs_dequantize(world, own):
    folder = quantized_copy(world, own)
    found = only(world.look(hf_checkpoint=own, ref_load=folder, use_kl_loss=True), "QNT03")
    assert names(found.finding, f"--ref-load {folder}", "compressed-tensors")
    assert world.look(hf_checkpoint=own, ref_load=folder, use_kl_loss=True, dequantize=True) == []


@fault("QNT03")
@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"actorder": "group"}, "actorder"),
        ({"strategy": "channel"}, "strategy 'channel'"),
    ],
)
def test_formats_that_are_not_supported_are_refused_with_their_settings(world, own, changes, seen):
    folder = quantized_copy(world, own)
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    settings["config_groups"]["group_0"]["weights"] |= changes
    edit(folder, quantization_config=settings)
    found = [each for each in world.look(hf_checkpoint=folder, dequantize=True) if each.id == "QNT03"]
    assert names(found[0].finding + found[0].remedy, seen)


def test_other_methods_are_refused_by_name(world, own):
    folder = quantized_copy(world, own)
    edit(folder, quantization_config={"quant_method": "bitsandbytes"})
    found = [each for each in world.look(hf_checkpoint=folder, dequantize=True) if each.id == "QNT03"]
    assert names(found[0].finding, "bitsandbytes")


@fault("QNT03")
@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_engines_of_a_trained_policy_cannot_have_awq_or_gptq(world, own, method):
    folder = world.folder / "quantized"
    write_calibrated(own, folder, method, group_size=8)
    for changes in ({"ref_load": own}, {"dequantize": True}):
        [found] = [each for each in world.look(hf_checkpoint=folder, **changes) if each.severity == "error"]
        assert found.id == "QNT03"
        assert names(found.finding, f"--hf-checkpoint {folder}", f"{method.upper()} with 4 bits, groups of 8")
        assert "hf-to-int4" in found.finding + found.remedy
    assert world.look(hf_checkpoint=folder, debug_rollout_only=True) == []
    assert {each.severity for each in world.look(hf_checkpoint=own, load=folder, dequantize=True)} == {"info"}


@fault("QNT01")
@pytest.mark.parametrize("form", [INT4, Fp8Blocks()], ids=["int4", "fp8"])
def test_an_ignore_list_that_covers_quantized_weights_is_reported(world, own, form):
    folder = quantized_copy(world, own, form)
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    key = "ignore" if "ignore" in settings else "modules_to_not_convert"
    edit(folder, quantization_config=settings | {key: [*settings[key], "re:.*down_proj$"]})
    found = only(world.look(hf_checkpoint=folder, dequantize=True), "QNT01")
    assert names(found.finding, "covers", "down_proj")
    assert "down_proj" in found.remedy


@fault("QNT01")
def test_an_ignore_list_that_lacks_a_plain_weight_is_reported(world, own):
    folder = world.folder / "quantized"
    folder.mkdir()
    quantize_folder(own, folder, Fp8Blocks(), ignore=["re:.*o_proj$"])
    assert world.look(hf_checkpoint=folder, dequantize=True) == []
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    edit(folder, quantization_config=settings | {"modules_to_not_convert": []})
    found = only(world.look(hf_checkpoint=folder, dequantize=True), "QNT01")
    assert names(found.finding, "does not cover", "o_proj")


@fault("QNT03")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "F8_E4M3"),
        ("model.layers.0.self_attn.q_proj.qweight", "I32"),
        ("model.layers.0.self_attn.q_proj.weight_packed", "I32"),
        ("model.layers.0.mlp.up_proj.weight", "I8"),
    ],
)
def test_quantized_tensors_are_found_without_a_note_in_config_json(world, name, dtype):
    for path in world.model.glob("*.safetensors*"):
        path.unlink()
    layers = [dense_layer(n) | ({name: (dtype, (8, 8))} if n == 0 else {}) for n in range(2)]
    tensors = {key: value for layer in layers for key, value in layer.items()}
    write_safetensors(world.model / "model.safetensors", tensors)
    found = [each for each in world.look() if each.severity == "error"]
    assert [each.id for each in found] == ["QNT03"]
    assert names(found[0].finding, name, dtype)


def test_masks_of_whole_numbers_are_not_quantized_weights(world):
    for path in world.model.glob("*.safetensors*"):
        path.unlink()
    mask = {"model.layers.0.attn.bias": ("I8", (4, 4)), "model.layers.1.attn.bias": ("I8", (4, 4))}
    tensors = dense_layer(0) | dense_layer(1) | mask
    write_safetensors(world.model / "model.safetensors", tensors)
    assert world.look() == []


def test_more_experts_for_each_token_than_there_are(world):
    path = world.model / "config.json"
    for chosen, expected in ((4, []), (5, ["CKPT04"])):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"num_experts": 4, "num_experts_per_tok": chosen}))
        found = world.look()
        assert [each.id for each in found] == expected
    assert "num_experts_per_tok 5 is more than num_experts 4" in found[0].finding


@fault("CKPT04")
def test_an_index_that_names_another_shard(world):
    layers = [dense_layer(0), dense_layer(1)]
    write_stored_model(world.model, layers, num_hidden_layers=2, max_position_embeddings=128)
    (world.model / "model.safetensors").unlink(missing_ok=True)
    assert world.look() == []
    path = world.model / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    name = "model.layers.0.self_attn.q_proj.weight"
    path.write_text(json.dumps({"weight_map": weight_map | {name: "model-00002-of-00002.safetensors"}}))
    found = only(world.look(), "CKPT04")
    assert names(found.finding, name, "is in model-00001-of-00002.safetensors", "not in model-00002")


@fault("CKPT04")
def test_a_tokenizer_with_more_tokens_than_the_embedding_has_rows(world, own):
    tensors = load_file(own / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    rows = len(table)
    save_file(tensors | {"model.embed_tokens.weight": table[:10].copy()}, own / "model.safetensors", {"format": "pt"})
    edit(own, vocab_size=10)
    found = [each for each in world.look(hf_checkpoint=own) if each.id == "CKPT04"]
    assert [each.severity for each in found] == ["error"]
    assert names(found[0].finding, "10 rows", "prompts contain them")
    save_file(tensors | {"model.embed_tokens.weight": table}, own / "model.safetensors", {"format": "pt"})
    edit(own, vocab_size=rows)
    assert world.look(hf_checkpoint=own) == []


@fault("CKPT03")
def test_an_output_layer_beside_tied_embeddings(world, own):
    tensors = load_file(own / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": table + 1}, own / "model.safetensors", {"format": "pt"})
    found = only(world.look(hf_checkpoint=own), "CKPT03")
    assert names(found.finding, "tie_word_embeddings", "lm_head.weight", "model.embed_tokens.weight")
    assert "false" in found.remedy
    edit(own, tie_word_embeddings=False)
    assert world.look(hf_checkpoint=own) == []
    edit(own, tie_word_embeddings=True)
    save_file(tensors | {"lm_head.weight": table.copy()}, own / "model.safetensors", {"format": "pt"})
    assert world.look(hf_checkpoint=own) == []


@fault("CKPT07")
def test_adapters_the_hubs_cache_and_runs_are_named(world, monkeypatch):
    adapter = world.folder / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-4B"}))
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    found = only(world.look(hf_checkpoint=adapter), "CKPT07")
    assert names(found.remedy, "LoRA adapter", "Qwen/Qwen3-4B", "merge_and_unload")
    cache = world.folder / "models--Qwen--Qwen3-4B"
    shutil.copytree(world.model, cache / "snapshots" / "0123abcd")
    found = only(world.look(hf_checkpoint=cache), "CKPT07")
    assert str(cache / "snapshots" / "0123abcd") in found.remedy
    assert world.look(hf_checkpoint=cache / "snapshots" / "0123abcd") == []
    run = world.folder / "run"
    shutil.copytree(world.model, run / "model")
    for name in ("config.json", "ledger.jsonl", "latest_checkpointed_iteration.txt"):
        (run / name).write_text("{}")
    assert str(run / "model") in only(world.look(hf_checkpoint=run), "CKPT07").remedy
    monkeypatch.chdir(world.folder)
    found = only(world.look(hf_checkpoint="."), "CKPT07")
    assert names(found.finding, "no config.json")
    assert names(found.remedy, "use a complete")


@fault("CKPT01")
@pytest.mark.parametrize(("tracker", "folder"), [("10", "iter_0000010"), ("release", "release")])
def test_a_megatron_lm_checkpoint_in_the_older_format_is_named(world, tracker, folder):
    saved = world.folder / "megatron"
    (saved / folder / "mp_rank_00").mkdir(parents=True)
    (saved / folder / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"")
    (saved / TRACKER).write_text(tracker)
    found = only(world.look(load=saved), "CKPT01")
    assert names(found.finding, "in the format torch", "model_optim_rng.pt")
    assert "interrupted" not in found.text()
    assert "torch_dist" in found.remedy
