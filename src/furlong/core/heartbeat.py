"""Heartbeats: each part of a run reports its progress, and the hang watchdog acts when all of them stop."""

from __future__ import annotations

import time


class Heartbeat:
    """Time of the last progress and number of beats, by kind. Thread-safe; a beat takes less than a microsecond.

    >>> heartbeat = Heartbeat()
    >>> heartbeat.beat("group")
    >>> heartbeat.counts()
    {'group': 1}
    """

    def __init__(self) -> None:
        self._beats: dict[str, tuple[float, int]] = {}

    def beat(self, kind: str) -> None:
        """Record progress of this kind."""
        self._beats[kind] = (time.monotonic(), self._beats.get(kind, (0.0, 0))[1] + 1)

    def last(self) -> float:
        """Return the `time.monotonic` of the last beat of any kind; 0 if there was none."""
        return max((when for when, _ in self._beats.copy().values()), default=0.0)

    def ages(self) -> dict[str, float]:
        """Return the seconds since the last beat of each kind."""
        now = time.monotonic()
        return {kind: now - when for kind, (when, _) in self._beats.copy().items()}

    def counts(self) -> dict[str, int]:
        """Return the number of beats of each kind."""
        return {kind: count for kind, (_, count) in self._beats.copy().items()}

    def reset(self) -> None:
        """Clear all beats, at the start of another run in this process."""
        self._beats.clear()


heartbeat = Heartbeat()
