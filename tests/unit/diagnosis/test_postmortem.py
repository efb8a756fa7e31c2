"""Signatures on real texts, and the status of a run from its folder."""

from __future__ import annotations

import asyncio
import fcntl
import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from furlong.catalogue import CATALOGUE, Diagnosis
from furlong.config import parse
from furlong.config.sections import Config
from furlong.core.batch import pack_micro_batch
from furlong.diagnosis.postmortem.log_text import LogText, phase_of
from furlong.diagnosis.postmortem.out_of_memory import OutOfMemoryReport
from furlong.diagnosis.postmortem.run_examination import examine, explain
from furlong.diagnosis.postmortem.signatures import GENERAL, SIGNATURES, match_signatures, parse_diagnosis
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

CUDA_OOM = """Traceback (most recent call last):
  File "src/furlong/training/worker.py", line 380, in _forward_backward
    return self.backend.forward_backward(self._micro(batch, rows), loss)
  File "src/furlong/training/fsdp/backend.py", line 200, in _stats
    hidden = packed.hidden(micro)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of \
which 1.20 GiB is free. Of the allocated memory 70.10 GiB is allocated by PyTorch, and 5.02 GiB is reserved by PyTorch
"""
INDUCTOR = """  File "/x/torch/_inductor/codecache.py", line 900, in load
    return json.loads(content)
  File "/usr/lib/python3.11/json/decoder.py", line 355, in raw_decode
json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)
"""


def diagnose(content: str, facts: dict[str, Any] | None = None, **flags: Any) -> list[Diagnosis]:
    return match_signatures(LogText("run.log", content, flags, facts or {}))


def test_out_of_memory_on_a_gpu_has_phase_values_and_a_remedy() -> None:
    facts = {"longest_sample": 9000, "largest_tensors": ["(9000, 151936) float32 5,216 MiB"], "steps": 3}
    [found] = diagnose(CUDA_OOM, facts, max_tokens_per_gpu=16384)
    assert found.id == "MEM02"
    assert "forward and backward" in found.evidence["phase"]
    sizes = {"tried": 2.5, "capacity": 79.11, "free": 1.2, "allocated": 70.1, "reserved": 5.02}
    assert {name: found.evidence[name] for name in sizes} == {name: f"{size:.2f} GiB" for name, size in sizes.items()}
    assert all(f"{name} {size:.2f} GiB" in found.finding for name, size in sizes.items())
    assert "longest sample 9000 tokens" in found.finding
    assert re.search(r"--max-tokens-per-gpu 8192 \(\D*16384\).*--recompute-activations", found.remedy)
    [found] = diagnose(CUDA_OOM, {"smallest_change": "--max-tokens-per-gpu 4096"})
    assert found.remedy.endswith(" --max-tokens-per-gpu 4096")
    [found] = diagnose(CUDA_OOM, micro_batch_size=4, recompute_activations=True)
    assert "--micro-batch-size 2;" in found.remedy


HOST_OOM = """Traceback (most recent call last):
  File "src/furlong/inference/embedded/engine.py", line 400, in _step
    self.batch.step()
RuntimeError: [enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to \
allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)
"""


def test_host_memory_for_generation_names_flags_of_the_engine() -> None:
    facts = {"smallest_change": "--max-tokens-per-gpu 2048"}
    sizes = {"rollout_batch_size": 8, "n_samples_per_prompt": 4, "embedded_num_slots": 128}
    [found] = diagnose(HOST_OOM, facts, **sizes, rollout_max_response_len=512)
    assert (found.id, found.evidence["phase"]) == ("MEM02", "generation")
    assert found.remedy == "use --embedded-num-slots 16 or --rollout-max-response-len 256 (now 512)"
    [found] = diagnose(HOST_OOM.replace("_step", "forward_backward"), facts, **sizes)
    assert "--max-tokens-per-gpu 2048" in found.remedy


