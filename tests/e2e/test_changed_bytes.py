"""A damaged file of a checkpoint or run folder is refused with its name, or changes nothing."""

from __future__ import annotations

import random
import shutil

import pytest

from changed_bytes import DAMAGE, HARMLESS, REFUSED, SavedRun, outcomes
from furlong.cli import main
from privileges import modes_apply


def test_a_changed_byte_of_any_file_is_refused_by_name_or_changes_nothing(tmp_path):
    saved = SavedRun(tmp_path)
    results = list(outcomes(saved, 10 * len(saved.files()), seed=1))
    assert [each for each in results if each[1] not in (REFUSED, HARMLESS)] == []
    assert {path.name for path, outcome, _ in results if outcome == REFUSED} >= {
        path.name for path in saved.checkpoint.rglob("*") if path.is_file()
    }


def test_a_file_damaged_in_another_way_is_refused_by_name_or_changes_nothing(tmp_path):
    draws = 12
    results = list(outcomes(SavedRun(tmp_path), draws * len(DAMAGE), seed=2, kinds=DAMAGE))
    assert [each for each in results if each[1] not in (REFUSED, HARMLESS)] == []
    assert sum(outcome == REFUSED for _, outcome, _ in results) > len(results) / 2


@pytest.mark.parametrize("kind", ["not readable", "a disk error", "a named pipe"])
def test_commands_name_the_file_of_a_run_that_cannot_be_read(kind, tmp_path, capsys):
    saved = SavedRun(tmp_path)
    run, other = saved.folder / "run", saved.folder / "other"
    shutil.copytree(run, other)
    for name in ("ledger.jsonl", "metrics.jsonl", "events.jsonl", "config.json"):
        content = (run / name).read_bytes()
        DAMAGE[kind](run / name, [], random.Random(0))
        with modes_apply():
            codes = [
                main(["report", str(run)]),
                main(["diff", str(run), str(other)]),
                main(["doctor", "--run", str(run)]),
            ]
        assert max(codes) > 0
        assert str(run / name) in capsys.readouterr().err
        (run / name).unlink()
        (run / name).write_bytes(content)
    assert main(["report", str(run)]) == 0
