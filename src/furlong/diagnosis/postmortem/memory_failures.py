"""Out of memory: signatures of GPU and host memory, with the flags that need less."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from furlong.catalogue import Diagnosis, diagnosis
from furlong.diagnosis.postmortem.log_text import (
    LESS_HOST_MEMORY,
    TRAINING_PHASES,
    UNKNOWN_PHASE,
    LogText,
    Signature,
    evidence_of,
    phase_of,
    signature,
    traceback_before,
)
from furlong.errors import MACHINE_MEMORY
from furlong.tools.memory_plan import remedy_of

# Words in a traceback of SGLang, in order of precedence, and what it was doing.
SGLANG = "sglang/srt/"
SGLANG_PHASES = (
    ("cuda_graph", "capturing CUDA graphs"),
    ("memory_pool", "allocating its KV cache"),
    ("load_model", "loading the model"),
    ("update_weights", "loading new weights"),
    ("", "generating"),
)


SMALLER_ENGINE = (
    "lower --sglang-mem-fraction-static to 0.7, then to 0.6 and 0.4; use --offload-optimizer-states or shorter samples"
)


def _out_of_memory(text: LogText, match: re.Match[str]) -> Diagnosis:
    """MEM02, or MEM03 if engine and trainer share the device and the first step succeeded."""
    evidence = evidence_of(text, match)
    message = text.content[match.start() : match.start() + 800]
    numbers = {
        name: number[1]
        for name, pattern in {
            "tried": r"Tried to allocate ([\d.]+ \w+)",
            "capacity": r"total capacity of ([\d.]+ \w+)",
            "free": r"of which ([\d.]+ \w+) is free",
            "allocated": r"([\d.]+ \w+) is allocated by PyTorch",
            "reserved": r"([\d.]+ \w+) is reserved by PyTorch",
        }.items()
        if (number := re.search(pattern, message))
    }
    before = traceback_before(text.content, match)
    is_second = _is_second_step(text)
    if SGLANG in before and not is_second:
        return _sglang_out_of_memory(text, before, evidence | numbers)
    phase = "generation" if SGLANG in before else phase_of(before)
    evidence |= numbers | {"phase": phase}
    sizes = ", ".join(f"{name} {value}" for name, value in numbers.items())
    details = "; ".join(filter(None, (sizes, *_memory_facts(text))))
    if is_second:
        return diagnosis(
            "MEM03",
            f"out of memory in {phase}, after {text.facts['steps']} steps on shared GPUs ({details})",
            remedy=f"{_less_memory(text)}; use --offload-optimizer-states or shorter samples; or lower "
            "--sglang-max-running-requests, so that the engine keeps less"
            if phase in TRAINING_PHASES
            else SMALLER_ENGINE,
            evidence=evidence,
        )
    return diagnosis(
        "MEM02",
        f"out of memory in {phase} ({details or match[0]})",
        remedy=_less_of_either(text, phase),
        evidence=evidence,
    )


def _is_second_step(text: LogText) -> bool:
    """Whether engine and trainer share the GPU, and the first step succeeded."""
    return bool(text.flags.get("colocate")) and int(text.facts.get("steps", 0)) >= 1


def _sglang_out_of_memory(text: LogText, before: str, evidence: dict[str, Any]) -> Diagnosis:
    """MEM02 of an engine, whose working memory must fit next to its share for weights and cache."""
    phase = next(phase for word, phase in SGLANG_PHASES if word in before)
    options: Mapping[str, Any] = text.flags.get("sglang_options") or {}
    fraction = options.get("mem_fraction_static")
    current = f" (now {fraction})" if fraction is not None else ""
    return diagnosis(
        "MEM02",
        f"an engine ran out of memory while {phase} ({text.source}, line {evidence['line']}): {evidence['text']}",
        cause="Weights and KV cache use --sglang-mem-fraction-static of a GPU; CUDA graphs, buffers and other "
        "processes must fit into the rest.",
        remedy=f"lower --sglang-mem-fraction-static{current} by 0.1, or --sglang-cuda-graph-max-bs and "
        "--sglang-max-running-requests; `furlong doctor` with the same flags lists what already uses the GPU (GPU04)",
        evidence=evidence | {"phase": phase},
    )


def _no_room_to_resume(text: LogText, match: re.Match[str]) -> Diagnosis:
    """MEM03 of an engine that cannot get back the memory that it released."""
    evidence, steps = evidence_of(text, match), int(text.facts.get("steps", 0))
    doing = "resume" if steps or "func=resume" in evidence["text"] else "allocate"
    return diagnosis(
        "MEM03",
        f"an engine could not {doing} its memory, {steps} steps into the run: its GPU was full "
        f"({text.source}, line {evidence['line']}): {evidence['text']}",
        cause="The memory that the trainer keeps during the weight update or while offloaded, and that of other "
        "processes, leaves less than the engine had.",
        remedy=f"{SMALLER_ENGINE}; `furlong doctor` with the same flags lists what else uses the GPU (GPU04)",
        evidence=evidence | {"phase": "resuming its memory"},
    )


def _too_small_a_share(text: LogText, match: re.Match[str]) -> Diagnosis:
    """MEM02 of an engine whose share of the GPU is too small for its weights."""
    evidence = evidence_of(text, match)
    return diagnosis(
        "MEM02",
        f"an engine's share of the GPU leaves no room for its KV cache ({text.source}, line {evidence['line']}): "
        f"{evidence['text']}",
        cause="--sglang-mem-fraction-static of the GPU is less than the weights need, or other processes use the GPU.",
        remedy="raise --sglang-mem-fraction-static, shard the model with a larger --rollout-num-gpus-per-engine, or "
        "end other processes on the GPU (GPU04)",
        evidence=evidence | {"phase": "allocating its KV cache"},
    )


def _memory_facts(text: LogText) -> list[str]:
    """List what is known about the run's memory when it ran out."""
    facts = text.facts
    longest, tensors = facts.get("longest_sample"), facts.get("largest_tensors")
    return [
        f"longest sample {longest} tokens" if longest else "",
        f"largest tensors: {', '.join(tensors)}" if tensors else "",
        str(facts.get("measured", "")),
        str(facts.get("predicted", "")),
    ]


