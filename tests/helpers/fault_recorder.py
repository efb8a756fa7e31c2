"""Record and compare transcripts of diagnoses, the program output for each fault in tests/faults/transcripts.

`python scripts/make_troubleshooting.py --record` rewrites the files with this module as a pytest plugin. A file has
the command and the first diagnosis of a row as printed in a terminal, without test and repository paths. The test
named in `sources.json` records the row, or the first marked test if that one no longer exists. In all other runs of
that test, tests/conftest.py compares its output with the file (`compare`).
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from faults_marker import last_typed, typed
from furlong.catalogue import Diagnosis
from runs import REPOSITORY

TRANSCRIPTS = Path(__file__).parents[1] / "faults" / "transcripts"
SOURCES = TRANSCRIPTS / "sources.json"  # row -> test that recorded it
WIDTH = 100  # terminal columns
ALIKE = 0.5  # fraction of words that must match: the rest are values and machine names
RECORD = "python scripts/make_troubleshooting.py --record"
_recorded: dict[str, str] = {}
_sources: dict[str, str] = {}


@dataclass
class Transcript:
    """The first diagnosis of each row in a test, as text, and the commands that caused them."""

    texts: dict[str, str] = field(default_factory=dict[str, str])
    commands: dict[str, str] = field(default_factory=dict[str, str])


def rows_of(item: pytest.Item) -> tuple[str, ...]:
    """Return the rows that a test is marked with."""
    return getattr(getattr(item, "function", None), "faults", ())


@contextlib.contextmanager
def listening(item: pytest.Item) -> Iterator[Transcript]:
    """Collect the diagnoses of the rows that a test is marked with."""
    rows, transcript = rows_of(item), Transcript()
    folder = vars(item)["funcargs"].get("tmp_path")
    make = Diagnosis.__init__

    def collect(self: Diagnosis, *args: Any, **named: Any) -> None:
        make(self, *args, **named)
        if self.id in rows and self.id not in transcript.texts:
            transcript.texts[self.id] = ""  # do not collect the shortened copy below
            short = Diagnosis(self.id, *(_short(t, folder) for t in (self.finding, self.cause, self.remedy)))
            transcript.texts[self.id], transcript.commands[self.id] = short.text(WIDTH), _short(last_typed(), folder)

    typed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Diagnosis, "__init__", collect)
        yield transcript


def compare(item: pytest.Item, transcript: Transcript) -> None:
    """Fail if the files that this test recorded differ from its transcript."""
    sources = json.loads(SOURCES.read_text())
    for row in rows_of(item):
        if sources.get(row) == item.nodeid:
            _, _, written = (TRANSCRIPTS / f"{row}.txt").read_text().partition("\n")
            if not is_alike(written, transcript.texts.get(row, "")):
                text = transcript.texts.get(row)
                pytest.fail(f"the transcript of {row} is out of date; run: {RECORD}\n{text}", False)


def is_alike(written: str, current: str) -> bool:
    """Return whether two texts of a diagnosis differ only in values."""
    (first, *rest), (other, *others) = _paragraphs(written), _paragraphs(current)
    words, other_words = set(first.split()), set(other.split())
    return rest == others and len(words & other_words) >= ALIKE * len(words)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run only the tests that inject a fault."""
    items[:] = [item for item in items if rows_of(item)]
    if SOURCES.exists():
        tests = {item.nodeid for item in items}
        _sources.update({row: test for row, test in json.loads(SOURCES.read_text()).items() if test in tests})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Record the rows of a test that are not assigned to another test."""
    with listening(item) as transcript:
        result = yield
    for row, text in transcript.texts.items():
        if row not in _recorded and _sources.get(row, item.nodeid) == item.nodeid:
            _recorded[row] = item.nodeid
            TRANSCRIPTS.mkdir(exist_ok=True)
            (TRANSCRIPTS / f"{row}.txt").write_text(f"$ {transcript.commands[row]}\n{text}\n")
    return result


def pytest_sessionfinish() -> None:
    """Store which test recorded each file; rows without a diagnosis in this session are left unchanged."""
    before: dict[str, str] = json.loads(SOURCES.read_text()) if SOURCES.exists() else {}
    SOURCES.write_text(json.dumps(dict(sorted((before | _recorded).items())), indent=1) + "\n")


def _paragraphs(text: str) -> list[str]:
    """Return finding, cause and remedy in one line each, without numbers and source locations."""
    lines = text.rstrip().splitlines() or [""]
    margin = " " * (lines[0].find("]") + 2)
    paragraphs = [lines[0]]
    for line in lines[1:]:
        if line.startswith(f"{margin}  "):
            paragraphs[-1] += f" {line.strip()}"
        else:
            paragraphs.append(line.strip())
    return [
        re.sub(r"[\d.,]*\d", "#", paragraph) for paragraph in paragraphs if not re.match(r"\S+\.py:\d+ in ", paragraph)
    ]


def _short(text: str, folder: Path | None) -> str:
    """Remove the machine's folders from a text."""
    if folder is not None:
        text = text.replace(f"{folder}/", "").replace(str(folder), "runs")
    for where, name in (
        (f"{REPOSITORY}/src/furlong/quickstart/model", "model"),
        (f"{REPOSITORY}/", ""),
        (sys.executable, "python"),
    ):
        text = text.replace(where, name)
    return re.sub(r"tests/(?=[a-z_]+\.py)", "", text)
