"""`furlong check` finds damage of every kind of file without a model."""

from __future__ import annotations

import random
import shutil

import pytest

from changed_bytes import DAMAGE, SavedRun
from furlong.cli import main
from privileges import modes_apply


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return SavedRun(tmp_path_factory.mktemp("saved"))


def check(path, capsys):
    with modes_apply():
        code = main(["check", str(path)])
    printed = capsys.readouterr()
    assert "Traceback" not in printed.out + printed.err
    return code, " ".join((printed.out + printed.err).split())


@pytest.mark.parametrize(
    "place", ["run", "dumps", "dumps/1.safetensors", "bundle.zip", "save", "save/iter_0000002", "model"]
)
def test_intact_files_have_no_problem(place, original, capsys):
    code, printed = check(original.folder / place, capsys)
    assert (code, "no problem" in printed or "intact" in printed or "complete" in printed) == (0, True), printed


@pytest.mark.parametrize(
    ("name", "checked"),
    [
        ("dumps/1.safetensors", "dumps"),
        ("dumps/1.safetensors", "dumps/1.safetensors"),
        ("bundle.zip", "bundle.zip"),
        ("run/ledger.jsonl", "run"),
        ("save/iter_0000002/state.json", "save"),
        ("save/iter_0000002/trainer/trainer_optimizer.safetensors", "save"),
        ("save/iter_0000002/rollout_0000002.safetensors", "save"),
    ],
)
def test_damage_is_found_and_named(name, checked, original, capsys):
    draw, path = random.Random(4), original.folder / name
    content = path.read_bytes()
    others = sorted(each for each in original.folder.rglob("*") if each.is_file() and each != path)
    for kind in ("4 KiB of noise", "cut", "empty", "zeros", "another file", "a folder", "not readable", "a disk error"):
        if kind in ("a folder", "another file") and checked in ("run", name):
            continue  # then it is another kind of file
        DAMAGE[kind](path, others, draw)
        code, printed = check(original.folder / checked, capsys)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        assert (code, path.name in printed) == (1, True), (kind, printed)
