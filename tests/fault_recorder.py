"""A pytest plugin that writes what the program says about each fault to tests/faults/transcripts.

`python scripts/make_troubleshooting.py --record` runs it. A diagnosis is kept as a terminal shows it, below the
command; folders of the test and of this repository are left out. The first that is said of each row is kept.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from faults_marker import last_typed, typed
from furlong.core.diagnosis import Diagnosis
from runs import REPOSITORY

TRANSCRIPTS = Path(__file__).parent / "faults" / "transcripts"
WIDTH = 100  # columns
_kept: set[str] = set()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that inject a fault, and no others."""
    items[:] = [item for item in items if _faults(item)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Keep the diagnoses of the rows that a test is marked with."""
    given = _faults(item)
    wanted = set(given) - _kept
    if not wanted:
        return (yield)
    folder = vars(item)["funcargs"].get("tmp_path")
    make = Diagnosis.__init__
    typed()

    def heard(self: Diagnosis, *args: Any, **named: Any) -> None:
        make(self, *args, **named)
        if self.id in wanted - _kept:
            _kept.add(self.id)
            command, sentence = last_typed(), given[self.id]
            head = f"# {sentence}\n" if sentence else f"$ {command}\n" if command else ""
            TRANSCRIPTS.mkdir(exist_ok=True)
            short = Diagnosis(self.id, *(_short(t, folder) for t in (self.finding, self.cause, self.remedy)))
            (TRANSCRIPTS / f"{self.id}.txt").write_text(_short(head, folder) + short.text(WIDTH) + "\n")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Diagnosis, "__init__", heard)
        return (yield)


def _faults(item: pytest.Item) -> dict[str, str]:
    """Row -> what the test hands to the doctor, of the rows that a test is marked with."""
    return getattr(getattr(item, "function", None), "faults", {})


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
