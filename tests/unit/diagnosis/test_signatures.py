"""Signatures on the words of other programs: one text each, with the row that it proves and words of the fix."""

from __future__ import annotations

import re
from typing import Any

import pytest

from furlong.catalogue import CATALOGUE, Diagnosis
from furlong.diagnosis.postmortem.matcher import LogText, find_cause, parse_diagnosis, phase_of
from furlong.diagnosis.postmortem.signatures import SIGNATURES

CUDA_OOM = """Traceback (most recent call last):
  File "src/furlong/training/worker.py", line 380, in _forward_backward
    return self.backend.forward_backward(self._micro(batch, rows), loss)
  File "src/furlong/training/fsdp/backend.py", line 200, in _stats
    hidden = packed.hidden(micro)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of \
which 1.20 GiB is free. Of the allocated memory 70.10 GiB is allocated by PyTorch, and 5.02 GiB is reserved by PyTorch
"""
IN_SGLANG = 'Traceback (most recent call last):\n  File "/x/sglang/srt/{}", line 1, in f\n    step()\n'
INDUCTOR = '  File "/x/torch/_inductor/codecache.py", line 900, in load\n    return json.loads(content)\n'

# One text for each signature.
TEXTS: tuple[tuple[str, str, str], ...] = (
    ("MEM02", "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
     "RAY_memory_usage_threshold"),
    ("MEM02", "slurmstepd: error: Detected 1 oom_kill event in StepId=48812.batch.", "--mem"),
    ("MEM02", "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 288.00 MiB.",
     "--sglang-cuda-graph-max-bs"),
    ("MEM02", "Decode out of memory. Try to lower your batch size.", "--sglang-max-running-requests"),
    ("MEM02", "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED", "--recompute"),
    ("MEM02", "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB.", "--recompute-activations"),
    ("MEM03", "[torch_memory_saver.cpp] CUresult error result=2 out of memory file=core.cpp func=resume line=1",
     "--sglang-mem-fraction-static to 0.7"),
    ("MEM02", "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
     "raise --sglang-mem-fraction-static"),
    ("MEM02", "OSError: [Errno 28] No space left on device: '/dev/shm/torch_4821_1'", "--shm-size=16g"),
    ("MEM02", "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes", "--mem"),
    ("GPU04", "RuntimeError: The memory capacity is unbalanced. a=94.5, b=137.6", "nvidia-smi"),
    ("GPU04", "CUDA error: CUDA-capable device(s) is/are busy or unavailable", "nvidia-smi -c 0"),
    ("GPU01", "RuntimeError: No CUDA GPUs are available", "CUDA_VISIBLE_DEVICES"),
    ("GPU01", "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000", "--actor-num-gpus-per-node"),
    ("GPU06", "RuntimeError: CUDA error: uncorrectable ECC error encountered", "Xid"),
    ("ENG01", "CUDA error: an illegal memory access was encountered", "CUDA_LAUNCH_BLOCKING=1"),
    ("ENG02", f"{INDUCTOR}json.decoder.JSONDecodeError: Expecting value", "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"),
    ("ENV01", "RuntimeError: The NVIDIA driver on your system is too old (found version 12020).", "driver"),
    ("ENV01", "ImportError: /x/flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda29c10_cuda", "furlong env"),
    ("ENV01", "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456",
     "--sglang-attention-backend"),
    ("GPU02", "(autoscaler) Error: No available node types can fulfill resource request {'GPU': 8.0}", "ray status"),
    ("GPU05", "ConnectionError: Could not find any running Ray instance.", "--ray-address"),
    ("GPU05", "RuntimeError: Version mismatch: The cluster was started with:\n    Ray: 2.9.3", "same versions"),
    ("NUM04", "AssertionError: Rank 4: found NaN in local grad norm for bucket #3", "--lr"),
    ("NUM04", "EngineError: the logits of request furlong-64 are not finite at response token 0", "--lr"),
    ("DISK01", "ray.exceptions.OutOfDiskError: Local disk is full", "RAY_TMPDIR"),
    ("DISK01", "RuntimeError: [enforce fail at inline_container.cc:626] . unexpected pos 4608 vs 4502", "--save"),
    ("DISK01", "OSError: [Errno 122] Disk quota exceeded", "quota -s"),
    ("DISK01", "OSError: [Errno 27] File too large", "ulimit -f"),
    ("DISK01", "OSError: [Errno 30] Read-only file system: '/data'", "--save"),
    ("LIMIT01", "OSError: [Errno 24] Too many open files", "ulimit -n"),
    ("LIMIT01", "RuntimeError: can't start new thread", "ulimit -u"),
    ("CKPT04", "SafetensorError: Error while deserializing header: MetadataIncompleteBuffer", "furlong check DIR"),
    ("CKPT04", 'FileNotFoundError: No such file or directory: "/x/model-00004-of-00008.safetensors"', "furlong check"),
    ("CFG05", "AssertionError: attention heads (28) must be divisible by tensor parallel size (8).",
     "--rollout-num-gpus-per-engine"),
    ("CKPT04", "size mismatch for model.embed_tokens.weight: copying a param with shape [1, 2]", "config.json"),
    ("CKPT07", "ValueError: Transformers does not recognize this architecture.", "transformers"),
    ("CKPT07", "huggingface_hub.errors.GatedRepoError: 401 Client Error.", "HF_TOKEN"),
    ("CKPT07", "OSError: Qwen/Qwen3-4b-x is not a valid model identifier listed on the hub", "--hf-checkpoint"),
    ("TPL01", "jinja2.exceptions.TemplateError: Conversation roles must alternate user/assistant/...",
     "--chat-template-path"),
    ("DATA04", "ValueError: The input (4200 tokens) is longer than the model's context length (4096 tokens).",
     "--rollout-max-prompt-len"),
    ("KILL01", "slurmstepd: error: *** JOB 1 ON gpu-1 CANCELLED AT 2026-01-01 DUE TO TIME LIMIT ***", "--time"),
    ("ENG03", "ray.exceptions.NodeDiedError: Task was killed due to the node dying.", "ray status"),
    ("ENG03", "Received sigquit from a child process. It usually means the child failed.", "end of its log"),
    ("SYNC01", "host:1 [0] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found", "NCCL_SOCKET_IFNAME"),
    ("ENG05", "Max retries exceeded with url: /get_model_info (Caused by NewConnectionError())", "/get_model_info"),
    ("SYNC01", "ncclRemoteError: A call failed possibly due to a network error", "end"),
    ("SYNC01", "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)", "--update-weight-timeout"),
    ("SYNC01", "[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation",
     "GLOO_SOCKET_IFNAME"),
    ("GPU03", "OSError: [Errno 98] Address already in use", "port"),
)  # fmt: skip


