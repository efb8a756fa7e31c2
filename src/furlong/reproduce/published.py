"""The published results: `published.json`, and the comparison of a new result with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from furlong.evals.eval_summary import Estimate
from furlong.reproduce.intervals import gap
from furlong.reproduce.rows import PACKAGE

PUBLISHED = PACKAGE / "published.json"


@dataclass(frozen=True)
class Comparison:
    """How a result compares with the published one. agrees: None if they cannot be compared."""

    agrees: bool | None
    text: str


@cache
def read_published(path: Path = PUBLISHED) -> dict[str, dict[str, Any]]:
    """Return the published results by row; empty without the file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def comparison(result: Mapping[str, Any], published: Mapping[str, Any] | None) -> Comparison:
    """Compare the accuracy after training with the published one: they agree if the 95 % intervals overlap."""
    if result["status"] == "failed":
        return Comparison(None, "not compared: the row failed")
    if published is None:
        return Comparison(None, "not compared: no result of this row is published")
    if published["status"] == "failed":
        return Comparison(None, "not compared: the published row failed")
    if result["steps"] != published["steps"]:
        return Comparison(None, f"not compared: {result['steps']} steps, published with {published['steps']}")
    measured, other = Estimate(**result["after"]), Estimate(**published["after"])
    missed = gap(measured, other)
    against = f"published: {other.value:.1%} ({other.low:.1%}-{other.high:.1%})"
    if missed == 0:
        return Comparison(True, f"within the interval; {against}")
    side = "below" if missed < 0 else "above"
    return Comparison(False, f"{side} the published interval by {abs(missed):.1%}; {against}")
