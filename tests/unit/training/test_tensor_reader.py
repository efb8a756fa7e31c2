from __future__ import annotations

import pytest
import torch

from furlong.errors import CheckpointError
from furlong.files.atomic import save_tensors
from furlong.models.hf_model import Rows
from furlong.training.checkpoint.tensor_reader import open_reader

TENSORS = {
    "half": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "one": torch.rand(4, 3),
    "other": torch.rand(4, 3),
    "scalar": torch.tensor(7),
    "flags": torch.tensor([True, False]),
}


@pytest.fixture
def folder(tmp_path):
    save_tensors(tmp_path / "x.safetensors", TENSORS, {"random": "text"})
    return tmp_path


def test_tensors_and_rows_are_read_as_they_were_saved(folder):
    with open_reader(folder, ["x.safetensors"]) as reader:
        assert reader.names == TENSORS.keys()
        assert reader.texts == {"random": "text"}
        for name, tensor in TENSORS.items():
            torch.testing.assert_close(reader.read(name), tensor, rtol=0, atol=0)
            assert reader.shape(name) == tensor.shape
        torch.testing.assert_close(reader.read("one", slice(1, 3)), TENSORS["one"][1:3], rtol=0, atol=0)
        assert reader.read("one", slice(4, 9)).shape == (0, 3)
        with pytest.raises(CheckpointError, match="no tensor absent"):
            reader.read("absent")


def test_pieces_are_read_as_one_tensor(folder):
    with open_reader(folder, ["x.safetensors"]) as reader:
        reader.join("both", Rows((("one", "other"),), 1))
        assert reader.names == {"both", "half", "scalar", "flags"}
        expected = torch.cat([TENSORS["one"], TENSORS["other"]], 1)[None]
        torch.testing.assert_close(reader.read("both"), expected, rtol=0, atol=0)


def test_tensors_own_their_memory(folder):
    """A file that is overwritten in place after loading changes nothing."""
    path = folder / "x.safetensors"
    with open_reader(folder, [path.name]) as reader:
        loaded = {name: reader.read(name) for name in TENSORS}
        targets = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
        targets["one"] = torch.zeros(4, 3, dtype=torch.float64)  # converted
        targets["other"] = torch.zeros(3, 4).T  # not contiguous
        reader.copy_into(targets, None)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    for name, tensor in TENSORS.items():
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=0)
        torch.testing.assert_close(targets[name], tensor.to(targets[name].dtype), rtol=0, atol=0)