def _less_memory(text: LogText) -> str:
    """Suggest flags that need less memory, with values."""
    if change := text.facts.get("smallest_change"):
        return remedy_of(str(change))
    flags, remedies = text.flags, list[str]()
    if tokens := flags.get("max_tokens_per_gpu"):
        remedies.append(f"--use-dynamic-batch-size --max-tokens-per-gpu {max(int(tokens) // 2, 1)} (now {tokens})")
    elif int(flags.get("micro_batch_size") or 1) > 1:
        remedies.append(f"--micro-batch-size {int(flags['micro_batch_size']) // 2}")
    if not flags.get("recompute_activations"):
        remedies.append("--recompute-activations")
    remedies.append("a lower --rollout-max-response-len if the longest sample alone does not fit")
    return f"use {'; '.join(remedies)}"


def _less_of_either(text: LogText, phase: str) -> str:
    """Suggest flags for GPU memory; those of an engine, too, if the traceback does not show whose memory it is."""
    engine = "; if it is an engine that ran out of memory, lower --sglang-mem-fraction-static"
    has_engine = text.flags.get("engine", "sglang") not in ("embedded", "external")
    return _less_memory(text) + (engine if phase == UNKNOWN_PHASE and has_engine else "")


def _host_memory(text: LogText, match: re.Match[str]) -> Diagnosis:
    """MEM02 of host memory: of training on a CPU, or of what a trainer on GPUs keeps on the host."""
    size = re.search(r"you tried to allocate (\d+) bytes", text.content[match.start() :])
    tried = f"tried {int(size[1]) / 2**20:,.0f} MiB" if size else match[0]
    details = "; ".join(filter(None, (tried, *_memory_facts(text))))
    phase = phase_of(traceback_before(text.content, match))
    remedy = _smaller_cache(text) if phase == "generation" else _less_memory(text)
    if phase == UNKNOWN_PHASE:
        remedy += f"; or {LESS_HOST_MEMORY}"
    return diagnosis(
        "MEM02",
        f"out of host memory in {phase} ({details})",
        cause="The process needed more than the machine, its container or `ulimit -v` allows.",
        remedy=remedy,
        evidence=evidence_of(text, match) | {"phase": phase},
    )


def _smaller_cache(text: LogText) -> str:
    """Suggest flags with which the embedded engine caches fewer tokens, with values."""
    flags = text.flags
    slots = int(flags.get("embedded_num_slots") or 1)
    samples = int(flags.get("rollout_batch_size") or slots) * int(flags.get("n_samples_per_prompt") or 1)
    running = min(slots, max(samples, 1))
    fewer = f"--embedded-num-slots {running // 2}" if running > 1 else ""
    length = flags.get("rollout_max_response_len")
    shorter = f"--rollout-max-response-len {max(int(length) // 2, 1)} (now {length})" if length else ""
    ways = " or ".join(filter(None, (fewer, shorter)))
    return f"use {ways}" if ways else "use a smaller model or more memory: one sequence at a time does not fit"


