"""Checkpoints of torch.distributed.checkpoint: reading, writing, and pickles that must run nothing."""

from __future__ import annotations

import argparse
import os
import pickle
import signal

import pytest
import torch
import torch.distributed.checkpoint as dcp

from furlong.errors import CheckpointError
from furlong.training.megatron_lm.dist_files import COMMON, INDEX, DistReader, DistWriter, common_of


@pytest.fixture
def folder(tmp_path):
    writer = DistWriter(tmp_path, max_bytes=300)
    whole = torch.arange(24.0).view(4, 6)
    for row in range(0, 4, 2):
        for column in range(0, 6, 3):
            part = whole[row : row + 2, column : column + 3]
            writer.add("a", part, offset=(row, column), shape=(4, 6))
    writer.add("b.of.bfloat16", torch.ones(3, dtype=torch.bfloat16), offset=(0,), shape=(3,))
    writer.add_empty_object("a._extra_state/shard_0_1")
    writer.close({"iteration": 3})
    return tmp_path


def test_any_box_is_read_from_the_chunks_that_it_overlaps(folder):
    files = DistReader(folder)
    assert files.names == {"a", "b.of.bfloat16"}
    assert (files.shape("a"), files.dtype("b.of.bfloat16")) == ((4, 6), torch.bfloat16)
    whole = torch.arange(24.0).view(4, 6)
    assert torch.equal(files.read("a", (1, 2), (2, 3)), whole[1:3, 2:5])
    assert torch.equal(files.read("a", (0, 0), (4, 6)), whole)
    assert len(files.files()) > 1
    with pytest.raises(CheckpointError, match=r"\b6 of 12 .*values of a\b"):
        files.read("a", (3, 0), (2, 6))


def test_boxes_are_read_across_layers_and_from_scalars(tmp_path):
    writer, whole = DistWriter(tmp_path), torch.arange(3 * 4 * 6.0).view(3, 4, 6)
    for layer in range(3):
        for half in (0, 2):
            writer.add("a", whole[layer : layer + 1, half : half + 2], offset=(layer, half, 0), shape=(3, 4, 6))
    writer.add("step", torch.tensor(7), offset=(), shape=())
    writer.close({})
    files = DistReader(tmp_path)
    assert torch.equal(files.read("a", (1, 1, 2), (1, 2, 3)), whole[1:2, 1:3, 2:5])
    assert torch.equal(files.read("a", (0, 1, 0), (3, 3, 6)), whole[:, 1:])
    assert [part.shape for part in files.parts("a")] == [(1, 2, 6)] * 6
    assert files.read("step", (), ()) == 7
    with pytest.raises(CheckpointError, match=r"\b24 of 48 .*values of a\b"):
        files.read("a", (2, 0, 0), (2, 4, 6))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_what_is_written_and_its_checkpoints_are_read(folder, tmp_path_factory):
    state = {"a": torch.zeros(4, 6), "b.of.bfloat16": torch.zeros(3, dtype=torch.bfloat16)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(state["a"], torch.arange(24.0).view(4, 6))
    other = tmp_path_factory.mktemp("torch")
    dcp.save(state, checkpoint_id=other, no_dist=True)
    assert torch.equal(DistReader(other).read("a", (0, 0), (4, 6)), state["a"])


class _Bomb:
    def __reduce__(self):
        return os.mkdir, (os.environ["BOMB"],)


def test_a_hostile_pickle_runs_nothing(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("BOMB", str(tmp_path / "went off"))
    torch.save({"iteration": 3, "args": _Bomb()}, folder / COMMON)
    with pytest.raises(CheckpointError, match=COMMON):
        common_of(folder)
    for name in ("builtins eval", "os mkdir", "torch load", "copyreg _reconstructor", "builtins getattr"):
        (folder / INDEX).write_bytes(f"c{name.replace(' ', chr(10))}\n(VBOMB\nVx\ntR.".encode())
        with pytest.raises(CheckpointError, match=INDEX):
            DistReader(folder)
    (folder / INDEX).write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(CheckpointError, match=r"\.mkdir\b"):
        DistReader(folder)
    assert not (tmp_path / "went off").exists()


def test_objects_in_common_are_placeholders_with_their_attributes(folder):
    torch.save({"args": argparse.Namespace(num_layers=4, kind=signal.SIGTERM, dtype=torch.float32)}, folder / COMMON)
    assert common_of(folder)["args"].get("num_layers") == 4
    assert common_of(folder)["args"].get("absent") is None
    (folder / COMMON).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=COMMON):
        common_of(folder)


def test_a_damaged_index_is_refused(folder):
    content = (folder / INDEX).read_bytes()
    memo = b"\x80\x02]r\xff\xff\xff\x1f."  # number 2**29 - 1 of the memo, for which Python would take 8 GiB
    huge = b"\x80\x04\x8e" + b"\xff" * 7 + b"\x0f."
    for data in (b"", b"x", content[:40], content[:400], huge, memo, pickle.dumps({})):
        (folder / INDEX).write_bytes(data)
        with pytest.raises(CheckpointError, match=INDEX):
            DistReader(folder)


def test_a_chunk_that_is_truncated_or_outside_the_folder_is_refused(folder):
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"\ba from .*__0_0\.distcp"):
        DistReader(folder).read("a", (0, 0), (4, 6))
    index = (folder / INDEX).read_bytes()
    (folder / INDEX).write_bytes(index.replace(b"__0_0.distcp", b"../_0.distcp"))
    with pytest.raises(CheckpointError, match=r"\.\./_0\.distcp"):
        DistReader(folder)
