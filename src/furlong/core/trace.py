"""What every process of a run was doing when: spans in the Chrome trace format, for Perfetto and chrome://tracing.

Each process writes lines of its own to `trace/<process>-<pid>.jsonl`, so that a killed one loses little; `merge` makes
the one file that a browser opens. Times are of the system's clock: processes of one machine line up.
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

from furlong.core.files import atomic_file

LAST = 1_000_000  # place of a process from the top: the driver is 0, then come the ranks, then engines
FOLDER = "FURLONG_TRACE"  # environment of processes that a run starts: where they write
_NOTHING: AbstractContextManager[None] = nullcontext()


class Tracer:
    """The spans of this process. Does nothing until `start`; usable from any thread.

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
        """Write to `folder` from now on, as `process`; a tracer that writes already goes on as it is."""
        if self._file is not None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{process.replace(' ', '-')}-{os.getpid()}.jsonl").open("ab", buffering=1 << 16)
        self._threads.clear()
        self._write({"ph": "M", "name": "process_name", "args": {"name": process}})
        self._write({"ph": "M", "name": "process_sort_index", "args": {"sort_index": place}})
        atexit.register(self.stop)

    def start_from_environment(self, process: str) -> None:
        """Start if the process that started this one writes a trace."""
        if folder := os.environ.get(FOLDER):
            self.start(Path(folder), process)

    def stop(self) -> None:
        """Write out what is buffered and write no more."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = None
        atexit.unregister(self.stop)

    def span(self, name: str, **facts: Any) -> AbstractContextManager[None]:
        """Time the body as a box on this thread's line. Boxes of one thread nest: not for what awaits others."""
        return _NOTHING if self._file is None else self._span(name, facts)

    def flight(self, name: str, **facts: Any) -> AbstractContextManager[None]:
        """Time the body on a line of its own, for what overlaps with others of its kind: requests, rollouts."""
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
            if self._file is not None:  # it was stopped while the span was open
                for line in lines:
                    line |= {"pid": os.getpid(), "tid": thread}
                    self._file.write(orjson.dumps(line, default=str) + b"\n")


def merge(folder: Path, target: Path) -> int:
    """Make one trace of the files of all processes in `folder`; returns the number of events.

    The last line of a process that was killed may be cut off; it is left out.
    """
    count = 0
    with atomic_file(target) as draft, draft.open("w") as out:
        out.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for event in _events(folder):
            out.write((",\n" if count else "") + event)
            count += 1
        out.write("\n]}\n")
    return count


def _events(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield line.rstrip()


tracer = Tracer()
