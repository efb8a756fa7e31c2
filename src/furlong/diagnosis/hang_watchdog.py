"""A watchdog that reports what every thread and process is doing when a run makes no progress, and may end the run.

Progress is a step, a group of samples, a micro-batch, a tensor sent to the engine, or an event. Processes on other
machines count when their step ends; their stack traces are requested when progress stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import psutil

from furlong.core.event_loop import LoopProbe
from furlong.core.process_end import exit_now
from furlong.core.tracing import heartbeat
from furlong.core.user_code import STACK_FRAME, is_event_loop, is_library_file, is_user_file
from furlong.interfaces import Observer

logger = logging.getLogger(__name__)

GRACE_S = 30.0  # for a cancelled run to end; then its process is killed
BLOCKED_S = 5.0  # beyond the first time that user code is seen to block the event loop
HUNG = 1  # exit code of a process that had to be killed
TASKS = 12  # maximum number of tasks to list with the objects they wait for
CALLERS = ("furlong-trainer", "MainThread", "asyncio_")  # threads that call user code
ENGINE_CALLS = ("Policy.generate", "generate_turn")
WAITING = ("threading.py", "queue.py", "selectors.py", "concurrent/futures/thread.py")  # where idle threads wait

Depths = Callable[[], Mapping[str, int]]
OnHang = Literal["warn", "stop-user-code", "stop"]


class HangWatchdog:
    """Watches `core.tracing.heartbeat` from its own thread. Use as a context manager around the run.

    One report is written to `folder` each time that progress stops. If the hang `stops` the run (`stop-user-code`: if
    user code does not return), the task passed to `attach` is cancelled, which ends the run in good order if its parts
    still respond; otherwise, and without such a task, the process exits with code 1 after `grace_s`. The event
    `blocked` has the user's line that keeps the event loop from running.

    seconds: time without progress; 0 disables the watchdog. observer: gets the events; without one, a hang is logged.
    depths: returns queue lengths. stacks: returns stack traces of processes that are not children of this one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seconds: float,
        stops: OnHang = "warn",
        observer: Observer | None = None,
        depths: Depths = dict,
        stacks: Callable[[], Mapping[str, str]] = dict,
        grace_s: float = GRACE_S,
    ) -> None:
        self._folder, self._seconds, self._stops, self._grace_s = folder, seconds, stops, grace_s
        self._observer, self._depths, self._stacks = observer, depths, stacks
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._reports = 0
        self._blocking: tuple[str, float] | None = None  # where user code blocks the event loop, and since when
        self._reported_places: set[str] = set()
        self._requests = 0  # that were finished at the last progress

    def __enter__(self) -> HangWatchdog:
        if self._seconds:
            heartbeat.reset()
            heartbeat.beat("start")
            self._thread = threading.Thread(target=self._watch, name="furlong-hang-watch", daemon=True)
            self._await_lock()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def observe(self, observer: Observer, *, depths: Depths, stacks: Callable[[], Mapping[str, str]]) -> None:
        """Send events to `observer` from now on; see the class. Before, only user code that hangs ends the process."""
        self._observer, self._depths, self._stacks = observer, depths, stacks

    def attach(self, task: asyncio.Task[Any]) -> None:
        """Set the run's task. Call it from the task's event loop."""
        heartbeat.beat("start")
        self._task, self._loop = task, task.get_loop()

    def begin_close(self) -> None:
        """From now on the run closes: cancelling it would replace its outcome. Call it on the event loop."""
        self._task = None

    def _watch(self) -> None:
        probe = None
        last = reported = 0.0  # times of the last heartbeat, and of the last one that was reported
        while not self._done.wait(min(self._seconds / 4, 5.0)):
            self._await_lock()
            if probe is None and self._loop is not None:
                probe = LoopProbe(self._loop)
            if probe is not None:
                self._report_blocking(probe.blocked_at())
            if (now := heartbeat.last()) != last:
                last, self._requests = now, heartbeat.notes().get("request", 0)
            seconds = time.monotonic() - last
            if seconds < self._seconds or last == reported:
                continue
            is_ending = self._report(seconds)
            reported = heartbeat.last()  # the report is an event, which does not count as progress
            if is_ending:
                if self._loop is not None:
                    with contextlib.suppress(RuntimeError):  # the loop has ended
                        self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())
                if not self._done.wait(self._grace_s if self._loop is not None else 0):
                    message = f"the run did not end within {self._grace_s:g} s; exiting"
                    logger.error("%s", message)
                    self._notify("failed", error="Hang", message=message)
                    exit_now(HUNG)
                return

    def _notify(self, event: str, **fields: Any) -> None:
        if self._observer is not None:
            self._observer.notify(event, **fields)
        elif event == "hang":
            logger.error("no progress for %s s while the run is built: %s; all stack traces are in %s",
                         fields["seconds"], fields["doing"], fields["report"])  # fmt: skip

    def _waits_for_user_code(self) -> bool:
        """Whether the run waits for user code.

        A function that keeps sending requests is not waited for, nor is one whose siblings have requests in flight.
        """
        if heartbeat.notes().get("request", 0) > self._requests:
            return False
        if any((busy := _busy_frames(name)) and is_user_file(busy[0].f_code.co_filename) for name in CALLERS):
            return True
        waits = self._user_waits()
        return bool(waits) and not any(wait.for_engine for wait in waits)

    def _await_lock(self) -> None:
        """Have the stacks printed, and the process exit without --on-hang warn, if this is not called again in time.

        Compiled code that keeps the interpreter lock stops every thread of Python; faulthandler needs no lock.
        """
        faulthandler.dump_traceback_later(self._seconds + self._grace_s, exit=self._stops != "warn", file=2)

    def _report_blocking(self, place: str | None) -> None:
        """Report user code that has kept the event loop from running for `BLOCKED_S`, once for each place."""
        now = time.monotonic()
        if place is None:
            self._blocking = None
        elif self._blocking is None:
            self._blocking = (place, now)
        elif now - self._blocking[1] >= BLOCKED_S and place not in self._reported_places:
            self._reported_places.add(place)
            self._notify("blocked", seconds=round(now - self._blocking[1], 1), where=place)

    def _report(self, seconds: float) -> bool:
        is_ending = (self._stops == "stop" and self._observer is not None) or (
            self._stops != "warn" and self._waits_for_user_code()
        )
        others = self._other_stacks()
        counts = heartbeat.counts()
        is_updating = counts.get("weight_update_started", 0) > counts.get("weight_update", 0)
        doing = "; ".join(["weights are being updated"] * is_updating + self._activity(describe_ranks(others)))
        fields: dict[str, Any] = {
            "seconds": round(seconds, 1),
            "doing": doing,
            "updates_weights": is_updating,
            "last": {name: round(age, 1) for name, age in heartbeat.ages().items()},  # seconds since each heartbeat
            "queues": dict(self._depths()),
            "waits": self._waits(),
            "requests": heartbeat.notes().get("request", 0) - self._requests,
        }
        path = self._folder / f"hang_{self._reports}.txt"
        self._reports += 1
        with path.open("w") as file:
            file.writelines(f"{name}: {value}\n" for name, value in fields.items())
            file.write(f"\nthreads of this process ({os.getpid()}):\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.write("\nchild processes:\n")
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):  # it has ended
                    file.write(f"  {child.pid}: {' '.join(child.cmdline())}\n")
            file.writelines(f"\n{name}:\n{text}\n" for name, text in others.items())
        self._notify("hang", **fields, report=str(path), stops=is_ending)
        return is_ending

    def _waits(self) -> list[str]:
        tasks = [] if self._loop is None else asyncio.all_tasks(self._loop)
        names = Counter(f"{re.sub('[0-9]', 'N', task.get_name())}: {task_wait(task)}" for task in tasks)
        return [f"{count} x {name}" for name, count in names.most_common(TASKS)]

    def _user_waits(self) -> Counter[TaskWait]:
        waits = [] if self._loop is None else [task_wait(task) for task in asyncio.all_tasks(self._loop)]
        is_any = any(wait.is_user for wait in waits)
        return Counter(wait for wait in waits if is_any and (wait.is_user or wait.for_engine))

    def _other_stacks(self) -> Mapping[str, str]:
        try:
            return self._stacks()
        except Exception as error:
            logger.warning("[CHECK01] cannot read the stack traces of other processes", exc_info=error)
            return {}

    def _activity(self, ranks: str) -> list[str]:
        if ranks:
            return [ranks]
        waits = self._user_waits()
        requests = heartbeat.notes().get("request", 0) - self._requests
        shown = "; ".join(f"{count} x {wait}" for wait, count in waits.most_common(3))
        found = [f"functions wait, {requests} requests finished since the last progress: {shown}"] if waits else []
        for name in (*CALLERS, "furlong-engine"):
            if (where := busy_in(name)) is not None:
                found.append(f"the thread {name.rstrip('_')} is in {where}")
        return found or ["all threads are idle", *self._waits()[:2]]


