"""What the program says about each fault, kept in tests/faults/transcripts as the test saw it that injects the fault.

`python scripts/make_troubleshooting.py --record` writes the files anew, with this module as a pytest plugin: of a row
the first diagnosis that is told, as a terminal shows it, below the command; folders of the test and of this repository
are left out. In every other run of a test that a file is from, tests/conftest.py has it compared (`compare`), so that
none can be of another wording than the program's.
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
from furlong.core.catalogue import Diagnosis
from runs import REPOSITORY

TRANSCRIPTS = Path(__file__).parents[1] / "faults" / "transcripts"
SOURCES = TRANSCRIPTS / "sources.json"  # row -> the test that its file is from
WIDTH = 100  # columns
ALIKE = 0.5  # share of the words of a finding that stay: it has values and names of the machine
RECORD = "python scripts/make_troubleshooting.py --record"
_kept: dict[str, str] = {}


@dataclass
class Heard:
    """The first diagnosis of each row that a test told, as text; `commands` are what was typed before."""

    texts: dict[str, str] = field(default_factory=dict[str, str])
    commands: dict[str, str] = field(default_factory=dict[str, str])


def rows_of(item: pytest.Item) -> tuple[str, ...]:
    """The rows that a test is marked with."""
    return getattr(getattr(item, "function", None), "faults", ())


@contextlib.contextmanager
def listening(item: pytest.Item) -> Iterator[Heard]:
    """Hear the diagnoses of the rows that a test is marked with."""
    rows, heard = rows_of(item), Heard()
    folder = vars(item)["funcargs"].get("tmp_path")
    make = Diagnosis.__init__

    def hear(self: Diagnosis, *args: Any, **named: Any) -> None:
        make(self, *args, **named)
        if self.id in rows and self.id not in heard.texts:
            heard.texts[self.id] = ""  # what is made below is not heard
            short = Diagnosis(self.id, *(_short(t, folder) for t in (self.finding, self.cause, self.remedy)))
            heard.texts[self.id], heard.commands[self.id] = short.text(WIDTH), _short(last_typed(), folder)

    typed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Diagnosis, "__init__", hear)
        yield heard


def compare(item: pytest.Item, heard: Heard) -> None:
    """Fail if the files that are from this test say something else than it heard."""
    sources = json.loads(SOURCES.read_text())
    for row in rows_of(item):
        if sources.get(row) == item.nodeid:
            _, _, written = (TRANSCRIPTS / f"{row}.txt").read_text().partition("\n")
            if not is_alike(written, heard.texts.get(row, "")):
                pytest.fail(f"the transcript of {row} is out of date; run: {RECORD}\n{heard.texts.get(row)}", False)


def is_alike(written: str, heard: str) -> bool:
    """Whether two texts of a diagnosis differ in values only."""
    (first, *rest), (other, *others) = _paragraphs(written), _paragraphs(heard)
    words, found = set(first.split()), set(other.split())
    return rest == others and len(words & found) >= ALIKE * len(words)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that inject a fault, and no others."""
    items[:] = [item for item in items if rows_of(item)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Keep what a test tells of rows that none before it told."""
    with listening(item) as heard:
        result = yield
    for row, text in heard.texts.items():
        if row not in _kept:
            _kept[row] = item.nodeid
            TRANSCRIPTS.mkdir(exist_ok=True)
            (TRANSCRIPTS / f"{row}.txt").write_text(f"$ {heard.commands[row]}\n{text}\n")
    return result


def pytest_sessionfinish() -> None:
    """Keep which test each file is from; those of rows that no test told are left as they are."""
    before: dict[str, str] = json.loads(SOURCES.read_text()) if SOURCES.exists() else {}
    SOURCES.write_text(json.dumps(dict(sorted((before | _kept).items())), indent=1) + "\n")


def _paragraphs(text: str) -> list[str]:
    """Finding, cause and way out in one line each, without numbers and without places in the program."""
    lines = text.rstrip().splitlines() or [""]
    margin = " " * (lines[0].find("]") + 2)
    found = [lines[0]]
    for line in lines[1:]:
        if line.startswith(f"{margin}  "):
            found[-1] += f" {line.strip()}"
        else:
            found.append(line.strip())
    return [re.sub(r"[\d.,]*\d", "#", paragraph) for paragraph in found if not re.match(r"\S+\.py:\d+ in ", paragraph)]


def _short(text: str, folder: Path | None) -> str:
    """The text without the machine's folders."""
    if folder is not None:
        text = text.replace(f"{folder}/", "").replace(str(folder), "runs")
    for where, name in (
        (f"{REPOSITORY}/src/furlong/quickstart/model", "model"),
        (f"{REPOSITORY}/", ""),
        (sys.executable, "python"),
    ):
        text = text.replace(where, name)
    return re.sub(r"tests/(?=[a-z_]+\.py)", "", text)
