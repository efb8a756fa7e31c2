"""Signatures of known failures in tracebacks and logs, one row each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from furlong.core.catalogue import CATALOGUE, Diagnosis, diagnosis
from furlong.core.transports import GLOO_REMEDY, NCCL_REMEDY, NETWORK_CAUSE
from furlong.errors import (
    ENGINE_KILLED,
    MACHINE_MEMORY,
    PLACEMENT_TIMEOUT,
    WORKER_DIED,
    HookError,
)
from furlong.tools.memory_plan import remedy_of

TRACEBACK = 8192  # characters before a match that may belong to its traceback
NEAR = 24  # lines around a match to search for more: seven frames of a traceback
STATED = re.compile(r"\[(?P<id>[A-Z]+\d\d)\] (?P<finding>.+)", re.DOTALL)

# Functions in a traceback and the phase of a run that they belong to.
PHASES = (
    ("optim_step", "the optimizer step"),
    ("log_probs", "a log-prob pass"),
    ("forward_backward", "forward and backward of training"),
    ("load_weights", "the weight update"),
    ("update_weights", "the weight update"),
    ("publish", "the weight update"),  # in logs of older versions
    ("save", "saving a checkpoint"),
    ("generate", "generation"),
    ("_step", "generation"),
    ("build", "building the run's parts"),
)
TRAINING_PHASES = frozenset(phase for _, phase in PHASES[:3])

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

USER_ROWS = frozenset({"HOOK01", "REW01", "REW03", "TOOL02"})  # caused by custom functions
# Rows whose signatures a user's server, process or message can contain, too.
ENGINE_ROWS = frozenset({"ENG01", "ENG03", "ENG05", "GPU02", "GPU03", "GPU04", "MEM03", "SYNC01"})
OUT_OF_MEMORY_TYPES = re.compile(r"\b(OutOfMemoryError|MemoryError)\b")
RECORD = re.compile(r"\d\d:\d\d:\d\d\S* [DIWEC] (?P<logger>\w+)[\w.]*: ")  # a line of the log that a logger wrote
LOGGERS = frozenset({"furlong", "sglang", "torch", "ray", "megatron", "transformers"})  # others are the user's
RAISE_LIMITS = (
    "raise the limit if a part needs longer: --distributed-timeout-minutes between trainer ranks, "
    "--update-weight-timeout for an engine that loads weights"
)
OOM_KILLER = "check for the out-of-memory killer (`dmesg | grep -i oom`)"
RANK = re.compile(r"\btrainer rank \d+", re.IGNORECASE)
RANK_CAUSE = "Its process ended: a signal (the out-of-memory killer, a scheduler, a person), or a crash in a library."
SGLANG_ENDS_ITSELF = "kill_process_tree called"
FREE_PORT = (
    "end the process that listens there, or use another port; fewer engines per machine (a larger "
    "--rollout-num-gpus-per-engine) need fewer ports"
)


@dataclass(frozen=True)
class LogText:
    """A part of a log, or a traceback: its source, and flags (by field) and facts of its run.

    failure: `errors.failure_record` of the error that ended the run, if this text contains it.
    """

    source: str
    content: str
    flags: Mapping[str, Any]
    facts: Mapping[str, Any]
    failure: Mapping[str, Any] | None = None

    @property
    def code(self) -> str:
        """The code of the failure, "" without one."""
        return str((self.failure or {}).get("code", ""))


@dataclass(frozen=True)
class Signature:
    """How a failure is recognized, and its diagnosis.

    codes: the start of the codes of errors of furlong. pattern: matches texts of other programs, and those of runs
    whose errors had no codes yet. also: must match in the lines around it. The signature is skipped if one of `causes`,
    which are more specific, was found.
    """

    id: str
    pattern: re.Pattern[str]
    diagnose: Callable[[LogText, re.Match[str]], Diagnosis]
    codes: str = ""
    also: re.Pattern[str] | None = None
    causes: frozenset[str] = frozenset()

    def match(self, text: LogText) -> re.Match[str] | None:
        """Return the line of the coded error, or else the first match of the pattern."""
        if self.codes and text.failure is not None and text.code.startswith(self.codes):
            line = str(text.failure["message"]).partition("\n")[0]
            if (match := re.search(re.escape(line), text.content)) is not None:
                return match
        matches = (m for m in self.pattern.finditer(text.content) if not _is_of_user(text.content, m))
        return next((m for m in matches if self.also is None or self.also.search(_around(text.content, m))), None)


def _is_of_user(content: str, match: re.Match[str]) -> bool:
    """Whether a logger of the user's code wrote the line of a match."""
    record = RECORD.search(content, content.rfind("\n", 0, match.start()) + 1, match.start())
    return record is not None and record["logger"] not in LOGGERS


