"""What a run is doing right now, for the terminal: its phases, how far each is, and the time that is left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from furlong.core.tracing import heartbeat

RECENT = 20  # steps whose mean time predicts the rest


@dataclass
class Phase:
    """A phase in progress: `done` of `total` units (0: unknown), tokens, and the seconds that it took the last time.

    beat: the kind of heartbeat that counts the units.
    """

    name: str
    total: int = 0
    unit: str = ""
    beat: str = ""
    last_s: float = 0.0
    done: int = 0
    tokens: int = 0
    started: float = field(default_factory=lambda: time.monotonic())
    beats: int = 0

    def text(self) -> str:
        """Return such as `rollout 312/512 samples, 41,200 tok/s` or `training, 12 s (15 s last time)`."""
        seconds = time.monotonic() - self.started
        done = heartbeat.counts().get(self.beat, 0) - self.beats if self.beat else self.done
        parts = [self.name]
        if done or self.total:
            total = f"{self.total:,}" if self.total >= done else "?"
            parts = [f"{self.name} {done:,}/{total} {self.unit}"]
        if self.tokens:
            parts.append(f"{self.tokens / max(seconds, 1e-3):,.0f} tok/s")
        elif seconds >= 1 and len(parts[0]) == len(self.name):
            parts.append(f"{seconds:.0f} s" + (f" ({self.last_s:.0f} s last time)" if self.last_s >= 1 else ""))
        return ", ".join(parts)


_current: ContextVar[Phase | None] = ContextVar("phase", default=None)


class Progress:
    """The phases in progress and the steps of the run in this process. Thread-safe.

    >>> progress = Progress()
    >>> with progress.phase("rollout", total=8, unit="samples"):
    ...     progress.advance(3)
    ...     progress.text()
    'rollout 3/8 samples'
    """

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self._ended: dict[str, tuple[float, int]] = {}  # seconds and units of the last phase of a name
        self.num_steps: int | None = None
        self._steps: deque[tuple[int, float]] = deque(maxlen=RECENT + 1)

    def start(self, num_steps: int | None) -> None:
        """Begin to count the steps of a run."""
        self.num_steps = num_steps
        self._steps.clear()

    @contextmanager
    def phase(
        self, name: str, *, total: int = 0, unit: str = "", beat: str = "", last_s: float = 0.0
    ) -> Generator[Phase]:
        """Show `name` while the body runs; `advance` in its tasks counts for it. See `Phase`."""
        before_s, before = self._ended.get(name, (last_s, 0))
        phase = Phase(name, total or (before if beat else 0), unit, beat, before_s)
        phase.beats = heartbeat.counts().get(beat, 0)
        self.phases.append(phase)
        token = _current.set(phase)
        try:
            yield phase
        finally:
            _current.reset(token)
            self.phases.remove(phase)
            units = heartbeat.counts().get(beat, 0) - phase.beats if beat else phase.done
            self._ended[name] = (time.monotonic() - phase.started, units)

    def advance(self, done: int = 1, *, tokens: int = 0) -> None:
        """Count units and tokens for the phase that this task belongs to."""
        if (phase := _current.get()) is not None:
            phase.done += done
            phase.tokens += tokens

    def expect(self, total: int) -> None:
        """Set the number of units of the phase that this task belongs to."""
        if (phase := _current.get()) is not None:
            phase.total = total

    def step(self, number: int) -> None:
        """Record the end of a step."""
        self._steps.append((number, time.monotonic()))

    @property
    def last_step(self) -> int:
        """The last step that ended; 0 before the first."""
        return self._steps[-1][0] if self._steps else 0

    def seconds_left(self) -> float | None:
        """Return the time until the last step, from that of recent ones; None if it is unknown."""
        if len(self._steps) < 2 or self.num_steps is None:
            return None
        (first, began), (last, ended) = self._steps[0], self._steps[-1]
        if last <= first:
            return None
        left = (self.num_steps - last) * (ended - began) / (last - first)
        return max(0.0, left - (time.monotonic() - ended))

    def text(self) -> str:
        """Return the phases in progress, the oldest first."""
        return "; ".join(phase.text() for phase in self.phases[:2])


progress = Progress()
