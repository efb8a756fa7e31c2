"""Every row of the catalogue has a test that injects its fault, and every entry of the guides a row."""

from __future__ import annotations

from faults.guides import ENTRIES
from faults_marker import injected
from furlong.catalogue import CATALOGUE
from furlong.catalogue.row import MD, MQ, SD, SQ, ST


def test_every_row_has_a_test_that_injects_its_fault():
    assert set(CATALOGUE) == set(injected())


def test_every_entry_of_a_guide_has_rows_that_name_its_remedies():
    missing: list[tuple[str, str, list[str]]] = []
    for entry in ENTRIES:
        rows = [CATALOGUE[id] for id in entry.rows]
        said = " ".join(f"{row.symptom} {row.cause} {row.checked} {row.remedy}" for row in rows)
        if names := [name for name in entry.names if name not in said]:
            missing.append((entry.guide, entry.seen, names))
        assert any(entry.guide in row.guides for row in rows), entry
    assert missing == []


def test_rows_name_the_guides_that_have_them_and_no_others():
    for guide in (MQ, MD, SQ, SD, ST):
        of_entries = {id for entry in ENTRIES if entry.guide == guide for id in entry.rows}
        assert {id for id, row in CATALOGUE.items() if guide in row.guides} == of_entries
