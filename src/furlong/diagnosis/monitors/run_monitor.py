"""The tracker and observer of a run: records steps and events, and reports what monitors find in them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from furlong.core.catalogue import Diagnosis
from furlong.core.tracing import heartbeat
from furlong.diagnosis.monitors.monitor import MonitorSuite
from furlong.tracking.run_files import EventLog

if TYPE_CHECKING:
    from furlong.interfaces import Tracker  # imports torch, which reading a run's folder does without

logger = logging.getLogger(__name__)

OnDiagnosis = Literal["warn", "stop", "strict"]
NO_PROGRESS = ("engine_silent",)  # events that do not count as progress
LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO}
ENDS: dict[OnDiagnosis, frozenset[str]] = {
    "warn": frozenset(),
    "stop": frozenset({"error"}),
    "strict": frozenset({"error", "warning"}),
}


class RunMonitor:
    """Implements `interfaces.Tracker` around a run's trackers, and `interfaces.Observer`.

    A diagnosis is logged, written to `events.jsonl` (event `diagnosis`), and added to the step's record as
    `diagnosis/<ID>` = 1; one caused by an event is added to the next record. `on_diagnosis` selects the severities that
    end the run after the step; ids in `ends` always end it. `earlier` yields the rows that the run's folder already
    has, read at the first step: a resumed run repeats a diagnosis only if it got worse. `measured` returns metrics of
    the machine for each step's record.
    """

    def __init__(
        self,
        suite: MonitorSuite,
        *,
        trackers: Tracker,
        events: EventLog,
        on_diagnosis: OnDiagnosis = "warn",
        ends: Collection[str] = (),
        earlier: Callable[[], Iterable[tuple[int, Mapping[str, float]]]] = tuple,
        measured: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self._suite, self._trackers, self._events = suite, trackers, events
        self._ends, self._ids, self._earlier = ENDS[on_diagnosis], ends, earlier
        self._measured = measured
        self._lock = threading.RLock()
        self._marks: dict[str, float] = {}
        self._has_begun = False
        self._broken: set[str] = set()
        self.ended_by: Diagnosis | None = None

    @property
    def stop_requested(self) -> bool:
        """Whether a diagnosis asks for the end of the run."""
        return self.ended_by is not None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record one step in all trackers, with the diagnoses made from it."""
        heartbeat.beat("step")
        metrics = metrics | self._measured()
        with self._lock:
            self._begin(step)
            diagnoses = self._check("step", lambda: self._suite.step(step, metrics))
            self._mark(diagnoses)
            marks, self._marks = self._marks, {}
        self._trackers.log(step, metrics | marks)
        self._events.write("step", step=step, seconds=metrics.get("perf/step_time"))
        self._report(diagnoses, step=step)

    def notify(self, event: str, **fields: Any) -> None:
        """Record an event. Callable from any thread."""
        if event not in NO_PROGRESS:
            heartbeat.beat(event)
        self._events.write(event, **fields)
        with self._lock:
            diagnoses = self._check(event, lambda: self._suite.event({"event": event, **fields}))
            self._mark(diagnoses)
        self._report(diagnoses)

    def close(self) -> None:
        """Close the trackers and the event log."""
        self._trackers.close()
        self._events.close()

    def _begin(self, first: int) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        for step, row in self._earlier():
            if step < first:
                self._suite.step(step, row)

    def _mark(self, diagnoses: list[Diagnosis]) -> None:
        self._marks.update({f"diagnosis/{diagnosis.id}": 1.0 for diagnosis in diagnoses})
        if self.ended_by is None:
            self.ended_by = next((d for d in diagnoses if d.severity in self._ends or d.id in self._ids), None)

    def _report(self, diagnoses: list[Diagnosis], **where: int) -> None:
        for diagnosis in diagnoses:
            logger.log(LEVELS[diagnosis.severity], "%s", diagnosis.text())
            self._events.write("diagnosis", **where, **diagnosis.record())

    def _check(self, source: str, check: Callable[[], list[Diagnosis]]) -> list[Diagnosis]:
        """Run monitors. An exception is a bug of a monitor: it is logged once per source and does not end the run."""
        try:
            return check()
        except Exception as error:
            if source not in self._broken:
                self._broken.add(source)
                logger.warning("[CHECK01] a monitor failed on %s (%s)", source, type(error).__name__, exc_info=error)
            return []
