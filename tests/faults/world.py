"""A command before it runs: its model, its prompts, and what the preflight reports."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from furlong.catalogue import CATALOGUE, Diagnosis
from furlong.config.command_line import examine
from furlong.diagnosis.preflight import preflight
from furlong.run.launch import findings_before_run
from runs import flags

Row = dict[str, Any]


@dataclass(frozen=True)
class World:
    """A folder with a healthy model and healthy prompts."""

    folder: Path
    model: Path
    data: Path

    def look(self, **changes: Any) -> list[Diagnosis]:
        """The diagnoses of the healthy command with these flags."""
        resolved, problems = examine(flags(self.model, self.data, self.folder / "run", **changes))
        return preflight(resolved.config, problems)

    def doctor(self, **changes: Any) -> list[Diagnosis]:
        """The diagnoses that `furlong doctor` prints for that command, and with which a run refuses it."""
        resolved, problems = examine(flags(self.model, self.data, self.folder / "run", **changes))
        return findings_before_run(resolved, problems)

    def write(self, *rows: Row | str) -> None:
        """Replace the prompts; strings are written as they are."""
        self.data.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))


def names(text: str, *values: object) -> bool:
    """Whether a message has these values, whatever words are around them."""
    missing = [value for value in map(str, values) if value not in text]
    assert not missing, f"{missing} not in {text!r}"
    return True


def only(found: list[Diagnosis], id: str, severity: str | None = None) -> Diagnosis:
    assert [each.id for each in found] == [id], "\n".join(each.text() for each in found)
    assert found[0].severity == (severity or CATALOGUE[id].severity)
    return found[0]
