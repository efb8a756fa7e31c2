from __future__ import annotations

import json
import os
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.errors import CheckpointError
from furlong.files.atomic import save_tensors
from furlong.files.checkpoint_folder import (
    MANIFEST,
    damaged_files,
    files_checked,
    read_manifest,
    read_verified,
    tensor_files,
    write_manifest,
)
from furlong.files.checksums import file_checksum
from furlong.files.file_manifest import manifest_text
from furlong.files.safetensors_header import read_header
from furlong.files.verified_tensors import BLOCK_BYTES, DIGITS, block_places

NAME = "weights.safetensors"
ROW = 64 << 10  # bytes; tensors below have 3, 40, 0 and 1 rows, so some span several blocks


def write(save, step=1):
    trainer = save / f"iter_{step:07d}" / "trainer"
    trainer.mkdir(parents=True)
    draw = torch.Generator().manual_seed(step)
    tensors = {name: torch.rand((rows, ROW // 4), generator=draw) for name, rows in (("a", 3), ("b", 40), ("none", 0))}
    save_tensors(trainer / NAME, tensors | {"scalar": torch.tensor(2.5)}, {"format": "pt"})
    (trainer / "meta.json").write_text("{}")
    write_manifest(trainer.parent, step)
    return trainer


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return write(tmp_path_factory.mktemp("saved"))


def read(trainer, name, rows=slice(None)):
    """Return the bytes of some rows of a tensor."""
    with tensor_files(trainer, [NAME]) as [file]:
        tensor = file.tensors[name]
        first, last, _ = rows.indices(tensor.shape[0] if tensor.shape else 1)
        row_bytes = ROW if tensor.shape else 4
        content = bytearray((last - first) * row_bytes)
        file.read(tensor.offset + first * row_bytes, memoryview(content))
    return bytes(content)


def flip(path, place, mask=1):
    content = bytearray(path.read_bytes())
    content[place] ^= mask
    path.write_bytes(content)


def test_blocks_begin_at_tensors_and_cover_the_file(saved):
    shard = read_header(saved / NAME)
    places = block_places(shard)
    assert (places[0], places[-1]) == (0, (saved / NAME).stat().st_size)
    assert {shard.header_bytes, *(tensor.offset for tensor in shard.tensors.values())} <= set(places)
    assert all(0 < end - start <= BLOCK_BYTES for start, end in pairwise(places))
    record = read_manifest(saved.parent)[f"trainer/{NAME}"]
    assert len(record.blocks) == DIGITS * (len(places) - 1)
    assert record.checksum == file_checksum(saved / NAME)
    assert [path.name for path in sorted(saved.iterdir())] == ["meta.json", NAME]


@pytest.mark.slow
@settings(deadline=None)
@given(data=st.data())
def test_any_rows_are_read_as_they_were_saved(saved, data):
    content, shard = (saved / NAME).read_bytes(), read_header(saved / NAME)
    name = data.draw(st.sampled_from(sorted(shard.tensors)))
    tensor = shard.tensors[name]
    if not tensor.shape:
        assert read(saved, name) == content[tensor.offset : tensor.offset + 4]
        return
    first = data.draw(st.integers(0, tensor.shape[0]))
    last = data.draw(st.integers(first, tensor.shape[0]))
    expected = content[tensor.offset + first * ROW : tensor.offset + last * ROW]
    assert read(saved, name, slice(first, last)) == expected


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_changed_byte_is_refused_or_outside_of_what_is_read(tmp_path_factory, data):
    trainer = write(tmp_path_factory.mktemp("changed"))
    shard, original = read_header(trainer / NAME), (trainer / NAME).read_bytes()
    place = data.draw(st.integers(0, shard.header_bytes) | st.integers(0, len(original) - 1))
    name = data.draw(st.sampled_from(("a", "b")))
    first = data.draw(st.integers(0, shard.tensors[name].shape[0]))
    flip(trainer / NAME, place, data.draw(st.integers(1, 255)))
    start = shard.tensors[name].offset + first * ROW
    try:
        content = read(trainer, name, slice(first, None))
    except CheckpointError as error:
        assert f"{trainer / NAME}" in str(error)  # noqa: PT017
        assert "no intact checkpoint before it" in str(error)  # noqa: PT017
        return
    assert not start <= place < start + len(content)
    assert content == original[start : start + len(content)]


def test_what_is_compared_is_what_was_read(saved, monkeypatch):
    """A disk that returns a wrong byte once: a second look at the file would find nothing."""
    preadv, place = os.preadv, read_header(saved / NAME).tensors["b"].offset

    def wrong(descriptor, buffers, offset):
        size = preadv(descriptor, buffers, offset)
        if offset == place:
            monkeypatch.setattr(os, "preadv", preadv)
            buffers[0][0] ^= 1
        return size

    monkeypatch.setattr(os, "preadv", wrong)
    with pytest.raises(CheckpointError, match=rf"{NAME} was changed after it was saved from byte {place} to"):
        read(saved, "b")
    assert damaged_files(saved.parent) == []


def test_errors_of_the_body_are_kept(saved):
    with pytest.raises(ZeroDivisionError), tensor_files(saved, [NAME]):
        raise ZeroDivisionError


@pytest.mark.parametrize("damage", ["cut", "extended", "missing", "a folder", "unreadable"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, damage, monkeypatch):
    trainer = write(tmp_path)
    path = trainer / NAME
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[:-1])
    elif damage == "extended":
        path.write_bytes(content + b"0")
    elif damage == "unreadable":
        monkeypatch.setattr(os, "preadv", raise_io_error)
    else:
        path.unlink()
        if damage == "a folder":
            path.mkdir()
    with pytest.raises(CheckpointError, match=rf"{NAME}.*no intact checkpoint before it"):
        read(trainer, "a")


def raise_io_error(*_):
    raise OSError(5, "Input/output error")


def test_manifests_without_blocks_are_compared_by_file(tmp_path):
    trainer = write(tmp_path)
    folder = trainer.parent
    records = {name: (r.num_bytes, r.checksum) for name, r in read_manifest(folder).items()}
    text = manifest_text(1, {name: type(read_manifest(folder)[name])(*r) for name, r in records.items()}, number=2)
    assert "blocks" not in text
    (folder / MANIFEST).write_text(text)
    assert {name: (r.num_bytes, r.checksum) for name, r in read_manifest(folder).items()} == records
    with files_checked(folder):
        read(trainer, "a")
    flip(trainer / NAME, -1)
    with pytest.raises(CheckpointError, match=rf"{NAME} was changed"), files_checked(folder):
        read(trainer, "a")
    sizes = {name: size for name, (size, _) in records.items()}
    (folder / MANIFEST).write_text(json.dumps({"format": 1, "step": 1, "files": sizes}))
    with files_checked(folder):
        assert np.frombuffer(read(trainer, "a"), np.float32).size == 3 * ROW // 4


def test_small_files_are_compared_as_they_are_read(tmp_path):
    trainer = write(tmp_path)
    assert read_verified(trainer.parent, "trainer/meta.json") == b"{}"
    (trainer / "meta.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"meta\.json was changed"):
        read_verified(trainer.parent, "trainer/meta.json")
    (trainer / "meta.json").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*meta\.json"):
        read_verified(trainer.parent, "trainer/meta.json")
