"""The types of the catalogue: `Row`, a kind of diagnosis; `Diagnosis`, one occurrence; `Problem`, one of flags."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")  # most severe first
MOMENTS = {"P": "before the start", "R": "while it runs", "X": "after it died"}

# The guides of slime and Miles that cover the same problem.
MQ, MD = "Miles FAQ", "Miles debugging guide"
SQ, SD, ST = "slime FAQ", "slime debugging guide", "slime troubleshooting guide"

NO_EFFECT = "CFG02"  # the row of flags without effect; other problems with flags are CFG05


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
        """Return the JSON-able form for `furlong doctor --list --json`, in which the remedy is called `way_out`."""
        fields = asdict(self) | {"moments": list(self.moments), "guides": list(self.guides)}
        return {"way_out" if name == "remedy" else name: value for name, value in fields.items()}


@dataclass(frozen=True)
class Diagnosis:
    """One problem: the finding with its values, the likely cause, and a remedy (an existing flag or command).

    `evidence` has the values as JSON-able data.

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
        """Return the message for people: finding, cause and remedy on separate lines.

        `width` wraps lines at spaces, if the indent leaves room; flags and paths stay whole.
        """
        indent = " " * (len(self.id) + 3)
        lines = [line for part in (self.finding, self.cause, self.remedy) for line in part.splitlines() if line]
        lines = [f"[{self.id}] {lines[0]}", *(indent + line for line in lines[1:])]
        if width is not None and width > 2 * len(indent):
            lines = [part for line in lines for part in _wrapped(line, width, indent)]
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """Return the JSON-able form for `events.jsonl` and `--json`."""
        return {
            "id": self.id,
            "severity": self.severity,
            "finding": self.finding,
            "cause": self.cause,
            "remedy": self.remedy,
            "evidence": dict(self.evidence),
        }


def _wrapped(line: str, width: int, indent: str) -> list[str]:
    """Wrap a line to `width`; continuation lines are indented by two more columns."""
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


class Problem(str):
    """A problem with flags: what is wrong, with the values; after the last semicolon, the fix. `row` is the diagnosis.

    >>> Problem("--ckpt-step -1: expected a number in [0, inf)").row
    'CFG05'
    """

    row: str

    def __new__(cls, message: str, row: str = "") -> Problem:
        """Keep the row of a message that is a Problem already; else a flag without effect is CFG02, the rest CFG05."""
        self = super().__new__(cls, message)
        known = message.row if isinstance(message, Problem) else ""
        self.row = known or row or (NO_EFFECT if "no effect" in message else "CFG05")
        return self
