"""Monitors and the state that they share: rows and events so far, and which diagnoses were already reported.

The same code reads a running run and the files of an earlier one.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from furlong.core.catalogue import Diagnosis
from furlong.diagnosis.monitors.run_facts import RunFacts

HISTORY = 128  # earlier rows that monitors can read
EVENTS = 16  # earlier events of one name that monitors can read

Row = Mapping[str, float]
Event = Mapping[str, Any]


@dataclass(frozen=True)
class StepContext:
    """One step: its merged metrics, and the earlier rows (oldest first)."""

    step: int
    row: Row
    history: Sequence[Row]
    facts: RunFacts

    @property
    def is_first(self) -> bool:
        """Whether this is the first batch of a run that did not resume."""
        return self.step == self.facts.first_step

    @property
    def trains_foreign_tokens(self) -> bool:
        """Whether the loss includes tokens that the policy did not sample, whose log-probs carry no information."""
        return self.row.get("rollout/env_tokens_in_loss", 0.0) > 0

    def recent(self, name: str, count: int) -> list[float]:
        """Return a metric in the last `count` rows, newest last. Rows without it are skipped."""
        rows = [*self.history[len(self.history) - min(count - 1, len(self.history)) :], self.row]
        return [row[name] for row in rows if name in row]


@dataclass(frozen=True)
class Alert:
    """A diagnosis and its level, in the monitor's own unit: it is reported again only if the level rises.

    `kind` separates the alerts of a monitor whose levels cannot be compared.
    """

    diagnosis: Diagnosis
    level: float = 1.0
    kind: str = ""


@dataclass(frozen=True)
class StepMonitor:
    """A condition on steps. Its alert is reported again at `again` times the last reported level."""

    id: str
    check: Callable[[StepContext], Alert | None]
    again: float = math.inf


@dataclass(frozen=True)
class EventMonitor:
    """A condition on events of one name. `check` gets the event and the earlier ones."""

    id: str
    event: str
    check: Callable[[Event, Sequence[Event], RunFacts], Alert | None]
    again: float = math.inf


class MonitorSuite:
    """Applies monitors to steps and events in order.

    >>> from furlong.diagnosis.monitors import MONITORS
    >>> suite = MonitorSuite(MONITORS, RunFacts())
    >>> [d.id for d in suite.step(1, {"rollout/truncated_ratio": 1.0})]
    ['STOP02']
    """

    def __init__(self, monitors: Sequence[StepMonitor | EventMonitor], facts: RunFacts) -> None:
        self.facts = facts
        self._step_monitors = [monitor for monitor in monitors if isinstance(monitor, StepMonitor)]
        self._event_monitors: defaultdict[str, list[EventMonitor]] = defaultdict(list)
        for monitor in monitors:
            if isinstance(monitor, EventMonitor):
                self._event_monitors[monitor.event].append(monitor)
        self._rows: deque[Row] = deque(maxlen=HISTORY)
        self._events: defaultdict[str, deque[Event]] = defaultdict(lambda: deque(maxlen=EVENTS))
        self._reported: dict[tuple[StepMonitor | EventMonitor, str], float] = {}

    def step(self, step: int, metrics: Row) -> list[Diagnosis]:
        """Check the merged metrics of one step; return what is new."""
        row = {name: value for name, value in metrics.items() if math.isfinite(value)}
        context = StepContext(step, row, tuple(self._rows), self.facts)
        diagnoses = [self._report(monitor, monitor.check(context)) for monitor in self._step_monitors]
        self._rows.append(row)
        return [diagnosis for diagnosis in diagnoses if diagnosis is not None]

    def event(self, event: Event) -> list[Diagnosis]:
        """Check one event, an object with the key `event`; return what is new."""
        name = str(event["event"])
        if name not in self._event_monitors:
            return []
        before = tuple(self._events[name])
        diagnoses = [self._report(m, m.check(event, before, self.facts)) for m in self._event_monitors[name]]
        self._events[name].append(event)
        return [diagnosis for diagnosis in diagnoses if diagnosis is not None]

    def _report(self, monitor: StepMonitor | EventMonitor, alert: Alert | None) -> Diagnosis | None:
        """Return the alert's diagnosis, unless it was reported and has not got worse by the monitor's factor."""
        if alert is None:
            return None
        last = self._reported.get((monitor, alert.kind))
        if last is not None and alert.level < last * monitor.again:
            return None
        self._reported[monitor, alert.kind] = alert.level
        return alert.diagnosis
