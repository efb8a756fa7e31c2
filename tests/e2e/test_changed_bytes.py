"""A damaged file of a checkpoint or run folder is refused with its name, or changes nothing."""

from __future__ import annotations

from changed_bytes import DAMAGE, HARMLESS, REFUSED, SavedRun, outcomes


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
