"""Post-mortem of a run: its status, and diagnoses from its exception, metrics, events and logs."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from furlong.catalogue import Diagnosis, diagnosis, most_severe_first
from furlong.diagnosis.postmortem.out_of_memory import is_out_of_memory
from furlong.diagnosis.postmortem.recorded_run import RecordedRun
from furlong.diagnosis.postmortem.signatures import (
    LogText,
    match_general,
    match_specific,
    parse_diagnosis,
    user_error_exclusions,
)
from furlong.diagnosis.postmortem.standing_still import diagnose_standstill, is_gone, standstill_note
from furlong.diagnosis.postmortem.sudden_end import killed, may_go_on
from furlong.errors import EngineError, EngineTimeoutError, HookError, UnreachableError, failure_record
from furlong.files.atomic import is_locked
from furlong.inference.supervisor.process import last_text, tail
from furlong.tracking.run_files import (
    EVENTS,
    RUN_LOG,
    RUN_STARTS,
    EventLog,
    read_intact_rows,
    read_steps,
)

Status = Literal["finished", "stopped", "failed", "killed", "running", "not started", "unknown"]
ENDS: Mapping[str, Status] = {"end": "finished", "failed": "failed", "stopped": "stopped"}
TAIL_LINES = 12  # of a log, to show
RECORDED = tuple(field.name for field in fields(Diagnosis))
ENGINE_ERRORS = frozenset(error.__name__ for error in (EngineError, EngineTimeoutError, UnreachableError))
ENGINE_LOG_ROWS = frozenset({"ENG01", "ENG02", "ENG03", "ENG05", "GPU04"})


@dataclass(frozen=True)
class Examination:
    """The state of a run. `last_words` has the name and the last lines of the log that matters most."""

    folder: str
    status: Status
    step: int
    num_steps: int | None
    error: str
    diagnoses: Sequence[Diagnosis]
    last_words: Sequence[str] = ()

    @property
    def is_healthy(self) -> bool:
        """Whether the run is running or finished, without diagnoses other than infos."""
        return self.status in ("finished", "running") and all(d.severity == "info" for d in self.diagnoses)

    def headline(self) -> str:
        """Return the folder, status and number of steps in one line."""
        total = f" of {self.num_steps}" if self.num_steps is not None else ""
        error = f": {self.error}" if self.error else ""
        return f"{self.folder}: {self.status} after {self.step}{total} steps{error}"

    def record(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "ok": self.is_healthy,
            "status": self.status,
            "step": self.step,
            "num_steps": self.num_steps,
            "error": self.error,
            "findings": [each.record() for each in self.diagnoses],
            "last_words": list(self.last_words),
        }


def examine(folder: Path) -> Examination:
    """Examine the folder of a running or ended run. Raises ConfigError if it is not one.

    Applies the monitors to `metrics.jsonl` and `events.jsonl`, and searches logs for known errors.
    """
    run = RecordedRun.read(folder, f"--run {folder}")
    status, failure = status_of(folder, run.events)
    if status == "running" and is_gone(run):
        status = "killed"
    diagnoses = [*run.diagnose(), *run.damage(is_running=status == "running")]
    error, words = _first_line(failure) if failure else "", list[str]()
    if status == "running":
        standing = diagnose_standstill(run)
        explained = {id for each in standing for id in each.evidence.get("explains", ())}
        diagnoses = [each for each in diagnoses if each.id not in explained]
        known = {each.id for each in diagnoses if each.severity != "info"}
        diagnoses += [each for each in standing if each.id not in known]
    if status == "killed":
        diagnoses = [each for each in diagnoses if each.id not in standstill_note(run).explains]
    if status in ("failed", "killed"):
        diagnoses += _failure_diagnoses(run, failure, status=status, known=[d.id for d in diagnoses])
        words = last_words(_relevant_log(folder, diagnoses, failure or {}))
    if status == "killed" and may_go_on(run):
        status = "unknown"
    num_steps = run.config.data.num_rollout
    return Examination(str(folder), status, run.last_step, num_steps, error, most_severe_first(diagnoses), words)


def _first_line(failure: Mapping[str, Any]) -> str:
    """Return the exception that ended a run and the first line of its message, as far as there are any."""
    message = str(failure.get("message", "")).splitlines()[:1]
    return ": ".join([*([str(failure["error"])] if failure.get("error") else []), *message])


def record_failure(folder: Path, error: BaseException, diagnoses: Sequence[Diagnosis]) -> None:
    """Write the failure of a run to its events, unless it is there already, and its diagnoses."""
    last = _last_transition(events_of(folder))
    log = EventLog(folder / EVENTS)
    if last is None or last["event"] == "start":
        log.write("failed", **failure_record(error))
    for each in diagnoses:
        log.write("diagnosis", **each.record())
    log.close()


def _last_transition(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the last event that marks a start or an end."""
    return next((event for event in reversed(events) if event["event"] in ("start", *ENDS)), None)