def test_a_full_disk_names_the_flag_of_checkpoints_or_of_weights_for_engines() -> None:
    line = "SyncError: weight_sync version 2: [Errno 28] No space left on device: '/fast/weights/v2/model.safetensors'"
    [found] = diagnose(line, update_weight_disk_dir="/fast/weights", save="/slow/save")
    assert (found.id, re.findall(r"--[a-z-]+", found.remedy)[0]) == ("DISK01", "--update-weight-disk-dir")
    [found] = diagnose(line.replace("/fast/weights/v2", "/slow/save"), update_weight_disk_dir="/fast/weights")
    assert re.findall(r"--[a-z-]+", found.remedy)[0] == "--save"


SGLANG_GRAPHS = """  File "/opt/site/sglang/srt/managers/scheduler.py", line 841, in init_all_cuda_graphs
    self.tp_worker.init_cuda_graphs()
  File "/opt/site/sglang/srt/model_executor/runner/decode_cuda_graph_runner.py", line 409, in __init__
    raise Exception(
Exception: Capture cuda graph failed: CUDA error: out of memory
Possible solutions:
1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)
"""  # the end of an engine's log on an H200


def test_an_engine_that_runs_out_of_memory_is_distinguished_from_the_trainer() -> None:
    [found] = diagnose(SGLANG_GRAPHS, max_tokens_per_gpu=32768, sglang_options={"mem_fraction_static": 0.8})
    assert found.id == "MEM02"
    assert found.evidence["phase"] == "capturing CUDA graphs"
    assert "(run.log, line 5): " in found.finding
    assert re.search(r"--sglang-mem-fraction-static \(\D*0\.8\)", found.remedy)
    [found] = diagnose(CUDA_OOM.replace("src/furlong/training/worker.py", "sglang/srt/managers/scheduler.py"))
    assert found.evidence["phase"] == "generating"
    [found] = diagnose(SGLANG_GRAPHS, {"steps": 3}, colocate=True)
    assert (found.id, found.evidence["phase"]) == ("MEM03", "generation")
    assert "--sglang-mem-fraction-static to 0.7" in found.remedy
    [found] = diagnose("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.\n")
    assert (found.id, found.remedy.startswith("raise --sglang-mem-fraction-static")) == ("MEM02", True)


NO_ROOM = """EngineError: engine 0 at http://127.0.0.1:27432: process 5051 was ended by signal 9; the end of its log:
    [torch_memory_saver.cpp] cuMemCreate CUDA_ERROR_OUT_OF_MEMORY (may not be an issue e.g. torch allocator will retry)
    [torch_memory_saver.cpp] cudaError error: 2 (out of memory)  file=csrc/core.cpp func=resume line=243
    [2026-11-23 03:16:43] Subprocess scheduler_0 (pid=5173) crashed with exit code 1. Triggering SIGQUIT for cleanup...
    [2026-11-23 03:16:48] kill_process_tree called: parent_pid=5051, include_parent=True, pid=5051
"""  # of an engine on an H200 whose trainer had kept what it needed for training


def test_an_engine_that_cannot_resume_its_memory_is_not_a_dead_engine() -> None:
    [found] = diagnose(NO_ROOM, {"steps": 2}, colocate=True)
    assert (found.id, found.evidence["line"]) == ("MEM03", 3)
    assert "2 steps" in found.finding
    assert "--sglang-mem-fraction-static to 0.7" in found.remedy
    [found] = diagnose("".join(NO_ROOM.splitlines(keepends=True)[:2]), {"steps": 2}, colocate=True)
    assert found.id == "ENG03"  # a warning of an allocation that is tried again


