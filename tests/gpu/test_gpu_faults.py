"""GPU faults are diagnosed with a working fix; runs with the same flags are bitwise reproducible.

With `pytest -s`, the logs of the runs show the diagnoses.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import threading
from collections.abc import Iterator

import psutil
import pytest
import torch

import faulty_engines
import faulty_hooks
from diagnosed_runs import events, run
from furlong.cli import main
from furlong.config.command_line import examine
from furlong.data.audit import audit
from furlong.diagnosis.preflight import preflight
from furlong.tools import gpu_memory as devices
from furlong.training.fsdp.backend import FsdpBackend
from runs import FORKED, flags, rows, train, write_model, write_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


SHAPE = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 5120,
         "intermediate_size": 25600, "num_hidden_layers": 64, "vocab_size": 151936}  # fmt: skip


def test_a_model_too_large_for_this_gpu_is_reported_before_the_run_with_a_fix(tmp_path):
    """MEM01, for the GPU that the driver reports."""
    folder = write_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | SHAPE))
    words = flags(folder, write_prompts(tmp_path / "p.jsonl"), tmp_path / "run", bf16=True)
    [found] = [each for each in preflight(examine(words)[0].config) if each.id == "MEM01"]
    assert main(["doctor", *words]) == 1
    assert torch.cuda.get_device_name() in found.finding
    mended = [*words, *found.remedy.split(), "--rollout-num-gpus", "1"]
    assert not [each for each in preflight(examine(mended)[0].config) if each.id == "MEM01"]


def test_memory_used_by_another_process_is_reported_before_the_run(tmp_path, monkeypatch):
    """GPU04."""
    words = flags(write_model(tmp_path / "model"), write_prompts(tmp_path / "p.jsonl"), tmp_path / "run")
    is_held = FORKED.Event()
    other = FORKED.Process(target=faulty_engines.hold_memory, args=(5 << 30, is_held), daemon=True)
    other.start()
    monkeypatch.setattr(devices, "_process_family", lambda: {str(os.getpid())})  # exclude the child process
    try:
        assert is_held.wait(60)
        [found] = [each for each in preflight(examine(words)[0].config) if each.id == "GPU04"]
        assert main(["doctor", *words]) == 0  # only a warning
    finally:
        other.kill()
        other.join()
    assert found.evidence["used"] > 5 << 30
    assert [name.split()[0] for name in found.evidence["processes"]] == [str(other.pid)]
    assert not [each for each in preflight(examine(words)[0].config) if each.id == "GPU04"]


def test_an_engine_that_keeps_memory_of_a_gpu_from_step_to_step(engines, tmp_path):
    """MEM03, as measured by the GPU driver."""
    engines.fault = faulty_engines.leaks_device_memory
    shared = {"num_rollout": 3, "rollout_num_gpus": 1, "colocate": True}
    code, found = run(tmp_path / "run", **shared)
    assert (code, "MEM03" in found) == (0, True), found
    kept = [row["memory/engine_kept_frac"] for row in rows(tmp_path / "run")]
    of_device = faulty_engines.DEVICE_BYTES / torch.cuda.get_device_properties(0).total_memory
    assert kept[2] - kept[1] == pytest.approx(of_device, rel=0.1)
    engines.fault = None
    code, found = run(tmp_path / "mended", **shared)
    assert (code, "MEM03" in found) == (0, False)


def test_a_kernel_with_an_illegal_access_ends_its_engine(engines, tmp_path):
    """ENG01, with the error reported by CUDA."""
    engines.fault = faulty_engines.writes_to_freed_memory
    one = {"num_rollout": 1, "rollout_num_gpus": 1, "colocate": True}
    code, found = run(tmp_path / "run", **one)
    assert (code, "ENG01" in found) == (1, True), found
    assert "CUDA error: an illegal memory access was encountered" in found["ENG01"]["finding"]
    code, found = run(tmp_path / "mended", **one, sglang_server_concurrency=faulty_engines.FEW)
    assert (code, "ENG01" in found) == (0, False)


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_an_engine_gets_its_memory_back_from_a_trainer_that_had_it(tmp_path):
    words = {"num_rollout": 3, "rollout_num_gpus": 1, "engine": "sglang", "colocate": True, "no_offload_train": True}
    words |= {"sglang_disable_cuda_graph": True, "sglang_mem_fraction_static": 0.6, "log_level": "DEBUG"}
    hook = f"{faulty_hooks.__file__}:postprocess_with_much_memory"
    code, found = run(tmp_path / "run", **words, rollout_data_postprocess_path=hook)
    assert (code, "MEM03" in found) == (0, False), found
    log = (tmp_path / "run" / "run.log").read_text()
    assert re.findall(r"weight_sync done: version (\d), .*every checksum verified", log) == ["0", "1", "2", "3"]


@contextlib.contextmanager
def woken_after(seconds: float) -> Iterator[None]:
    """Resume stopped child processes after `seconds`, so that they can be terminated."""

    def wake() -> None:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.resume()

    timer = threading.Timer(seconds, wake)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        wake()


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_a_stopped_sglang_server_does_not_take_its_weights(tmp_path):
    """SYNC01: the server's schedulers are stopped, but it still answers health checks."""
    transport = "nccl" if torch.cuda.device_count() > 1 else "ipc"  # the server is on the last GPU
    words = {"num_rollout": 1, "rollout_num_gpus": 1, "engine": "sglang", "sglang_max_total_tokens": 1 << 16}
    words |= {"sglang_disable_cuda_graph": True, "update_weight_transport": transport, "update_weight_timeout": 10}
    hook = f"{faulty_hooks.__file__}:generate_and_stop_schedulers"
    with woken_after(150):
        code, found = run(tmp_path / "run", **words, custom_generate_function_path=hook)
    assert (code, "SYNC01" in found) == (1, True), found
    assert found["SYNC01"]["evidence"]["version"] == 1


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_a_stopped_sglang_server_is_replaced_and_the_new_one_has_the_weights(tmp_path, transport):
    if transport == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL joins processes on two GPUs; one is visible")
    words = {"num_rollout": 2, "rollout_num_gpus": 1, "engine": "sglang", "colocate": transport == "ipc"}
    words |= {"sglang_disable_cuda_graph": True, "sglang_max_total_tokens": 1 << 16, "update_weight_timeout": 15}
    words |= {"update_weight_transport": transport, "use_fault_tolerance": True, "rollout_health_check_timeout": 15}
    words |= {"log_level": "DEBUG"}
    hook = f"{faulty_hooks.__file__}:generate_and_stop_schedulers"
    code, found = run(tmp_path / "run", **words, custom_generate_function_path=hook)
    assert code == 0, found
    assert audit(tmp_path / "run" / "ledger.jsonl", finished=True).ok
    assert len(events(tmp_path / "run", "engine_restarted")) == 1
    log = (tmp_path / "run" / "run.log").read_text()
    assert re.findall(r"weight_sync done: version (\d), .*every checksum verified", log)[-1] == "2"