def _small_batch_memory(text: LogText, match: re.Match[str]) -> Diagnosis:
    """MEM02 of an engine whose KV cache is too small for one batch."""
    evidence = evidence_of(text, match)
    return diagnosis(
        "MEM02",
        f"an engine's KV cache is too small for a batch ({text.source}, line {evidence['line']}): {evidence['text']}",
        cause="The requests that run together need more tokens of KV cache than --sglang-mem-fraction-static leaves.",
        remedy="lower --sglang-max-running-requests or --sglang-chunked-prefill-size, or raise "
        "--sglang-mem-fraction-static if the GPU has free memory",
        evidence=evidence | {"phase": "generating"},
    )


def _graphs_out_of_memory(text: LogText, match: re.Match[str]) -> Diagnosis:
    if _is_second_step(text):
        return _out_of_memory(text, match)
    return _sglang_out_of_memory(text, f"{SGLANG}cuda_graph", evidence_of(text, match))


def _library_out_of_memory(text: LogText, match: re.Match[str]) -> Diagnosis:
    """MEM02 of the memory that a library allocates beside PyTorch: of an engine, or of training."""
    before = traceback_before(text.content, match)
    if SGLANG in before:
        return _sglang_out_of_memory(text, before, evidence_of(text, match))
    evidence = evidence_of(text, match)
    return diagnosis(
        "MEM02",
        f"out of GPU memory in a library ({text.source}, line {evidence['line']}): {evidence['text']}",
        cause="NCCL and cuBLAS allocate memory beside PyTorch's, which had used up the GPU.",
        remedy=_less_memory(text),
        evidence=evidence | {"phase": phase_of(before)},
    )


GPU_WORDS = (
    r"(torch\.)?OutOfMemoryError|(CUDA|HIP) out of memory|CUDA (driver )?error: out of memory|"
    r"(cudaErrorMemoryAllocation|hipErrorOutOfMemory)[^\n]*"
)
LIBRARY_WORDS = (
    r"Cuda failure (\d+ )?'out of memory'[^\n]*|(CUBLAS|CUDNN|CUSPARSE)_STATUS_ALLOC_FAILED[^\n]*|"
    r"(CUBLAS|CUDNN)_STATUS_NOT_INITIALIZED[^\n]*"
)
MACHINE = (
    "the memory of a machine is used up",
    "end other processes there, or use fewer --num-reward-workers or a smaller --rollout-batch-size; "
    "RAY_memory_usage_threshold=0.98 in Ray's environment raises Ray's limit of 0.95",
    "Ray ends processes of a machine before the kernel has to, whichever process filled its memory.",
)

MEMORY: tuple[Signature, ...] = (
    signature(
        "MEM02",
        r"[^\n]*running low on memory[^\n]*|exceeds the memory usage threshold[^\n]*",
        MACHINE,
        codes=MACHINE_MEMORY,
        before_codes=r"Ray ended it, as its machine ran low on memory[^\n]*",
    ),
    signature(
        "MEM02",
        r"[Dd]etected \d+ oom[-_]kill event[^\n]*|[Mm]emory cgroup out of memory[^\n]*|"
        r"Exceeded job memory limit[^\n]*|OOMKilled",
        (
            "the job's memory limit ended a process",
            "request more memory from the scheduler (Slurm: --mem; Kubernetes: resources.limits.memory), or use fewer "
            "--num-reward-workers or a smaller --rollout-batch-size",
            "The processes of the job together used more host memory than the scheduler granted.",
        ),
    ),
    signature("MEM02", r"Capture cuda ?graph failed[^\n]*out of memory[^\n]*", _graphs_out_of_memory),
    signature("MEM02", r"(Decode|Prefill) out of memory[^\n]*", _small_batch_memory),
    signature("MEM02", LIBRARY_WORDS, _library_out_of_memory),
    signature("MEM02", GPU_WORDS, _out_of_memory),
    signature("MEM03", r"\[torch_memory_saver[^\n]*out of memory[^\n]*", _no_room_to_resume),
    signature(
        "MEM02",
        r"Not enough memory[^\n]*mem[-_]fraction[-_]static[^\n]*|"
        r"[^\n]*available KV cache memory[^\n]*",
        _too_small_a_share,
    ),
    signature(
        "MEM02",
        r"[^\n]*shared memory segment /dev/shm[^\n]*|[^\n]*out of shared memory[^\n]*|"
        r"No space left on device[^\n]*/dev/shm[^\n]*|[^\n]*/dev/shm[^\n]*No space left on device",
        (
            "/dev/shm is too small",
            "start the container with --shm-size=16g or --ipc=host, or remount it: `mount -o remount,size=16g "
            "/dev/shm`; NCCL_SHM_DISABLE=1 makes NCCL use the network instead",
            "NCCL and data loaders exchange data in /dev/shm, of which Docker gives a container 64 MiB.",
        ),
    ),
    signature("MEM02", r"can't allocate memory[^\n]*|Cannot allocate memory|\bMemoryError\b", _host_memory),
)
