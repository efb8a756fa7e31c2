"""The status of a run from its folder, and what its error, events and logs say about its end."""

from __future__ import annotations

import asyncio
import fcntl
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from furlong.catalogue import Diagnosis
from furlong.commands.doctor import doctor
from furlong.config import parse
from furlong.config.sections import Config
from furlong.core.batch import pack_micro_batch
from furlong.diagnosis.postmortem.out_of_memory import OutOfMemoryReport
from furlong.diagnosis.postmortem.run_examination import examine, explain
from furlong.errors import (
    ENGINE_HANGS,
    ENGINE_KILLED,
    MACHINE_MEMORY,
    PLACEMENT_TIMEOUT,
    WORKER_DIED,
    ClusterError,
    ConfigError,
    DataError,
    EngineError,
    FurlongError,
    HookError,
    Loss,
    RolloutError,
    TrainerError,
    failure_record,
)
from furlong.inference.supervisor.process import LocalHost, ServerProcess
from furlong.tools.run_diff import summarize
from furlong.tracking.run_files import read_rows, read_steps
from models_zoo import random_batch


@pytest.mark.parametrize(
    ("id", "error"),
    [
        ("ENG03", Loss("anything", ENGINE_KILLED, "engine 0", "an empty log").error(suffix="\nand a fix")),
        ("ENG03", TrainerError("a rank is no more", code=WORKER_DIED)),
        ("ENG03", EngineError("engine 0 stands still while it starts", code=ENGINE_HANGS)),
        ("MEM02", TrainerError("Ray took a rank", code=MACHINE_MEMORY)),
        ("GPU02", ClusterError("too few slots", code=PLACEMENT_TIMEOUT)),
    ],
)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_an_error_with_a_code_is_recognized_whatever_it_says(
    tmp_path: Path, id: str, error: FurlongError, is_wrapped: bool
) -> None:
    raised: Exception = error
    if is_wrapped:
        raised = RolloutError("rollout 3 failed")
        raised.__cause__ = error
    [found], _ = explain(pickle.loads(pickle.dumps(error)) if not is_wrapped else raised, tmp_path, {})
    assert (found.id, str(raised).partition("\n")[0] in found.finding) == (id, True)
    failed = {"event": "failed", **failure_record(raised)}
    folder = run_folder(tmp_path, START, failed, log=f"{type(raised).__name__}: {raised}")
    [found] = examine(folder).diagnoses
    assert (found.id, failed["code"]) == (id, error.code)
    if error.code == ENGINE_KILLED:
        assert "dmesg" in found.remedy
    if error.code == ENGINE_HANGS:
        assert ("SIGSTOP" in found.remedy, "dmesg" in found.remedy) == (True, False)


