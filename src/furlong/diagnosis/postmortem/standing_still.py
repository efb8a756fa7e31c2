"""A run that does not go on: in progress without progress, or without an end because it was killed."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import psutil

from furlong.catalogue import Diagnosis, diagnosis
from furlong.core.text import abbreviate
from furlong.core.user_code import STACK_FRAME, is_user_file
from furlong.diagnosis.postmortem.recorded_run import RecordedRun

LIMIT_S, LIMIT_STEPS = 300.0, 10.0  # without progress, in seconds and in longest steps
PROGRESS_FILES = ("ledger.jsonl", "metrics.jsonl")  # written after each group, and after each step
NO_PROGRESS = frozenset({"diagnosis", "hang", "blocked", "engine_silent", "placement_waiting"})
CRASH = re.compile(  # as faulthandler writes it
    rf"Fatal Python error: (?P<what>[^\n]+)\n.*?^Current thread [^\n]+\n(?P<stack>({STACK_FRAME.pattern}\n)+)",
    re.MULTILINE | re.DOTALL,
)
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(frozen=True)
class RunProcess:
    """A process of a run."""

    pid: int
    command: str
    is_stopped: bool
    is_main: bool = False

    @property
    def is_engine(self) -> bool:
        """Whether it is an engine server."""
        return not self.is_main and ("sglang" in self.command or "furlong serve" in self.command)

    def __str__(self) -> str:
        part = "the run's own process" if self.is_main else "engine server" if self.is_engine else "process"
        return f"{part} {self.pid} ({self.command[:80]})"


def is_gone(run: RecordedRun) -> bool:
    """Whether the run's process was on this machine and is gone, although another one has its log open."""
    start = run.started
    if start.get("process") is None or start.get("machine") != socket.gethostname():
        return False
    return _main_process(start) is None


def diagnose_standstill(run: RecordedRun) -> list[Diagnosis]:
    """HANG01, ENG06: what stands still in a run that is in progress, [] if nothing does."""
    age_s, last = last_progress(run, time.time())
    processes = _processes(run)
    return stopped_processes(processes) or without_progress(run, age_s, last, processes)


def last_progress(run: RecordedRun, now_s: float) -> tuple[float, str]:
    """Return the seconds since the last progress, and what it was. Groups of samples count: the ledger's last write."""
    times = [
        (float(e["time"]), str(e["event"])) for e in run.since_start if "time" in e and e["event"] not in NO_PROGRESS
    ]
    for name in PROGRESS_FILES:
        if (path := run.folder / name).exists():
            times.append((path.stat().st_mtime, f"write to {name}"))
    when, what = max(times, default=(now_s, "nothing"))
    return max(now_s - when, 0.0), what


def stopped_processes(processes: Sequence[RunProcess]) -> list[Diagnosis]:
    """HANG01, or ENG06 for engines: processes that a signal or a debugger has stopped."""
    diagnoses: list[Diagnosis] = []
    for id, stopped in (
        ("HANG01", [p for p in processes if p.is_stopped and not p.is_engine]),
        ("ENG06", [p for p in processes if p.is_stopped and p.is_engine]),
    ):
        if stopped:
            pids = " ".join(str(process.pid) for process in stopped)
            diagnoses.append(
                diagnosis(
                    id,
                    f"{abbreviate(stopped, 3, separator='; ')} {'are' if len(stopped) > 1 else 'is'} stopped (state T)",
                    cause="A signal stopped it (SIGSTOP, or Ctrl-Z in its terminal), or a debugger did.",
                    remedy=f"`kill -CONT {pids}` resumes it",
                    evidence={"stopped": [process.pid for process in stopped]},
                )
            )
    return diagnoses


def without_progress(
    run: RecordedRun, age_s: float, last: str, processes: Sequence[RunProcess] = ()
) -> list[Diagnosis]:
    """HANG01: no progress for much longer than the steps so far took."""
    times = [float(e["time"]) for e in run.since_start if "time" in e and e["event"] in ("start", "step")]
    longest_s = max((b - a for a, b in pairwise(times)), default=None) if run.steps_since_start else None
    timeout_s = run.config.fault.hang_timeout
    if age_s <= max(LIMIT_S, timeout_s if longest_s is None else LIMIT_STEPS * longest_s):
        return []
    usual = "no step is complete" if longest_s is None else f"the longest step took {longest_s:.3g} s"
    pid = next((process.pid for process in processes if process.is_main), "PID")
    return [
        diagnosis(
            "HANG01",
            f"no progress for {age_s:.0f} s (last: {last}; {usual})",
            cause="A custom function, an engine or another process does not return, or is very slow.",
            remedy=f"`py-spy dump --pid {pid}` shows where it is; a lower "
            f"--hang-timeout (now {timeout_s:g} s) reports all stacks and the function that is awaited",
            severity="warning",
            evidence={"seconds": round(age_s, 1), "last": last, "longest_step_s": longest_s},
        )
    ]


