"""Every row of the catalogue has a test that injects its fault."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from faults.symptoms import SYMPTOMS
from furlong.doctor.catalogue import CATALOGUE

TESTS = Path(__file__).parents[1]
SOURCES = TESTS.parent / "src" / "furlong"

# The rows that answer the entries of each guide; a guide's other entries are descriptions, not faults.
ANSWERED = {
    "Miles FAQ": "CKPT01 CKPT02 CKPT06 CKPT07 CFG01 CFG04 GPU01 GPU02 GPU03 TPL01 STOP01 STOP02 NUM04 MEM01 MEM02 "
    "ENG01 ENG02 ENG05 DATA04",
    "Miles debugging guide": "CKPT01 CKPT03 CFG04 TPL01 TPL02 TPL03 NUM01 NUM02 NUM03 NUM05 MEM03 ENG01 ENG02 SYNC01 "
    "REW02 ASYNC02 HANG01 DET01",
    "slime FAQ": "CKPT01 CKPT02 CKPT06 CKPT07 CFG01 GPU01 GPU02 GPU03 TPL01 STOP01 STOP02 NUM04 MEM01 MEM02 "
    "ENG01 ENG02 ENG05",
    "slime debugging guide": "CKPT03 CKPT04 NUM01 NUM03 ENG01 SYNC02 QNT01 QNT02",
    "slime troubleshooting guide": "CKPT01 CKPT05 CFG01 CFG03 NUM04 MEM01 MEM02 MEM03 ENG03 ENG04 SYNC01 DATA01 DATA02 "
    "DATA03 REW01 REW02 ASYNC01 TOOL01 TOOL02",
}


def injected() -> dict[str, list[str]]:
    """Row -> the tests marked with `@fault(row)`, told from the text of the tests."""
    found: dict[str, list[str]] = {}
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Name) and mark.func.id == "fault":
                    for id in mark.args:
                        assert isinstance(id, ast.Constant)
                        found.setdefault(str(id.value), []).append(node.name)
    return found


def test_every_row_has_a_test_that_injects_its_fault():
    assert set(CATALOGUE) <= set(injected())


def test_every_mark_names_a_row():
    assert set(injected()) <= set(CATALOGUE)


@pytest.mark.parametrize("guide", ANSWERED)
def test_every_entry_of_a_guide_has_its_row(guide):
    assert set(ANSWERED[guide].split()) <= {id for id, row in CATALOGUE.items() if guide in row.guides}


def test_every_symptom_has_a_row_or_a_reason_and_the_tests_are_there():
    text = "".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    for symptom in SYMPTOMS:
        assert symptom.rows or symptom.note
        assert set(symptom.rows) <= set(CATALOGUE)
        assert all(f"def {name}(" in text for name in symptom.tests), symptom


def test_nothing_forks():
    for path in SOURCES.rglob("*.py"):
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not names & {"fork", "forkpty", "get_context", "set_start_method"}, path
