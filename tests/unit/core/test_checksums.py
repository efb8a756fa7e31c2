from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from furlong.errors import CheckpointError
from furlong.files.checkpoint_folder import (
    MANIFEST,
    check_manifest,
    checksum_warning,
    damaged_files,
    files_checked,
    read_manifest,
    write_manifest,
)
from furlong.files.checksums import SMALL_BYTES, FileCheck, file_checksum
from furlong.files.sealed_arrays import load_arrays, save_arrays

LARGE, SMALL = "trainer/weights", "trainer/meta.json"


def write(save, step):
    folder = save / f"iter_{step:07d}"
    (folder / "trainer").mkdir(parents=True)
    (folder / LARGE).write_bytes(bytes([step]) * (2 * SMALL_BYTES))
    (folder / SMALL).write_text("{}")
    (folder / "state.json").write_text("{}")
    write_manifest(folder, step)
    return folder


def flip(path, place, mask=1):
    content = bytearray(path.read_bytes())
    content[place] ^= mask
    path.write_bytes(content)


def test_a_manifest_has_size_and_checksum_of_every_file_and_takes_those_that_were_left(tmp_path):
    folder = write(tmp_path, 3)
    records = read_manifest(folder)
    assert records.keys() == {LARGE, SMALL, "state.json"}
    for name, record in records.items():
        assert (record.num_bytes, record.checksum) == ((folder / name).stat().st_size, file_checksum(folder / name))
    assert {p.name for p in (folder / "trainer").iterdir()} == {"weights", "meta.json"}
    assert damaged_files(folder) == []


@pytest.mark.parametrize("name", [LARGE, SMALL])
def test_a_changed_byte_is_refused_with_the_file_and_the_newest_intact_checkpoint(tmp_path, name):
    write(tmp_path, 2)
    flip(write(tmp_path, 4) / name, 0)
    folder = write(tmp_path, 6)
    flip(folder / name, -1)
    with pytest.raises(CheckpointError, match=rf"iter_0000006/{name} .*--ckpt-step 2$"), files_checked(folder):
        pass


def test_damage_explains_an_exception_that_it_causes(tmp_path):
    folder = write(tmp_path, 1)
    with pytest.raises(ZeroDivisionError), files_checked(folder):
        raise ZeroDivisionError
    flip(folder / LARGE, 5)
    with pytest.raises(CheckpointError, match="weights"), files_checked(folder):
        raise ZeroDivisionError


def test_ranks_share_the_large_files(tmp_path):
    paths = [tmp_path / str(number) for number in range(5)]
    for path in paths:
        path.write_bytes(bytes(2 * SMALL_BYTES))
    expected = [(path, "0" * 32) for path in paths]
    shares = [FileCheck(expected, part=rank, parts=2).wait() for rank in range(2)]
    assert [len(share) for share in shares] == [3, 2]
    assert {line.split()[0] for share in shares for line in share} == set(map(str, paths))


@pytest.mark.slow
def test_every_changed_byte_of_a_manifest_is_refused(tmp_path):
    folder = write(tmp_path, 1)
    content = (folder / MANIFEST).read_bytes()
    for place in range(len(content)):
        flip(folder / MANIFEST, place, 1 << place % 8)
        with pytest.raises(CheckpointError, match="iter_0000001"):
            check_manifest(folder)
        (folder / MANIFEST).write_bytes(content)
    check_manifest(folder)


@pytest.mark.parametrize("text", ["", "[]", "1", "{}", '{"format": 2}', '{"format": 2, "files": [1]}', "[" * 100_000])
def test_any_other_content_of_a_manifest_is_a_checkpoint_error(tmp_path, text):
    folder = write(tmp_path, 1)
    (folder / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        check_manifest(folder)


def test_a_checkpoint_of_an_older_version_is_read_with_a_warning(tmp_path):
    folder = write(tmp_path, 1)
    assert checksum_warning(folder) is None
    sizes = {name: record.num_bytes for name, record in read_manifest(folder).items()}
    (folder / MANIFEST).write_text(json.dumps({"format": 1, "step": 1, "files": sizes}))
    flip(folder / LARGE, 0)
    check_manifest(folder)
    with files_checked(folder):
        pass
    assert f"{folder} was saved without checksums" in checksum_warning(folder)
    (folder / SMALL).write_text("")
    with pytest.raises(CheckpointError, match=r"meta\.json has 0 bytes, expected 2"):
        check_manifest(folder)


@pytest.mark.slow
@given(data=st.data(), rows=st.integers(0, 5))
def test_a_changed_byte_of_sealed_arrays_is_refused_or_changes_nothing(tmp_path_factory, data, rows):
    path = tmp_path_factory.mktemp("sealed") / "file"
    arrays = {"a": np.arange(rows, dtype=np.float32), "b": np.zeros((2, rows), np.int8)}
    texts = {"format": "x", "rollout_id": "3"}
    save_arrays(path, arrays, texts)
    flip(path, data.draw(st.integers(0, path.stat().st_size - 1)), data.draw(st.integers(1, 255)))
    try:
        read, header = load_arrays(path, frozenset(texts))
    except ValueError:
        return
    assert header == texts
    assert read.keys() == arrays.keys()
    assert all(read[name].tobytes() == array.tobytes() for name, array in arrays.items())
    assert all((read[name].dtype, read[name].shape) == (array.dtype, array.shape) for name, array in arrays.items())
