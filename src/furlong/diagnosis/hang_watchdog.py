"""A watchdog that reports what every thread and process is doing when a run makes no progress.

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
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TextIO

import psutil

from furlong.core.event_loop import LoopProbe, is_event_loop
from furlong.core.process_exit import STDERR
from furlong.core.process_guard import process_guard
from furlong.core.tracing import heartbeat
from furlong.core.user_code import exit_process, is_library_file, is_user_file
from furlong.core.user_processes import kill_user_processes
from furlong.diagnosis.monitors.machine_monitors import ALL_IDLE
from furlong.interfaces import Observer

logger = logging.getLogger(__name__)

GRACE_S = 30.0  # for a cancelled run to end; then its process is killed
BLOCKED_S = 5.0  # beyond the first time that user code is seen to block the event loop
DUMP_S = 10.0  # for the stack traces of another process
HUNG = 1  # exit code of a process that had to be killed
TASKS = 12  # maximum number of tasks to list with the objects they wait for
CALLERS = ("furlong-trainer", "MainThread", "asyncio_")  # threads that call user code
AWAITED = {"(rewards/": "REW03", "(sglang/http_": "ENG06"}  # part of a function's place, and the row of such a wait
ENGINE_CALLS = ("Policy.generate", "generate_turn")
WAITING = (
    "threading.py",
    "queue.py",
    "selectors.py",
    "concurrent/futures/thread.py",
)  # files in which idle threads wait

Depths = Callable[[], Mapping[str, int]]
OnHang = Literal["warn", "stop-user-code", "stop"]
NOTED_S, NOTED_PAUSES = 30.0, 2.0  # without progress, in seconds and in units of the longest pause so far, for a note
WARNED_AT = (1 / 6, 1 / 2)  # parts of the time after which user code that does not return is named


class HangWatchdog:
    """Watches `core.tracing.heartbeat` from its own thread. Use as a context manager around the run.

    One report is written to `folder` each time that progress stops. If the hang `stops` the run (`stop-user-code`: if
    user code does not return), the task passed to `attach` is cancelled, which ends the run in good order if its parts
    still respond; otherwise, and without such a task, the process exits with code 1 after `grace_s`. Before, warnings
    name the line of user code, and the event `no_progress` has what the run is doing, for `furlong doctor --run`.

    seconds: time without progress; 0 disables the watchdog. depths: returns queue lengths. stacks: returns stack traces
    of processes that are not children of this one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seconds: float,
        observer: Observer,
        stops: OnHang = "warn",
        depths: Depths = dict,
        stacks: Callable[[], Mapping[str, str]] = dict,
        grace_s: float = GRACE_S,
    ) -> None:
        self._folder, self._seconds, self._observer = folder, seconds, observer
        self._stops, self._depths, self._stacks, self._grace_s = stops, depths, stacks, grace_s
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._reports = 0
        self._blocking: tuple[str, float] | None = None  # where user code blocks the event loop, and since when
        self._reported_places: set[str] = set()
        self._last = 0.0  # the last progress that was seen, and the requests that were finished then
        self._requests = 0
        self._longest_pause_s = 0.0  # between two times that progress was seen
        self._noted = 0.0  # the last progress before the standstill that was noted
        self._places_before: Mapping[int, str] = {}  # of user code in threads when the run began

    def __enter__(self) -> HangWatchdog:
        if self._seconds:
            heartbeat.reset()
            heartbeat.beat("start")
            self._places_before = user_code_in_threads()
            self._thread = threading.Thread(target=self._watch, name="furlong-hang-watch", daemon=True)
            self._await_lock()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def attach(self, task: asyncio.Task[Any]) -> None:
        """Set the run's task. Call it from the task's event loop."""
        self._task, self._loop = task, task.get_loop()

    def begin_close(self) -> None:
        """From now on the run closes: cancelling it would replace its outcome. Call it on the event loop."""
        self._task = None

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _watch(self) -> None:
        probe = None
        reported = 0.0  # the last heartbeat before the hang that was reported
        num_warnings = 0  # since the last progress
        while not self._done.wait(min(self._seconds / 4, 5.0)):
            self._await_lock()
            if probe is None and self._loop is not None:
                probe = LoopProbe(self._loop)
            if probe is not None:
                self._report_blocking(probe.blocked_at())
            last = heartbeat.last()
            if last != self._last:
                self._longest_pause_s = max(self._longest_pause_s, last - (self._last or last))
                self._last, self._requests, num_warnings = last, heartbeat.notes().get("request", 0), 0
            seconds = time.monotonic() - last
            if seconds < self._seconds and num_warnings < sum(seconds > self._seconds * part for part in WARNED_AT):
                num_warnings += 1
                self._warn(seconds)
            if last != self._noted and max(NOTED_S, NOTED_PAUSES * self._longest_pause_s) < seconds < self._seconds:
                self._noted = last
                self._note(seconds)
            if seconds < self._seconds or last == reported:
                continue
            is_ending = self._report(seconds)
            reported = heartbeat.last()  # the report is an event, which does not count as progress
            if is_ending:
                if self._loop is not None:
                    with contextlib.suppress(RuntimeError):  # the loop has ended
                        self._loop.call_soon_threadsafe(self._cancel)
                self._end_if_needed()
                return

    def _warn(self, seconds: float) -> None:
        """Name the user code that does not return, if the run will end because of it."""
        if self._stops != "warn" and (place := self._user_code()) is not None:
            logger.warning(
                "no progress for %.0f s: user code does not return, %s; the run ends after %g s without progress "
                "(--hang-timeout, or --on-hang warn to wait)",
                seconds, place, self._seconds,
            )  # fmt: skip

    def _note(self, seconds: float) -> None:
        """Record what the run is doing, once for each standstill."""
        requests = heartbeat.notes().get("request", 0) - self._requests
        doing, probable = self._activity(describe_ranks(self._other_stacks()), requests)
        self._observer.notify("no_progress", seconds=round(seconds, 1), doing=doing, probable=probable)

    def _user_code(self) -> str | None:
        """Return where user code stands that the run waits for; None if it waits for something else.

        A function that keeps asking the engine is not waited for, nor is one beside others whose requests are in the
        engine. Ranks on other machines may be in user code at the time of a look, as progress within a step is not
        seen.
        """
        if heartbeat.notes().get("request", 0) > self._requests:
            return None
        if (place := running_user_code()) is not None:
            return place
        waits = list(self._user_waits())
        return str(waits[0]) if waits and not any(wait.for_engine for wait in waits) else None

    def _await_lock(self) -> None:
        """Have the stacks printed, and the process exit without --on-hang warn, if this is not called again in time.

        Compiled code that keeps the interpreter lock stops every thread of Python; faulthandler needs no lock.
        """
        faulthandler.dump_traceback_later(self._seconds + self._grace_s, exit=self._stops != "warn", file=STDERR)

    def _report_blocking(self, place: str | None) -> None:
        """Report user code that has kept the event loop from running for `BLOCKED_S`, once for each place."""
        now = time.monotonic()
        if place is None:
            self._blocking = None
        elif self._blocking is None:
            self._blocking = (place, now)
        elif now - self._blocking[1] >= BLOCKED_S and place not in self._reported_places:
            self._reported_places.add(place)
            self._observer.notify("blocked", seconds=round(now - self._blocking[1], 1), where=place)

    def _report(self, seconds: float) -> bool:
        """Report a hang; returns whether it ends the run."""
        is_ending = self._stops == "stop" or (self._stops == "stop-user-code" and self._user_code() is not None)
        others = self._other_stacks()
        requests = heartbeat.notes().get("request", 0) - self._requests
        doing, probable = self._activity(describe_ranks(others), requests)
        ages, counts = heartbeat.ages(), heartbeat.counts()
        path = self._folder / f"hang_{self._reports}.txt"
        self._reports += 1
        with path.open("w") as file:
            self._write(file, seconds, doing, ages, counts)
            for name, text in others.items():
                file.write(f"\n{name}:\n{text}\n")
        self._observer.notify(
            "hang",
            seconds=round(seconds, 1),
            doing=doing,
            probable=probable,
            report=str(path),
            stops=is_ending,
            last={name: round(age, 1) for name, age in ages.items()},
            queues=dict(self._depths()),
            waits=self._waits(),
            requests=requests,
        )
        return is_ending

    def _write(
        self, file: TextIO, seconds: float, doing: str, ages: Mapping[str, float], counts: Mapping[str, int]
    ) -> None:
        file.write(f"no progress for {seconds:.1f} s; {doing}\n\nlast heartbeats:\n")
        for name, age in sorted(ages.items(), key=lambda item: item[1]):
            file.write(f"  {name}: {age:.1f} s ago, {counts[name]} in total\n")
        file.write("\nqueues:\n")
        file.writelines(f"  {name}: {depth}\n" for name, depth in self._depths().items())
        file.write("\nwaiting tasks:\n")
        file.writelines(f"  {line}\n" for line in self._waits())
        file.write(f"\nthreads of this process ({os.getpid()}):\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        for child in psutil.Process().children(recursive=True):
            file.write(f"\nprocess {child.pid}:\n{stacks_of(child)}\n")

    def _waits(self) -> list[str]:
        """Count the event loop's tasks by the function that they wait in."""
        if self._loop is None:
            return []
        tasks = asyncio.all_tasks(self._loop)
        names = Counter(f"{_kind(task.get_name())}: {waiting_in(task)}" for task in tasks)
        return [f"{count} x {name}" for name, count in names.most_common(TASKS)]

    def _user_waits(self) -> Counter[TaskWait]:
        """Count the tasks that wait in functions of the user, and those that wait for the engine beside them."""
        if self._loop is None:
            return Counter()
        waits = [task_wait(task) for task in asyncio.all_tasks(self._loop)]
        is_any = any(wait.is_user for wait in waits)
        return Counter(wait for wait in waits if is_any and (wait.is_user or wait.for_engine))

    def _other_stacks(self) -> Mapping[str, str]:
        try:
            return self._stacks()
        except Exception as error:
            logger.warning("[CHECK01] cannot read the stack traces of other processes", exc_info=error)
            return {}

    def _activity(self, ranks: str, requests: int) -> tuple[str, str]:
        """Describe what the run is doing, and guess the catalogue row behind the hang.

        requests: requests that were finished since the last progress.
        """
        counts = heartbeat.counts()
        if counts.get("weight_update_started", 0) > counts.get("weight_update", 0):
            return f"weights are being updated{'; ' if ranks else ''}{ranks}", "SYNC01"
        if ranks:
            return ranks, "HANG01"
        waits = self._user_waits()
        if waits and requests:
            return self._user_activity(waits, requests, None)
        for name in CALLERS:
            if (where := busy_in(name)) is not None:
                return f"the thread {name.rstrip('_')} is in {where}", "HANG01"
        engine = busy_in("furlong-engine")
        if waits:
            return self._user_activity(waits, requests, engine)
        if engine is not None:
            return f"the thread furlong-engine is in {engine}", "HANG01"
        before = self._places_before
        threads = Counter(place for id, place in user_code_in_threads().items() if place != before.get(id))
        if threads:
            shown = "; ".join(f"{count} x {place}" for place, count in threads.most_common(3))
            return f"user code runs in threads of its own: {shown}", "HANG01"
        running = any(count for name, count in self._depths().items() if name.endswith("running"))
        lines = self._waits()
        waited = next((row for part, row in AWAITED.items() if any(part in line for line in lines)), "HANG01")
        probable = "STOP02" if running and waited == "HANG01" else waited
        called = process_guard.last_called()
        last = [f"user code called last: {called}"] if called else []
        return "; ".join([ALL_IDLE, *lines[:2], *last]), probable

    def _user_activity(self, waits: Counter[TaskWait], requests: int, engine: str | None) -> tuple[str, str]:
        """Describe which functions of the user wait, and for what: the engine, or something of their own."""
        shown = "; ".join(f"{count} x {wait}" for wait, count in waits.most_common(3))
        own = sum(count for wait, count in waits.items() if not wait.for_engine)
        if requests:  # the engine answers, so a function does not come to an end
            return f"functions keep asking the engine, {requests} requests finished since: {shown}", "HANG01"
        if own == waits.total():
            return f"functions wait for something of their own, not for the engine: {shown}", "HANG01"
        state = f"; the thread furlong-engine is in {engine}" if engine is not None else ""
        return f"no request finished since: {shown}{state}", "HANG01" if own else "STOP02"

    def _end_if_needed(self) -> None:
        """Wait for the run to end; kill the process if it does not."""
        if self._done.wait(self._grace_s):
            return
        place = self._user_code()
        message = f"the run did not end within {self._grace_s:g} s; exiting{'' if place is None else f': {place} runs'}"
        logger.error("%s", message)
        self._observer.notify("failed", error="Hang", message=message)
        kill_user_processes()
        exit_process(HUNG)


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


def waiting_in(task: asyncio.Task[Any]) -> str:
    """Return the function that a task waits in, as `function (file:line)`."""
    return str(task_wait(task))


def running_user_code() -> str | None:
    """Return where a thread of this process executes user code, or a library that user code calls; None if none."""
    for name in CALLERS:
        if (found := _busy_frames(name)) is not None and is_user_file(found[0].f_code.co_filename):
            return _place(found[0])
    return None


def user_code_in_threads() -> dict[int, str]:
    """Return the innermost place of user code in each thread that has one, such as those of environments."""
    places: dict[int, str] = {}
    for thread, innermost in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage]  documented
        frame: FrameType | None = innermost
        while frame is not None and not is_user_file(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None and not innermost.f_code.co_filename.endswith(WAITING):
            places[thread] = _place(frame)
    return places


def busy_in(thread_name: str) -> str | None:
    """Return where a thread of this process is busy; None if it is idle or does not exist.

    That is the innermost function of the user or of furlong, and what it calls in a library, such as an operator.
    """
    found = _busy_frames(thread_name)
    if found is None:
        return None
    frame, innermost = found
    return _place(frame) if frame is innermost else f"{_place(frame)}, calling {innermost.f_code.co_qualname}"


def _busy_frames(thread_name: str) -> tuple[FrameType, FrameType] | None:
    """Return the frame of `busy_in`, and the innermost one."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]  documented, for debuggers
    frames.pop(threading.get_ident(), None)  # a cycle with this function's own frame would keep all of them
    for thread in threading.enumerate():
        if not thread.name.startswith(thread_name) or thread.ident not in frames:
            continue
        innermost = frames[thread.ident]
        if innermost.f_code.co_filename.endswith(WAITING):
            continue
        frame: FrameType | None = innermost
        while frame is not None and is_library_file(frame.f_code.co_filename) and not is_event_loop(frame):
            frame = frame.f_back
        if frame is not None and is_event_loop(frame):
            continue  # between two tasks
        return frame or innermost, innermost
    return None


def stacks_of(process: psutil.Process) -> str:
    """Return the command and stack traces of another process, read by py-spy if it is installed."""
    try:
        command = " ".join(process.cmdline())
    except psutil.Error as error:
        return f"(gone: {error})"
    local = Path(sys.executable).with_name("py-spy")
    tool = str(local) if local.exists() else shutil.which("py-spy")
    if tool is None:
        return f"{command}\n(install py-spy to see its stack traces)"
    try:
        done = subprocess.run(
            [tool, "dump", "--pid", str(process.pid)], capture_output=True, text=True, timeout=DUMP_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{command}\n(py-spy did not answer within {DUMP_S:g} s)"
    return f"{command}\n{done.stdout or done.stderr}"


def _place(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_qualname} ({'/'.join(Path(code.co_filename).parts[-2:])}:{frame.f_lineno})"


def _kind(name: str) -> str:
    """Replace the digits in a task's name."""
    return "".join("N" if char.isdigit() else char for char in name)


WORK = "cluster/rank_actor.py"  # frames above it execute a call of the driver
FRAME = re.compile(r'^\s*File "(?P<path>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)', re.MULTILINE)
WAITS = ("torch/distributed/",)  # an innermost function there waits for other ranks


@dataclass(frozen=True)
class RankActivity:
    """Return a rank's innermost function, and the innermost furlong function that called it."""

    where: str
    caller: str
    waits: bool

    def text(self) -> str:
        """Describe it, as in `waits in all_reduce (...), from optim_step (...)`."""
        caller = f", from {self.caller}" if self.caller and self.caller != self.where else ""
        return f"{'waits in' if self.waits else 'is in'} {self.where}{caller}"


def rank_activity(stacks: str) -> RankActivity | None:
    """Parse faulthandler's stack traces of a rank; None if no thread executes a call of the driver."""
    for thread in re.split(r"\n\s*\n|(?=^(?:Current thread|Thread) 0x)", stacks, flags=re.MULTILINE):
        if WORK not in thread:
            continue
        frames = [(m["path"], m["line"], m["name"]) for m in FRAME.finditer(thread)]
        caller = next((f for f in frames if "/furlong/" in f[0] and WORK not in f[0]), None)
        return RankActivity(
            where=_frame_place(frames[0]),
            caller="" if caller is None else _frame_place(caller),
            waits=any(part in frames[0][0] for part in WAITS),
        )
    return None


def describe_ranks(stacks: Mapping[str, str]) -> str:
    """Describe all ranks in one line, those that the others wait for first; "" if the driver called none."""
    activities = {name: rank_activity(text) for name, text in stacks.items()}
    silent = [f"{name} {text.strip()}" for name, text in stacks.items() if text.startswith("(")]
    busy = [f"{name} {each.text()}" for name, each in activities.items() if each is not None and not each.waits]
    waiting: dict[str, list[str]] = {}
    for name, each in activities.items():
        if each is not None and each.waits:
            waiting.setdefault(each.text(), []).append(name.partition(",")[0])
    parts = [*silent, *busy, *(f"{', '.join(names)}: {text}" for text, names in waiting.items())]
    return "; ".join(parts)


def _frame_place(frame: tuple[str, str, str]) -> str:
    path, line, name = frame
    return f"{name} ({'/'.join(Path(path).parts[-2:])}:{line})"
