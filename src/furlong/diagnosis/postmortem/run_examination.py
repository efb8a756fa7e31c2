"""Examines the folder of a run: how it stands, what its monitors say of its metrics, and what its logs say."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from furlong.config.sections import by_field
from furlong.core.catalogue import Diagnosis, diagnosis, most_severe_first
from furlong.core.files import is_locked
from furlong.core.text import abbreviate
from furlong.diagnosis.monitors import MONITORS
from furlong.diagnosis.monitors.monitor import MonitorSuite
from furlong.diagnosis.monitors.run_facts import RunFacts
from furlong.diagnosis.postmortem.out_of_memory import is_of_memory
from furlong.diagnosis.postmortem.signatures import LogText, blamed_on_users, matches, own_words
from furlong.errors import EngineError, HookError
from furlong.inference.supervisor.log_tail import end_of_log, last_text, tail
from furlong.tracking.event_log import EventLog
from furlong.tracking.run_files import EVENTS, METRICS, RUN_LOG, read_intact_rows, read_sections, read_steps

Status = Literal["finished", "stopped", "failed", "killed", "running", "not started", "unknown"]
ENDS: Mapping[str, Status] = {"end": "finished", "failed": "failed", "stopped": "stopped"}
TAIL_LINES = 12  # that are shown
DAMAGED_LINES = 8  # whose numbers are shown
RECORDED = tuple(field.name for field in fields(Diagnosis))
LOG_OF_ENGINES = frozenset({"ENG01", "ENG02", "ENG03", "ENG05", "GPU04"})


@dataclass(frozen=True)
class Examination:
    """What a run's folder says. `last_words` are the end of the log that matters most, with its name first."""

    folder: str
    status: Status
    step: int
    num_steps: int | None
    error: str
    found: Sequence[Diagnosis]
    last_words: Sequence[str] = ()

    @property
    def is_healthy(self) -> bool:
        """Whether the run is going on or has ended as it should, and nothing but infos was found."""
        return self.status in ("finished", "running") and all(d.severity == "info" for d in self.found)

    def headline(self) -> str:
        """One line: the folder, how the run stands, and after how many steps."""
        of = f" of {self.num_steps}" if self.num_steps is not None else ""
        why = f": {self.error}" if self.error else ""
        return f"{self.folder}: {self.status} after {self.step}{of} steps{why}"

    def record(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "ok": self.is_healthy,
            "status": self.status,
            "step": self.step,
            "num_steps": self.num_steps,
            "error": self.error,
            "findings": [found.record() for found in self.found],
            "last_words": list(self.last_words),
        }


def examine(folder: Path) -> Examination:
    """Read the folder of a run that goes on or has ended. Raises ConfigError if it is none.

    Monitors are applied again to `metrics.jsonl` and `events.jsonl`, in their order of time as far as it is known;
    logs are searched for what is known to go wrong.
    """
    config = read_sections(folder, f"--run {folder}")
    events = events_of(folder)
    rows = read_steps(folder)
    status, failure = status_of(folder, events)
    step = max([rows[-1][0] if rows else 0, *_steps_since_start(events)])
    found = [*_told_again(config, rows, events), *_lost(folder, rows, events, is_running=status == "running")]
    error = _first_line(failure) if failure else ""
    if status in ("failed", "killed"):
        found += _died(folder, config, failure, events, status=status, step=step, known=[d.id for d in found])
    logs = logs_of(folder)
    words: list[str] = []
    if status in ("failed", "killed"):
        is_engine = any(d.id in LOG_OF_ENGINES for d in found)
        of_engines = [log for log in logs if log.parent != folder]
        words = last_words(of_engines[-1] if is_engine and of_engines else folder / RUN_LOG)
    return Examination(str(folder), status, step, config["data"]["num_rollout"], error, most_severe_first(found), words)


def _first_line(failure: Mapping[str, Any]) -> str:
    """What ended a run: an exception, if one did, and the first line of what it said, if it said anything."""
    said = str(failure.get("message", "")).splitlines()[:1]
    return ": ".join([*([str(failure["error"])] if failure.get("error") else []), *said])


