"""Post-mortem of a run: its status, and diagnoses from its exception, metrics, events and logs.

An error that is a diagnosis itself, and an error of user code, end the search for other causes.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from furlong.catalogue import Diagnosis, diagnosis, most_severe_first
from furlong.diagnosis.postmortem.matcher import LogText, find_cause, parse_diagnosis
from furlong.diagnosis.postmortem.out_of_memory import is_out_of_memory
from furlong.diagnosis.postmortem.recorded_run import RecordedRun
from furlong.diagnosis.postmortem.signatures import SIGNATURES
from furlong.diagnosis.postmortem.standing_still import diagnose_standstill, is_gone, killed, other_machine
from furlong.errors import (
    ClusterError,
    EngineError,
    EngineTimeoutError,
    HookError,
    RolloutError,
    SyncError,
    TrainerError,
    UnreachableError,
    failure_record,
)
from furlong.files.atomic import is_locked
from furlong.inference.supervisor.process import last_text, tail
from furlong.tracking.run_files import EVENTS, RUN_LOG, RUN_STARTS, EventLog, read_intact_rows, read_steps

Status = Literal["finished", "stopped", "failed", "killed", "running", "not started", "unknown"]
ENDS: Mapping[str, Status] = {"end": "finished", "failed": "failed", "stopped": "stopped"}
TAIL_LINES = 12  # of a log, to show
LAST_LINES = 60  # of the log of a killed run, to search
# Records about samples, with the indented lines below: user code's own errors do not end a run.
OF_SAMPLES = re.compile(r"^[^\n]* [WE] furlong\.(rollout|rewards)\b[^\n]*\n([ \t][^\n]*\n)*", re.MULTILINE)
RECORDED = tuple(field.name for field in fields(Diagnosis))
# Errors that the log of another process may explain.
ENGINE_ERRORS = (EngineError, EngineTimeoutError, UnreachableError)
OF_PROCESSES = frozenset(e.__name__ for e in (*ENGINE_ERRORS, SyncError, TrainerError, ClusterError, RolloutError))
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
    error, words = "", list[str]()
    if status == "running":
        standing = diagnose_standstill(run)
        proven = {each.id for each in standing if "stopped" in each.evidence}  # monitors saw only what follows from it
        diagnoses = [each for each in diagnoses if each.id not in proven]
        known = {each.id for each in diagnoses if each.severity != "info"}
        diagnoses += [each for each in standing if each.id not in known]
    if failure is not None:
        message = str(failure.get("message", "")).splitlines()[:1]
        error = ": ".join([*([str(failure["error"])] if failure.get("error") else []), *message])
    if status in ("failed", "killed"):
        found = _causes(run, failure or {}, status=status)
        diagnoses += [each for each in found if each.id not in [known.id for known in diagnoses]]
        words = last_words(_relevant_log(folder, found, failure or {}))
    if status == "killed" and other_machine(run) is not None:
        status = "unknown"
    num_steps = run.config.data.num_rollout
    return Examination(str(folder), status, run.last_step, num_steps, error, most_severe_first(diagnoses), words)


AfterMemory = Callable[[BaseException], Mapping[str, Any]]


def explain(
    error: BaseException, folder: Path, flags: Mapping[str, Any], *, after_memory: AfterMemory | None = None
) -> tuple[list[Diagnosis], list[str]]:
    """Diagnose an exception that is about to end a run; return the diagnoses and the last lines of the relevant log.

    Searches the traceback and the engines' logs. An error that is a diagnosis itself is not repeated.
    `after_memory(error)` returns facts of an out-of-memory error.
    """
    failure = failure_record(error)
    if parse_diagnosis(str(error)) is not None:
        return [], []
    if isinstance(
        error, HookError
    ):  # the user's; but torch's compiler, which it may call, has a cache that can be damaged
        own = LogText("traceback", "".join(traceback.format_exception(error)), flags, {}, failure)
        damaged = find_cause([signature for signature in SIGNATURES if signature.id == "ENG02"], [own])
        found = [damaged] if damaged is not None else _of_user(failure)
    else:
        facts: dict[str, Any] = {"steps": (read_steps(folder) or [(0, {})])[-1][0]}
        if after_memory is not None and is_out_of_memory(error):
            facts |= after_memory(error)
        own = LogText("traceback", "".join(traceback.format_exception(error)), flags, facts, failure)
        found = _search(own, _log_texts(folder, flags, facts))
    log = _relevant_log(folder, found, failure)
    return found, last_words(log) if log.name != RUN_LOG else []


def record_failure(folder: Path, error: BaseException, diagnoses: Sequence[Diagnosis]) -> None:
    """Write the failure of a run to its events, unless it is there already, and its diagnoses."""
    last = _last_transition(read_intact_rows(folder / EVENTS, "event")[0])
    log = EventLog(folder / EVENTS)
    if last is None or last["event"] == "start":
        log.write("failed", **failure_record(error))
    for each in diagnoses:
        log.write("diagnosis", **each.record())
    log.close()


def status_of(folder: Path, events: Sequence[Mapping[str, Any]]) -> tuple[Status, Mapping[str, Any] | None]:
    """Return the status of the last start in `events`, and the event that ended it early.

    A start without an end was killed. Steps without a start are "unknown".
    """
    last = _last_transition(events)
    if last is not None and last["event"] in ENDS:
        status = ENDS[last["event"]]
        return status, None if status == "finished" else last
    if is_locked(folder / RUN_LOG):  # as a run holds it until its end
        return "running", None
    if last is None:
        return ("unknown" if read_steps(folder) else "not started"), None
    return "killed", None


def _last_transition(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    return next((event for event in reversed(events) if event["event"] in ("start", *ENDS)), None)


def _causes(run: RecordedRun, failure: Mapping[str, Any], *, status: Status) -> list[Diagnosis]:
    if failure:
        after = run.events[list(run.events).index(failure) :]
        recorded = [
            Diagnosis(**{name: event[name] for name in RECORDED}) for event in after if event["event"] == "diagnosis"
        ]
        own = parse_diagnosis(str(failure["message"]))
        if found := [*([own] if own is not None else []), *(d for d in recorded if own is None or d.id != own.id)]:
            return found
        if failure.get("error") == HookError.__name__:
            return _of_user(failure)
    facts = {"steps": run.last_step}
    if status == "killed":
        log = last_text(run.folder / RUN_LOG)
        log = OF_SAMPLES.sub("", log[max(log.rfind(f"furlong: {RUN_STARTS}"), 0) :])
        end, cause = killed(run, log), None
        if "stack" not in end.evidence:
            lines = log.splitlines()[-LAST_LINES:]
            cause = find_cause(SIGNATURES, [LogText(RUN_LOG, "\n".join(lines), run.flags, facts)])
        return [each for each in (cause, end) if each is not None]
    own = LogText(EVENTS, f"{failure.get('error')}: {failure['message']}", run.flags, facts, failure)
    return _search(own, _log_texts(run.folder, run.flags, facts))


def _search(own: LogText, logs: Sequence[LogText]) -> list[Diagnosis]:
    of_process = own.failure.get("error") in OF_PROCESSES or own.code != ""
    found = find_cause(SIGNATURES, [*logs, own] if of_process else [own])  # logs have the details
    return [found] if found is not None else []


def _of_user(failure: Mapping[str, Any]) -> list[Diagnosis]:
    cause = "The custom function raised it, or something that it calls."
    finding = str(failure.get("message", "")).partition("\n")[0]
    return [diagnosis("HOOK01", finding, cause=cause, remedy="fix it at the line that the message shows")]


def _log_texts(folder: Path, flags: Mapping[str, Any], facts: Mapping[str, Any]) -> list[LogText]:
    return [LogText(str(log.relative_to(folder)), last_text(log), flags, facts) for log in logs_of(folder)]


def logs_of(folder: Path) -> list[Path]:
    """List the logs of the run's engines and workers under logs/, the most recently written last."""
    return sorted((folder / "logs").rglob("*.log"), key=lambda path: path.stat().st_mtime)


def _relevant_log(folder: Path, diagnoses: Sequence[Diagnosis], failure: Mapping[str, Any]) -> Path:
    """Return the log of the process that failed: the one that the error names, or the run's own.

    The log written last is that of a survivor, so without a name it counts only if it is the only one.
    """
    of_engine = [each for each in diagnoses if each.id in ENGINE_LOG_ROWS]
    if not of_engine:
        return folder / RUN_LOG
    logs, sources = logs_of(folder), [str(each.evidence.get("source", "")) for each in of_engine]
    text = "\n".join([str(failure.get("message", "")), *(each.finding for each in of_engine)])
    for log in logs:
        if log.name in text or str(log.relative_to(folder)) in sources:
            return log
    for log in logs:  # `engine 1` names engine-1.log
        if re.search(rf"\b{re.escape(log.stem.replace('-', ' '))}\b", text):
            return log
    return logs[0] if len(logs) == 1 else folder / RUN_LOG


def last_words(path: Path) -> list[str]:
    """Return the name and last lines of a log."""
    lines = tail(path, TAIL_LINES)
    return [f"last lines of {path}:", *(line[:300] for line in lines)] if lines else []
