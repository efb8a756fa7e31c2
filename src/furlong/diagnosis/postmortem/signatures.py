"""What errors and logs look like when a known thing went wrong: one row each, matched against text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from furlong.core.catalogue import CATALOGUE, Diagnosis, diagnosis
from furlong.core.transports import GLOO_REMEDY, NCCL_REMEDY, NETWORK_CAUSE
from furlong.errors import HookError

TRACEBACK = 8192  # letters of the longest that is looked at
NEAR = 24  # lines around a match that are looked at for more: seven calls of a traceback
TOLD = re.compile(r"\[(?P<id>[A-Z]+\d\d)\] (?P<finding>.+)", re.DOTALL)

# Functions of a traceback, innermost first, and the phase of a run that they belong to.
PHASES = (
    ("optim_step", "the optimizer step"),
    ("log_probs", "a log-prob pass"),
    ("forward_backward", "forward and backward of training"),
    ("load_weights", "publishing weights"),
    ("publish", "publishing weights"),
    ("save", "saving a checkpoint"),
    ("generate", "generation"),
    ("_step", "generation"),
    ("build", "building the run's parts"),
)
PHASES_OF_TRAINING = frozenset(phase for _, phase in PHASES[:3])

# Words of a traceback of SGLang's and what it was doing, the first that is found.
OF_SGLANG = "sglang/srt/"
DOINGS_OF_SGLANG = (
    ("cuda_graph", "capturing CUDA graphs"),
    ("memory_pool", "taking memory for its KV cache"),
    ("load_model", "loading the model"),
    ("update_weights", "taking new weights"),
    ("", "generating"),
)


LESS_OF_ENGINES = (
    "lower --sglang-mem-fraction-static to 0.7, then to 0.6 and 0.4; --offload-optimizer-states; shorter samples"
)

OF_USERS = frozenset({"HOOK01", "REW01", "REW03", "TOOL02"})  # rows of which a user's function is the cause
OF_ENGINES = frozenset({"ENG01", "ENG03", "ENG05"})  # whose words a user's own server or process may say, too
SGLANG_ENDS_ITSELF = "kill_process_tree called"


@dataclass(frozen=True)
class LogText:
    """A piece of log or a traceback: where it is from, and what is known of its run (flags by name)."""

    source: str
    content: str
    flags: Mapping[str, Any]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Signature:
    """One row: what the text matches, and the diagnosis of a match.

    `also` has to be among the lines around it. It is left out where one of `causes` was found, which say more.
    """

    id: str
    pattern: re.Pattern[str]
    tell: Callable[[LogText, re.Match[str]], Diagnosis | None]
    also: re.Pattern[str] | None = None
    causes: frozenset[str] = frozenset()


def matches(text: LogText, *, found_first: Iterator[str] | tuple[str, ...] = ()) -> list[Diagnosis]:
    """The diagnoses of a text, one for each id, in the order of `SIGNATURES`; ids of `found_first` are left out."""
    told = set(found_first)
    found: list[Diagnosis] = []
    for signature in SIGNATURES:
        if signature.id in told or signature.causes & told:
            continue
        for match in signature.pattern.finditer(text.content):
            if signature.also is not None and not signature.also.search(_around(text.content, match)):
                continue
            if (result := signature.tell(text, match)) is not None:
                found.append(result)
                told.add(signature.id)
                break
    return found


def blamed_on_users(error: str, message: str) -> frozenset[str]:
    """Ids that the text of an error cannot be, since a user's function raised it, and not an engine.

    error: the name of the exception, message: what it says.
    """
    own = own_words(message)
    is_users = error == HookError.__name__ or (own is not None and own.id in OF_USERS)
    return OF_ENGINES if is_users else frozenset()


def own_words(message: str) -> Diagnosis | None:
    """The diagnosis that a message of furlong's own is: `[ID] finding`, cause and way out on lines of their own."""
    match = TOLD.search(message)
    if match is None or match["id"] not in CATALOGUE:
        return None
    row = CATALOGUE[match["id"]]
    finding, *rest = [line.strip() for line in match["finding"].splitlines() if line.strip()]
    cause = " ".join(rest[:-1]) if len(rest) > 1 else row.cause
    return Diagnosis(row.id, finding, cause, rest[-1] if rest else row.remedy, row.severity)