def record_failure(folder: Path, error: BaseException, found: Sequence[Diagnosis]) -> None:
    """Write to a run's events that it failed, if that is not said yet, and then what it failed of."""
    last = _last_turn(events_of(folder))
    log = EventLog(folder / EVENTS)
    if last is None or last["event"] == "start":
        log.write("failed", error=type(error).__name__, message=str(error))
    for each in found:
        log.write("diagnosis", **each.record())
    log.close()


def _last_turn(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The last event that says that a run begins or ends."""
    return next((event for event in reversed(events) if event["event"] in ("start", *ENDS)), None)


def status_of(folder: Path, events: Sequence[Mapping[str, Any]]) -> tuple[Status, Mapping[str, Any] | None]:
    """How the last start in `events` went, and the event that ended it early. A start without an end was killed.

    It is unknown where steps were recorded and no start.
    """
    last = _last_turn(events)
    if last is not None and last["event"] in ENDS:
        status = ENDS[last["event"]]
        return status, None if status == "finished" else last
    if is_running(folder):
        return "running", None
    if last is None:
        return ("unknown" if read_steps(folder) else "not started"), None
    return "killed", None


def is_running(folder: Path) -> bool:
    """Whether a process holds the run's log, as each does until its end."""
    return is_locked(folder / RUN_LOG)


def events_of(folder: Path) -> list[dict[str, Any]]:
    """The events of a run; what a kill left of a line is passed over."""
    return read_intact_rows(folder / EVENTS, "event")[0]


def logs_of(folder: Path) -> list[Path]:
    """Logs of the run's engines and workers under logs/, the last written last."""
    return sorted((folder / "logs").rglob("*.log"), key=lambda path: path.stat().st_mtime)


def last_words(path: Path) -> list[str]:
    """The name of a log and its last lines; of a process's own log before them its first exception."""
    lines = tail(path, TAIL_LINES) if path.name == RUN_LOG else end_of_log(path, TAIL_LINES)
    return [f"the end of {path}:", *(line[:300] for line in lines)] if lines else []


def _told_again(
    config: Mapping[str, Any], rows: Sequence[tuple[int, Mapping[str, float]]], events: Sequence[Mapping[str, Any]]
) -> list[Diagnosis]:
    """What the monitors say of the recorded steps and events; of each id the last word."""
    suite = MonitorSuite(MONITORS, RunFacts.from_recorded(config))
    found = [d for step, row in rows for d in suite.step(step, row)]
    found += [d for event in events for d in suite.event(event)]
    return list({d.id: d for d in found}.values())


def _lost(
    folder: Path, rows: Sequence[tuple[int, Any]], events: Sequence[Mapping[str, Any]], *, is_running: bool
) -> list[Diagnosis]:
    """CHECK01: files of the folder that lack what others of them say, so that less was looked at than it seems."""
    missing: list[str] = []
    for name, key, of_kills in ((METRICS, "step", 0), (EVENTS, "event", 1)):  # an event that a kill cut off stays there
        damaged = read_intact_rows(folder / name, key)[1]
        if len(damaged) > of_kills:
            missing.append(f"{_lines(damaged)} of {name} cannot be read")
    have = {step for step, _ in rows}
    done = _steps_since_start(events)
    if (lacking := done - have) and not is_running:
        missing.append(f"{METRICS} lacks {len(lacking)} of {len(done)} steps")
    if have and not any(event["event"] == "start" for event in events):
        missing.append(f"{EVENTS} does not say that the run began, nor how it ended")
    if not missing:
        return []
    return [
        diagnosis(
            "CHECK01",
            f"{folder}: {'; '.join(missing)}",
            cause="The folder was copied in part, its disk was full, or its files were cut off.",
            remedy="take the folder from where it is whole; what is said here is of the rest",
            evidence={"missing": missing},
        )
    ]


def _lines(numbers: Sequence[int]) -> str:
    """`line 3`, `lines 1, 2, 3`, or the first of many and how many there are."""
    return f"line{'s' * (len(numbers) > 1)} {abbreviate(numbers, DAMAGED_LINES)}"


def _steps_since_start(events: Sequence[Mapping[str, Any]]) -> set[int]:
    """The steps that the last start made, as its events say; a run that resumes repeats some of those before."""
    starts = [i for i, event in enumerate(events) if event["event"] == "start"]
    since = events[starts[-1] if starts else 0 :]
    return {event["step"] for event in since if event["event"] == "step" and type(event.get("step")) is int}


def _died(
    folder: Path,
    config: Mapping[str, Any],
    failure: Mapping[str, Any] | None,
    events: Sequence[Mapping[str, Any]],
    *,
    status: Status,
    step: int,
    known: list[str],
) -> list[Diagnosis]:
    found, not_it = list[Diagnosis](), frozenset[str]()
    if failure is not None:
        explained = [event for event in events[events.index(failure) :] if event["event"] == "diagnosis"]
        found += [Diagnosis(**{name: event[name] for name in RECORDED}) for event in explained]
        own = own_words(str(failure["message"]))
        if own is not None and own.id not in [each.id for each in found]:
            found.insert(0, own)
        not_it = blamed_on_users(str(failure.get("error")), str(failure["message"]))
    found = [each for each in found if each.id not in known]
    facts = {"steps": step}
    is_engine = failure is not None and failure.get("error") == EngineError.__name__  # its own log says more
    paths = [folder / RUN_LOG, *logs_of(folder)]
    for path in reversed(paths) if is_engine else paths:
        if path.exists():
            text = LogText(str(path.relative_to(folder)), _since_start(last_text(path)), by_field(config), facts)
            passed_over = not_it if path is paths[0] else ()  # an engine's log is its own
            found += matches(text, found_first=(*known, *passed_over, *(d.id for d in found)))
    if status == "killed":
        found.append(_killed(folder, config, events, step))
    return found


def _since_start(log: str) -> str:
    """The part of a log that the last start wrote; a log that names no start is returned whole."""
    return log[max(log.rfind("furlong: run folder"), 0) :]


def _killed(folder: Path, config: Mapping[str, Any], events: Sequence[Mapping[str, Any]], step: int) -> Diagnosis:
    last = events[-1]
    saved = config["checkpoint"]["save"] if any(event["event"] == "save" for event in events) else None
    doing = {"publishing": "while it published weights", "save": "after a save"}.get(last["event"], "")
    return diagnosis(
        "KILL01",
        f"{folder}: the run has a start and no end; it was killed after step {step}"
        + (f", {doing}" if doing else "")
        + f" (last event: {last['event']})",
        remedy="look for the out-of-memory killer (`dmesg | grep -i oom`) and for the scheduler's limits; "
        + (f"go on with --load {saved}" if saved else "nothing was saved: give --save to the next run"),
        evidence={"step": step, "last_event": dict(last)},
    )


AfterMemory = Callable[[BaseException], Mapping[str, Any]]


def explain(
    error: BaseException, folder: Path, flags: Mapping[str, Any], *, after_memory: AfterMemory | None = None
) -> tuple[list[Diagnosis], list[str]]:
    """What the error, its traceback and the engines' logs look like; and the last lines of the log that matters.

    An error that is a diagnosis itself is not told again. `after_memory(error)` gives facts of an error of memory.
    """
    facts: dict[str, Any] = {"steps": (read_steps(folder) or [(0, {})])[-1][0]}
    if after_memory is not None and is_of_memory(error):
        facts |= after_memory(error)
    own = own_words(str(error))
    told = [own.id] if own is not None else []
    logs = logs_of(folder)
    texts = [LogText("traceback", "".join(traceback.format_exception(error)), flags, facts)]
    texts += [LogText(str(log.relative_to(folder)), last_text(log), flags, facts) for log in logs]
    found: list[Diagnosis] = []
    not_it = blamed_on_users(type(error).__name__, str(error))
    for text in reversed(texts) if isinstance(error, EngineError) else texts:  # an engine's own log says more
        passed_over = not_it if text is texts[0] else ()  # an engine's log is its own
        found += matches(text, found_first=(*told, *passed_over, *(d.id for d in found)))
    if isinstance(error, HookError) and not found:
        cause = "That function raised it, or what it asks."
        found.append(
            diagnosis(
                "HOOK01",
                str(error).partition("\n")[0],
                cause=cause,
                remedy="mend the function, at the line that it names",
            )
        )
    is_engine = any(d.id in LOG_OF_ENGINES for d in found)
    return found, last_words(logs[-1]) if is_engine and logs else []