def killed(run: RecordedRun, log: str = "") -> Diagnosis:
    """KILL01: what is known about a run without an end. `log` is that of its last start."""
    last = next((event for event in reversed(run.since_start) if event["event"] not in NO_PROGRESS), run.events[-1])
    resume = _how_to_resume(run)
    evidence = {"step": run.last_step, "last_event": dict(last)}
    if (machine := other_machine(run)) is not None:
        process, age_s = run.started.get("process"), last_progress(run, time.time())[0]
        return diagnosis(
            "KILL01",
            f"{run.folder}: the run started on {machine} (process {process}) and has no end; its last progress was "
            f"{age_s:.0f} s ago, after step {run.last_step} (last event: {last['event']})",
            cause=f"Something outside ended it, or it is in progress on {machine}, whose processes cannot be seen from "
            f"{socket.gethostname()}.",
            remedy=f"run the doctor on {machine}; without process {process} there, the run was killed: {resume}",
            evidence=evidence | {"machine": machine, "seconds": round(age_s, 1)},
        )
    if (crash := CRASH.search(log)) is not None:
        frames = [(f"{function} ({path}:{line})", path) for path, line, function in STACK_FRAME.findall(crash["stack"])]
        users = [place for place, path in frames if is_user_file(path)]
        caller = next((place for place in users if place != frames[0][0]), "")
        return diagnosis(
            "KILL01",
            f"{run.folder}: the run crashed after step {run.last_step}: {crash['what']} in {frames[0][0]}"
            + (f", called from {caller}" if caller else ""),
            cause="Compiled code failed"
            + (", called by a custom function." if users else ": a kernel or a library of this environment."),
            remedy="the stacks of all threads are in run.log; "
            + ("fix what that function calls" if users else "run `furlong env`, which tries compiled libraries")
            + f"; {resume}",
            evidence=evidence | {"stack": [place for place, _ in frames]},
        )
    doing = {"weight_update_started": ", during a weight update", "save": ", after a save"}.get(last["event"], "")
    return diagnosis(
        "KILL01",
        f"{run.folder}: the run started but did not end; it was killed after step {run.last_step}{doing} (last event: "
        f"{last['event']})",
        remedy=f"check for the out-of-memory killer (`dmesg | grep -i oom`) and for the scheduler's limits; {resume}",
        evidence=evidence,
    )


def other_machine(run: RecordedRun) -> str | None:
    """Return the machine of the last start if it is not this one, so that the run may be in progress there."""
    machine = run.started.get("machine")
    return machine if machine and machine != socket.gethostname() else None


def _how_to_resume(run: RecordedRun) -> str:
    """Return which checkpoint a next run can load. Others in the folder of --save may be of other runs."""
    flags = run.config.checkpoint
    if any(event["event"] == "save" for event in run.events):
        return f"resume with --load {flags.save}"
    if flags.load is not None:
        return f"nothing was saved since --load {flags.load}, from which the same command continues"
    if flags.save is not None:
        return f"nothing was saved in {flags.save}, so the same command starts anew: use --save-interval"
    return "nothing was saved: use --save in the next run"


def _main_process(start: Mapping[str, Any]) -> psutil.Process | None:
    try:
        process = psutil.Process(start["process"])
        is_later = process.create_time() > float(start.get("time", 0)) + 1
        return None if is_later or process.status() == psutil.STATUS_ZOMBIE else process
    except psutil.Error:
        return None


def _processes(run: RecordedRun) -> list[RunProcess]:
    start = run.started
    is_here = start.get("process") is not None and start.get("machine", "") == socket.gethostname()
    main = _main_process(start) if is_here else None
    found: list[RunProcess] = []
    for process in [] if main is None else [main, *main.children(recursive=True)]:
        try:
            command = " ".join(" ".join(process.cmdline()).split()) or process.name()
            found.append(RunProcess(process.pid, command, process.status() in STOPPED, process == main))
        except psutil.Error:  # it ended just now
            continue
    return found