def phase_of(traceback: str) -> str:
    """What the run was doing, by the innermost function of a traceback that says so."""
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
    """MEM02, or MEM03 where engine and trainer share the device and the first step went well."""
    evidence = _evidence(text, match)
    said = text.content[match.start() : match.start() + 800]
    numbers = {
        name: number[1]
        for name, pattern in {
            "tried": r"Tried to allocate ([\d.]+ \w+)",
            "capacity": r"total capacity of ([\d.]+ \w+)",
            "free": r"of which ([\d.]+ \w+) is free",
            "allocated": r"([\d.]+ \w+) is allocated by PyTorch",
            "reserved": r"([\d.]+ \w+) is reserved by PyTorch",
        }.items()
        if (number := re.search(pattern, said))
    }
    before = _before_end(text.content, match)
    is_second = bool(text.flags.get("colocate")) and int(text.facts.get("steps", 0)) >= 1
    if OF_SGLANG in before and not is_second:
        return _sglang_out_of_memory(text, before, evidence | numbers)
    phase = "generation" if OF_SGLANG in before else phase_of(before)
    evidence |= numbers | {"phase": phase}
    shown = "; ".join(filter(None, (", ".join(f"{name} {value}" for name, value in numbers.items()), *_known(text))))
    if is_second:
        return diagnosis(
            "MEM03",
            f"out of memory in {phase}, after {text.facts['steps']} steps on shared GPUs ({shown})",
            remedy=f"{_less_memory(text)}; --offload-optimizer-states; shorter samples; or a lower "
            "--sglang-max-running-requests, so that the engine keeps less"
            if phase in PHASES_OF_TRAINING
            else LESS_OF_ENGINES,
            evidence=evidence,
        )
    return diagnosis(
        "MEM02", f"out of memory in {phase} ({shown or match[0]})", remedy=_less_memory(text), evidence=evidence
    )


def _sglang_out_of_memory(text: LogText, before: str, evidence: dict[str, Any]) -> Diagnosis:
    """MEM02 of an engine: it has a share of the GPU for weights and cache, and its work has to fit beside that."""
    doing = next(doing for word, doing in DOINGS_OF_SGLANG if word in before)
    options: Mapping[str, Any] = text.flags.get("sglang_options") or {}
    fraction = options.get("mem_fraction_static")
    given = f" (it is {fraction})" if fraction is not None else ""
    return diagnosis(
        "MEM02",
        f"an engine ran out of memory while {doing} ({text.source}, line {evidence['line']}): {evidence['text']}",
        cause="Weights and KV cache take --sglang-mem-fraction-static of a GPU; graphs, buffers and whoever else is on "
        "that GPU have to fit into the rest.",
        remedy=f"lower --sglang-mem-fraction-static{given} by 0.1, or --sglang-cuda-graph-max-bs and "
        "--sglang-max-running-requests; `furlong doctor` with the same flags says what has the GPU already (GPU04)",
        evidence=evidence | {"phase": doing},
    )


def _no_room_to_resume(text: LogText, match: re.Match[str]) -> Diagnosis:
    """MEM03 of an engine that wants the memory back which it released."""
    evidence = _evidence(text, match)
    return diagnosis(
        "MEM03",
        f"an engine could not take its memory back, {text.facts.get('steps', 0)} steps into the run: its GPU was full "
        f"({text.source}, line {evidence['line']}): {evidence['text']}",
        cause="What a trainer keeps while weights are published, or asleep, and what others have of the GPU leave less "
        "than the engine had.",
        remedy=f"{LESS_OF_ENGINES}; `furlong doctor` with the same flags says who else has the GPU (GPU04)",
        evidence=evidence | {"phase": "taking memory back"},
    )


def _too_small_a_share(text: LogText, match: re.Match[str]) -> Diagnosis:
    """MEM02 of an engine whose share of the GPU is not enough for its weights."""
    evidence = _evidence(text, match)
    return diagnosis(
        "MEM02",
        f"an engine's share of the GPU leaves no room for its KV cache ({text.source}, line {evidence['line']}): "
        f"{evidence['text']}",
        cause="--sglang-mem-fraction-static of the GPU is less than the weights, or others have the memory.",
        remedy="raise --sglang-mem-fraction-static, cut the model with a larger --rollout-num-gpus-per-engine, or end "
        "who else has the GPU (GPU04)",
        evidence=evidence | {"phase": "taking memory for its KV cache"},
    )


def _known(text: LogText) -> list[str]:
    """What was known of the run's memory when it ran out."""
    facts = text.facts
    longest, tensors = facts.get("longest_sample"), facts.get("largest_tensors")
    return [
        f"longest sample {longest} tokens" if longest else "",
        f"largest tensors: {', '.join(tensors)}" if tensors else "",
        str(facts.get("measured", "")),
        str(facts.get("predicted", "")),
    ]


def _before_end(content: str, match: re.Match[str]) -> str:
    """The traceback that ends with the match; of a log that was cut off, what there is of it."""
    start = content.rfind("Traceback (most recent call last)", 0, match.start())
    return content[max(start, match.start() - TRACEBACK, 0) : match.start()]


