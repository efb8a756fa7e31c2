"""Folders of torch.distributed.checkpoint: written, read, and never unpickled."""

from __future__ import annotations

import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from furlong.errors import CheckpointError
from furlong.training.checkpoint.dist_files import INDEX, DistFiles, DistWriter
from furlong.training.checkpoint.inert_pickle import read_inert


@pytest.fixture
def folder(tmp_path):
    writer = DistWriter(tmp_path, max_bytes=300)
    whole = torch.arange(24.0).view(4, 6)
    for row in range(0, 4, 2):
        for column in range(0, 6, 3):
            part = whole[row : row + 2, column : column + 3]
            writer.add("a", part, offset=(row, column), shape=(4, 6))
    writer.add("b.of.bfloat16", torch.ones(3, dtype=torch.bfloat16), offset=(0,), shape=(3,))
    writer.add_nothing("a._extra_state/shard_0_1")
    writer.close({"iteration": 3})
    return tmp_path


def test_any_box_is_read_from_the_parts_that_it_overlaps(folder):
    files = DistFiles(folder)
    assert files.names == {"a", "b.of.bfloat16"}
    assert (files.shape("a"), files.dtype("b.of.bfloat16")) == ((4, 6), torch.bfloat16)
    whole = torch.arange(24.0).view(4, 6)
    assert torch.equal(files.read("a", (1, 2), (2, 3)), whole[1:3, 2:5])
    assert torch.equal(files.read("a", (0, 0), (4, 6)), whole)
    assert len(files.files()) > 1
    with pytest.raises(CheckpointError, match="holds 6 of 12 wanted values of a"):
        files.read("a", (3, 0), (2, 6))


def test_of_what_is_stored_row_by_row_only_the_rows_that_are_wanted_are_looked_at(tmp_path):
    writer, whole = DistWriter(tmp_path), torch.arange(3 * 4 * 6.0).view(3, 4, 6)
    for layer in range(3):
        for half in (0, 2):
            writer.add("a", whole[layer : layer + 1, half : half + 2], offset=(layer, half, 0), shape=(3, 4, 6))
    writer.close({})
    files = DistFiles(tmp_path)
    assert torch.equal(files.read("a", (1, 1, 2), (1, 2, 3)), whole[1:2, 1:3, 2:5])
    assert torch.equal(files.read("a", (0, 1, 0), (3, 3, 6)), whole[:, 1:])
    assert torch.equal(files.read("a", (1, 0, 0), (2, 4, 1)), whole[1:, :, :1])
    entry = files._tensors["a"]
    assert [chunk.offset for chunk in entry.near((1, 1, 2), (1, 2, 3))] == [(1, 0, 0), (1, 2, 0)]
    with pytest.raises(CheckpointError, match="holds 24 of 48 wanted values of a"):
        files.read("a", (2, 0, 0), (2, 4, 6))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_what_is_written_here_and_the_other_way(folder, tmp_path_factory):
    state = {"a": torch.zeros(4, 6), "b.of.bfloat16": torch.zeros(3, dtype=torch.bfloat16)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(state["a"], torch.arange(24.0).view(4, 6))
    other = tmp_path_factory.mktemp("torch")
    dcp.save(state, checkpoint_id=other, no_dist=True)
    assert torch.equal(DistFiles(other).read("a", (0, 0), (4, 6)), state["a"])


class _Bomb:
    def __reduce__(self):
        return os.mkdir, (os.environ["BOMB"],)


def test_a_pickle_that_would_run_something_runs_nothing(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("BOMB", str(tmp_path / "went off"))
    data = pickle.dumps(_Bomb())
    assert read_inert(data).name.endswith(".mkdir")
    (folder / INDEX).write_bytes(data)
    with pytest.raises(CheckpointError, match="cannot read"):
        DistFiles(folder)
    assert not (tmp_path / "went off").exists()


@pytest.mark.parametrize("length", [0, 1, 40, 400])
def test_an_index_that_is_cut_off_is_refused(folder, length):
    (folder / INDEX).write_bytes((folder / INDEX).read_bytes()[:length])
    with pytest.raises(CheckpointError, match="cannot read"):
        DistFiles(folder)


def test_a_part_that_is_cut_off_or_outside_is_refused(folder):
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"cannot read a from .*__0_0\.distcp"):
        DistFiles(folder).read("a", (0, 0), (4, 6))
    index = (folder / INDEX).read_bytes()
    (folder / INDEX).write_bytes(index.replace(b"__0_0.distcp", b"../_0.distcp"))
    with pytest.raises(CheckpointError, match="outside of its folder"):
        DistFiles(folder).read("a", (0, 0), (4, 6))
