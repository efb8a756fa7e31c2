"""A run in progress that makes no progress: judged by the age of its last event and the state of its processes."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import httpx
import psutil

from furlong.catalogue import Diagnosis, diagnosis
from furlong.core.text import abbreviate
from furlong.diagnosis.monitors.machine_monitors import ALL_IDLE, hang_remedy
from furlong.diagnosis.monitors.monitor import RunFacts
from furlong.diagnosis.postmortem.recorded_run import RecordedRun

IDLE_S, BUSY_S = 60.0, 300.0  # without progress, at least, of processes that compute nothing, and of others
STARTING_S = 120.0  # the same of processes that compute nothing, before the first step
IDLE_STEPS, BUSY_STEPS = 3.0, 10.0  # the same in units of the longest step so far
IDLE_CPU, SAMPLE_S = 0.05, 1.0  # CPU seconds per second of an idle run, measured over this time
HEALTH_S, MAX_REQUESTS = 10.0, 16  # of an engine's answer to /health; concurrent requests
PROGRESS_FILES = ("ledger.jsonl", "metrics.jsonl")  # written after each group, and after each step
NOTED_CAUSES = {
    "HOOK02": "A custom function does not return.",
    "HANG01": "A custom function, or what it calls, does not return.",
    "REW03": "A reward function, or a server that it asks, does not return.",
    "ENG06": "An engine server does not answer.",
    "SYNC01": "The weights do not arrive in an engine.",
}
NO_PROGRESS = frozenset({"diagnosis", "hang", "no_progress", "blocked", "engine_silent", "placement_waiting"})
PARTS = (  # text in the command line of a process, and what the process is
    ("furlong serve", "engine server"),
    ("sglang", "engine server"),
    ("rewards.sandbox_worker", "reward worker"),
    ("environments.worker_process", "environment worker"),
    ("ray::TrainerRank", "trainer rank"),
    ("ray::", "process of Ray"),
)
NO_ANSWER = "A custom function, an engine or another process does not return."
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

    @property
    def part(self) -> str:
        """What it is in the run, such as `reward worker`."""
        if self.is_main:
            return "the run's own process"
        return next((part for sign, part in PARTS if sign in self.command), "process")

    def __str__(self) -> str:
        port = re.search(r"--port[ =](\d+)", self.command) if self.is_engine else None
        return f"{self.part} {self.pid} ({f'port {port[1]}' if port else self.command[:60]})"


@dataclass(frozen=True)
class Liveness:
    """What is known about a run's processes.

    cpu: CPU seconds that they use per second; None if not measured. busiest: the one that uses most of it, if any does.
    """

    processes: Sequence[RunProcess]
    cpu: float | None = None
    busiest: RunProcess | None = None


def is_gone(run: RecordedRun) -> bool:
    """Whether the run's process was on this machine and is gone, although another one has its log open."""
    start = run.started
    if start.get("process") is None or start.get("machine") != socket.gethostname():
        return False
    return _main_process(start) is None


def diagnose_standstill(run: RecordedRun, *, now_s: float | None = None) -> list[Diagnosis]:
    """HANG01, ENG06, ENG03: what stands still in a run that is in progress, [] if nothing does.

    Measures the CPU time of the run's processes for a second if there was no progress for long, and sends a health
    request to each external engine.
    """
    age_s, last = last_progress(run, time.time() if now_s is None else now_s)
    processes = _processes(run)
    is_measured = bool(processes) and age_s > IDLE_S
    liveness = _measured(processes) if is_measured else Liveness(processes)
    diagnoses = stopped_processes(liveness.processes)
    if addresses := run.config.cluster.rollout_external_engine_addrs:
        with ThreadPoolExecutor(MAX_REQUESTS) as pool:
            diagnoses += chain.from_iterable(pool.map(unanswering_engine, addresses))
    return diagnoses or without_progress(run, age_s, last, liveness)


