"""Suggestions for a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> tuple[list[str], str]:
    """Up to three of `known` that resemble `name`, best first, and a phrase that offers them ("" if there is none).

    >>> did_you_mean("--rollout-batchsize", ["--rollout-batch-size", "--lr"])
    (['--rollout-batch-size'], 'did you mean --rollout-batch-size?')
    """
    matches = difflib.get_close_matches(name, list(known), n=3, cutoff=0.75)
    best = _likeness(name, matches[0]) if matches else 0.0
    matches = [match for match in matches if _likeness(name, match) > best - 0.08]
    return matches, f"did you mean {' or '.join(matches)}?" if matches else ""


def _likeness(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio()
