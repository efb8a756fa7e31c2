"""Reads a run's steps and events one after the other and says what is wrong, each thing once.

The same reading serves a run that goes on and the files that a run left.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from furlong.core.catalogue import Diagnosis
from furlong.diagnosis.monitors.run_facts import Setting

HISTORY = 128  # rows that monitors may look back
EVENTS = 16  # earlier events of one name that monitors may look back

Row = Mapping[str, float]
Event = Mapping[str, Any]


@dataclass(frozen=True)
class Now:
    """One step as monitors see it: its merged metrics, and the rows before it (oldest first)."""

    step: int
    row: Row
    history: Sequence[Row]
    setting: Setting

    @property
    def is_first(self) -> bool:
        """Whether this is the first batch of a run that started from the beginning."""
        return self.step == self.setting.first_step

    @property
    def has_foreign_tokens(self) -> bool:
        """Whether tokens that the policy did not sample are trained on, which makes their log-probs say nothing."""
        return self.row.get("rollout/env_tokens_in_loss", 0.0) > 0

    def recent(self, name: str, count: int) -> list[float]:
        """The values of a metric in the last `count` rows, this one included and last; rows without it are left out."""
        rows = [*self.history[len(self.history) - min(count - 1, len(self.history)) :], self.row]
        return [row[name] for row in rows if name in row]


@dataclass(frozen=True)
class Found:
    """A diagnosis, and how bad it is in the unit of its monitor, so that it is told again only if it got worse.

    `kind` where a monitor finds several things, whose levels are not compared with each other.
    """

    diagnosis: Diagnosis
    level: float = 1.0
    kind: str = ""


@dataclass(frozen=True)
class StepMonitor:
    """One row of the table: a condition over steps. It is told again when its level is `again` times what was told."""

    id: str
    check: Callable[[Now], Found | None]
    again: float = math.inf


@dataclass(frozen=True)
class EventMonitor:
    """One row of the table: a condition over events of one name; `check` gets the event and the earlier ones."""

    id: str
    event: str
    check: Callable[[Event, Sequence[Event], Setting], Found | None]
    again: float = math.inf


class Reading:
    """Applies monitors to steps and events in their order.

    >>> from furlong.diagnosis.monitors.table import MONITORS
    >>> reading = Reading(MONITORS, Setting())
    >>> [d.id for d in reading.step(1, {"rollout/truncated_ratio": 1.0})]
    ['STOP02']
    """

    def __init__(self, monitors: Sequence[StepMonitor | EventMonitor], setting: Setting) -> None:
        self.setting = setting
        self._of_steps = [monitor for monitor in monitors if isinstance(monitor, StepMonitor)]
        self._of_events: defaultdict[str, list[EventMonitor]] = defaultdict(list)
        for monitor in monitors:
            if isinstance(monitor, EventMonitor):
                self._of_events[monitor.event].append(monitor)
        self._rows: deque[Row] = deque(maxlen=HISTORY)
        self._events: defaultdict[str, deque[Event]] = defaultdict(lambda: deque(maxlen=EVENTS))
        self._told: dict[tuple[StepMonitor | EventMonitor, str], float] = {}

    def step(self, step: int, metrics: Row) -> list[Diagnosis]:
        """Read the merged metrics of one step."""
        row = {name: value for name, value in metrics.items() if math.isfinite(value)}
        now = Now(step, row, tuple(self._rows), self.setting)
        found = [self._new(monitor, monitor.check(now)) for monitor in self._of_steps]
        self._rows.append(row)
        return [diagnosis for diagnosis in found if diagnosis is not None]

    def event(self, event: Event) -> list[Diagnosis]:
        """Read one event, an object with the key `event`."""
        name = str(event["event"])
        if name not in self._of_events:
            return []
        before = tuple(self._events[name])
        found = [self._new(m, m.check(event, before, self.setting)) for m in self._of_events[name]]
        self._events[name].append(event)
        return [diagnosis for diagnosis in found if diagnosis is not None]

    def _new(self, monitor: StepMonitor | EventMonitor, found: Found | None) -> Diagnosis | None:
        """What is to be told now: nothing if it was told already and did not get worse by the monitor's factor."""
        if found is None:
            return None
        told = self._told.get((monitor, found.kind))
        if told is not None and found.level < told * monitor.again:
            return None
        self._told[monitor, found.kind] = found.level
        return found.diagnosis
