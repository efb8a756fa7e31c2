"""Run folders at many moments, as `furlong doctor --run` gets them: killed, failed, standing still."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from diagnosis_score import Case, case
from faults.score_refusals import recorded_run
from furlong.catalogue import Diagnosis
from furlong.diagnosis.postmortem import run_examination, standing_still
from furlong.diagnosis.postmortem.standing_still import RunProcess
from furlong.errors import ENGINE_EXITED, ENGINE_HANGS, ENGINE_KILLED, MACHINE_MEMORY, WORKER_DIED

Event = dict[str, Any]
MAIN = RunProcess(7, "furlong train", is_stopped=False, is_main=True)
ENGINE = RunProcess(8, "python -m furlong serve", is_stopped=False)
ENGINE_1 = "engine 1 at http://127.0.0.1:2: process 8 was ended by signal 9"


def _examined(
    *,
    upto: str,
    more: Sequence[Event] = (),
    logs: Mapping[str, str] | None = None,
    age_s: float | None = None,
    processes: Sequence[RunProcess] = (),
    cpu: float = 0.0,
    flags: Mapping[str, Any] | None = None,
) -> Callable[[Path], list[Diagnosis]]:
    """Examine a recorded run of two steps that ends with its first event `upto`, or with its last one, for "last".

    more: later events. logs: those of its processes, the survivor's last. age_s: it is in progress, and that is the age
    of its last event. The fix of the first diagnosis has the last words, too.
    """

    def examine(folder: Path) -> list[Diagnosis]:
        run = shutil.copytree(recorded_run(), folder / "run")
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()][:-1]
        if upto != "last":
            events = events[: 1 + next(i for i, event in enumerate(events) if event["event"] == upto)]
        shift = 0.0 if age_s is None else time.time() - age_s - events[-1]["time"]
        num_steps = sum(event["event"] == "step" for event in events)
        steps = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join(steps[:num_steps]))
        for name in ("ledger.jsonl", "metrics.jsonl"):
            os.utime(run / name, (events[-1]["time"] + shift,) * 2)
        rows = [event | {"time": event["time"] + shift} for event in (*events, *more) if "time" in event]
        rows += [{"time": time.time()} | event for event in more if "time" not in event]
        (run / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        _set_flags(run, flags or {})
        for name, text in (logs or {}).items():
            (run / "logs").mkdir(exist_ok=True)
            (run / "logs" / name).write_text(text)
        with contextlib.ExitStack() as stack:
            alive = age_s is not None
            for place, value in {
                (run_examination, "is_running"): lambda _: alive,
                (run_examination, "is_gone"): lambda _: False,
                (standing_still, "_processes"): lambda _: list(processes),
                (standing_still, "_measured"): lambda processes: standing_still.Liveness(processes, cpu),
            }.items():
                stack.enter_context(mock.patch.object(*place, value))
            result = run_examination.examine(run)
        words = "\n".join(result.last_words)
        return [replace(each, remedy=f"{each.remedy}\n{words}") for each in result.diagnoses]

    return examine


def _set_flags(run: Path, changes: Mapping[str, Any]) -> None:
    path = run / "config.json"
    content = json.loads(path.read_text())
    for section in content["config"].values():
        section.update({name: value for name, value in changes.items() if name in section})
    path.write_text(json.dumps(content))


def _failed(error: str, message: str, code: str = "") -> list[Event]:
    return [{"event": "failed", "error": error, "message": message, "code": code}]


TWO_ENGINES = {"engine-1.log": "Traceback\nValueError: of the dead\n", "engine-0.log": "of the survivor\n"}
RANKS = {"trainer-rank-1.log": "Fatal Python error: of the dead\n", "trainer-rank-0.log": "of the survivor\n"}

KILLED = (
    *(case(f"killed after the first {moment}", "KILL01", _examined(upto=moment), remedy=remedy, without=without)
      for moment, remedy, without in (
          ("start", "use --save|dmesg", "resume"),
          ("weight_update_started", "use --save|dmesg", "resume"),
          ("step", "use --save|dmesg", "resume"),
          ("save", "resume with --load", "use --save"),
      )),
    case("killed after its last step", "KILL01", _examined(upto="last"), remedy="resume with --load"),
    case("killed in a weight update after a save", "KILL01",
         _examined(upto="last", more=[{"event": "weight_update_started", "version": 3}]), remedy="resume with --load"),
    case("killed after it had lost an engine", "KILL01",
         _examined(upto="save", more=[{"event": "engine_lost", "engine": 0, "url": "http://127.0.0.1:1",
                                       "reason": "was ended by signal 9", "code": ENGINE_KILLED}]),
         remedy="resume with --load", also="ENG03"),
)  # fmt: skip

FAILED = (
    case("an engine that the kernel killed", "ENG03",
         _examined(upto="step", more=_failed("EngineError", ENGINE_1, ENGINE_KILLED), logs=TWO_ENGINES),
         remedy="oom|engine-1.log|of the dead", without="of the survivor"),
    case("an engine that exited", "ENG03",
         _examined(upto="step", logs=TWO_ENGINES, more=_failed(
             "EngineError", "engine 1 at http://127.0.0.1:2: process 8 ended with exit code 1", ENGINE_EXITED)),
         remedy="read the end of its log|of the dead", without="of the survivor"),
    case("an engine that hung", "ENG03",
         _examined(upto="step", logs=TWO_ENGINES, more=_failed(
             "EngineTimeoutError", "engine 1 at http://127.0.0.1:2: no answer within 600 s", ENGINE_HANGS)),
         remedy="of the dead", without="of the survivor"),
    case("a rank that died", "ENG03",
         _examined(upto="save", more=_failed("TrainerError", "trainer rank 1 is gone", WORKER_DIED), logs=RANKS),
         remedy="resume with --load|of the dead", without="--use-fault-tolerance|of the survivor"),
    case("a rank that died before a save", "ENG03",
         _examined(upto="step", more=_failed("TrainerError", "trainer rank 1 is gone", WORKER_DIED), logs=RANKS),
         remedy="of the dead", without="--use-fault-tolerance|of the survivor"),
    case("a machine without memory", "MEM02",
         _examined(upto="step", more=_failed("TrainerError", "trainer rank 1: Ray ended it, as its machine ran low on "
                                             "memory (0.96 used)", MACHINE_MEMORY), logs=RANKS),
         remedy="--num-reward-workers"),
    case("a disk that was full at a save", "DISK01",
         _examined(upto="save", more=_failed("OSError", "[Errno 28] No space left on device: '/ckpt/w'")),
         remedy="--save"),
    case("a user's function", "HOOK01",
         _examined(upto="step", more=[*_failed("HookError", "--custom-generate-function-path own.py:generate raised "
                                               "RuntimeError: CUDA out of memory at the judge"),
                                      {"event": "diagnosis", "id": "HOOK01", "severity": "error", "finding": "own.py",
                                       "cause": "It raised.", "remedy": "fix it", "evidence": {}}])),
)  # fmt: skip

STILL = (
    *(case(f"no progress for {age} s after {moment}", "HANG01",
           _examined(upto=moment, age_s=age, processes=[MAIN, ENGINE], cpu=cpu), remedy="py-spy dump --pid 7")
      for moment, age, cpu in (("start", 150, 0.0), ("step", 70, 0.0), ("save", 4000, 0.0), ("step", 400, 0.9),
                               ("start", 3700, 0.9))),
    case("a run that Ctrl-Z stopped", "HANG01",
         _examined(upto="step", age_s=5, processes=[replace(MAIN, is_stopped=True), ENGINE]), remedy="kill -CONT 7"),
    case("an engine that was stopped", "ENG06",
         _examined(upto="step", age_s=5, processes=[MAIN, replace(ENGINE, is_stopped=True)]), remedy="kill -CONT 8"),
    case("an engine that is gone", "ENG03",
         _examined(upto="step", age_s=5, processes=[MAIN],
                   flags={"engine": "external", "rollout_external_engine_addrs": ["127.0.0.1:1"]}),
         remedy="start it again", without="--use-fault-tolerance"),
)  # fmt: skip

CASES: tuple[Case, ...] = (*KILLED, *FAILED, *STILL)