def match_signatures(text: LogText, *, known: Iterable[str] = ()) -> list[Diagnosis]:
    """Diagnose a text, once per id, in the order of `SIGNATURES`. Ids in `known` are skipped."""
    seen = set(known)
    diagnoses: list[Diagnosis] = []
    for signature in SIGNATURES:
        if signature.id in seen or signature.causes & seen:
            continue
        if (match := signature.match(text)) is not None:
            diagnoses.append(signature.diagnose(text, match))
            seen.add(signature.id)
    return diagnoses


def user_error_exclusions(error: str, message: str) -> frozenset[str]:
    """Return the ids that do not apply if a custom function raised the exception `error` with `message`.

    A function may run out of memory itself; then the type of its exception says so.
    """
    stated = parse_diagnosis(message)
    is_user_error = error == HookError.__name__ or (stated is not None and stated.id in USER_ROWS)
    if not is_user_error:
        return frozenset()
    return ENGINE_ROWS if OUT_OF_MEMORY_TYPES.search(message) else ENGINE_ROWS | {"MEM02"}


def parse_diagnosis(message: str) -> Diagnosis | None:
    """Parse a message of furlong that is a diagnosis: `[ID] finding`, then cause and remedy on separate lines."""
    match = STATED.search(message)
    if match is None or match["id"] not in CATALOGUE:
        return None
    row = CATALOGUE[match["id"]]
    finding, *rest = [line.strip() for line in match["finding"].splitlines() if line.strip()]
    cause = " ".join(rest[:-1]) if len(rest) > 1 else row.cause
    return Diagnosis(row.id, finding, cause, rest[-1] if rest else row.remedy, row.severity)


def phase_of(traceback: str) -> str:
    """Return the phase of a run, from the innermost function of a traceback that belongs to one."""
    names = re.findall(r", in (\w+)", traceback)
    for name in reversed(names):
        for function, phase in PHASES:
            if name.strip("_") == function.strip("_"):
                return phase
    return "an unknown phase"


def _around(content: str, match: re.Match[str]) -> str:
    lines_before = content[: match.start()].splitlines()[-NEAR:]
    lines_after = content[match.start() :].splitlines()[: NEAR + 1]
    return "\n".join([*lines_before, *lines_after])


def _evidence(text: LogText, match: re.Match[str]) -> dict[str, Any]:
    number = text.content.count("\n", 0, match.start()) + 1
    line = text.content.splitlines()[number - 1].strip()
    return {"source": text.source, "line": number, "text": line[:400]} | dict(text.facts)


def _out_of_memory(text: LogText, match: re.Match[str]) -> Diagnosis:
    """MEM02, or MEM03 if engine and trainer share the device and the first step succeeded."""
    evidence = _evidence(text, match)
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
    before = _traceback_before(text.content, match)
    is_second = bool(text.flags.get("colocate")) and int(text.facts.get("steps", 0)) >= 1
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
        "MEM02", f"out of memory in {phase} ({details or match[0]})", remedy=_less_memory(text), evidence=evidence
    )


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
    evidence = _evidence(text, match)
    return diagnosis(
        "MEM03",
        f"an engine could not resume its memory, {text.facts.get('steps', 0)} steps into the run: its GPU was full "
        f"({text.source}, line {evidence['line']}): {evidence['text']}",
        cause="The memory that the trainer keeps during the weight update or while offloaded, and that of other "
        "processes, leaves less than the engine had.",
        remedy=f"{SMALLER_ENGINE}; `furlong doctor` with the same flags lists what else uses the GPU (GPU04)",
        evidence=evidence | {"phase": "resuming its memory"},
    )


def _too_small_a_share(text: LogText, match: re.Match[str]) -> Diagnosis:
    """MEM02 of an engine whose share of the GPU is too small for its weights."""
    evidence = _evidence(text, match)
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


def _traceback_before(content: str, match: re.Match[str]) -> str:
    """Return the traceback before the match, as far as the log has it."""
    start = content.rfind("Traceback (most recent call last)", 0, match.start())
    return content[max(start, match.start() - TRACEBACK, 0) : match.start()]


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