def status_of(folder: Path, events: Sequence[Mapping[str, Any]]) -> tuple[Status, Mapping[str, Any] | None]:
    """Return the status of the last start in `events`, and the event that ended it early.

    A start without an end was killed. Steps without a start are "unknown".
    """
    last = _last_transition(events)
    if last is not None and last["event"] in ENDS:
        status = ENDS[last["event"]]
        return status, None if status == "finished" else last
    if is_running(folder):
        return "running", None
    if last is None:
        return ("unknown" if read_steps(folder) else "not started"), None
    return "killed", None


def is_running(folder: Path) -> bool:
    """Whether a process holds the lock on the run's log, as a run does until its end."""
    return is_locked(folder / RUN_LOG)


def events_of(folder: Path) -> list[dict[str, Any]]:
    """Read the events of a run; a last line that a kill cut off is skipped."""
    return read_intact_rows(folder / EVENTS, "event")[0]


def logs_of(folder: Path) -> list[Path]:
    """List the logs of the run's engines and workers under logs/, the most recently written last."""
    return sorted((folder / "logs").rglob("*.log"), key=lambda path: path.stat().st_mtime)


def _relevant_log(folder: Path, diagnoses: Sequence[Diagnosis], failure: Mapping[str, Any]) -> Path:
    """Return the log of the process that failed: the one that the error names, or the run's own.

    The log written last is that of a survivor, so without a name it counts only if it is the only one.
    """
    logs = logs_of(folder)
    if not any(each.id in ENGINE_LOG_ROWS for each in diagnoses):
        return folder / RUN_LOG
    texts = [str(failure.get("message", "")), *(str(each.evidence.get("text", "")) for each in diagnoses)]
    texts += [each.finding for each in diagnoses if each.id in ENGINE_LOG_ROWS]
    sources = [str(each.evidence.get("source", "")) for each in diagnoses if each.id in ENGINE_LOG_ROWS]
    for log in logs:
        if any(log.name in text for text in texts) or str(log.relative_to(folder)) in sources:
            return log
    for log in logs:
        if any(_names_process(text, log.stem) for text in texts):
            return log
    return logs[0] if len(logs) == 1 else folder / RUN_LOG


def _names_process(text: str, stem: str) -> bool:
    """Whether a text names the process of a log: `engine 1` that of `engine-1`, `trainer rank 0` `trainer-rank-0`."""
    return re.search(rf"\b{re.escape(stem.replace('-', ' '))}\b", text) is not None


def last_words(path: Path) -> list[str]:
    """Return the name and last lines of a log."""
    lines = tail(path, TAIL_LINES)
    return [f"last lines of {path}:", *(line[:300] for line in lines)] if lines else []


def _failure_diagnoses(
    run: RecordedRun, failure: Mapping[str, Any] | None, *, status: Status, known: list[str]
) -> list[Diagnosis]:
    diagnoses, events = list[Diagnosis](), list(run.events)
    if failure is not None:
        explained = [event for event in events[events.index(failure) :] if event["event"] == "diagnosis"]
        diagnoses += [Diagnosis(**{name: event[name] for name in RECORDED}) for event in explained]
        stated = parse_diagnosis(str(failure["message"]))
        if stated is not None and stated.id not in [each.id for each in diagnoses]:
            diagnoses.insert(0, stated)
    diagnoses = [each for each in diagnoses if each.id not in known]
    flags, facts, failure = run.flags, {"steps": run.last_step}, failure or {}
    texts = [*_run_texts(run, failure), *_log_texts(run.folder, flags, facts)]
    diagnoses += _match_all(texts, failure, known=[*known, *(d.id for d in diagnoses)], is_explained=bool(diagnoses))
    if status == "killed":
        diagnoses.append(killed(run))
    return diagnoses


def _run_texts(run: RecordedRun, failure: Mapping[str, Any]) -> list[LogText]:
    """Return the end of the run's log, and the failure as its event has it if the log lacks it."""
    path, facts = run.folder / RUN_LOG, {"steps": run.last_step}
    texts = [LogText(RUN_LOG, _since_start(last_text(path)), run.flags, facts, failure)] if path.exists() else []
    first_line = str(failure.get("message", "")).partition("\n")[0]
    if first_line and not any(first_line in text.content for text in texts):
        texts.append(LogText(EVENTS, f"{failure.get('error')}: {failure['message']}", run.flags, facts, failure))
    return texts


def _log_texts(folder: Path, flags: Mapping[str, Any], facts: Mapping[str, Any]) -> list[LogText]:
    """Read the ends of the logs of engines and workers."""
    return [LogText(str(log.relative_to(folder)), last_text(log), flags, facts) for log in logs_of(folder)]


def _match_all(
    texts: Sequence[LogText], failure: Mapping[str, Any], *, known: Sequence[str], is_explained: bool
) -> list[Diagnosis]:
    """Diagnose texts, once per id; those of engines first if an engine failed, because they have the details.

    The words of general kinds count only if nothing else explains the failure.
    Errors of custom functions do not count as those of engines, except in the engines' own logs.
    """
    diagnoses: list[Diagnosis] = []
    excluded = user_error_exclusions(str(failure.get("error")), str(failure.get("message", "")))
    ordered = list(reversed(texts) if failure.get("error") in ENGINE_ERRORS else texts)
    for text in ordered:
        skipped = excluded if text.failure is not None else ()
        diagnoses += match_specific(text, known=(*known, *skipped, *(d.id for d in diagnoses)))
    if diagnoses or is_explained or failure.get("error") == HookError.__name__:
        return diagnoses
    return next(filter(None, (match_general(text, known=known) for text in ordered)), [])


def _since_start(log: str) -> str:
    """Return the part of a log since the last start; all of it if it has no start."""
    return log[max(log.rfind(f"furlong: {RUN_STARTS}"), 0) :]


HOOK_ERRORS = (HookError.__name__, "ProcessChangedError")  # which name the function themselves
AfterMemory = Callable[[BaseException], Mapping[str, Any]]


def explain(
    error: BaseException, folder: Path, flags: Mapping[str, Any], *, after_memory: AfterMemory | None = None
) -> tuple[list[Diagnosis], list[str]]:
    """Diagnose an exception that is about to end a run; return the diagnoses and the last lines of the relevant log.

    Searches the traceback and the engines' logs. An error that is a diagnosis itself is not repeated.
    `after_memory(error)` returns facts of an out-of-memory error.
    """
    facts: dict[str, Any] = {"steps": (read_steps(folder) or [(0, {})])[-1][0]}
    if after_memory is not None and is_out_of_memory(error):
        facts |= after_memory(error)
    failure, stated = failure_record(error), parse_diagnosis(str(error))
    text = LogText("traceback", "".join(traceback.format_exception(error)), flags, facts, failure)
    known = [stated.id] if stated is not None else []
    diagnoses = _match_all(
        [text, *_log_texts(folder, flags, facts)], failure, known=known, is_explained=stated is not None
    )
    if isinstance(error, HookError) and not diagnoses:
        cause = "The custom function raised it, or something that it calls."
        diagnoses.append(diagnosis("HOOK01", str(error).partition("\n")[0], cause=cause))
    log = _relevant_log(folder, diagnoses, failure)
    return diagnoses, last_words(log) if log.name != RUN_LOG else []
