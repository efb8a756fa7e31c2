from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from data_zoo import chat_tokenizer
from faults.world import World
from runs import write_prompts
from stored_models import dense_layer, write_stored_model


@pytest.fixture(scope="session")
def pristine(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pristine") / "model"
    write_stored_model(folder, [dense_layer(0), dense_layer(1)], num_hidden_layers=2, max_position_embeddings=128)
    chat_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def world(pristine, tmp_path) -> World:
    """A model and prompts with which nothing is wrong."""
    shutil.copytree(pristine, tmp_path / "model")
    data = write_prompts(tmp_path / "prompts.jsonl", 24)
    return World(tmp_path, tmp_path / "model", data)