def last_progress(run: RecordedRun, now_s: float) -> tuple[float, str]:
    """Return the seconds since the last progress, and what it was. Groups of samples count: the ledger's last write."""
    times = [(float(e["time"]), str(e["event"])) for e in run.since_start if "time" in e and is_progress(e)]
    for name in PROGRESS_FILES:
        path = run.folder / name
        if path.exists():
            times.append((path.stat().st_mtime, f"write to {name}"))
    when, what = max(times, default=(now_s, "nothing"))
    return max(now_s - when, 0.0), what


def is_progress(event: Mapping[str, Any]) -> bool:
    """Whether an event says that the run came further."""
    return event["event"] not in NO_PROGRESS


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
                    evidence={"stopped": [process.pid for process in stopped], "explains": [id]},  # what a monitor saw
                )
            )
    return diagnoses


def unanswering_engine(address: str) -> list[Diagnosis]:
    """ENG03 for an engine that refuses connections, ENG06 for one that does not answer a health request."""
    url, shown = (address if "://" in address else f"http://{address}"), address.rpartition("@")[2]
    try:
        httpx.get(f"{url.rstrip('/')}/health", timeout=HEALTH_S, trust_env=False)
    except httpx.TimeoutException:
        return [
            diagnosis(
                "ENG06",
                f"the engine at {shown} did not answer /health within {HEALTH_S:g} s",
                remedy="inspect its process (`ps`: state T means stopped, `kill -CONT` resumes it; `py-spy dump` shows "
                "where it is) and the end of its log",
                evidence={"address": shown},
            )
        ]
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return [
            diagnosis(
                "ENG03",
                f"the engine at {shown} is unreachable: {error}",
                cause="Its process ended, or the network between this machine and it does not work.",
                remedy="read the end of its log, and start it again",
                evidence={"address": shown},
            )
        ]
    return []


def without_progress(run: RecordedRun, age_s: float, last: str, liveness: Liveness) -> list[Diagnosis]:
    """HANG01: no progress for much longer than the steps so far took; sooner if the run's processes compute nothing."""
    longest_s = _longest_step(run)
    is_idle = liveness.cpu is not None and liveness.cpu < IDLE_CPU and not _has_remote_parts(run)
    if longest_s is None:
        limit_s = STARTING_S if is_idle else max(BUSY_S, run.config.fault.hang_timeout)
    else:
        least_s, steps = (IDLE_S, IDLE_STEPS) if is_idle else (BUSY_S, BUSY_STEPS)
        limit_s = max(least_s, steps * longest_s)
    if age_s <= limit_s:
        return []
    usual = "no step is complete" if longest_s is None else f"the longest step took {longest_s:.3g} s"
    note = standstill_note(run)
    looked_at = [each.pid for each in liveness.processes if each.part == "reward worker"]
    if note.probable != "REW03" or not looked_at:
        looked_at = [each.pid for each in liveness.processes if each.is_main]
    doing, remedy = f": {note.text}" if note.text else "", f"{note.remedy}; " if note.remedy else ""
    timeout_s = run.config.fault.hang_timeout
    return [
        diagnosis(
            "HANG01",
            f"no progress for {age_s:.0f} s (last: {last}; {usual}{_cpu_text(liveness)}){doing}",
            cause=note.cause or (NO_ANSWER if is_idle else "One part takes much longer than before, or does not end."),
            remedy=f"{remedy}`py-spy dump --pid {looked_at[0] if looked_at else 'PID'}` shows where it is; a lower "
            f"--hang-timeout (now {timeout_s:g} s) reports all stacks and the function that is awaited",
            severity="warning",
            evidence={
                "seconds": round(age_s, 1),
                "last": last,
                "longest_step_s": longest_s,
                "cpu": liveness.cpu,
                "probable": note.probable,
                "explains": note.explains,
            },
        )
    ]


def _cpu_text(liveness: Liveness) -> str:
    if liveness.cpu is None:
        return ""
    busiest = "" if liveness.busiest is None else f", most of it {liveness.busiest}"
    return f"; its processes use {liveness.cpu:.0%} of a CPU{busiest}"


