"""`trainer.json`: other content is an error that names it."""

from __future__ import annotations

import json

import pytest
import torch

from furlong.errors import CheckpointError
from furlong.files.atomic import save_tensors
from furlong.training.checkpoint.trainer_files import META, read_meta, restore_random
from furlong.training.ranks import Ranks

GOOD = {"format": 1, "files": {}, "has_optimizer": False, "roles": [], "python_random": [], "numpy_random": []}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        json.dumps(GOOD | {"format": 2}).encode(),
        json.dumps(GOOD | {"files": 1}).encode(),
        json.dumps({name: value for name, value in GOOD.items() if name != "roles"}).encode(),
    ],
)
def test_other_content_is_named(content, tmp_path):
    (tmp_path / META).write_bytes(content)
    with pytest.raises(CheckpointError, match=str(tmp_path / META)):
        read_meta(tmp_path)


@pytest.mark.parametrize(
    "change", [{"python_random": [3]}, {"python_random": [3, [1], None]}, {"numpy_random": ["MT19937", "x", 0, 0.0]}]
)
def test_damaged_random_states_are_named(change, tmp_path):
    (tmp_path / META).write_text(json.dumps(GOOD | change))
    states = {"torch": torch.get_rng_state(), "numpy": torch.zeros(624, dtype=torch.int64)}
    save_tensors(tmp_path / "trainer_rng.safetensors", states)
    with pytest.raises(CheckpointError, match=r"trainer_rng\.safetensors and trainer\.json are damaged"):
        restore_random(tmp_path, GOOD | change, Ranks())
