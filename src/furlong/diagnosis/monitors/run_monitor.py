"""What a run attaches: it hears every step and event, records them, tells what is wrong, and may end the run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from furlong.core.catalogue import Diagnosis
from furlong.core.heartbeat import heartbeat
from furlong.diagnosis.monitors.monitor import Reading
from furlong.tracking.event_log import EventLog

if TYPE_CHECKING:
    from furlong.interfaces import Tracker  # which needs torch: reading a run's folder does not

logger = logging.getLogger(__name__)

OnDiagnosis = Literal["warn", "stop", "strict"]
NO_PROGRESS = ("engine_silent",)  # events that say that nothing gets done
LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO}
ENDS: dict[OnDiagnosis, frozenset[str]] = {
    "warn": frozenset(),
    "stop": frozenset({"error"}),
    "strict": frozenset({"error", "warning"}),
}


class Watch:
    """Implements `interfaces.Tracker` around a run's trackers, and `interfaces.Observer`.

    A diagnosis goes to the log, to `events.jsonl` (event `diagnosis`), and as `diagnosis/<ID>` = 1 to the record of its
    step; one of an event goes to the next record. `on_diagnosis` says which of them end the run after the step, and so
    do those whose ids are in `ends`. `earlier` are the rows that the run's folder holds already, read when the first
    step is known: a run that resumes tells what was told before only if it got worse. `measured` gives metrics of the
    machine, which go into the record of each step.
    """

    def __init__(
        self,
        reading: Reading,
        *,
        trackers: Tracker,
        events: EventLog,
        on_diagnosis: OnDiagnosis = "warn",
        ends: Collection[str] = (),
        earlier: Callable[[], Iterable[tuple[int, Mapping[str, float]]]] = tuple,
        measured: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self._reading, self._trackers, self._events = reading, trackers, events
        self._ends, self._ids, self._earlier = ENDS[on_diagnosis], ends, earlier
        self._measured = measured
        self._lock = threading.RLock()
        self._marks: dict[str, float] = {}
        self._is_begun = False
        self._broken: set[str] = set()
        self.ended_by: Diagnosis | None = None

    @property
    def stop_requested(self) -> bool:
        """Whether a diagnosis asks for the end of the run."""
        return self.ended_by is not None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record one step everywhere, with what is wrong with it."""
        heartbeat.beat("step")
        metrics = metrics | self._measured()
        with self._lock:
            self._begin(step)
            found = self._checked("step", lambda: self._reading.step(step, metrics))
            self._mark(found)
            marks, self._marks = self._marks, {}
        self._trackers.log(step, metrics | marks)
        self._events.write("step", step=step, seconds=metrics.get("perf/step_time"))
        self._tell(found, step=step)

    def notify(self, event: str, **fields: Any) -> None:
        """Record an event. May be called from any thread."""
        if event not in NO_PROGRESS:
            heartbeat.beat(event)
        self._events.write(event, **fields)
        with self._lock:
            found = self._checked(event, lambda: self._reading.event({"event": event, **fields}))
            self._mark(found)
        self._tell(found)

    def close(self) -> None:
        """Close the trackers and the record of events."""
        self._trackers.close()
        self._events.close()

    def _begin(self, first: int) -> None:
        if self._is_begun:
            return
        self._is_begun = True
        for step, row in self._earlier():
            if step < first:
                self._reading.step(step, row)

    def _mark(self, found: list[Diagnosis]) -> None:
        self._marks.update({f"diagnosis/{diagnosis.id}": 1.0 for diagnosis in found})
        if self.ended_by is None:
            self.ended_by = next((d for d in found if d.severity in self._ends or d.id in self._ids), None)

    def _tell(self, found: list[Diagnosis], **where: int) -> None:
        for diagnosis in found:
            logger.log(LEVELS[diagnosis.severity], "%s", diagnosis.text())
            self._events.write("diagnosis", **where, **diagnosis.record())

    def _checked(self, what: str, read: Callable[[], list[Diagnosis]]) -> list[Diagnosis]:
        """Run monitors; one that raises is a bug that must not end a run, and is reported once."""
        try:
            return read()
        except Exception as error:
            if what not in self._broken:
                self._broken.add(what)
                logger.warning("[CHECK01] a monitor failed on %s (%s)", what, type(error).__name__, exc_info=error)
            return []