@dataclass(frozen=True)
class Note:
    """What a run recorded about its standstill, "" if nothing: what it does, the remedy, and the row of its cause."""

    text: str = ""
    remedy: str = ""
    probable: str = ""

    @property
    def cause(self) -> str:
        """The cause in one sentence, "" if it is not known."""
        return NOTED_CAUSES.get(self.probable, "")

    @property
    def explains(self) -> Sequence[str]:
        """Rows that monitors report for the same cause."""
        return ("HOOK02",) if self.probable == "HOOK02" else ()


def standstill_note(run: RecordedRun) -> Note:
    """Return what the run itself recorded since its last progress.

    A line of user code that blocks its event loop says more than what the run was doing as a whole.
    """
    written = max((path.stat().st_mtime for name in PROGRESS_FILES if (path := run.folder / name).exists()), default=0)
    noted: dict[str, Mapping[str, Any]] = {}
    for event in reversed(run.since_start):
        if is_progress(event) or float(event.get("time", 0)) < written:
            break
        noted.setdefault(str(event["event"]), event)
    if (blocked := noted.get("blocked")) is not None:
        where = blocked.get("where")
        return Note(f"{where} blocks the run", "fix that function", "HOOK02")
    if (note := noted.get("no_progress")) is not None:
        return _described(run, str(note.get("doing")), str(note.get("probable")))
    return Note()


def _described(run: RecordedRun, doing: str, probable: str) -> Note:
    """Return what a run noted; of reward calls the flags of the reward, since their code runs in other processes."""
    if probable == "REW03":
        reward = next((run.flags[name] for name in ("custom_rm_path", "rm_url", "rm_type") if run.flags[name]), None)
        doing = f"reward calls ({reward}) do not return"
    if probable == "HANG01" and doing.startswith(ALL_IDLE):
        return Note(doing)
    return Note(doing, hang_remedy(probable, RunFacts.of(run.config)), probable)


def _longest_step(run: RecordedRun) -> float | None:
    """Return the seconds of the longest step since the start, from the times of its events; None before the first."""
    times = [float(e["time"]) for e in run.since_start if "time" in e and e["event"] in ("start", "step")]
    return max((b - a for a, b in pairwise(times)), default=None) if run.steps_since_start else None


def _has_remote_parts(run: RecordedRun) -> bool:
    """Whether processes of the run may be on other machines, so that those here may wait for them."""
    config = run.config
    return bool(config.cluster.rollout_external_engine_addrs) or config.cluster.ray_address is not None


def _main_process(start: Mapping[str, Any]) -> psutil.Process | None:
    """Return the process of the last start; None if it is gone (another process may have its number)."""
    try:
        process = psutil.Process(start["process"])
        is_later = process.create_time() > float(start.get("time", 0)) + 1
        return None if is_later or process.status() == psutil.STATUS_ZOMBIE else process
    except psutil.Error:
        return None


def _processes(run: RecordedRun) -> list[RunProcess]:
    """List the run's process and those that it started, [] if they are not on this machine."""
    start = run.started
    if start.get("process") is None or start.get("machine", "") != socket.gethostname():
        return []
    main = _main_process(start)
    if main is None:
        return []
    found: list[RunProcess] = []
    for process in [main, *main.children(recursive=True)]:
        try:
            command = " ".join(" ".join(process.cmdline()).split()) or process.name()
            found.append(RunProcess(process.pid, command, process.status() in STOPPED, process.pid == main.pid))
        except psutil.Error:  # it ended just now
            continue
    return found


def _measured(processes: Sequence[RunProcess]) -> Liveness:
    """Measure the CPU seconds per second that the processes use."""
    before = [(process, _cpu_seconds(process.pid)) for process in processes]
    time.sleep(SAMPLE_S)
    rates = [(max(_cpu_seconds(process.pid) - used, 0.0) / SAMPLE_S, process) for process, used in before]
    total = sum(rate for rate, _ in rates)
    rate, busiest = max(rates, key=lambda each: each[0])
    return Liveness(processes, total, busiest if total >= IDLE_CPU and rate > total / 2 else None)


def _cpu_seconds(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
