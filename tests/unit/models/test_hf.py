from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM

from furlong.errors import CheckpointError, ConfigError
from furlong.models import hf_model as hf
from furlong.models.hf_config import load_config
from furlong.models.hf_folder import check_folder
from furlong.models.presets import PRESETS, preset_config, write_preset
from furlong.models.tokenizer import IM_END, SPECIALS, build_tokenizer, load_tokenizer
from models_zoo import FAMILIES, family_config


@pytest.fixture
def tiny(tmp_path):
    return write_preset("tiny", tmp_path / "tiny")


def test_a_written_preset_loads_with_the_same_weights_and_keeps_random_states(tiny):
    state = torch.get_rng_state()
    again = hf.build_model(preset_config("tiny"), seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    loaded = hf.load_model(tiny)
    for (name, a), (_, b) in zip(loaded.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_loaded_model_does_not_depend_on_its_file(tiny):
    path = tiny / "model.safetensors"
    expected, model = load(path.read_bytes()), hf.load_model(tiny)  # `load_file` would map it
    assert str(path) not in Path("/proc/self/maps").read_text()
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    os.truncate(path, 10)  # a mapped page of the file would now end the process
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.named_parameters())


@pytest.mark.parametrize(("name", "millions"), [("tiny", 1.0), ("3m", 3.2), ("12m", 11.8)])
def test_presets_have_the_size_in_their_name(name, millions):
    model = hf.build_model(preset_config(name), seed=0)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.03)
    assert name in PRESETS


def test_an_unknown_preset_is_an_error():
    with pytest.raises(ConfigError, match="3m"):
        preset_config("4m")


def test_the_tokenizer_round_trips_text_and_ends_with_its_own_id(tiny):
    tokenizer = load_tokenizer(tiny)
    text = "12+34=?\n yes "
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_id == SPECIALS.index(IM_END)
    assert tokenizer.encode("é") == [SPECIALS.index("<|unk|>")]
    assert tokenizer.vocab_size <= load_config(tiny).vocab_size


def test_the_chat_template_marks_turns_with_special_ids():
    tokenizer = build_tokenizer()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1="}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text)
    assert ids.count(SPECIALS.index("<|im_start|>")) == 2
    assert ids.count(SPECIALS.index(IM_END)) == 1


def test_a_missing_folder_is_an_error_with_similar_names(tiny):
    with pytest.raises(ConfigError, match=r"tinny; .*contains tiny. Give a model folder"):
        hf.load_model(tiny.parent / "tinny")


@pytest.mark.parametrize(
    ("file", "load"),
    [
        ("config.json", hf.load_config),
        ("model.safetensors", hf.load_model),
        ("tokenizer.json", lambda folder: check_folder(folder, tokenizer=True)),
    ],
)
def test_a_missing_file_is_an_error_with_the_closest_match(tiny, file, load):
    (tiny / file).rename(tiny / f"{file}.bak")
    (tiny / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match=rf"no {file}.*: {file}\.bak"):
        load(tiny)


def test_a_family_that_transformers_does_not_know_is_an_error(tiny):
    config = json.loads((tiny / "config.json").read_text()) | {"model_type": "qwen99"}
    (tiny / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="qwen99"):
        load_config(tiny)


def test_incomplete_weights_are_an_error(tiny):
    tensors = load_file(tiny / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tiny / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"\(model\.safetensors\) do not fit.*missing_keys 1.*model\.norm\.weight"
    ):
        hf.load_model(tiny)


def test_a_family_with_its_own_attention_is_refused(tmp_path):
    config = BloomConfig(vocab_size=40, hidden_size=32, n_layer=1, n_head=4)
    BloomForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"bloom.*packed attention"):
        hf.load_model(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_is_loaded_by_transformers_and_the_exported_names_are_those_on_disk(family, tmp_path):
    model = hf.build_model(family_config(family), seed=1, dtype=torch.bfloat16)
    hf.save_model(model, tmp_path)
    on_disk = load_file(tmp_path / "model.safetensors")
    for _ in range(2):  # what is known of a name afterwards changes nothing
        published = {
            known: part
            for name, tensor in hf.named_tensors(model)
            for known, part in hf.on_disk(model, name, tensor.detach())
        }
        assert published.keys() == on_disk.keys()
        assert all(torch.equal(published[name], on_disk[name]) for name in on_disk)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    for (name, a), (_, b) in zip(loaded.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_an_export_contains_tokenizer_and_generation_config(tiny, tmp_path):
    hf.write_config(hf.load_model(tiny), tmp_path / "out", dtype=torch.bfloat16, companions=tiny)
    assert load_config(tmp_path / "out").dtype == torch.bfloat16
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()
    assert (tmp_path / "out/generation_config.json").read_bytes() == (tiny / "generation_config.json").read_bytes()
    assert load_tokenizer(tmp_path / "out").chat_template == load_tokenizer(tiny).chat_template


def test_a_model_one_level_below_is_named(tmp_path):
    (tmp_path / "checkpoint-60").mkdir()
    (tmp_path / "checkpoint-60" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"one level below; use .*/checkpoint-60$"):
        check_folder(tmp_path)
    (tmp_path / "checkpoint-80").mkdir()
    (tmp_path / "checkpoint-80" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="it contains checkpoint-60, checkpoint-80"):
        check_folder(tmp_path)
