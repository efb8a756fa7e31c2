from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import save_file

from furlong.errors import CheckpointError
from furlong.files.tensor_file import StoredTensor, TensorFile, read_arrays, read_file, read_header

KINDS = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "int64",
    "int32",
    "uint8",
    "bool",
]


@pytest.fixture
def written(tmp_path):
    tensors = {name: torch.ones(5, 3).to(getattr(torch, name)) for name in KINDS}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "large": torch.rand(3, 700_000)}
    save_file(tensors, tmp_path / "x.safetensors", {"key": "text"})
    return tensors


def raw(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def test_tensors_and_header_are_those_that_were_written(written, tmp_path):
    path = tmp_path / "x.safetensors"
    read, header = dict(read_file(path)), read_header(path)
    assert read.keys() == written.keys() == header.tensors.keys()
    for name, tensor in written.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(raw(read[name]), raw(tensor))
        assert (header.tensors[name].shape, header.tensors[name].num_bytes) == (tensor.shape, tensor.nbytes)
    assert header.texts == {"key": "text"}
    assert header.tensors["bfloat16"] == StoredTensor("BF16", (5, 3))
    with TensorFile(path) as file:
        assert torch.equal(file.read("large", slice(1, 3)), written["large"][1:3])
        assert file.texts == {"key": "text"}
    assert [name for name, _ in read_file(path, lambda name: name == "scalar")] == ["scalar"]


def test_a_file_that_is_cut_after_a_read_does_not_change_what_was_read(written, tmp_path):
    path = tmp_path / "x.safetensors"
    read = dict(read_file(path))
    os.truncate(path, 10)
    assert torch.equal(read["large"], written["large"])


def test_files_that_are_missing_cut_or_something_else_are_named(written, tmp_path):
    path = tmp_path / "x.safetensors"
    whole = path.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"
    for content, why in (
        (b"", "cut off"),
        (whole[:-1], "cut off"),
        (whole + b"x", "not a safetensors file"),
        (b"\x02" + bytes(7) + b"[]", "not a safetensors file"),
        (pointer, f"Git LFS pointer of {len(pointer)} bytes"),
        (None, "does not exist"),
    ):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        for read in (read_header, read_arrays, TensorFile):
            with pytest.raises(CheckpointError, match=f"cannot read {path}: .*{why}"):
                read(path)
        path.write_bytes(whole)