@dataclass(frozen=True)
class TaskWait:
    """Where a task waits: in a function of the user if furlong called one, else in the innermost one beyond asyncio."""

    place: str
    is_user: bool
    for_engine: bool

    def __str__(self) -> str:
        return f"{self.place}{', in policy().generate' if self.is_user and self.for_engine else ''}"


def task_wait(task: asyncio.Task[Any]) -> TaskWait:
    """Return where a task waits, and whether it waits for the engine."""
    place, is_user, for_engine, is_called = "nothing: it is done", False, False, False
    inner: Any = task.get_coro()
    while inner is not None:
        frame: FrameType | None = getattr(inner, "cr_frame", None) or getattr(inner, "ag_frame", None)
        if frame is not None:
            code = frame.f_code
            is_own = is_user_file(code.co_filename)
            is_called |= not is_own
            if is_own and is_called:
                place, is_user, for_engine = _place(frame), True, False
            elif code.co_qualname in ENGINE_CALLS:
                for_engine = True
            if not is_user and Path(code.co_filename).parent.name != "asyncio":
                place = _place(frame)
        inner = None if is_user and for_engine else getattr(inner, "cr_await", None) or getattr(inner, "ag_await", None)
    return TaskWait(place, is_user, for_engine)


def busy_in(thread_name: str) -> str | None:
    """Return where a thread of this process is busy; None if it is idle or does not exist.

    That is the innermost function of the user or of furlong, and what it calls in a library, such as an operator.
    """
    if (frames := _busy_frames(thread_name)) is None:
        return None
    frame, innermost = frames
    return _place(frame) if frame is innermost else f"{_place(frame)}, calling {innermost.f_code.co_qualname}"


