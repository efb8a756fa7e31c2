"""Every diagnosis that furlong makes, one row each.

A new diagnosis is

1. a row here, in the table of its subject;
2. a function that finds it, and its line in the table of its moment: `preflight.CHECKS` before the start,
   `monitors.table.MONITORS` while the run goes on, `postmortem.signatures.SIGNATURES` after it died;
3. a test marked `@fault(ID)` that injects the fault as a user would; scripts/make_troubleshooting.py records what it
   saw for docs/troubleshooting.md.

The function names the row by its id and adds what it saw:

    diagnosis("CKPT02", "--ckpt-step 7: runs/a has no iter_0000007", remedy="use --ckpt-step 8")

Severity and likely cause come from the row unless the finder knows better. docs/troubleshooting.md and
`furlong doctor --list` are written from these rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from furlong.core.catalogue import engine_rows as engines
from furlong.core.catalogue import flag_rows as flags
from furlong.core.catalogue import machine_rows as machines
from furlong.core.catalogue import model_rows as models
from furlong.core.catalogue import numeric_rows as numbers
from furlong.core.catalogue import run_rows as runs
from furlong.core.catalogue import text_rows as texts
from furlong.core.catalogue.row import MOMENTS, SEVERITIES, Diagnosis, Row, Severity
from furlong.core.text import did_you_mean
from furlong.errors import ConfigError

__all__ = [
    "CATALOGUE",
    "MOMENTS",
    "SEVERITIES",
    "Diagnosis",
    "Row",
    "Severity",
    "diagnosis",
    "find_row",
    "most_severe_first",
]

_TABLES = (models, flags, machines, texts, numbers, engines, runs)
CATALOGUE: dict[str, Row] = {row.id: row for table in _TABLES for row in table.ROWS}


def diagnosis(
    id: str,
    finding: str,
    *,
    remedy: str,
    cause: str | None = None,
    severity: Severity | None = None,
    evidence: Mapping[str, Any] | None = None,
) -> Diagnosis:
    """Make the diagnosis of a row: what was found, with its values, and what mends it.

    `cause` and `severity` are the row's where they are not given. Raises KeyError for an id without a row, ValueError
    for a severity above the row's.
    """
    row = CATALOGUE[id]
    if severity is not None and SEVERITIES.index(severity) < SEVERITIES.index(row.severity):
        raise ValueError(f"{id} is at most {row.severity}, got {severity}; raise it in its row")
    return Diagnosis(
        id,
        finding,
        row.cause if cause is None else cause,
        remedy,
        row.severity if severity is None else severity,
        dict(evidence or {}),
    )


def find_row(id: str) -> Row:
    """The row called `id`, in any case. Raises ConfigError with the closest ids."""
    if (row := CATALOGUE.get(id.upper())) is not None:
        return row
    _, hint = did_you_mean(id.upper(), CATALOGUE)
    raise ConfigError(f"no diagnosis {id}; {hint or '`furlong doctor --list` names all'}")


def most_severe_first(found: list[Diagnosis]) -> list[Diagnosis]:
    """Errors, then warnings, then infos; in the order found within each."""
    return sorted(found, key=lambda d: SEVERITIES.index(d.severity))
