"""The types of the catalogue: a row for each kind of diagnosis, and the diagnosis made from it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")  # most severe first
MOMENTS = {"P": "before the start", "R": "while it runs", "X": "after it died"}

# The guides that answer these questions for slime and Miles; a row names those that have its entry.
MQ, MD = "Miles FAQ", "Miles debugging guide"
SQ, SD, ST = "slime FAQ", "slime debugging guide", "slime troubleshooting guide"


@dataclass(frozen=True)
class Row:
    """One kind of diagnosis.

    moments: letters of `MOMENTS`, when it can be detected. severity: the highest; a check may report a lower one.
    symptom: what the user sees. cause: the likely one. checked: what the program evaluates.
    """

    id: str
    title: str
    moments: str
    severity: Severity
    symptom: str
    cause: str
    checked: str
    remedy: str
    guides: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """JSON-able form, for `furlong doctor --list --json`."""
        fields = asdict(self) | {"moments": list(self.moments), "guides": list(self.guides)}
        return {"way_out" if name == "remedy" else name: value for name, value in fields.items()}


@dataclass(frozen=True)
class Diagnosis:
    """One finding. `evidence` holds the values behind it, JSON-able.

    finding: what is wrong, with the values seen; cause: the likely reason; remedy: a flag or command that exists.

    >>> print(Diagnosis("CKPT02", "--ckpt-step 7: no iter_0000007", "it was not saved", "use --ckpt-step 8").text())
    [CKPT02] --ckpt-step 7: no iter_0000007
             it was not saved
             use --ckpt-step 8
    """

    id: str
    finding: str
    cause: str
    remedy: str
    severity: Severity = "error"
    evidence: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def text(self, width: int | None = None) -> str:
        """The message as people read it: finding, cause and remedy on lines of their own.

        `width` breaks lines at spaces to that many columns, if there is room for it; flags and paths stay whole.
        """
        indent = " " * (len(self.id) + 3)
        lines = [line for part in (self.finding, self.cause, self.remedy) for line in part.splitlines() if line]
        lines = [f"[{self.id}] {lines[0]}", *(indent + line for line in lines[1:])]
        if width is not None and width > 2 * len(indent):
            lines = [part for line in lines for part in _wrapped(line, width, indent)]
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """JSON-able form, for `events.jsonl` and `--json`."""
        return {
            "id": self.id,
            "severity": self.severity,
            "finding": self.finding,
            "cause": self.cause,
            "remedy": self.remedy,
            "evidence": dict(self.evidence),
        }


def _wrapped(line: str, width: int, indent: str) -> list[str]:
    """A line in lines of `width`; what does not fit follows two columns behind `indent`."""
    if len(line) <= width:
        return [line]
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=indent + "  ",
        drop_whitespace=True,
        expand_tabs=False,
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )
