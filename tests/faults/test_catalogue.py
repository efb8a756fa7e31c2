"""Every row of the catalogue has a test that injects its fault."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from fault_recorder import SOURCES, TRANSCRIPTS, is_alike
from faults.guides import ENTRIES
from faults.symptoms import SYMPTOMS
from faults_marker import injected
from furlong.catalogue import CATALOGUE, Diagnosis
from furlong.catalogue.row import MD, MQ, SD, SQ, ST
from furlong.diagnosis.postmortem.log_text import LogText
from furlong.diagnosis.postmortem.signatures import match_signatures

TESTS = Path(__file__).parents[1]
PORT_TAKEN = "Max retries exceeded with url: /get_model_info\n[Errno 98] address already in use\n"  # as a log has it


def test_every_row_has_a_test_that_injects_its_fault():
    assert set(CATALOGUE) <= set(injected())


def test_every_mark_names_a_row():
    assert set(injected()) <= set(CATALOGUE)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.guide}: {entry.seen}")
def test_every_entry_of_a_guide_has_rows_that_name_its_remedies(entry):
    rows = [CATALOGUE[id] for id in entry.rows]
    said = " ".join(f"{row.symptom} {row.cause} {row.checked} {row.remedy}" for row in rows)
    assert [name for name in entry.names if name not in said] == []
    assert any(entry.guide in row.guides for row in rows)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.guide}: {entry.seen}")
def test_the_program_itself_names_a_remedy_of_every_entry(entry):
    said = [(TRANSCRIPTS / f"{id}.txt").read_text() for id in entry.rows]
    said += [found.text() for found in match_signatures(LogText("log", PORT_TAKEN, {}, {})) if found.id in entry.rows]
    words = " ".join(" ".join(said).split())
    assert not entry.names or any(name in words for name in entry.names)


def test_transcripts_are_of_marked_tests():
    sources = json.loads(SOURCES.read_text())
    assert set(sources) == {path.stem for path in TRANSCRIPTS.glob("*.txt")} == set(CATALOGUE)
    marked = injected()
    assert all(name.rpartition("::")[2].partition("[")[0] in marked[row] for row, name in sources.items())


def test_texts_are_compared_without_their_values_and_line_breaks():
    said = Diagnosis("NUM03", "step 1: train/grad_norm 2088, at first 100 is a lot", "A cause.", "lower --lr 1e-6 now")
    other = Diagnosis("NUM03", "step 12: train/grad_norm 101.5, at first 100 is a lot", "A cause.", "lower --lr 3 now")
    assert not is_alike(said.text(100), other.text(24))
    same = dataclasses.replace(other, remedy="lower --lr 2e-7 now")
    assert is_alike(said.text(100), same.text(24))
    assert not is_alike(said.text(100), dataclasses.replace(same, cause="Another.").text(24))
    assert not is_alike(said.text(100), dataclasses.replace(same, finding="the norm has grown").text(24))
    assert not is_alike(said.text(100), "")


def test_rows_name_the_guides_that_have_them_and_no_others():
    for guide in (MQ, MD, SQ, SD, ST):
        of_entries = {id for entry in ENTRIES if entry.guide == guide for id in entry.rows}
        assert {id for id, row in CATALOGUE.items() if guide in row.guides} == of_entries


def test_every_symptom_has_a_row_or_a_reason_and_the_tests_are_there():
    text = "".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    for symptom in SYMPTOMS:
        assert symptom.rows or symptom.note
        assert set(symptom.rows) <= set(CATALOGUE)
        assert all(f"def {name}(" in text for name in symptom.tests), symptom