def _less_memory(text: LogText) -> str:
    """Flags that take less memory, with values."""
    if change := text.facts.get("smallest_change"):
        return str(change)
    flags, ways = text.flags, list[str]()
    if tokens := flags.get("max_tokens_per_gpu"):
        ways.append(f"--max-tokens-per-gpu {max(int(tokens) // 2, 1)} (it is {tokens})")
    elif int(flags.get("micro_batch_size") or 1) > 1:
        ways.append(f"--micro-batch-size {int(flags['micro_batch_size']) // 2}")
    if not flags.get("recompute_activations"):
        ways.append("--recompute-activations")
    return "; ".join([*ways, "a lower --rollout-max-response-len if the longest sample alone does not fit"])


def _host_memory(text: LogText, match: re.Match[str]) -> Diagnosis:
    """MEM02 of the machine's own memory: training's, or what it holds for a trainer on GPUs."""
    said = re.search(r"you tried to allocate (\d+) bytes", text.content[match.start() :])
    tried = f"tried {int(said[1]) / 2**20:,.0f} MiB" if said else match[0]
    shown = "; ".join(filter(None, (tried, *_known(text))))
    phase = phase_of(_before_end(text.content, match))
    return diagnosis(
        "MEM02",
        f"the machine's own memory ran out in {phase} ({shown})",
        cause="The process needed more than the machine, its container or `ulimit -v` has left.",
        remedy=_less_memory(text),
        evidence=_evidence(text, match) | {"phase": phase},
    )


def _simply(id: str, what: str, remedy: str, cause: str | None = None) -> Callable[[LogText, re.Match[str]], Diagnosis]:
    """A diagnosis that says the same whatever the values; the line that matched follows."""

    def tell(text: LogText, match: re.Match[str]) -> Diagnosis:
        evidence = _evidence(text, match)
        finding = f"{what} ({evidence['source']}, line {evidence['line']}): {evidence['text']}"
        return diagnosis(id, finding, remedy=remedy, cause=cause, evidence=evidence)

    return tell


def _full_disk(text: LogText, match: re.Match[str]) -> Diagnosis:
    """What to do depends on whether weights were written for engines, or a checkpoint."""
    evidence = _evidence(text, match)
    folder = text.flags.get("update_weight_disk_dir")
    remedy = "use --save on another disk, --keep-checkpoints, or a larger --save-interval"
    if folder and str(folder) in evidence["text"]:
        remedy = "use --update-weight-disk-dir on another disk, without --update-weight-disk-keep-files"
    finding = f"the disk is full ({evidence['source']}, line {evidence['line']}): {evidence['text']}"
    return diagnosis("DISK01", finding, remedy=remedy, evidence=evidence)


def _unreachable(text: LogText, match: re.Match[str]) -> Diagnosis:
    taken = re.search(r"address already in use", text.content, re.IGNORECASE)
    return diagnosis(
        "ENG05",
        f"no connection to an engine ({text.source}): {_evidence(text, match)['text']}",
        cause="Its port belongs to another process (GPU03)."
        if taken
        else "It is still starting, or it died: its log has the last words.",
        remedy="end the process that has the port, or give another one; fewer engines on a machine, by a larger "
        "--rollout-num-gpus-per-engine, want fewer ports"
        if taken
        else "wait until the server answers /get_model_info; if it does not, look at the end of its log",
        evidence=_evidence(text, match) | {"port_taken": taken is not None},
    )


def _died(text: LogText, match: re.Match[str]) -> Diagnosis:
    """ENG03: a process that a signal ended from outside, or one that ended by itself.

    SGLang ends all of its processes by signal 9 where one of them fails, the first one too.
    """
    ended_itself = SGLANG_ENDS_ITSELF in text.content[match.end() :]
    is_killed = re.search(r"was ended by signal (9|15)\b", match[0]) is not None and not ended_itself
    ways = ["look for the out-of-memory killer (`dmesg | grep -i oom`)" if is_killed else "read the end of its log"]
    if not is_killed and not ended_itself:
        ways.append("if a signal ended it, look for the out-of-memory killer (`dmesg | grep -i oom`)")
    if not is_killed and text.flags.get("engine") not in ("embedded", "external"):
        ways.append("lower --sglang-mem-fraction-static or --rollout-batch-size")
        ways.append("--sglang-disable-cuda-graph to find the cause")
    if not text.flags.get("use_fault_tolerance"):
        ways.append("--use-fault-tolerance starts engines again")
    cause = None
    if is_killed:
        cause = "A signal from outside ended it: the machine's out-of-memory killer, a scheduler, or a person."
    elif ended_itself:
        cause = "One of its processes failed, and SGLang ended the others; the first exception of its log says why."
    return _simply("ENG03", "a worker or an engine died", "; ".join(ways), cause)(text, match)