def test_out_of_memory_at_the_second_step_of_a_colocated_run() -> None:
    [found] = diagnose(CUDA_OOM, {"steps": 1, "smallest_change": "--max-tokens-per-gpu 4096"}, colocate=True)
    assert found.id == "MEM03"
    assert re.findall(r"--[a-z-]+", found.remedy)[:3] == [
        "--max-tokens-per-gpu", "--offload-optimizer-states", "--sglang-max-running-requests"
    ]  # fmt: skip
    [found] = diagnose(CUDA_OOM.replace("_backward", "_else"), {"steps": 1}, colocate=True)
    assert (found.id, "--sglang-mem-fraction-static to 0.7" in found.remedy) == ("MEM03", True)
    assert [d.id for d in diagnose(CUDA_OOM, {"steps": 0}, colocate=True)] == ["MEM02"]


@pytest.mark.parametrize(
    ("id", "content", "word"),
    [
        ("ENG01", "CUDA error: an illegal memory access was encountered\n", "--sglang-mem-fraction-static"),
        ("ENG02", INDUCTOR, "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"),
        ("ENG03", "ray.exceptions.ActorDiedError: The actor died unexpectedly\n", "end of its log"),
        ("ENG03", "EngineError: engine 0 at http://127.0.0.1:2: process 9 was ended by signal 9; its log\n", "dmesg"),
        (
            "ENG05",
            "Max retries exceeded with url: /get_model_info (Caused by NewConnectionError('refused'))\n",
            "/get_model_info",
        ),
        ("SYNC01", "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)\n", "NCCL_SOCKET_IFNAME"),
        (
            "SYNC01",
            "[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation\n",
            "GLOO_",
        ),
        ("NUM04", "EngineError: the logits of request furlong-64 are not finite at response token 0\n", "--lr"),
        ("DISK01", "OSError: [Errno 28] No space left on device\n", "--keep-checkpoints"),
        ("DISK01", "OSError: [Errno 27] File too large\n", "ulimit -f"),
        (
            "GPU02",
            "ClusterError: waiting for 8 GPUs since 600 s: 4 are free, 4 are missing (10.0.0.1: 4 of 8 free); others "
            "hold them. End those\n",
            "--placement-timeout",
        ),
        ("GPU03", "OSError: [Errno 98] Address already in use\n", "port"),
        ("MEM02", "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried 8 bytes\n", "--max-tokens"),
    ],
)
def test_a_signature_is_found_with_its_line_and_remedy(id: str, content: str, word: str) -> None:
    [found] = diagnose("12:00:00 I furlong: run folder x\n" + content, max_tokens_per_gpu=1024)
    assert (found.id, word in found.remedy) == (id, True)
    assert found.evidence["text"] in content
    assert found.evidence["line"] > 1


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


def test_every_signature_has_a_row_for_ended_runs() -> None:
    assert {signature.id for signature in (*SIGNATURES, *GENERAL)} == {
        id for id, row in CATALOGUE.items() if "X" in row.moments
    } - {
        "CHECK01",
        *("REW03", "STOP02"),  # stated by the error of a run whose every sample fails
        "TOOL02",  # the form of DATA04 where a function extends conversations
    }


@pytest.mark.parametrize("content", [
    "json.decoder.JSONDecodeError: in my own reward function\n",
    "12:00:00 I furlong: memory 3 GiB, 2.50 GiB allocated\n",
    "step 3 reward 0.1\n",
])  # fmt: skip
def test_other_texts_match_nothing(content: str) -> None:
    assert diagnose(content) == []


def test_a_taken_port_is_named_as_the_cause_of_a_refused_connection() -> None:
    found = diagnose("OSError: [Errno 98] address already in use\nConnection refused\n")
    assert [d.id for d in found] == ["ENG05", "GPU03"]
    assert "GPU03" in found[0].cause


def test_a_message_that_is_a_diagnosis_is_read_back() -> None:
    original = Diagnosis("NUM04", "rollout 3: loss nan", "A learning rate.", "lower --lr")
    assert parse_diagnosis(original.text()) == original
    assert parse_diagnosis("[KeyError] nothing") is None
    assert parse_diagnosis("[ABC01] no such row") is None