def test_an_error_of_memory_is_explained_by_the_micro_batch_that_ran(tmp_path: Path) -> None:
    def forward_backward(micro: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    batch = random_batch(prompts=[3, 5], responses=[[4], [20]])
    with pytest.raises(torch.OutOfMemoryError) as caught:
        forward_backward(pack_micro_batch(batch, [0, 1]))
    asked: list[dict[str, Any]] = []

    def after_memory(error: BaseException) -> dict[str, Any]:
        asked.append(OutOfMemoryReport(Config()).facts(error))
        return asked[0] | {"predicted": "predicted 9 GiB", "smallest_change": "--max-tokens-per-gpu 16"}

    flags = {"max_tokens_per_gpu": 64}
    [found], words = explain(caught.value, tmp_path, flags, after_memory=after_memory)
    assert "(tried 1.00 GiB; longest sample 25 tokens; predicted 9 GiB)" in found.finding
    assert "forward and backward" in found.evidence["phase"]
    assert (found.remedy.endswith(" --max-tokens-per-gpu 16"), words) == (True, [])
    assert (asked[0]["micro_batch_tokens"], asked[0]["micro_batch_samples"]) == (32, 2)


def test_the_engines_log_explains_an_engine_that_died(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    lines = [f"line {i}" for i in range(30)]
    text = "\n".join([*lines, "CUDA error: an illegal memory access was encountered"])
    (tmp_path / "logs" / "engine-0.log").write_text(text)
    found, words = explain(EngineError("engine http://a:1 is gone: no answer"), tmp_path, {})
    assert [d.id for d in found] == ["ENG01"]
    assert str(tmp_path / "logs" / "engine-0.log") in words[0]
    assert (len(words), words[-1]) == (13, "CUDA error: an illegal memory access was encountered")


SCHEDULER_DIED = (
    """[10:12:29 TP0] sglang is using nccl==2.28.9
[10:12:47 DP0 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/x/sglang/srt/managers/scheduler.py", line 4623, in run_scheduler_process
    scheduler = Scheduler(
                ^^^^^^^^^^
  File "/x/sglang/srt/model_executor/model_runner.py", line 883, in load_model
    raise RuntimeError(message)
{said}

[10:12:47] kill_process_tree called: parent_pid=4823
Traceback (most recent call last):
  File "/x/multiprocessing/connection.py", line 399, in _recv
    raise EOFError
EOFError

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
"""
    + 60 * """  File "/x/sglang/launch_server.py", line 71, in <module>\n"""
    + """\
RuntimeError: Rank 0 scheduler died during initialization (exit code: -3).
"""
)
UNBALANCED = (
    "RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. a=94.5, b=137.6"
)
SGLANG_OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB."


@pytest.mark.parametrize(
    ("error", "id"),
    [
        (HookError("--rollout-function-path: rollout raised URLError: Connection refused\n  own.py:3 in f"), "HOOK01"),
        (HookError("--custom-rm-path: f raised MemoryError"), "HOOK01"),
        (HookError("--custom-generate-function-path: f raised OSError: No space left on device"), "HOOK01"),
        (RolloutError("[REW03] rollout 2: every sample failed: 32x an illegal memory access was encountered\n"
                      "  What scores fails.\n  mend what scores"), "REW03"),
        (RolloutError("[HOOK01] rollout 0: every sample failed: 8x engine 3 died\n  It fails.\n  mend it"), "HOOK01"),
    ],
)  # fmt: skip
def test_errors_of_custom_functions_are_not_blamed_on_engines(tmp_path: Path, error: Exception, id: str) -> None:
    found, _ = explain(error, tmp_path, {})
    assert [d.id for d in found] == ([id] if isinstance(error, HookError) else [])  # the others state it themselves
    failed = {"event": "failed", "error": type(error).__name__, "message": str(error)}
    diagnosed = [{"event": "diagnosis", **d.record()} for d in found]
    folder = run_folder(tmp_path, {"event": "start"}, failed, *diagnosed, log=f"{type(error).__name__}: {error}")
    assert [d.id for d in examine(folder).diagnoses] == [id]


@pytest.mark.parametrize(
    ("said", "id", "words"),
    [
        (UNBALANCED, "GPU04", "`nvidia-smi`"),
        (SGLANG_OOM, "MEM02", "--sglang-mem-fraction-static"),
        ("ValueError: no such model", "ENG03", "its log"),
    ],
)
def test_the_first_exception_of_an_engines_log_is_reported_as_the_cause(
    tmp_path: Path, said: str, id: str, words: str
) -> None:
    async def start() -> EngineError:
        end = "import pathlib, sys; print(pathlib.Path(sys.argv[1]).read_text()); sys.exit(1)"
        process = await LocalHost().start([sys.executable, "-S", "-c", end, str(tmp_path / "says")], log=log)
        engine = ServerProcess("engine 0", "http://127.0.0.1:9", [process], None)
        with pytest.raises(EngineError) as caught:
            await engine.while_starting(engine.wait_until_ready(), 20.0)
        return caught.value

    log = tmp_path / "logs" / "engine-0.log"
    log.parent.mkdir()
    log.write_text("CUDA out of memory\n")  # of an earlier start
    (tmp_path / "says").write_text(SCHEDULER_DIED.format(said=said))
    error = asyncio.run(start())
    message = str(error)
    lines = [line.strip() for line in message.splitlines()]
    assert "exit code 1" in lines[0]
    assert said in lines
    assert lines[-2].startswith("RuntimeError: Rank 0 scheduler died")
    found, _ = explain(error, tmp_path, {})
    assert ([d.id for d in found], words in found[0].remedy) == ([id], True)
    assert said in found[0].finding or id == "ENG03"
    failed = {"event": "failed", "error": "EngineError", "message": message}
    folder = run_folder(tmp_path, {"event": "start"}, failed, log=f"EngineError: {message}")
    assert [d.id for d in examine(folder).diagnoses][:1] == [id]


def test_an_interrupted_run_without_a_message_is_examined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path / "run", START, {"event": "failed", "error": "KeyboardInterrupt", "message": ""})
    result = examine(folder)
    assert (result.status, result.error) == ("failed", "KeyboardInterrupt")
    for event, shown in (
        ({"event": "stopped", "message": "by SIGHUP"}, "by SIGHUP\nno problems found"),
        ({"event": "failed", "error": "DataError", "message": "row 0"}, "DataError: row 0\nno diagnosis besides"),
    ):
        assert doctor(["--run", str(run_folder(folder, START, event))]) == 1
        assert shown in capsys.readouterr().out


def test_an_error_that_is_a_diagnosis_is_not_reported_twice(tmp_path: Path) -> None:
    error = EngineError("[ENG01] an illegal memory access was encountered\n  cause\n  remedy")
    assert explain(error, tmp_path, {}) == ([], [])


def run_folder(folder: Path, *events: dict[str, Any], rows: int = 2, log: str = "") -> Path:
    words = f"--hf-checkpoint {folder} --rollout-batch-size 4 --num-rollout 9".split()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(parse(words).to_json())
    (folder / "events.jsonl").write_text("".join(json.dumps({"time": 1.0} | event) + "\n" for event in events))
    (folder / "metrics.jsonl").write_text("".join(f'{{"step":{i + 1},"train/grad_norm":1.0}}\n' for i in range(rows)))
    (folder / "run.log").write_text(log)
    return folder


START, END = {"event": "start"}, {"event": "end"}


def test_a_run_that_ended_well_is_healthy(tmp_path: Path) -> None:
    result = examine(run_folder(tmp_path / "run", START, END, log="Connection refused once, and tried again\n"))
    assert (result.status, result.step, result.is_healthy, result.diagnoses) == ("finished", 2, True, [])
    assert result.headline().endswith("run: finished after 2 of 9 steps")


def test_a_start_without_an_end_is_a_kill_unless_the_run_is_running(tmp_path: Path) -> None:
    last = "weight_update_started"
    folder = run_folder(tmp_path / "run", END, START, {"event": last, "version": 2}, log="x\n")
    result = examine(folder)
    assert (result.status, [d.id for d in result.diagnoses], result.is_healthy) == ("killed", ["KILL01"], False)
    assert "step 2" in result.diagnoses[0].finding
    assert "during a weight update" in result.diagnoses[0].finding
    assert result.diagnoses[0].evidence["last_event"]["event"] == last
    assert "--save" in result.diagnoses[0].remedy
    assert "--load" not in result.diagnoses[0].remedy
    assert result.last_words[1:] == ["x"]
    with (folder / "run.log").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        result = examine(folder)
    assert (result.status, result.is_healthy, result.diagnoses) == ("running", True, [])


def test_a_run_that_never_started(tmp_path: Path) -> None:
    assert examine(run_folder(tmp_path / "run", rows=0)).status == "not started"
    with pytest.raises(ConfigError, match="none: no such directory"):
        examine(tmp_path / "none")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model_type": "qwen3"}', '{"config": {"data"'])
def test_a_folder_with_another_config_is_not_a_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json (is corrupt|was not written)"):
        examine(tmp_path)


def test_a_folder_with_missing_files_is_not_healthy(tmp_path: Path) -> None:
    steps = [{"event": "step", "step": step} for step in (1, 2)]
    folder = run_folder(tmp_path / "run", START, *steps, END)
    assert examine(folder).is_healthy
    (folder / "metrics.jsonl").unlink()
    result = examine(folder)
    assert (result.status, result.step, [d.id for d in result.diagnoses]) == ("finished", 2, ["CHECK01"])
    assert "metrics.jsonl" in result.diagnoses[0].finding
    assert "2 of 2 steps" in result.diagnoses[0].finding
    (run_folder(folder) / "events.jsonl").write_text('12\n[1]\n{"a": 1}\n{"torn')
    result = examine(folder)
    assert (result.status, result.step, result.is_healthy) == ("unknown", 2, False)
    assert "lines 1, 2, 3 of events.jsonl" in result.diagnoses[0].finding
    assert len(result.diagnoses[0].evidence["missing"]) == 2


@pytest.mark.parametrize("line", ['{"step":null,"x":1}', '{"step":"3"}', '{"step":true}', '{"x":1}'])
def test_a_line_without_a_step_is_named_and_the_others_are_read(tmp_path: Path, line: str) -> None:
    folder = run_folder(tmp_path / "run", START, END)
    whole = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(f'{line}\n{whole}{{"step":3,"torn')  # the end is what a kill leaves
    result = examine(folder)
    assert (result.status, result.step, [d.id for d in result.diagnoses]) == ("finished", 2, ["CHECK01"])
    assert "line 1 of metrics.jsonl" in result.diagnoses[0].finding
    assert [step for step, _ in read_steps(folder)] == [1, 2]
    assert summarize(folder).num_steps == 2
    with pytest.raises(DataError, match=r"metrics\.jsonl.*line 1"):
        list(read_rows(folder / "metrics.jsonl", "step"))


def test_many_damaged_lines_are_counted(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", START, {"event": "step", "step": None}, END)
    (folder / "metrics.jsonl").write_text("x\n" * 12)
    assert "lines 1, 2, 3, 4, 5, 6, 7, 8 and 4 more of metrics.jsonl" in examine(folder).diagnoses[0].finding


def test_a_failed_run_has_its_stated_diagnosis_and_those_of_its_monitors(tmp_path: Path) -> None:
    message = Diagnosis("NUM04", "rollout 3: loss nan", "A learning rate.", "lower --lr").text()
    failed = {"event": "failed", "error": "TrainerError", "message": message}
    died = {"event": "worker_died", "worker": "w", "error": "E", "message": "m"}
    folder = run_folder(tmp_path / "run", START, died, failed, log="No space left on device\n")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step":3,"rollout/staleness/max":5,"rollout/staleness/mean":5}\n{"step":4,"torn')
    result = examine(folder)
    assert [d.id for d in result.diagnoses] == ["ASYNC02", "NUM04", "ASYNC01"]  # errors first
    assert result.error == "TrainerError: [NUM04] rollout 3: loss nan"
    assert result.record()["ok"] is False


RANK_DIED = "WorkerCrashed: trainer rank 1, process 9 on a died: its process ended; the last lines of LOG:\n    bye"


def test_a_trainer_rank_that_died_has_its_own_log_and_no_fault_tolerance(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name in ("trainer-rank-1", "trainer-rank-0", "engine-0"):  # survivors write last
        (tmp_path / "logs" / f"{name}.log").write_text(f"of {name}\n")
    dead = tmp_path / "logs" / "trainer-rank-1.log"
    for message in (RANK_DIED.replace("LOG", str(dead)), "WorkerCrashed: trainer rank 1 died: it is gone"):
        [found], words = explain(TrainerError(message, code=WORKER_DIED), tmp_path, {"save": "kept"})
        assert (found.id, "--use-fault-tolerance" in found.remedy, "--load kept" in found.remedy) == (
            "ENG03", False, True
        )  # fmt: skip
        assert words == [f"last lines of {dead}:", "of trainer-rank-1"]


def test_last_words_are_those_of_the_engine_that_the_error_names(tmp_path: Path) -> None:
    message = "engine 1 at http://a:1: process 9 was ended by signal 9"
    failed = {"event": "failed", "error": "EngineError", "message": message, "code": ENGINE_KILLED}
    folder = run_folder(tmp_path, START, failed, log=f"EngineError: {message}\n")
    (folder / "logs").mkdir()
    for name in ("engine-1", "engine-10", "engine-0"):
        (folder / "logs" / f"{name}.log").write_text(f"of {name}\n")
    result = examine(folder)
    assert [d.id for d in result.diagnoses] == ["ENG03"]
    assert list(result.last_words) == [f"last lines of {folder / 'logs' / 'engine-1.log'}:", "of engine-1"]


def test_last_words_are_those_of_the_run_if_no_log_is_named(tmp_path: Path) -> None:
    message = "an engine is gone: no answer"
    failed = {"event": "failed", "error": "EngineError", "message": message, "code": ENGINE_KILLED}
    folder = run_folder(tmp_path, START, failed, log=f"EngineError: {message}\n")
    (folder / "logs").mkdir()
    for name in ("engine-1", "engine-0"):
        (folder / "logs" / f"{name}.log").write_text(f"of {name}\n")
    assert list(examine(folder).last_words)[1:] == [f"EngineError: {message}"]


def test_an_error_that_nothing_explains_has_no_diagnosis(tmp_path: Path) -> None:
    failed = {"event": "failed", "error": "KeyError", "message": "'answer'", "code": ""}
    folder = run_folder(tmp_path, START, failed, log="KeyError: 'answer'\n")
    (folder / "logs").mkdir()
    (folder / "logs" / "engine-0.log").write_text("Connection refused\n")  # after the run had ended
    assert (examine(folder).diagnoses, examine(folder).is_healthy) == ([], False)


def test_errors_of_user_code_in_samples_are_not_the_cause_of_a_killed_run(tmp_path: Path) -> None:
    for error in ("MemoryError: no room in the cache", "OSError: [Errno 28] No space left on device"):
        log = f"10:00:00 W furlong.rollout.generate: custom generate function failed (sample 3): {error}\n  own.py:3\n"
        result = examine(run_folder(tmp_path / error[:5], START, log=log))
        assert [d.id for d in result.diagnoses] == ["KILL01"]
        result = examine(run_folder(tmp_path / f"own-{error[:5]}", START, log=f"{error}\n"))
        assert len(result.diagnoses) == 2