def diagnose(content: str, facts: dict[str, Any] | None = None, **flags: Any) -> Diagnosis:
    found = find_cause(SIGNATURES, [LogText("run.log", content, flags, facts or {})])
    assert found is not None, content
    return found


@pytest.mark.parametrize(("id", "text", "word"), TEXTS, ids=[f"{id} {text[:30]}" for id, text, _ in TEXTS])
def test_a_text_proves_its_row_with_its_line_and_remedy(id: str, text: str, word: str) -> None:
    found = diagnose(f"12:00:00 I furlong: run folder x\n{text}\n")
    assert (found.id, word in found.remedy) == (id, True), found.remedy
    assert found.evidence["text"] in text
    assert found.evidence["line"] > 1


def test_every_signature_has_a_text_and_every_row_of_one_says_that_it_is_found_after_a_failure() -> None:
    tested = {
        number
        for _, text, _ in TEXTS
        for number in [next(i for i, each in enumerate(SIGNATURES) if each.search(LogText("", text)))]
    }
    assert [each for i, each in enumerate(SIGNATURES) if i not in tested and each.pattern] == []
    assert all("X" in CATALOGUE[each.id].moments for each in SIGNATURES)


def test_other_texts_prove_nothing() -> None:
    for content in (
        "json.decoder.JSONDecodeError: in my own reward function\n",
        "12:00:00 I furlong: memory 3 GiB, 2.50 GiB allocated\n",
        "12:00:00 E my_rewards: CUDA out of memory in my own server\n",
        "step 3 reward 0.1\nKeyError: 'answer'\nValueError: shapes (3, 4) and (5,) not aligned\n",
    ):
        assert find_cause(SIGNATURES, [LogText("run.log", content)]) is None