@pytest.mark.parametrize(
    ("function", "phase"),
    [
        ("optim_step", "optimizer step"),
        ("_log_probs", "log-prob"),
        ("load_weights", "weight update"),
        ("main", "unknown"),
    ],
)
def test_the_phase_is_that_of_the_innermost_function(function: str, phase: str) -> None:
    lines = [f"  File x, line 1, in {name}" for name in ("start", function, "other")]
    assert phase in phase_of("\n".join(lines))


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


def test_an_engine_that_exited_by_itself_was_not_ended_from_outside() -> None:
    line = "EngineError: engine 0 at http://127.0.0.1:2: process 9 was ended by signal 9; the last lines of its log:\n"
    [outside] = diagnose(line + "    POST /generate\n", engine="sglang")
    [inside] = diagnose(
        line + "    kill_process_tree called: parent_pid=9, include_parent=True, pid=9\n", engine="sglang"
    )
    assert "out-of-memory killer" in outside.cause + outside.remedy
    assert "out-of-memory killer" not in inside.cause + inside.remedy
    assert inside.cause not in (outside.cause, CATALOGUE["ENG03"].cause)
    assert "--sglang-mem-fraction-static" in inside.remedy


@pytest.mark.parametrize(
    ("error", "named"), [("ended with exit code 1", "--sglang-disable-cuda-graph"), ("was ended by signal 9", "dmesg")]
)
def test_remedies_of_a_dead_engine_are_flags_that_it_supports(error: str, named: str) -> None:
    line = f"EngineError: engine 0 at http://127.0.0.1:2: process 9 {error}; its log\n"
    assert named in diagnose(line, engine="sglang")[0].remedy
    own = diagnose(line, engine="embedded", use_fault_tolerance=True)[0].remedy
    assert "--sglang" not in own
    assert "--use-fault-tolerance" not in own


@pytest.mark.slow
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
    log.write_text(CUDA_OOM)  # of an earlier start
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


def test_an_interrupted_run_without_a_message_is_examined(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", START, {"event": "failed", "error": "KeyboardInterrupt", "message": ""})
    result = examine(folder)
    assert (result.status, result.error) == ("failed", "KeyboardInterrupt")


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


@pytest.mark.parametrize("last", ["weight_update_started", "publishing"])  # the second one in older runs
def test_a_start_without_an_end_is_a_kill_unless_the_run_is_running(tmp_path: Path, last: str) -> None:
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
    with pytest.raises(ConfigError, match=r"none.*config\.json"):
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


def test_a_failed_run_has_its_stated_diagnosis_its_signatures_and_its_monitors(tmp_path: Path) -> None:
    message = Diagnosis("NUM04", "rollout 3: loss nan", "A learning rate.", "lower --lr").text()
    failed = {"event": "failed", "error": "TrainerError", "message": message}
    died = {"event": "worker_died", "worker": "w", "error": "E", "message": "m"}
    log = "12:00 I furlong: run folder a\nNo space left on device\n12:01 I furlong: run folder a\n" + CUDA_OOM
    folder = run_folder(tmp_path / "run", START, died, failed, log=log)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step":3,"rollout/staleness/max":5,"rollout/staleness/mean":5}\n{"step":4,"torn')
    result = examine(folder)
    assert [d.id for d in result.diagnoses] == [
        "ASYNC02",
        "NUM04",
        "MEM02",
        "ASYNC01",
    ]  # errors first; no DISK01: before
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


def test_a_collective_that_timed_out_names_the_flags_of_its_limit() -> None:
    for line in (
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",
        "[x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete",
    ):
        [found] = diagnose(line)
        assert found.id == "SYNC01"
        assert all(flag in found.remedy for flag in ("--distributed-timeout-minutes", "--update-weight-timeout"))
        assert "NCCL_TIMEOUT" not in found.remedy
