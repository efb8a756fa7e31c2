from __future__ import annotations

import os

import pytest

from furlong.core import drafts
from furlong.core.drafts import file_draft, write_atomically


def test_a_file_is_the_old_one_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "file"
    for old, new in ((None, "first"), ("first", "second")):
        with file_draft(path) as draft:
            draft.write_text(new)
            assert (path.read_text() if path.exists() else None) == old
        assert path.read_text() == new
        assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_write_that_ends_halfway_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(type(error)), file_draft(path) as draft:  # noqa: PT012  the block is what is tried
        draft.write_text("ne")
        raise error
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_what_was_wrong_first_is_what_is_raised(tmp_path):
    with pytest.raises(ZeroDivisionError), file_draft(tmp_path / "no-such-folder" / "file"):
        _ = 1 / 0


def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_is_then(tmp_path, monkeypatch):
    seen: list[object] = []
    replace = os.replace
    monkeypatch.setattr(drafts, "sync_to_disk", lambda path: seen.append((path, path.name in os.listdir(tmp_path))))
    monkeypatch.setattr(drafts.os, "replace", lambda *paths: (seen.append("named"), replace(*paths)))
    write_atomically(tmp_path / "file", "text")
    (draft, was_there), named, (folder, _) = seen
    assert (draft.parent, was_there, named, folder) == (tmp_path, True, "named", tmp_path)
    assert draft.name != "file"