def test_a_cause_goes_before_what_follows_from_it() -> None:
    follows = "Connection refused\nActorDiedError\n[Rank 3] Watchdog caught collective operation timeout\n"
    assert diagnose(f"{follows}OSError: [Errno 28] No space left on device\n").id == "DISK01"
    assert diagnose(follows).id == "ENG03"
    taken = diagnose("OSError: [Errno 98] address already in use\nConnection refused\n")
    assert (taken.id, "GPU03" in taken.cause) == ("ENG05", True)


def test_out_of_memory_on_a_gpu_has_phase_values_and_a_remedy() -> None:
    facts = {"longest_sample": 9000, "largest_tensors": ["(9000, 151936) float32 5,216 MiB"], "steps": 3}
    found = diagnose(CUDA_OOM, facts, max_tokens_per_gpu=16384)
    assert (found.id, found.evidence["phase"]) == ("MEM02", "forward and backward of training")
    sizes = {"tried": 2.5, "capacity": 79.11, "free": 1.2, "allocated": 70.1, "reserved": 5.02}
    assert all(f"{name} {size:.2f} GiB" in found.finding for name, size in sizes.items())
    assert "longest sample 9000 tokens" in found.finding
    assert re.search(r"--max-tokens-per-gpu 8192 \(\D*16384\).*--recompute-activations", found.remedy)
    assert diagnose(CUDA_OOM, {"smallest_change": "--max-tokens-per-gpu 4096"}).remedy.endswith(" 4096")


def test_host_memory_for_generation_names_flags_of_the_engine() -> None:
    text = """Traceback (most recent call last):
  File "src/furlong/inference/embedded/engine.py", line 400, in _step
    self.batch.step()
RuntimeError: [enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory: you tried to allocate \
8589934592 bytes.
"""
    facts = {"smallest_change": "--max-tokens-per-gpu 2048"}
    sizes = {"rollout_batch_size": 8, "n_samples_per_prompt": 4, "embedded_num_slots": 128}
    found = diagnose(text, facts, **sizes, rollout_max_response_len=512)
    assert (found.id, found.evidence["phase"]) == ("MEM02", "generation")
    assert "--embedded-num-slots" in found.remedy
    assert "--max-tokens-per-gpu 2048" in diagnose(text.replace("_step", "forward_backward"), facts, **sizes).remedy


def test_an_engine_that_runs_out_of_memory_is_distinguished_from_the_trainer() -> None:
    graphs = (
        IN_SGLANG.format("model_executor/cuda_graph_runner.py") + "Capture cuda graph failed: CUDA error: out of memory"
    )
    found = diagnose(graphs, max_tokens_per_gpu=32768, sglang_options={"mem_fraction_static": 0.8})
    assert (found.id, found.evidence["phase"]) == ("MEM02", "capturing CUDA graphs")
    assert re.search(r"--sglang-mem-fraction-static \(\D*0\.8\)", found.remedy)
    found = diagnose(CUDA_OOM.replace("src/furlong/training/worker.py", "sglang/srt/managers/scheduler.py"))
    assert found.evidence["phase"] == "generating"
    found = diagnose(graphs, {"steps": 3}, colocate=True)
    assert (found.id, "--sglang-mem-fraction-static to 0.7" in found.remedy) == ("MEM03", True)


def test_out_of_memory_at_the_second_step_of_a_colocated_run() -> None:
    found = diagnose(CUDA_OOM, {"steps": 1, "smallest_change": "--max-tokens-per-gpu 4096"}, colocate=True)
    assert (found.id, re.findall(r"--[a-z-]+", found.remedy)[:2]) == (
        "MEM03", ["--max-tokens-per-gpu", "--offload-optimizer-states"]
    )  # fmt: skip
    found = diagnose(CUDA_OOM.replace("_backward", "_else"), {"steps": 1}, colocate=True)
    assert (found.id, "--sglang-mem-fraction-static to 0.7" in found.remedy) == ("MEM03", True)
    assert diagnose(CUDA_OOM, {"steps": 0}, colocate=True).id == "MEM02"


