"""The catalogue of diagnoses: one row per kind.

To add a diagnosis, touch three files:

1. add a row to the table of its subject here;
2. write a function that detects it, next to its like, and add it to the table at the end of that module: `CHECKS` of
   `diagnosis.preflight.*_checks` before the start, `MONITORS` of `diagnosis.monitors.*_monitors` during the run,
   `diagnosis.postmortem.signatures` after a failure;
3. write a test marked `@fault(ID)` that injects the fault as a user would cause it, and applies the fix.

The function refers to the row by id and adds the values it saw:

    diagnosis("CKPT02", "--ckpt-step 7: runs/a has no iter_0000007", remedy="use --ckpt-step 8")

Severity, cause and remedy default to those of the row. A cause is named only from evidence of it, and otherwise listed
as a candidate. The page of diagnoses and `furlong doctor --list` are generated from the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from furlong.catalogue import agent_rows, run_rows, setup_rows, training_rows
from furlong.catalogue.row import MOMENTS, NO_EFFECT, SEVERITIES, Diagnosis, Problem, Row, Severity
from furlong.core.text import did_you_mean
from furlong.errors import ConfigError

__all__ = [
    "CATALOGUE",
    "MOMENTS",
    "NO_EFFECT",
    "SEVERITIES",
    "Diagnosis",
    "Problem",
    "Row",
    "Severity",
    "diagnosis",
    "find_row",
    "most_severe_first",
]

CATALOGUE: dict[str, Row] = {
    row.id: row for table in (setup_rows, training_rows, agent_rows, run_rows) for row in table.ROWS
}


def diagnosis(
    id: str,
    finding: str,
    *,
    remedy: str | None = None,
    cause: str | None = None,
    severity: Severity | None = None,
    evidence: Mapping[str, Any] | None = None,
) -> Diagnosis:
    """Make a diagnosis from a row and the finding with its values.

    `remedy`, `cause` and `severity` default to the row's. Raises KeyError for an unknown id, ValueError for a severity
    above the row's.
    """
    row = CATALOGUE[id]
    if severity is not None and SEVERITIES.index(severity) < SEVERITIES.index(row.severity):
        raise ValueError(f"{id} is at most {row.severity}, got {severity}; raise it in its row")
    return Diagnosis(
        id,
        finding,
        row.cause if cause is None else cause,
        row.remedy if remedy is None else remedy,
        row.severity if severity is None else severity,
        dict(evidence or {}),
    )


def find_row(id: str) -> Row:
    """Return the row called `id`, in any case. Raises ConfigError that suggests similar ids."""
    if (row := CATALOGUE.get(id.upper())) is not None:
        return row
    _, hint = did_you_mean(id.upper(), CATALOGUE)
    raise ConfigError(f"there is no diagnosis {id}; {hint or '`furlong doctor --list` lists all of them'}")


def most_severe_first(diagnoses: list[Diagnosis]) -> list[Diagnosis]:
    """Sort by severity: errors, warnings, infos. Stable."""
    return sorted(diagnoses, key=lambda d: SEVERITIES.index(d.severity))
