"""Damaged files of a delta and of a local checkpoint are refused by name; no value is taken from them."""

from __future__ import annotations

import json
import os
import random
import shutil

import pytest
import torch

from furlong.core.delta import Delta, DeltaWriter
from furlong.core.weights import WeightSource
from furlong.errors import SyncError
from furlong.weight_sync.transports.disk import VersionFolders
from furlong.weight_sync.transports.local_checkpoint import LocalCheckpoint
from transport_context import transport_context

BASE = {"a": torch.arange(600, dtype=torch.bfloat16).view(20, 30), "b": torch.ones(20, 30, dtype=torch.bfloat16)}
NEW = {"a": BASE["a"] + 8, "b": BASE["b"]}

DAMAGES = {
    "empty": lambda path, _: path.write_bytes(b""),
    "half": lambda path, content: path.write_bytes(content[: len(content) // 2]),
    "zeros": lambda path, content: path.write_bytes(bytes(len(content))),
    "noise": lambda path, content: path.write_bytes(random.Random(1).randbytes(len(content))),
    "longer": lambda path, content: path.write_bytes(content + b"}}}}"),
    "deep": lambda path, _: path.write_text("[" * 100_000),
    "list": lambda path, _: path.write_text("[1]"),
    "null": lambda path, _: path.write_text("null"),
    "folder": lambda path, _: (path.unlink(), path.mkdir()),
    "missing": lambda path, _: path.unlink(),
    "loop": lambda path, _: (path.unlink(), path.symlink_to(path.name)),
}


def delta_in(folder, encoding="xor"):
    folder.mkdir()
    copies = {name: tensor.clone() for name, tensor in BASE.items()}
    DeltaWriter(folder, copies, encoding=encoding, checksum="xxh3-128").write(NEW.items(), version=8, base_version=7)
    return folder


@pytest.fixture
def local(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    folders = VersionFolders(transport_context(2000, folder=tmp_path / "w"))
    local = LocalCheckpoint(tmp_path / "local")
    local.seed(folders.write(WeightSource(BASE.items), 7), 7)
    folders.close()
    return local


def read(folder):
    return dict(Delta.open(folder).source(BASE.__getitem__).open())


def damaged(path, kind):
    DAMAGES[kind](path, path.read_bytes())


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("file", ["delta.json", "delta.bin"])
def test_a_damaged_delta_is_refused_with_the_file(tmp_path, file, kind):
    folder = delta_in(tmp_path / "d")
    if (file, kind) == ("delta.bin", "longer"):
        return  # the bytes after the last tensor are not read
    damaged(folder / file, kind)
    with pytest.raises(SyncError, match=rf"d/{file}.*--load"):
        read(folder)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("file", ["delta.json", "delta.bin"])
def test_no_changed_byte_of_a_delta_gives_other_values(tmp_path, file, encoding):
    folder = delta_in(tmp_path / "d", encoding)
    content = (folder / file).read_bytes()
    for place in range(0, len(content), max(1, len(content) // 60)):
        changed = bytearray(content)
        changed[place] ^= 1 << (place % 8)
        (folder / file).write_bytes(changed)
        try:
            result = read(folder)
        except SyncError:
            continue
        delta = Delta.open(folder)
        assert (delta.version, delta.base_version) == (8, 7)
        assert all(torch.equal(result[name], NEW[name]) for name in NEW)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": "8"}, "version is '8', expected an integer"),
        ({"base_version": float("inf")}, "base_version is inf"),
        ({"encoding": "zip"}, "encoding is 'zip', expected xor or overwrite"),
        ({"checksum": ["md5"]}, r"checksum is \['md5'\]"),
        ({"tensors": [1]}, r"tensors is \[1\], expected an object"),
        ({"tensors": {"a": 5}}, "tensor 'a' is 5"),
        ({"tensors": {"a": {"dtype": 4, "shape": [1], "offset": 0, "size": 0, "checksum": ""}}}, "tensor 'a'"),
        ({"tensors": {"a": {"dtype": "x", "shape": [1], "offset": 0, "size": 0, "checksum": ""}}}, "dtype 'x'"),
        ({"tensors": {"a": {"dtype": "int8", "shape": 1, "offset": 0, "size": 0, "checksum": ""}}}, "tensor 'a'"),
        ({"tensors": {"a": {"dtype": "int8", "shape": [1], "offset": -4, "size": 0, "checksum": ""}}}, "tensor 'a'"),
        ({"tensors": {"a": {"dtype": "int8", "shape": [1], "offset": 0, "size": 1e9, "checksum": ""}}}, "tensor 'a'"),
    ],
)  # fmt: skip
def test_values_of_another_type_are_refused_in_a_manifest_without_a_checksum(tmp_path, change, words):
    path = delta_in(tmp_path / "d") / "delta.json"
    manifest = json.loads(path.read_text())
    del manifest["manifest_xxh3_128"]
    path.write_text(json.dumps(manifest))
    assert torch.equal(read(path.parent)["a"], NEW["a"])  # as written by earlier versions
    path.write_text(json.dumps(manifest | change))
    with pytest.raises(SyncError, match=rf"delta\.json is not a valid delta manifest: .*{words}"):
        Delta.open(path.parent)


def test_a_delta_that_claims_terabytes_allocates_none(tmp_path):
    folder = delta_in(tmp_path / "d")
    manifest = json.loads((folder / "delta.json").read_text())
    del manifest["manifest_xxh3_128"]
    manifest["tensors"]["a"]["size"] = 2**42
    (folder / "delta.json").write_text(json.dumps(manifest))
    with pytest.raises(SyncError, match=r"delta\.bin ends within a"):
        read(folder)
    bomb = b"\x28\xb5\x2f\xfd\xe0" + (2**42).to_bytes(8, "little") + b"\x01\x00\x00"  # a frame of 4 TiB
    manifest["tensors"]["a"] |= {"offset": 0, "size": len(bomb)}
    (folder / "delta.json").write_text(json.dumps(manifest))
    (folder / "delta.bin").write_bytes(bomb)
    with pytest.raises(SyncError, match=r"delta\.bin is corrupt: it has 4398046511104 bytes, expected at most"):
        read(folder)


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("file", ["furlong_version.json", "model.safetensors.index.json", "model-00001.safetensors"])
def test_a_damaged_local_checkpoint_is_refused_with_the_file_and_not_written(tmp_path, local, file, kind):
    folder = delta_in(tmp_path / "d")
    path = local.folder / file
    damaged(path, kind)
    if (file, kind) == ("furlong_version.json", "missing"):
        assert not local.catch_up(folder)  # it has no version, and is written anew
        return
    with pytest.raises(SyncError, match=rf"local/{file} is damaged: .*delete the folder .*local "):
        local.catch_up(folder)
    if file != "furlong_version.json":
        assert local.version == 7


def test_swapped_and_changed_tensors_of_a_local_checkpoint_are_refused(tmp_path, local):
    folder = delta_in(tmp_path / "d")
    files = sorted(local.folder.glob("*.safetensors"))
    copies = [path.read_bytes() for path in files]
    assert len(files) == 2
    files[0].write_bytes(copies[1])
    with pytest.raises(SyncError, match=r"model-00001\.safetensors is damaged: it has no tensor a"):
        local.catch_up(folder)
    files[0].write_bytes(copies[0][:-1] + b"\x55")  # within the values
    with pytest.raises(SyncError, match="a has a wrong checksum"):
        local.catch_up(folder)
    assert local.version is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_permissions_is_named(tmp_path, local):
    (local.folder / "furlong_version.json").chmod(0)
    with pytest.raises(SyncError, match=r"furlong_version\.json is damaged: it cannot be read: Permission denied"):
        local.catch_up(delta_in(tmp_path / "d"))


def test_a_folder_that_cannot_be_written_is_named(tmp_path, local):
    shutil.rmtree(local.folder)
    blocked = LocalCheckpoint(tmp_path / "config.json" / "local")
    with pytest.raises(SyncError, match="cannot write into --update-weight-local-checkpoint-dir"):
        blocked.seed(next((tmp_path / "w").glob("version_*")), 7)