def test_a_gpu_without_memory_ends_a_run_with_the_phase_and_the_smallest_change(tmp_path, monkeypatch):
    forward_backward, taken = FsdpBackend.forward_backward, []

    def after_all_was_taken(self, micro, loss_fn, **role):
        torch.cuda.synchronize()
        for power in range(36, 8, -1):
            try:
                while True:
                    taken.append(torch.empty(1 << power, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                continue
        return forward_backward(self, micro, loss_fn, **role)

    monkeypatch.setattr(FsdpBackend, "forward_backward", after_all_was_taken)
    words = {"max_tokens_per_gpu": 512, "use_dynamic_batch_size": True}
    try:
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
            train(flags(write_model(tmp_path / "m"), write_prompts(tmp_path / "p.jsonl"), tmp_path / "run", **words))
    finally:
        taken.clear()
        torch.cuda.empty_cache()
    note = next(note for note in caught.value.__notes__ if "MEM02" in note)
    assert "[MEM02] out of memory in forward and backward of training (tried " in note
    assert "; predicted " in note
    assert re.search(r"--max-tokens-per-gpu \d+$", note)
    assert "[MEM02]" in (tmp_path / "run" / "run.log").read_text()


def test_deterministic_runs_are_equal_bit_for_bit(tmp_path):
    model, prompts = write_model(tmp_path / "model"), write_prompts(tmp_path / "prompts.jsonl")
    for name in ("first", "second"):
        words = {"deterministic_mode": True, "save": tmp_path / name / "saved", "save_interval": 2}
        train(flags(model, prompts, tmp_path / name, **words))
    weights = [
        {path.name: path.read_bytes() for path in (tmp_path / name / "saved").rglob("*.safetensors")}
        for name in ("first", "second")
    ]
    assert weights[0]
    assert weights[0] == weights[1]
