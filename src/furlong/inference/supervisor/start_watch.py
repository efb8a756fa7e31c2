"""Detects a starting server that makes no progress: one of its processes is stopped, or none of them does anything.

Health checks begin when a server is up; without this, such a server would be noticed at the limit of its start only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from furlong.inference.supervisor.host import Activity, HostProcess

STOPPED_S = 10.0  # in state T, before a starting server counts as lost
IDLE_S = 300.0  # without processor time and without output
LOOK_S = 1.0  # between two looks at the processes


@dataclass
class StartWatch:
    """Watches the processes of a starting server."""

    processes: Sequence[HostProcess]
    _looked_s: float = field(default_factory=time.monotonic, init=False)
    _progress_s: float = field(default_factory=time.monotonic, init=False)  # of the last progress
    _running_s: float = field(default_factory=time.monotonic, init=False)  # when no process was stopped
    _before: list[Activity] = field(default_factory=list[Activity], init=False)

    async def stall(self) -> str:
        """Return why the server makes no progress; "" if it does, or if that is not known yet."""
        if time.monotonic() - self._looked_s < LOOK_S:
            return ""
        activities = [await process.activity() for process in self.processes]
        now_s = self._looked_s = time.monotonic()
        stopped = [pid for activity in activities for pid in activity.stopped]
        if not stopped:
            self._running_s = now_s
        if activities != self._before:
            self._before, self._progress_s = activities, now_s
        if now_s - self._running_s > STOPPED_S:
            pids = " and ".join(map(str, stopped))
            return f"process {pids} has been stopped by a signal (state T) for {now_s - self._running_s:.0f} s"
        if now_s - self._progress_s > IDLE_S:
            return f"it used no processor time and logged nothing for {now_s - self._progress_s:.0f} s"
        return ""
