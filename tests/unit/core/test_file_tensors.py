"""Tensors of safetensors files are in memory of their own, whatever happens to the file."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from furlong.errors import CheckpointError
from furlong.files.file_tensors import DTYPES, read_file, read_tensor, save_verified
from furlong.files.sealed_arrays import load_arrays, save_arrays
from furlong.files.verified_tensors import open_tensor_file


def write(path: Path, save: Any = save_file) -> dict[str, torch.Tensor]:
    tensors = {name: torch.ones(5, 3).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "large": torch.rand(3, 700_000)}
    save(tensors, path)
    return tensors


def verified(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_verified(path, tensors, {"format": "pt"})


@pytest.mark.parametrize("save", [save_file, verified])
def test_tensors_of_every_dtype_equal_those_that_were_written(save, tmp_path):
    path = tmp_path / "x.safetensors"
    written, read = write(path, save), dict(read_file(path))
    assert read.keys() == written.keys()
    for name, tensor in written.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read[name].view(torch.uint8), tensor.view(torch.uint8)) if tensor.dim() else True
    with open_tensor_file(path) as file:
        assert torch.equal(read_tensor(file, "large", slice(1, 3)), written["large"][1:3])
    assert dict(read_file(path, lambda name: name == "scalar"))["scalar"].item() == 2.5


@pytest.mark.slow
def test_a_changed_byte_of_a_file_with_its_own_checksums_is_refused_by_name_or_changes_no_tensor(tmp_path):
    path = tmp_path / "x.safetensors"
    written = write(path, verified)
    content, draw, errors = bytearray(path.read_bytes()), random.Random(0), list[str]()
    header = 8 + int.from_bytes(content[:8], "little")
    for place in [*draw.sample(range(header), 80), *draw.sample(range(header, len(content)), 20)]:
        changed = bytearray(content)
        changed[place] ^= draw.randrange(1, 256)
        path.write_bytes(changed)
        try:
            read = dict(read_file(path))
        except CheckpointError as error:
            errors.append(str(error))
            continue
        assert read.keys() == written.keys()
        assert all(torch.equal(bytes_of(read[name]), bytes_of(written[name])) for name in written)
    assert len(errors) > 90
    assert [error for error in errors if str(path) not in error] == []


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def test_other_programs_read_a_file_with_its_own_checksums(tmp_path):
    written = write(tmp_path / "x.safetensors", verified)
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == written.keys()
    assert torch.equal(read["large"], written["large"])


def test_a_file_that_is_cut_after_a_read_does_not_change_what_was_read(tmp_path):
    path = tmp_path / "x.safetensors"
    written, read = write(path), dict(read_file(path))
    os.truncate(path, 10)
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert torch.equal(read["large"], written["large"])


def test_a_file_that_is_cut_during_a_read_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "x.safetensors"
    write(path)
    tensors = read_file(path)
    next(tensors)
    os.truncate(path, path.stat().st_size - 1000)
    with pytest.raises(CheckpointError, match=f"{path} was cut off at byte"):
        list(tensors)


@pytest.mark.parametrize("content", [b"", b"\x05\0\0\0", b"\x02" + bytes(7) + b"{}x", b"\x02" + bytes(7) + b"[]"])
def test_other_files_are_refused_by_name(content, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=str(path)):
        list(read_file(path))


def test_tensors_that_overlap_or_leave_a_gap_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    for second in ((0, 4), (2, 6), (8, 12)):
        header = '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],'
        header += f'"data_offsets":[{second[0]},{second[1]}]}}}}'
        path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(second[1]))
        with pytest.raises(CheckpointError, match="tensor b begins"):
            list(read_file(path))


def test_arrays_of_every_dtype_equal_those_that_were_written(tmp_path):
    path = tmp_path / "x.safetensors"
    kinds = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")
    arrays = {kind: np.arange(6).reshape(2, 3).astype(kind) for kind in kinds} | {"empty": np.empty(0, "f4")}
    save_arrays(path, arrays, {"a": "b"})
    read, texts = load_arrays(path, frozenset("a"))
    assert texts == {"a": "b"}
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype
        assert np.array_equal(read[name], array)
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match="its header requires"):
        load_arrays(path, frozenset("a"))
