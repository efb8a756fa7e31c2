"""Folders of models with vision are their language models; saved folders keep the rest."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
from safetensors.torch import load_file

from furlong.inference.embedded import EmbeddedEngine
from furlong.interfaces import SamplingParams
from furlong.models.hf_config import load_config
from furlong.models.hf_model import build_empty, build_model, load_model, misfits, named_tensors, on_disk, save_model
from furlong.models.model_facts import delta_nets
from furlong.models.stored_tensors import open_tensors
from furlong.training.checkpoint.trainer_files import write_model
from furlong.training.ranks import Ranks
from models_zoo import VOCAB, add_vision, family_config


@pytest.fixture(params=["qwen3_5_text", "qwen3_5_moe_text"])
def released(request, tmp_path):
    model = build_model(family_config(request.param), seed=0)
    save_model(model, tmp_path / "released")
    add_vision(tmp_path / "released")
    return model, tmp_path / "released"


def test_the_language_model_is_loaded(released, caplog):
    model, folder = released
    assert load_config(folder).model_type == model.config.model_type
    loaded = load_model(folder)
    assert "does not use" not in caplog.text
    assert len(delta_nets(loaded)) == 1
    own = dict(model.named_parameters())
    assert own.keys() == dict(loaded.named_parameters()).keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in loaded.named_parameters())
    with open_tensors(folder) as stored:
        assert "model.layers.0.linear_attn.A_log" in stored.names
        assert torch.equal(stored.read("model.norm.weight"), own["model.norm.weight"])
    named = [stored for name, each in named_tensors(loaded) for stored, _ in on_disk(loaded, name, each)]
    with open_tensors(folder) as stored:
        assert {*named} == {name for name in stored.names if "visual" not in name}
    shapes = {name: tuple(each.shape) for name, each in load_file(folder / "model.safetensors").items()}
    assert misfits(folder, shapes) == ([], {})


def test_a_saved_folder_is_the_released_one_with_the_trained_weights(released, tmp_path):
    model, folder = released
    with open_tensors(folder) as stored:
        trained = [(name, stored.read(name) + 1) for name in sorted(stored.names) if "visual" not in name]
    write_model(
        tmp_path / "saved", lambda: build_empty(folder), trained, Ranks(), dtype=torch.float32, companions=folder
    )
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "saved"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor if "visual" in name else tensor + 1), name
    one, other = (json.loads((each / "config.json").read_text()) for each in (folder, tmp_path / "saved"))
    assert (other["model_type"], other["architectures"]) == (one["model_type"], one["architectures"])
    assert other["text_config"]["layer_types"] == model.config.layer_types
    assert other["vision_config"]["depth"] == 1
    load_model(tmp_path / "saved")


def test_the_embedded_engine_generates_text_with_it(released):
    async def generated(**what):
        engine = EmbeddedEngine(**what, dtype=torch.float32, num_slots=1)
        completion = await engine.generate([3, 5, 7], SamplingParams(max_new_tokens=6, temperature=0.0))
        await engine.close()
        return completion.tokens

    model, folder = released
    plain = {"config": model.config, "state_dict": model.state_dict()}
    tokens = asyncio.run(generated(model_dir=folder))
    assert tokens == asyncio.run(generated(**plain))
    assert all(token < VOCAB for token in tokens)