def test_out_of_memory_where_trainer_and_engines_stay_on_a_gpu_says_how_they_take_turns() -> None:
    for steps in (0, 1):
        for stay in (False, True):
            flags = {"colocate": True, "offload_train": not stay, "offload_rollout": not stay}
            found = diagnose(CUDA_OOM, {"steps": steps}, **flags)
            assert found.remedy.startswith("let trainer and engines use the GPU in turn (--offload); or ") is stay


def test_an_engine_that_cannot_resume_its_memory_is_not_a_dead_engine() -> None:
    text = """EngineError: engine 0 at http://127.0.0.1:27432: process 5051 was ended by signal 9; the end of its log:
    [torch_memory_saver.cpp] cuMemCreate CUDA_ERROR_OUT_OF_MEMORY (may not be an issue e.g. torch allocator will retry)
    [torch_memory_saver.cpp] cudaError error: 2 (out of memory)  file=csrc/core.cpp func=resume line=243
"""
    found = diagnose(text, {"steps": 2}, colocate=True)
    assert (found.id, found.evidence["line"]) == ("MEM03", 3)
    assert diagnose("".join(text.splitlines(keepends=True)[:2]), {"steps": 2}, colocate=True).id == "ENG03"  # retried


def test_a_full_disk_names_the_flag_of_checkpoints_or_of_weights_for_engines() -> None:
    line = "SyncError: weight_sync version 2: [Errno 28] No space left on device: '/fast/weights/v2/model.safetensors'"
    found = diagnose(line, update_weight_disk_dir="/fast/weights", save="/slow/save")
    assert re.findall(r"--[a-z-]+", found.remedy)[0] == "--update-weight-disk-dir"
    found = diagnose(line.replace("/fast/weights/v2", "/slow/save"), update_weight_disk_dir="/fast/weights")
    assert re.findall(r"--[a-z-]+", found.remedy)[0] == "--save"
    frame = '  File "src/furlong/files/sample_file.py", line 71, in save_samples\n    save_file(tensors, draft)\n'
    found = diagnose(f"Traceback (most recent call last):\n{frame}SafetensorError: No space left on device")
    assert re.findall(r"--[a-z-]+", found.remedy) == ["--save-debug-rollout-data"]


def test_an_engine_that_exited_by_itself_was_not_ended_from_outside() -> None:
    line = "EngineError: engine 0 at http://127.0.0.1:2: process 9 was ended by signal 9; the last lines of its log:\n"
    outside = diagnose(line + "    POST /generate\n", engine="sglang")
    inside = diagnose(line + "    kill_process_tree called: parent_pid=9\n", engine="sglang")
    assert "out-of-memory killer" in outside.cause + outside.remedy
    assert "out-of-memory killer" not in inside.cause + inside.remedy
    assert "--sglang-mem-fraction-static" in inside.remedy
    exited = diagnose(line.replace("was ended by signal 9", "ended with exit code 1"), engine="sglang")
    assert "--sglang-disable-cuda-graph" in exited.remedy
    own = diagnose(line, engine="embedded", use_fault_tolerance=True).remedy
    assert "--sglang" not in own
    assert "--use-fault-tolerance" not in own


def test_a_checkpoint_of_another_model_and_a_conversation_beyond_the_context_have_their_own_rows() -> None:
    assert diagnose("size mismatch for lm_head.weight: x", load="runs/a").id == "CKPT01"
    text = "The input (4200 tokens) is longer than the model's context length (4096 tokens)."
    assert diagnose(text, custom_generate_function_path="own.py:f").id == "TOOL02"


def test_a_message_that_is_a_diagnosis_is_read_back() -> None:
    original = Diagnosis("NUM04", "rollout 3: loss nan", "A learning rate.", "lower --lr")
    assert parse_diagnosis(original.text()) == original
    assert parse_diagnosis("[KeyError] nothing") is None
    assert parse_diagnosis("[ABC01] no such row") is None


def test_the_phase_is_that_of_the_innermost_function() -> None:
    for function, phase in {"optim_step": "optimizer step", "_log_probs": "log-prob", "main": "unknown"}.items():
        lines = [f"  File x, line 1, in {name}" for name in ("start", function, "other")]
        assert phase in phase_of("\n".join(lines))
