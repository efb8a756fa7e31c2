"""A watchdog over a run: when nothing has got done for a time it writes down what everybody is doing.

Progress is a step, a group of samples, a micro-batch, a tensor that was published, or an event. What processes on other
machines got done shows when their step ends; what they are doing is asked for when nothing gets done.
"""

from __future__ import annotations

import asyncio
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
from typing import Any, TextIO

import psutil

from furlong.core.heartbeat import heartbeat
from furlong.interfaces import Observer

logger = logging.getLogger(__name__)

GRACE_S = 30.0  # for a run that was asked to end; then its process is ended
DUMP_S = 10.0  # for the stacks of one other process
HUNG = 1  # exit code of a process that had to be ended
TASKS = 12  # that are shown with what they wait for
WAITING = ("threading.py", "queue.py", "selectors.py", "concurrent/futures/thread.py")  # where idle threads are

Depths = Callable[[], Mapping[str, int]]


class HangWatchdog:
    """Watches `core.heartbeat` from a thread of its own. Use as a context around the run; `attach` names what to end.

    seconds: without progress; 0 watches nothing. With `stops` the run's task is cancelled, which ends the run in good
    order where its parts still answer; a process that has not ended `grace_s` later is ended with exit code 1. `depths`
    gives lengths of queues, `stacks` those of processes that are not this one's children. One report is written for
    each time that progress ceases.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seconds: float,
        observer: Observer,
        stops: bool = False,
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

    def __enter__(self) -> HangWatchdog:
        if self._seconds:
            heartbeat.reset()
            heartbeat.beat("start")
            self._thread = threading.Thread(target=self._watch, name="furlong-hang-watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def attach(self, task: asyncio.Task[Any]) -> None:
        """Name the run's task, from within its event loop."""
        self._task, self._loop = task, task.get_loop()

    def _watch(self) -> None:
        told = 0.0  # the last sign of life before the hang that was told
        while not self._done.wait(min(self._seconds / 4, 5.0)):
            last = heartbeat.last()
            if time.monotonic() - last < self._seconds or last == told:
                continue
            told = last
            self._tell(time.monotonic() - last)
            told = heartbeat.last()  # telling it is an event, and no progress
            if self._stops and self._task is not None and self._loop is not None:
                self._loop.call_soon_threadsafe(self._task.cancel)
                self._end_if_needed()
                return

    def _tell(self, seconds: float) -> None:
        others = self._others()
        doing, probable = self._doing(describe_ranks(others))
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
            stops=self._stops,
            last={what: round(age, 1) for what, age in ages.items()},
            queues=dict(self._depths()),
        )

    def _write(
        self, file: TextIO, seconds: float, doing: str, ages: Mapping[str, float], counts: Mapping[str, int]
    ) -> None:
        file.write(f"nothing got done for {seconds:.1f} s; {doing}\n\nlast signs of life:\n")
        for what, age in sorted(ages.items(), key=lambda item: item[1]):
            file.write(f"  {what}: {age:.1f} s ago, {counts[what]} so far\n")
        file.write("\nqueues:\n")
        file.writelines(f"  {name}: {depth}\n" for name, depth in self._depths().items())
        file.write("\nwho waits for what:\n")
        file.writelines(f"  {line}\n" for line in self._waits())
        file.write(f"\nthreads of this process ({os.getpid()}):\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        for child in psutil.Process().children(recursive=True):
            file.write(f"\nprocess {child.pid}:\n{stacks_of(child)}\n")

    def _waits(self) -> list[str]:
        """The tasks of the event loop, each with the innermost function that it waits in; equal ones counted."""
        if self._loop is None:
            return []
        tasks = asyncio.all_tasks(self._loop)
        names = Counter(f"{_kind(task.get_name())}: {waiting_in(task)}" for task in tasks)
        return [f"{count} x {name}" for name, count in names.most_common(TASKS)]

    def _others(self) -> Mapping[str, str]:
        try:
            return self._stacks()
        except Exception as error:
            logger.warning("[CHECK01] the stacks of other processes could not be read", exc_info=error)
            return {}

    def _doing(self, ranks: str) -> tuple[str, str]:
        """What the run is busy with, and the row of the catalogue that is likely behind it."""
        counts = heartbeat.counts()
        if counts.get("publishing", 0) > counts.get("publication", 0):
            return f"weights are being published{'; ' if ranks else ''}{ranks}", "SYNC01"
        if ranks:
            return ranks, "HANG01"
        for name in ("furlong-trainer", "MainThread", "furlong-engine"):
            if (where := busy_in(name)) is not None:
                return f"the thread {name} is in {where}", "HANG01"
        running = any(count for name, count in self._depths().items() if name.endswith("running"))
        waits = self._waits()
        probable = "REW03" if any("(rewards/" in line for line in waits) else "STOP02" if running else "HANG01"
        return f"no thread works; {'; '.join(waits[:2])}", probable

    def _end_if_needed(self) -> None:
        """Wait for the run's end; end the process if it does not come."""
        if self._done.wait(self._grace_s):
            return
        message = f"the run did not end within {self._grace_s:g} s of being asked to; its process is ended"
        logger.error("%s", message)
        self._observer.notify("failed", error="Hang", message=message)
        os._exit(HUNG)


def waiting_in(task: asyncio.Task[Any]) -> str:
    """The innermost coroutine that a task waits in, asyncio's own left out, as `function (file:line)`."""
    inner: Any = task.get_coro()
    found = "nothing: it is done"
    while inner is not None:
        frame: FrameType | None = getattr(inner, "cr_frame", None)
        if frame is not None and Path(frame.f_code.co_filename).parent.name != "asyncio":
            found = _place(frame)
        inner = getattr(inner, "cr_await", None)
    return found


def busy_in(thread_name: str) -> str | None:
    """Where a thread of this process is at work; None if it waits for work, or there is none of that name."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]  documented, for debuggers
    for thread in threading.enumerate():
        if not thread.name.startswith(thread_name) or thread.ident not in frames:
            continue
        frame = frames[thread.ident]
        if not frame.f_code.co_filename.endswith(WAITING):
            return _place(frame)
    return None


def stacks_of(process: psutil.Process) -> str:
    """The command and the stacks of another process, by py-spy where it is installed."""
    try:
        command = " ".join(process.cmdline())
    except psutil.Error as error:
        return f"(gone: {error})"
    beside = Path(sys.executable).with_name("py-spy")
    tool = str(beside) if beside.exists() else shutil.which("py-spy")
    if tool is None:
        return f"{command}\n(install py-spy to see its stacks)"
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
    """A task's name without its numbers."""
    return "".join("N" if char.isdigit() else char for char in name)


WORK = "cluster/rank_actor.py"  # a thread below it does what the driver asked for
FRAME = re.compile(r'^\s*File "(?P<path>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)', re.MULTILINE)
WAITS = ("torch/distributed/",)  # innermost functions there wait for other ranks


@dataclass(frozen=True)
class RankActivity:
    """What one rank does: the innermost function, and the innermost of furlong's that called it."""

    where: str
    caller: str
    waits: bool

    def text(self) -> str:
        """In words, such as `waits in all_reduce (...), from optim_step (...)`."""
        caller = f", from {self.caller}" if self.caller and self.caller != self.where else ""
        return f"{'waits in' if self.waits else 'is in'} {self.where}{caller}"


def rank_activity(stacks: str) -> RankActivity | None:
    """What the thread that was asked for something does; None if none was, or the stacks are none."""
    for thread in re.split(r"\n\s*\n|(?=^(?:Current thread|Thread) 0x)", stacks, flags=re.MULTILINE):
        if WORK not in thread:
            continue
        frames = [(m["path"], m["line"], m["name"]) for m in FRAME.finditer(thread)]
        own = next((f for f in frames if "/furlong/" in f[0] and WORK not in f[0]), None)
        return RankActivity(
            where=_frame_place(frames[0]),
            caller="" if own is None else _frame_place(own),
            waits=any(part in frames[0][0] for part in WAITS),
        )
    return None


def describe_ranks(stacks: Mapping[str, str]) -> str:
    """One line about all ranks: what those do that others wait for, first; "" if nobody was asked for anything."""
    found = {name: rank_activity(text) for name, text in stacks.items()}
    silent = [f"{name} {text.strip()}" for name, text in stacks.items() if text.startswith("(")]
    busy = [f"{name} {each.text()}" for name, each in found.items() if each is not None and not each.waits]
    waiting: dict[str, list[str]] = {}
    for name, each in found.items():
        if each is not None and each.waits:
            waiting.setdefault(each.text(), []).append(name.partition(",")[0])
    parts = [*silent, *busy, *(f"{', '.join(names)}: {text}" for text, names in waiting.items())]
    return "; ".join(parts)


def _frame_place(frame: tuple[str, str, str]) -> str:
    path, line, name = frame
    return f"{name} ({'/'.join(Path(path).parts[-2:])}:{line})"
