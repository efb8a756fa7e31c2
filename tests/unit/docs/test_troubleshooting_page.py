"""The troubleshooting page is written from the catalogue, and written again when that changes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from furlong.catalogue import CATALOGUE

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "troubleshooting.md"


def test_the_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_troubleshooting", ROOT / "scripts" / "make_troubleshooting.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert PAGE.read_text() == script.render(), "run: python scripts/make_troubleshooting.py"


def test_every_row_has_a_section() -> None:
    text = PAGE.read_text()
    assert [id for id in CATALOGUE if f"\n## {id}: " not in text] == []


def test_every_row_has_a_transcript() -> None:
    for path in (ROOT / "tests" / "faults" / "transcripts").glob("*.txt"):
        head, first, *_ = path.read_text().splitlines()
        assert head.startswith(("$ furlong ", "# Recorded: ", "# Given: "))
        assert first.startswith(f"[{path.stem}] ")
    names = {path.stem for path in (ROOT / "tests" / "faults" / "transcripts").glob("*.txt")}
    assert names == set(CATALOGUE), "run: python scripts/make_troubleshooting.py --record"
