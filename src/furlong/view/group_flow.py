"""What became of each prompt group, from the ledger."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from furlong.data.audit import Audit, audit, living_events

PAGE = 100


@dataclass
class GroupFate:
    """One group: its origin, the rollout it was last issued to, how often it was returned, and its state.

    state: issued, generated, returned, restored, trained or dropped. reason: of the drop or the last return. step: as
    in metrics.jsonl, if trained.
    """

    group: int
    epoch: int
    row: int
    rollout: int
    state: str = "issued"
    reason: str = ""
    step: int | None = None
    num_returned: int = 0


class GroupFlow:
    """The groups of a run's ledger, read again when the file has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._groups: list[GroupFate] = []
        self._audit = Audit(str(path))

    def flow(self) -> dict[str, Any]:
        """Return the counts of the flow. Empty without a ledger. Raises DataError if it cannot be read."""
        if not self._read():
            return {}
        result = self._audit
        return {
            "issued": result.num_groups,
            "trained": result.num_trained,
            "dropped": dict(result.drop_reasons.most_common()),
            "in_flight": dict(result.in_flight),
            "returned": sum(group.num_returned for group in self._groups),
            "resumes": result.num_resumes,
            "rolled_back": result.num_rolled_back,
            "problems": result.problems[:20],
        }

    def page(self, *, state: str = "", reason: str = "", group: int | None = None, offset: int = 0) -> dict[str, Any]:
        """Return {"total": ..., "rows": [...]} of the groups with a state, a reason or a number, the newest first."""
        if not self._read():
            return {"total": 0, "rows": []}
        chosen = [
            fate
            for fate in reversed(self._groups)
            if state in ("", fate.state) and reason in ("", fate.reason) and group in (None, fate.group)
        ]
        return {"total": len(chosen), "rows": [vars(fate) for fate in chosen[offset : offset + PAGE]]}

    def _read(self) -> bool:
        if not self._path.is_file():
            return False
        status = os.stat(self._path)
        stamp = (status.st_ino, status.st_size)
        if stamp != self._stamp:
            self._audit = audit(self._path)
            self._groups = list(_fates(self._path).values())
            self._stamp = stamp
        return True


def _fates(path: Path) -> dict[int, GroupFate]:
    fates: dict[int, GroupFate] = {}
    for event in living_events(path):
        number = event.get("g")
        if type(number) is not int:
            continue
        kind = event["e"]
        fate = fates.get(number)
        if fate is None:
            fate = fates[number] = GroupFate(number, event.get("ep", -1), event.get("row", -1), event.get("r", -1))
        fate.state, fate.rollout = kind, event.get("r", fate.rollout)
        if kind == "trained":
            fate.step = event.get("s", -1) + 1
        if kind in ("dropped", "returned"):
            fate.reason = event.get("why", "")
            fate.num_returned += kind == "returned"
    return fates