def _busy_frames(thread_name: str) -> tuple[FrameType, FrameType] | None:
    """Return the frame of `busy_in`, and the innermost one."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]  documented, for debuggers
    frames.pop(threading.get_ident(), None)  # a cycle with this function's own frame would keep all of them
    for thread in threading.enumerate():
        innermost = frames.get(thread.ident or 0) if thread.name.startswith(thread_name) else None
        if innermost is None or innermost.f_code.co_filename.endswith(WAITING):
            continue
        frame: FrameType | None = innermost
        while frame is not None and is_library_file(frame.f_code.co_filename) and not is_event_loop(frame):
            frame = frame.f_back
        if frame is None or not is_event_loop(frame):  # which is between two tasks
            return frame or innermost, innermost
    return None


def _place(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_qualname} ({'/'.join(Path(code.co_filename).parts[-2:])}:{frame.f_lineno})"


WORK = "cluster/rank_actor.py"  # frames above it execute a call of the driver
COLLECTIVES = "torch/distributed/"  # an innermost function there waits for other ranks


def describe_ranks(stacks: Mapping[str, str]) -> str:
    """Describe faulthandler's stack traces of ranks in one line, those that the others wait for first.

    Returns "" if no rank executes a call of the driver. A text in parentheses says why a rank has no stack trace.
    """
    silent, busy = list[str](), list[str]()
    waiting: dict[str, list[str]] = {}
    for name, text in stacks.items():
        if text.startswith("("):
            silent.append(f"{name} {text.strip()}")
        threads = re.split(r"\n\s*\n|(?=^(?:Current thread|Thread) 0x)", text, flags=re.MULTILINE)
        frames = next((STACK_FRAME.findall(thread) for thread in threads if WORK in thread), [])
        if not frames:
            continue
        own = next((frame for frame in frames if "/furlong/" in frame[0] and WORK not in frame[0]), frames[0])
        where, caller = (f"{f} ({'/'.join(Path(path).parts[-2:])}:{line})" for path, line, f in (frames[0], own))
        where += f", from {caller}" if caller != where else ""
        if COLLECTIVES in frames[0][0]:
            waiting.setdefault(where, []).append(name.partition(",")[0])
        else:
            busy.append(f"{name} is in {where}")
    return "; ".join([*silent, *busy, *(f"{', '.join(names)}: waits in {at}" for at, names in waiting.items())])
