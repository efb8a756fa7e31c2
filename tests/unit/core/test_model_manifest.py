"""The manifest of model folders: every file that loaders read is covered, by name, and so is the manifest."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from furlong.cli import main
from furlong.errors import ConfigError
from furlong.files.file_tensors import save_verified
from furlong.files.model_manifest import MODEL_MANIFEST, changed_files, write_model_manifest
from furlong.models.hf_folder import check_folder
from furlong.models.hf_model import load_model, save_model
from furlong.models.tokenizer import load_tokenizer
from furlong.quickstart.quickstart import model_folder

NAMES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a folder with the small files of the quickstart's model and verified weights."""
    folder = tmp_path_factory.mktemp("written")
    for name in NAMES:
        shutil.copyfile(model_folder() / name, folder / name)
    save_verified(folder / "model.safetensors", {"a": torch.ones(3)}, {"format": "pt"})
    write_model_manifest(folder)
    return folder


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written, tmp_path / "model")


@pytest.mark.parametrize("name", [*NAMES, MODEL_MANIFEST])
def test_every_changed_byte_of_a_small_file_is_found_under_its_name(folder, name):
    content = (folder / name).read_bytes()
    assert changed_files(folder) == []
    for place in range(0, len(content), max(1, len(content) // 40)):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        (folder / name).write_bytes(changed)
        (problem,) = changed_files(folder)
        assert str(folder / name) in problem


@pytest.mark.parametrize("texts", [{"format": "pt"}, {"format": "other"}], ids=["same header", "other header"])
def test_weights_of_another_folder_are_found_by_their_header(folder, texts):
    save_verified(folder / "model.safetensors", {"a": torch.zeros(3)}, texts)
    (problem,) = changed_files(folder)
    assert problem.startswith(f"{folder / 'model.safetensors'} was changed after it was saved")


def test_weights_without_checksums_are_covered_as_a_whole(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"other")
    write_model_manifest(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"Other")
    assert "model.safetensors was changed" in changed_files(tmp_path)[0]


def test_a_missing_file_is_named_and_a_file_that_no_loader_reads_may_be_added(folder):
    (folder / "README.md").write_text("# A card")
    assert changed_files(folder) == []
    (folder / "generation_config.json").unlink()
    assert changed_files(folder) == [f"{folder / 'generation_config.json'} is missing, which was saved with the folder"]


@pytest.mark.slow
def test_a_manifest_that_is_no_file_is_named(folder):
    (folder / MODEL_MANIFEST).unlink()
    assert changed_files(folder) == []
    os.mkfifo(folder / MODEL_MANIFEST)
    assert changed_files(folder) == [f"{folder / MODEL_MANIFEST} is not a file"]


@pytest.mark.slow
def test_a_changed_file_is_refused_by_loaders_until_the_change_is_accepted(tmp_path, capsys):
    source, folder = model_folder(), tmp_path / "fp8"
    assert main(["convert", "hf-to-fp8", str(source), str(folder)]) == 0
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant", "helper"))
    for load in (check_folder, load_tokenizer):
        with pytest.raises(ConfigError, match=rf"{template} was changed .*furlong check {folder} --accept-changes"):
            load(folder)
    assert main(["convert", "dequantize", str(folder), str(tmp_path / "whole")]) == 2
    assert main(["check", str(folder)]) == 1
    capsys.readouterr()
    assert main(["check", str(folder), "--accept-changes"]) == 0
    assert f"accepted: {template} was changed" in capsys.readouterr().out
    assert main(["check", str(folder)]) == 0
    load_tokenizer(folder)


def test_damage_is_not_accepted(folder, capsys):
    manifest = (folder / MODEL_MANIFEST).read_bytes()
    (folder / "config.json").write_text("{")
    assert main(["check", str(folder), "--accept-changes"]) != 0
    assert "config.json" in capsys.readouterr().out
    assert (folder / MODEL_MANIFEST).read_bytes() == manifest


def test_only_a_folder_with_a_manifest_has_changes_to_accept(capsys):
    assert main(["check", str(model_folder()), "--accept-changes"]) == 2
    assert f"has no {MODEL_MANIFEST}" in capsys.readouterr().err


@pytest.mark.slow
def test_transformers_ignores_the_manifest(tmp_path):
    folder = shutil.copytree(model_folder(), tmp_path / "model")
    write_model_manifest(folder)
    expected = AutoModelForCausalLM.from_pretrained(model_folder()).state_dict()
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(model_folder()).get_vocab()
    assert tokenizer.chat_template == (folder / "chat_template.jinja").read_text()


def test_a_model_that_replaces_another_one_has_not_its_manifest(folder):
    save_model(load_model(model_folder()), folder)
    assert changed_files(folder) == []
