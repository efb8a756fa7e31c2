"""A run that has a start and no end: it was killed, unless it goes on where this process cannot see it."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from furlong.catalogue import Diagnosis, diagnosis
from furlong.diagnosis.postmortem.recorded_run import RecordedRun
from furlong.diagnosis.postmortem.standing_still import is_progress, last_progress, standstill_note
from furlong.files.atomic import is_locked
from furlong.tracking.run_files import EVENTS, RUN_LOG, read_intact_rows

DOING = {
    "weight_update_started": "during a weight update",
    "publishing": "during a weight update",  # the name in runs of older versions
    "save": "after a save",
}


def may_go_on(run: RecordedRun) -> bool:
    """Whether a run without an end may be in progress: on another machine, or in the folder that this is a copy of."""
    return _other_machine(run) is not None or _original_in_progress(run) is not None


def killed(run: RecordedRun) -> Diagnosis:
    """KILL01: what is known about a run without an end."""
    if (original := _original_in_progress(run)) is not None:
        return diagnosis(
            "KILL01",
            f"{run.folder} is a copy of {original}, where the run is in progress; the copy ends after step "
            f"{run.last_step}",
            cause="The folder was copied before the run ended.",
            remedy=f"examine the run itself: `furlong doctor --run {original}`",
            severity="info",
            evidence={"original": str(original)},
        )
    last = next((event for event in reversed(run.since_start) if is_progress(event)), run.events[-1])
    doing, stood = DOING.get(last["event"], ""), standstill_note(run)
    resume = _how_to_resume(run)
    stand = f"it stood still before it was killed: {stood.remedy}; " if stood.remedy else ""
    evidence = {"step": run.last_step, "last_event": dict(last)}
    if (machine := _other_machine(run)) is not None:
        process, age_s = run.started.get("process"), last_progress(run, time.time())[0]
        return diagnosis(
            "KILL01",
            f"{run.folder}: the run started on {machine} (process {process}) and has no end; its last progress was "
            f"{age_s:.0f} s ago, after step {run.last_step} (last event: {last['event']})",
            cause=f"Something outside ended it, or it is in progress on {machine}, whose processes cannot be seen from "
            f"{socket.gethostname()}.",
            remedy=f"run the doctor on {machine}; without process {process} there, the run was killed: {stand}{resume}",
            evidence=evidence | {"machine": machine, "seconds": round(age_s, 1)},
        )
    return diagnosis(
        "KILL01",
        f"{run.folder}: the run started but did not end; it was killed after step {run.last_step}"
        + (f", {doing}" if doing else "")
        + f" (last event: {last['event']})"
        + (f"; it stood still before: {stood.text}" if stood.text else ""),
        remedy="check for the out-of-memory killer (`dmesg | grep -i oom`) and for the scheduler's limits, and, if the "
        f"exit code was 0, for functions of yours that call os._exit; {stand}{resume}",
        evidence=evidence,
    )


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


def _other_machine(run: RecordedRun) -> str | None:
    """Return the machine of the last start if it is not this one."""
    machine = run.started.get("machine")
    return machine if machine and machine != socket.gethostname() else None


def _original_in_progress(run: RecordedRun) -> Path | None:
    """Return the folder that this one is a copy of, if its run is in progress."""
    if run.config.track.output_dir is None:
        return None
    original = Path(run.config.track.output_dir)
    if original.resolve() == run.folder.resolve() or not is_locked(original / RUN_LOG):
        return None
    starts = [event for event in read_intact_rows(original / EVENTS, "event")[0] if event["event"] == "start"]
    return original if starts and starts[-1] == run.started else None
