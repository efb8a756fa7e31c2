"""Progress of the processes of a run: heartbeats for the hang watchdog, and spans for a trace.

Spans have the Chrome trace format, for Perfetto and chrome://tracing.
Each process appends to its own `trace/<process>-<pid>.jsonl`, so that a killed one loses little. `merge` combines them
into one file that a browser opens. Timestamps are from the system clock, so processes of one machine line up.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import orjson

LAST = 1_000_000  # sort index of a process: the driver is 0, followed by the ranks, then the engines
FOLDER = "FURLONG_TRACE"  # environment variable with the trace folder, for child processes
_NOTHING: AbstractContextManager[None] = nullcontext()


class Heartbeat:
    """Time of the last progress and number of beats, by kind. Thread-safe; a beat takes less than a microsecond.

    >>> heartbeat = Heartbeat()
    >>> heartbeat.beat("group")
    >>> heartbeat.counts()
    {'group': 1}
    """

    def __init__(self) -> None:
        self._beats: dict[str, tuple[float, int]] = {}
        self._notes: dict[str, int] = {}

    def beat(self, kind: str) -> None:
        """Record progress of this kind."""
        self._beats[kind] = (time.monotonic(), self._beats.get(kind, (0.0, 0))[1] + 1)

    def note(self, kind: str) -> None:
        """Count something that is not progress by itself, such as a request of a conversation that may never end."""
        self._notes[kind] = self._notes.get(kind, 0) + 1

    def notes(self) -> dict[str, int]:
        """Return the number of notes of each kind."""
        return self._notes.copy()

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
        self._notes.clear()


class Tracer:
    """The spans of this process. A no-op until `start`; thread-safe.

    >>> tracer.start(Path("outputs/x/trace"), "driver")
    >>> with tracer.span("train", rollout=3):
    ...     time.sleep(0.001)
    >>> tracer.stop()
    """

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._threads: set[int] = set()

    def start(self, folder: Path, process: str, *, place: int = LAST) -> None:
        """Start to write to `folder` as `process`. No effect if already started."""
        if self._file is not None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{process.replace(' ', '-')}-{os.getpid()}.jsonl").open("ab", buffering=1 << 16)
        self._threads.clear()
        self._write({"ph": "M", "name": "process_name", "args": {"name": process}})
        self._write({"ph": "M", "name": "process_sort_index", "args": {"sort_index": place}})
        atexit.register(self.stop)

    def start_from_environment(self, process: str) -> None:
        """Start if the parent process writes a trace."""
        if folder := os.environ.get(FOLDER):
            self.start(Path(folder), process)

    def stop(self) -> None:
        """Flush and stop."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = None
        atexit.unregister(self.stop)

    def span(self, name: str, **facts: Any) -> AbstractContextManager[None]:
        """Time the body as a box on this thread's track. Boxes of one thread nest, so do not use it around `await`."""
        return _NOTHING if self._file is None else self._span(name, facts)

    def flight(self, name: str, **facts: Any) -> AbstractContextManager[None]:
        """Time the body on its own track, for work that overlaps with others of its kind: requests, rollouts."""
        return _NOTHING if self._file is None else self._flight(name, facts)

    @contextmanager
    def _span(self, name: str, facts: dict[str, Any]) -> Generator[None]:
        started = time.time_ns()
        try:
            yield
        finally:
            duration = (time.time_ns() - started) / 1e3
            self._write({"ph": "X", "name": name, "ts": started / 1e3, "dur": duration, "args": facts})

    @contextmanager
    def _flight(self, name: str, facts: dict[str, Any]) -> Generator[None]:
        common = {"name": name, "cat": name, "id": f"{os.getpid()}-{next(self._ids)}"}
        self._write({"ph": "b", "ts": time.time_ns() / 1e3, "args": facts, **common})
        try:
            yield
        finally:
            self._write({"ph": "e", "ts": time.time_ns() / 1e3, **common})

    def _write(self, event: dict[str, Any]) -> None:
        thread = threading.get_ident()
        lines = [event]
        if thread not in self._threads:
            self._threads.add(thread)
            name = threading.current_thread().name
            lines.insert(0, {"ph": "M", "name": "thread_name", "args": {"name": name}})
        with self._lock:
            if self._file is not None:  # stopped while the span was open
                for line in lines:
                    line |= {"pid": os.getpid(), "tid": thread}
                    self._file.write(orjson.dumps(line, default=str) + b"\n")


def merge(folder: Path, target: Path) -> int:
    """Merge the files of all processes in `folder` into one trace; returns the number of events.

    An incomplete last line, from a process that was killed, is skipped.
    """
    count = 0
    draft = target.with_name(f".{target.name}.partial")
    with draft.open("w") as out:
        out.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for event in _events(folder):
            out.write((",\n" if count else "") + event)
            count += 1
        out.write("\n]}\n")
    draft.replace(target)
    return count


def _events(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield line.rstrip()


tracer = Tracer()
heartbeat = Heartbeat()
