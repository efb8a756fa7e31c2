"""The form of a row of the catalogue."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from furlong.core.diagnosis import Severity

MOMENTS = {"P": "before the start", "R": "while it runs", "X": "after it died"}

# The guides that answer these questions for slime and Miles; a row names those that have its entry.
MQ, MD = "Miles FAQ", "Miles debugging guide"
SQ, SD, ST = "slime FAQ", "slime debugging guide", "slime troubleshooting guide"


@dataclass(frozen=True)
class Row:
    """One diagnosis.

    moments: letters of `MOMENTS`. severity: the most severe form; a finder may report a milder one. symptom: what a
    person sees. cause: the likely one. checked: what the program evaluates. way_out: what mends it.
    """

    id: str
    title: str
    moments: str
    severity: Severity
    symptom: str
    cause: str
    checked: str
    way_out: str
    guides: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """JSON-able form, for `furlong doctor --list --json`."""
        return asdict(self) | {"moments": list(self.moments), "guides": list(self.guides)}