def _row(
    id: str,
    pattern: str,
    tell: Callable[[LogText, re.Match[str]], Diagnosis | None],
    also: str = "",
    causes: tuple[str, ...] = (),
) -> Signature:
    return Signature(id, re.compile(pattern), tell, re.compile(also) if also else None, frozenset(causes))


SIGNATURES: tuple[Signature, ...] = (
    _row(
        "MEM02",
        r"Ray ended it, as its machine ran low on memory[^\n]*",
        _simply(
            "MEM02",
            "the memory of a machine is used up",
            "end or shrink who else has it; fewer --num-reward-workers, a smaller --rollout-batch-size; "
            "RAY_memory_usage_threshold=0.98 in Ray's environment lets it fill further than 0.95, Ray's limit",
            cause="Ray ends processes of a machine before the kernel has to, whoever filled its memory.",
        ),
    ),
    _row("MEM02", r"(torch\.)?OutOfMemoryError|CUDA out of memory|CUDA error: out of memory", _out_of_memory),
    _row("MEM03", r"\[torch_memory_saver[^\n]*out of memory[^\n]*\bfunc=resume\b[^\n]*", _no_room_to_resume),
    _row("MEM02", r"Not enough memory[^\n]*mem[-_]fraction[-_]static[^\n]*", _too_small_a_share),
    _row(
        "GPU04",
        r"memory capacity is unbalanced[^\n]*",
        _simply(
            "GPU04",
            "another process has memory of an engine's GPUs",
            "end it (`nvidia-smi` shows it, and `furlong doctor` with the same flags), or name free GPUs with "
            "CUDA_VISIBLE_DEVICES",
        ),
    ),
    _row("MEM02", r"can't allocate memory[^\n]*|Cannot allocate memory|\bMemoryError\b", _host_memory),
    _row(
        "ENG01",
        r"an illegal memory access was encountered",
        _simply("ENG01", "illegal memory access", CATALOGUE["ENG01"].remedy),
    ),
    _row(
        "ENG02",
        r"JSONDecodeError",
        _simply(
            "ENG02",
            "torch's compiler could not read its cache",
            "set TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 in the environment, or delete the cache folder that the "
            "traceback names",
        ),
        also=r"inductor|torch[/.]_dynamo|triton",
    ),
    _row("ENG05", r"Max retries exceeded with url: /\w+|Connection refused", _unreachable),
    _row(
        "ENG03",
        r"WorkerCrashed\w*|RaySystemError|ActorDiedError|engine \S+ (died|is gone|exited)[^\n]*|"
        r"engine \d+ at \S+: [^\n]* (was ended by|ended with) [^\n]*",
        _died,
        causes=("ENG01", "ENG02", "GPU04", "MEM02", "MEM03"),
    ),
    _row(
        "GPU02",
        r"waiting for [^\n]* are missing [^\n]*",
        _simply(
            "GPU02",
            "the placement group did not get its GPUs",
            "end the job that holds them, ask for fewer, share them with --colocate, or wait longer with "
            "--placement-timeout",
        ),
    ),
    _row(
        "SYNC01",
        r"Watchdog caught collective operation timeout|NCCL[^\n]*[Tt]ime(d )?out|collective operation timeout",
        _simply(
            "SYNC01",
            "ranks did not meet in a collective",
            NCCL_REMEDY,
            NETWORK_CAUSE,
        ),
    ),
    _row(
        "SYNC01",
        r"gloo/transport/\S+ Timed out waiting \d+ms for \w+ operation",
        _simply("SYNC01", "ranks did not meet in a collective of gloo", GLOO_REMEDY, NETWORK_CAUSE),
    ),
    _row(
        "NUM04",
        r"logits of request \S+ are not finite[^\n]*",
        _simply("NUM04", "the engine got weights that are not finite", "lower --lr or --clip-grad; "
                "go on from a checkpoint before the last step"),
    ),
    _row(
        "DISK01",
        r"No space left on device|Disk quota exceeded",
        _full_disk,
    ),
    _row(
        "DISK01",
        r"File too large",
        _simply("DISK01", "a file may not become as large", "raise `ulimit -f`, or use --save on another file system",
                "The shell, the scheduler or the file system limits the size of a file."),
    ),
    _row(
        "GPU03",
        r"[Aa]ddress already in use[^\n]*",
        _simply(
            "GPU03",
            "a port is taken",
            "end the process that listens there, or give another port; fewer engines on a machine, by a larger "
            "--rollout-num-gpus-per-engine, want fewer ports",
        ),
    ),
)  # fmt: skip