def _host_memory(text: LogText, match: re.Match[str]) -> Diagnosis:
    """MEM02 of host memory: of training on a CPU, or of what a trainer on GPUs keeps on the host."""
    size = re.search(r"you tried to allocate (\d+) bytes", text.content[match.start() :])
    tried = f"tried {int(size[1]) / 2**20:,.0f} MiB" if size else match[0]
    details = "; ".join(filter(None, (tried, *_memory_facts(text))))
    phase = phase_of(_traceback_before(text.content, match))
    return diagnosis(
        "MEM02",
        f"out of host memory in {phase} ({details})",
        cause="The process needed more than the machine, its container or `ulimit -v` allows.",
        remedy=_smaller_cache(text) if phase == "generation" else _less_memory(text),
        evidence=_evidence(text, match) | {"phase": phase},
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


def _fixed(
    id: str, problem: str, remedy: str | None = None, cause: str | None = None
) -> Callable[[LogText, re.Match[str]], Diagnosis]:
    """Make a diagnosis with a fixed text, followed by the matching line."""

    def diagnose(text: LogText, match: re.Match[str]) -> Diagnosis:
        evidence = _evidence(text, match)
        finding = f"{problem} ({evidence['source']}, line {evidence['line']}): {evidence['text']}"
        return diagnosis(id, finding, remedy=remedy, cause=cause, evidence=evidence)

    return diagnose


def _full_disk(text: LogText, match: re.Match[str]) -> Diagnosis:
    """DISK01, with the flag of the file that did not fit: weights for engines, or a checkpoint."""
    evidence = _evidence(text, match)
    folder, remedy = text.flags.get("update_weight_disk_dir"), None
    if folder and str(folder) in evidence["text"]:
        remedy = "use --update-weight-disk-dir on another disk, without --update-weight-disk-keep-files"
    finding = f"the disk is full ({evidence['source']}, line {evidence['line']}): {evidence['text']}"
    return diagnosis("DISK01", finding, remedy=remedy, evidence=evidence)


def _unreachable(text: LogText, match: re.Match[str]) -> Diagnosis:
    is_taken = re.search(r"address already in use", text.content, re.IGNORECASE) is not None
    return diagnosis(
        "ENG05",
        f"cannot connect to an engine ({text.source}): {_evidence(text, match)['text']}",
        cause="Its port is used by another process (GPU03)." if is_taken else "It is still starting, or it died.",
        remedy=FREE_PORT
        if is_taken
        else "wait until the server answers /get_model_info; if it does not, read the end of its log",
        evidence=_evidence(text, match) | {"port_taken": is_taken},
    )


def _died(text: LogText, match: re.Match[str]) -> Diagnosis:
    """ENG03: a process that a signal ended from outside, or that exited by itself.

    If one of its processes fails, SGLang ends all of them, including the first one, with signal 9.
    --use-fault-tolerance does not restart trainer ranks.
    """
    if text.code == WORKER_DIED or RANK.search(_evidence(text, match)["text"]) is not None:
        return _fixed("ENG03", "a trainer rank died", _rank_remedy(text), RANK_CAUSE)(text, match)
    ended_itself = SGLANG_ENDS_ITSELF in text.content[match.end() :]
    is_killed = text.code == ENGINE_KILLED or re.search(r"was ended by signal (9|15)\b", match[0]) is not None
    is_killed = is_killed and not ended_itself
    remedies = [OOM_KILLER if is_killed else "read the end of its log"]
    if not is_killed and not ended_itself:
        remedies.append(f"if a signal ended it, {OOM_KILLER}")
    if not is_killed and text.flags.get("engine") not in ("embedded", "external"):
        remedies.append("lower --sglang-mem-fraction-static or --rollout-batch-size")
        remedies.append("use --sglang-disable-cuda-graph to find the cause")
    if not text.flags.get("use_fault_tolerance"):
        remedies.append("use --use-fault-tolerance to restart engines")
    cause = None
    if is_killed:
        cause = "A signal from outside ended it: the out-of-memory killer, a scheduler, or a person."
    elif ended_itself:
        cause = "One of its processes failed and SGLang ended the others; the first exception in its log is the reason."
    return _fixed("ENG03", "a worker or an engine died", "; ".join(remedies), cause)(text, match)


def _rank_remedy(text: LogText) -> str:
    save = text.flags.get("save")
    resume = f"resume with --load {save}" if save else "use --save in the next run: nothing was saved"
    return f"read the end of its log; {OOM_KILLER}; {resume}"


def _signature(
    id: str,
    pattern: str,
    diagnose: Callable[[LogText, re.Match[str]], Diagnosis] | tuple[str, ...],
    *,
    codes: str = "",
    also: str = "",
    causes: tuple[str, ...] = (),
) -> Signature:
    """Make a row of `SIGNATURES`. A tuple is a diagnosis with fixed texts: problem, and remedy and cause if any."""
    diagnose = _fixed(id, *diagnose) if isinstance(diagnose, tuple) else diagnose
    return Signature(id, re.compile(pattern), diagnose, codes, re.compile(also) if also else None, frozenset(causes))


SIGNATURES: tuple[Signature, ...] = (
    _signature(
        "MEM02",
        r"Ray ended it, as its machine ran low on memory[^\n]*",
        (
            "the memory of a machine is used up",
            "end other processes there, or use fewer --num-reward-workers or a smaller --rollout-batch-size; "
            "RAY_memory_usage_threshold=0.98 in Ray's environment raises Ray's limit of 0.95",
            "Ray ends processes of a machine before the kernel has to, whichever process filled its memory.",
        ),
        codes=MACHINE_MEMORY,
    ),
    _signature("MEM02", r"(torch\.)?OutOfMemoryError|CUDA out of memory|CUDA error: out of memory", _out_of_memory),
    _signature("MEM03", r"\[torch_memory_saver[^\n]*out of memory[^\n]*\bfunc=resume\b[^\n]*", _no_room_to_resume),
    _signature("MEM02", r"Not enough memory[^\n]*mem[-_]fraction[-_]static[^\n]*", _too_small_a_share),
    _signature(
        "GPU04",
        r"memory capacity is unbalanced[^\n]*",
        (
            "another process uses memory of an engine's GPUs",
            "end it (`nvidia-smi`, or `furlong doctor` with the same flags, lists it), or select free GPUs with "
            "CUDA_VISIBLE_DEVICES",
        ),
    ),
    _signature("MEM02", r"can't allocate memory[^\n]*|Cannot allocate memory|\bMemoryError\b", _host_memory),
    _signature("ENG01", r"an illegal memory access was encountered", ("illegal memory access",)),
    _signature(
        "ENG02",
        r"JSONDecodeError",
        ("torch's compiler could not read its cache",),
        also=r"inductor|torch[/.]_dynamo|triton",
    ),
    _signature("ENG05", r"Max retries exceeded with url: /\w+|Connection refused", _unreachable),
    _signature(
        "ENG03",
        r"WorkerCrashed\w*|RaySystemError|ActorDiedError|engine \S+ (died|is gone|exited)[^\n]*|"
        r"engine \d+ at \S+: [^\n]* (was ended by|ended with) [^\n]*",
        _died,
        codes="ENG03",
        causes=("ENG01", "ENG02", "GPU04", "MEM02", "MEM03"),
    ),
    _signature(
        "GPU02",
        r"waiting for [^\n]* are missing [^\n]*",
        (
            "the placement group did not get its GPUs",
            "end the job that uses them, request fewer, share them with --colocate, or wait longer with "
            "--placement-timeout",
        ),
        codes=PLACEMENT_TIMEOUT,
    ),
    _signature(
        "SYNC01",
        r"Watchdog caught collective operation timeout|NCCL[^\n]*[Tt]ime(d )?out|collective operation timeout",
        ("a collective timed out", f"{RAISE_LIMITS}; {NCCL_REMEDY}", NETWORK_CAUSE),
    ),
    _signature(
        "SYNC01",
        r"gloo/transport/\S+ Timed out waiting \d+ms for \w+ operation",
        ("a gloo collective timed out", f"{RAISE_LIMITS}; {GLOO_REMEDY}", NETWORK_CAUSE),
    ),
    _signature(
        "NUM04",
        r"\[NUM04\] [^\n]*|logits of request \S+ are not finite[^\n]*",
        (
            "the engine got non-finite weights",
            "lower --lr or --clip-grad; resume from a checkpoint before the last step",
        ),
    ),
    _signature("DISK01", r"No space left on device|Disk quota exceeded", _full_disk),
    _signature(
        "DISK01",
        r"File too large",
        (
            "a file exceeds the size limit",
            "raise `ulimit -f`, or use --save on another file system",
            "The shell, the scheduler or the file system limits file sizes.",
        ),
    ),
    _signature("GPU03", r"[Aa]ddress already in use[^\n]*", ("a port is taken", FREE_PORT)),
)
