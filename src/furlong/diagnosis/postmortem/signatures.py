"""The signatures of failures: a pattern, the row that it proves, and what to do. The first match counts.

In order of precedence: memory, other causes, and what follows from them (a process that is gone, a connection that
broke, a collective that timed out). To add one, add a row here and a text to tests/unit/diagnosis/test_signatures.py.
"""

from __future__ import annotations

import re
from dataclasses import replace

from furlong.catalogue import Diagnosis, diagnosis
from furlong.core.transports import GLOO_REMEDY, NCCL_REMEDY, NETWORK_CAUSE
from furlong.diagnosis.monitors.machine_monitors import ENGINE_HANGS_CAUSE
from furlong.diagnosis.postmortem.matcher import (
    TRAINING_PHASES,
    UNKNOWN_PHASE,
    LogText,
    Signature,
    evidence_of,
    phase_of,
    stated,
    traceback_before,
)
from furlong.errors import ENGINE_HANGS, ENGINE_KILLED, MACHINE_MEMORY, PLACEMENT_TIMEOUT, WORKER_DIED
from furlong.tools.memory_plan import remedy_of

# ---- memory

SGLANG = "sglang/srt/"
SGLANG_PHASES = {  # words in a traceback of SGLang, in order of precedence, and what it was doing
    "cuda_graph": "capturing CUDA graphs",
    "memory_pool": "allocating its KV cache",
    "load_model": "loading the model",
    "update_weights": "loading new weights",
    "": "generating",
}
SIZES = {
    "tried": r"[Tt]ried to allocate ([\d.]+ \w+)",
    "capacity": r"total capacity of ([\d.]+ \w+)",
    "free": r"of which ([\d.]+ \w+) is free",
    "allocated": r"([\d.]+ \w+) is allocated by PyTorch",
    "reserved": r"([\d.]+ \w+) is reserved by PyTorch",
}
SMALLER_ENGINE = (
    "lower --sglang-mem-fraction-static to 0.7, then to 0.6 and 0.4; use --offload-optimizer-states or shorter samples"
)
LESS_HOST_MEMORY = (
    "use fewer --num-reward-workers or a smaller --rollout-batch-size, request more memory from the scheduler (Slurm: "
    "--mem; Kubernetes: resources.limits.memory), or end other processes of the machine"
)


def _gpu_memory(text: LogText, match: re.Match[str]) -> Diagnosis:
    found, flags = _full_gpu(text, match), text.flags
    if not flags.get("colocate") or flags.get("offload_train") is not False or flags.get("offload_rollout"):
        return found
    return replace(found, remedy=f"let trainer and engines use the GPU in turn (--offload); or {found.remedy}")


def _full_gpu(text: LogText, match: re.Match[str]) -> Diagnosis:
    before, steps = traceback_before(text.content, match), int(text.facts.get("steps", 0))
    is_engine = SGLANG in before or "apture cuda" in match[0]
    is_second = bool(text.flags.get("colocate")) and steps >= 1
    message = text.content[match.start() : match.start() + 800]
    numbers = {name: found[1] for name, pattern in SIZES.items() if (found := re.search(pattern, message))}
    sizes = ", ".join(f"{name} {value}" for name, value in numbers.items())
    details = "; ".join(filter(None, (sizes, *_memory_facts(text)))) or match[0]
    if is_second:
        phase = "generation" if is_engine else phase_of(before)
        is_training = phase in TRAINING_PHASES
        return diagnosis(
            "MEM03",
            f"out of memory in {phase}, after {steps} steps on shared GPUs ({details})",
            remedy=f"{_less_memory(text)}; use --offload-optimizer-states or shorter samples; or lower "
            "--sglang-max-running-requests, so that the engine keeps less"
            if is_training
            else SMALLER_ENGINE,
            evidence=evidence_of(text, match) | numbers | {"phase": phase},
        )
    if is_engine:
        words = before + match[0].lower().replace(" ", "_")
        phase = next(phase for word, phase in SGLANG_PHASES.items() if word in words)
        fraction = (text.flags.get("sglang_options") or {}).get("mem_fraction_static")
        return stated(
            "MEM02",
            text,
            match,
            f"an engine ran out of memory while {phase}",
            cause="Weights and KV cache use --sglang-mem-fraction-static of a GPU; CUDA graphs, buffers and other "
            "processes must fit into the rest.",
            remedy=f"lower --sglang-mem-fraction-static{f' (now {fraction})' if fraction is not None else ''} by 0.1, "
            "or --sglang-cuda-graph-max-bs and --sglang-max-running-requests; `furlong doctor` with the same flags "
            "lists what already uses the GPU (GPU04)",
            phase=phase,
        )
    phase, remedy = phase_of(before), _less_memory(text)
    if phase == UNKNOWN_PHASE and text.flags.get("engine", "sglang") not in ("embedded", "external"):
        remedy += "; if it is an engine that ran out of memory, lower --sglang-mem-fraction-static"
    evidence = evidence_of(text, match) | numbers | {"phase": phase}
    return diagnosis("MEM02", f"out of memory in {phase} ({details})", remedy=remedy, evidence=evidence)


def _host_memory(text: LogText, match: re.Match[str]) -> Diagnosis:
    size = re.search(r"you tried to allocate (\d+) bytes", text.content[match.start() :])
    tried = f"tried {int(size[1]) / 2**20:,.0f} MiB" if size else match[0]
    phase = phase_of(traceback_before(text.content, match))
    remedy = "use fewer --embedded-num-slots, or a lower --rollout-max-response-len"
    if phase != "generation":
        remedy = _less_memory(text)
    if phase == UNKNOWN_PHASE:
        remedy += f"; or {LESS_HOST_MEMORY}"
    return diagnosis(
        "MEM02",
        f"out of host memory in {phase} ({'; '.join(filter(None, (tried, *_memory_facts(text))))})",
        cause="The process needed more than the machine, its container or `ulimit -v` allows.",
        remedy=remedy,
        evidence=evidence_of(text, match) | {"phase": phase},
    )


def _no_room_to_resume(text: LogText, match: re.Match[str]) -> Diagnosis:
    steps = int(text.facts.get("steps", 0))
    doing = "resume" if steps or "func=resume" in match[0] else "allocate"
    return stated(
        "MEM03",
        text,
        match,
        f"an engine could not {doing} its memory, {steps} steps into the run: its GPU was full",
        cause="The memory that the trainer keeps during the weight update or while offloaded, and that of other "
        "processes, leaves less than the engine had.",
        remedy=f"{SMALLER_ENGINE}; `furlong doctor` with the same flags lists what else uses the GPU (GPU04)",
        phase="resuming its memory",
    )


def _memory_facts(text: LogText) -> list[str]:
    facts = text.facts
    longest, tensors = facts.get("longest_sample"), facts.get("largest_tensors")
    return [
        f"longest sample {longest} tokens" if longest else "",
        f"largest tensors: {', '.join(tensors)}" if tensors else "",
        str(facts.get("measured", "")),
        str(facts.get("predicted", "")),
    ]


def _less_memory(text: LogText) -> str:
    if change := text.facts.get("smallest_change"):
        return remedy_of(str(change))
    smaller = "a smaller --micro-batch-size"
    if tokens := text.flags.get("max_tokens_per_gpu"):
        smaller = f"--use-dynamic-batch-size --max-tokens-per-gpu {max(int(tokens) // 2, 1)} (now {tokens})"
    return (
        f"use {smaller}, --recompute-activations, or a lower --rollout-max-response-len if the longest sample alone "
        "does not fit"
    )


MEMORY = (
    Signature(
        "MEM02", r"[^\n]*(running|ran) low on memory[^\n]*|exceeds the memory usage threshold[^\n]*",
        "the memory of a machine is used up",
        "end other processes there, or use fewer --num-reward-workers or a smaller --rollout-batch-size; "
        "RAY_memory_usage_threshold=0.98 in Ray's environment raises Ray's limit of 0.95",
        "Ray ends processes of a machine before the kernel has to, whichever process filled its memory.",
        code=MACHINE_MEMORY,
    ),
    Signature(
        "MEM02",
        r"[Dd]etected \d+ oom[-_]kill event|[Mm]emory cgroup out of memory|Exceeded job memory limit|OOMKilled|"
        r"Out of memory: Killed process",
        "a process was ended because host memory was used up", LESS_HOST_MEMORY,
        "The processes of the job or of the machine together used more host memory than there is, or was granted.",
    ),
    Signature("MEM02", r"Capture cuda ?graph failed[^\n]*out of memory[^\n]*", diagnose=_gpu_memory),
    Signature(
        "MEM02", r"(Decode|Prefill) out of memory[^\n]*", "an engine's KV cache is too small for a batch",
        "lower --sglang-max-running-requests or --sglang-chunked-prefill-size, or raise --sglang-mem-fraction-static "
        "if the GPU has free memory",
        "The requests that run together need more tokens of KV cache than --sglang-mem-fraction-static leaves.",
    ),
    Signature(
        "MEM02",
        r"Cuda failure (\d+ )?'out of memory'[^\n]*|(CUBLAS|CUDNN|CUSPARSE)_STATUS_ALLOC_FAILED[^\n]*|"
        r"(CUBLAS|CUDNN)_STATUS_NOT_INITIALIZED[^\n]*|(torch\.)?OutOfMemoryError|(CUDA|HIP) out of memory|"
        r"CUDA (driver )?error: out of memory|(cudaErrorMemoryAllocation|hipErrorOutOfMemory)[^\n]*",
        diagnose=_gpu_memory,
    ),
    Signature("MEM03", r"\[torch_memory_saver[^\n]*out of memory[^\n]*", diagnose=_no_room_to_resume),
    Signature(
        "MEM02", r"Not enough memory[^\n]*mem[-_]fraction[-_]static[^\n]*|[^\n]*available KV cache memory[^\n]*",
        "an engine's share of the GPU leaves no room for its KV cache",
        "raise --sglang-mem-fraction-static, shard the model with a larger --rollout-num-gpus-per-engine, or end other "
        "processes on the GPU (GPU04)",
        "--sglang-mem-fraction-static of the GPU is less than the weights need, or other processes use the GPU.",
    ),
    Signature(
        "MEM02",
        r"[^\n]*shared memory segment /dev/shm[^\n]*|[^\n]*out of shared memory[^\n]*|"
        r"No space left on device[^\n]*/dev/shm[^\n]*|[^\n]*/dev/shm[^\n]*No space left on device",
        "/dev/shm is too small",
        "start the container with --shm-size=16g or --ipc=host, or remount it: `mount -o remount,size=16g /dev/shm`; "
        "NCCL_SHM_DISABLE=1 makes NCCL use the network instead",
        "NCCL and data loaders exchange data in /dev/shm, of which Docker gives a container 64 MiB.",
    ),
    Signature("MEM02", r"can't allocate memory[^\n]*|Cannot allocate memory|\bMemoryError\b", diagnose=_host_memory),
)  # fmt: skip

# ---- other causes

FREE_PORT = (
    "end the process that listens there, or use another port; with engine servers, fewer of them per machine (a larger "
    "--rollout-num-gpus-per-engine) need fewer ports"
)
CHECK_MODEL = "download or convert the model again; `furlong check DIR` names what is damaged or missing"


DUMPS = {"save_samples": "--save-debug-rollout-data", "save_batch": "--save-debug-train-data"}  # by function


def _full_disk(text: LogText, match: re.Match[str]) -> Diagnosis:
    folder, remedy, before = text.flags.get("update_weight_disk_dir"), None, traceback_before(text.content, match)
    if folder and str(folder) in evidence_of(text, match)["text"]:
        remedy = "use --update-weight-disk-dir on another disk, without --update-weight-disk-keep-files"
    dump = next((flag for function, flag in DUMPS.items() if f", in {function}\n" in before), None)
    if dump is not None:
        remedy = f"free space there, or use {dump} on another disk"
    cause = "The file that was written did not fit, or another process fills the disk."
    return stated("DISK01", text, match, "the disk is full", remedy=remedy, cause=cause)


def _other_shapes(text: LogText, match: re.Match[str]) -> Diagnosis:
    load = text.flags.get("load")
    return stated(
        "CKPT01" if load else "CKPT04",
        text,
        match,
        "stored tensors do not fit the model",
        cause="The files were saved from a model of another size or vocabulary, or config.json is that of another one.",
        remedy=f"use the checkpoint of this model in place of --load {load}, or the --hf-checkpoint that it was "
        "trained from"
        if load
        else "download or convert the model again with its own config.json; `furlong check DIR` names the tensors",
    )


def _too_long(text: LogText, match: re.Match[str]) -> Diagnosis:
    return stated(
        "TOOL02" if text.flags.get("custom_generate_function_path") else "DATA04",
        text,
        match,
        "a request exceeds the engine's context",
        remedy="lower --rollout-max-prompt-len so that longer prompts are dropped, or raise --rollout-max-context-len "
        "and --sglang-context-length up to the model's context length",
    )


CAUSES = (
    Signature(
        "GPU04", r"memory capacity is unbalanced[^\n]*", "another process uses memory of an engine's GPUs",
        "end it (`nvidia-smi`, or `furlong doctor` with the same flags, lists it), or select free GPUs with "
        "CUDA_VISIBLE_DEVICES",
    ),
    Signature(
        "GPU04", r"device\(s\) is/are busy or unavailable[^\n]*", "a GPU accepts no further process",
        "end the process that uses it (`nvidia-smi` lists it), or set the compute mode to default with `nvidia-smi -c "
        "0`",
        "Another process uses the GPU, and its compute mode is exclusive; or the GPU needs a reset.",
    ),
    Signature(
        "GPU01", r"No CUDA GPUs are available|no CUDA-capable device is detected|invalid device ordinal",
        "a process found no GPU",
        "check `nvidia-smi` and CUDA_VISIBLE_DEVICES there, start a container with access to the GPUs, or lower "
        "--actor-num-gpus-per-node and --rollout-num-gpus to the GPUs of the machine",
        "CUDA_VISIBLE_DEVICES hides the GPUs, the container has none, or the flags need more than there are.",
    ),
    Signature(
        "GPU01", r"Duplicate GPU detected[^\n]*", "two ranks use the same GPU",
        "lower --actor-num-gpus-per-node to the GPUs of a machine, and do not set CUDA_VISIBLE_DEVICES for single "
        "ranks",
        "More ranks were started on a machine than it has GPUs.",
    ),
    Signature(
        "GPU06", r"\bXid \(|fallen off the bus|[Uu]ncorrectable (NVLink|ECC)[^\n]*|GPU is lost|GPU requires (a )?reset",
        "a GPU or its driver failed",
        "look at `nvidia-smi -q` and for `Xid` in `dmesg` on that machine; exclude it (Slurm: --exclude), restart it, "
        "and resume with --load",
    ),
    Signature(
        "ENG01",
        r"an illegal (memory access|instruction) was encountered|(cudaError|CUDA_ERROR_)(Illegal|ILLEGAL_)\w+|"
        r"unspecified launch failure|misaligned address",
        "illegal memory access",
    ),
    Signature(
        "ENG02",
        r"JSONDecodeError|EOFError: Ran out of input|UnpicklingError|file too short|invalid ELF header|"
        r"FileNotFoundError: [^\n]*(torchinductor|\.triton)",
        "torch's compiler could not read its cache", also=r"inductor|torch[/.]_dynamo|triton",
    ),
    Signature(
        "ENV01", r"driver on your system is too old[^\n]*|driver version is insufficient[^\n]*",
        "the GPU's driver is older than PyTorch's CUDA",
        "update the driver, or install PyTorch for the CUDA version that `nvidia-smi` prints",
        "PyTorch was built for a newer CUDA than the driver supports.",
    ),
    Signature(
        "ENV01", r"no kernel image is available for execution[^\n]*|undefined symbol: [^\n]*|GLIBC(XX)?_\d[^\n]*",
        "a compiled library does not fit this PyTorch, GPU or system",
        "run `furlong env`, which imports each one, and install it again for this PyTorch and GPU",
        "It was built for another version of PyTorch, another GPU architecture, or a newer system.",
    ),
    Signature(
        "ENV01", r"out of resource: shared memory[^\n]*", "a Triton kernel is too large for this GPU",
        "select other kernels (for attention: --sglang-attention-backend), or use a GPU with more shared memory per "
        "block",
        "Its block sizes were chosen for another GPU, such as an H100.",
    ),
    Signature(
        "GPU02", r"No available node types can fulfill[^\n]*|resource request[^\n]* cannot be scheduled[^\n]*",
        "no node of the cluster has what a process requests",
        "lower --actor-num-gpus-per-node or --rollout-num-gpus-per-engine to the GPUs of a node, or add nodes; `ray "
        "status` lists them",
        "A single node must have all GPUs of a bundle.",
    ),
    Signature("GPU02", "", "the placement group did not get its GPUs", code=PLACEMENT_TIMEOUT),
    Signature(
        "GPU05",
        r"Could not find any running Ray instance[^\n]*|[^\n]*(Failed|[Uu]nable) to connect to GCS[^\n]*",
        "Ray does not answer",
    ),
    Signature(
        "GPU05", r"Version mismatch: The cluster was started with[^\n]*",
        "the cluster runs another version of Ray or Python",
        "install the same versions of Ray and Python on every machine, and restart the cluster",
        "Ray requires the same versions on all machines.",
    ),
    Signature(
        "NUM04", r"found (NaN|Inf) in local[^\n]*|Unexpected result (nan|inf)[^\n]*", "loss or gradient is not finite"
    ),
    Signature(
        "NUM04",
        r"\[NUM04\] [^\n]*|probability tensor contains either[^\n]*|NaN in the logits[^\n]*|"
        r"logits of request \S+ are not finite[^\n]*",
        "the engine's logits are not finite",
        "lower --lr or --clip-grad; resume from a checkpoint before the last step",
    ),
    Signature(
        "DISK01", r"OutOfDiskError[^\n]*|object store is full and the local disk[^\n]*",
        "the disk of Ray's objects is full",
        "delete old sessions in /tmp/ray, or set RAY_TMPDIR to another disk before `ray start`",
        "Ray writes its logs and objects that do not fit into memory below /tmp/ray.",
    ),
    Signature(
        "DISK01",
        r"No space left on device|StorageFull|unexpected pos \d+ vs \d+|PytorchStreamWriter failed writing",
        diagnose=_full_disk,
    ),
    Signature(
        "DISK01", r"Disk quota exceeded", "a disk quota is used up",
        "delete files of yours there (`quota -s` lists the limits; the cache of the hub is HF_HOME), use --save on "
        "another disk, or --keep-checkpoints",
        "Your account or project may store no more bytes or files on this disk, which itself has space.",
    ),
    Signature(
        "DISK01", r"File too large", "a file exceeds the size limit",
        "raise `ulimit -f`, or use --save on another file system",
        "The shell, the scheduler or the file system limits file sizes.",
    ),
    Signature(
        "DISK01", r"Read-only file system", "a folder cannot be written",
        "use --save on a disk that is mounted for writing", "Its disk is read-only.",
    ),
    Signature(
        "LIMIT01", r"Too many open files", "too many open files",
        "raise the limit before the start: `ulimit -n 65536` (in containers --ulimit nofile=65536)",
        "The process may open no more files and sockets (`ulimit -n`), or something does not close them.",
    ),
    Signature(
        "LIMIT01", r"can't start new thread|pthread_create[^\n]*(fail|unavailable)[^\n]*",
        "no further process or thread can be started",
        "raise the limit before the start (`ulimit -u`; in containers --pids-limit), use fewer --num-reward-workers, "
        "and set OMP_NUM_THREADS=1 and OPENBLAS_NUM_THREADS=1",
        "The user or the container has used up its processes and threads; libraries start a thread per core in every "
        "process.",
    ),
    Signature(
        "CKPT04", r"Error while deserializing header[^\n]*", "a safetensors file is cut off, or is not one", CHECK_MODEL
    ),
    Signature(
        "CKPT04", r"no file named [^\n]* found in directory[^\n]*|No such file or directory: [^\n]*\.safetensors[^\n]*",
        "a weight file is missing", CHECK_MODEL,
    ),
    Signature(
        "CFG05", r"[^\n]*must be divisible by (the )?(tensor|pipeline|expert)[- _](model[- _])?parallel[^\n]*",
        "the model cannot be split over that many GPUs",
        "choose a --rollout-num-gpus-per-engine (of an engine) or a --tensor-model-parallel-size (of the trainer) that "
        "divides the model's attention heads and experts",
        "Each GPU gets the same number of heads, layers or experts.",
    ),
    Signature(
        "CKPT01",
        r"size mismatch for \S+:[^\n]*|Global shape mismatch for loaded[^\n]*|Missing key\(s\) in state_dict[^\n]*",
        diagnose=_other_shapes,
    ),
    Signature(
        "CKPT07", r"does not recognize this architecture|Unrecognized model in[^\n]*",
        "transformers does not know the model's architecture",
        "use a model that furlong supports (docs: Models), or a version of transformers in the range that `furlong "
        "env` prints and that knows it",
        "The model is newer than the installed transformers, or config.json has another model_type.",
    ),
    Signature(
        "CKPT07", r"[Gg]ated ?[Rr]epo[^\n]*", "the hub does not give access to a model",
        "ask for access on the model's page, set HF_TOKEN (`hf auth login`) of the account that has it, and download "
        "the model: `hf download NAME --local-dir DIR`",
        "The model is gated: its owner grants access to accounts.",
    ),
    Signature(
        "CKPT07",
        r"is not a valid model identifier[^\n]*|Can't load (tokenizer|the configuration|config)\w* (for|of)[^\n]*|"
        r"RepositoryNotFoundError[^\n]*|couldn't connect to 'https://huggingface\.co'[^\n]*|LocalEntryNotFoundError",
        "a model is read from the hub",
    ),
    Signature(
        "TPL01", r"Conversation roles must alternate[^\n]*|chat_template is not set[^\n]*|System role not supported",
        "the chat template refuses the messages",
        "change the messages to the roles that the template accepts, or give another one with --chat-template-path; "
        "without a template, remove --apply-chat-template",
        "The model's template has rules for roles, or the tokenizer has no template.",
    ),
    Signature(
        "DATA04",
        r"longer than the model's context length[^\n]*|exceeds the (maximum allowed length|model's[^\n]* context)|"
        r"maximum context length is \d+ tokens[^\n]*",
        diagnose=_too_long,
    ),
)  # fmt: skip

# ---- what follows from other causes

RAISE_LIMITS = (
    "raise the limit if a part needs longer: --distributed-timeout-minutes between trainer ranks, "
    "--update-weight-timeout for an engine that loads weights"
)
OOM_KILLER = "check for the out-of-memory killer (`dmesg | grep -i oom`)"
HANGS_REMEDY = (
    "read the end of its log for what it waits for; if a process is in state T, find the program that sends it SIGSTOP"
)
RANK = re.compile(r"\btrainer rank \d+|class_name: TrainerRank", re.IGNORECASE)
# The innermost frame that faulthandler prints, in a package.
CRASHED = re.compile(r"most recent call first\):\n[^\n]*(?:site|dist)-packages/(?P<name>\w+)")
BY_SIGNAL = re.compile(r"(ended by signal |Signal |exitcode +: -)(9|15)\b")


def _unreachable(text: LogText, match: re.Match[str]) -> Diagnosis:
    is_taken = re.search(r"address already in use", text.content, re.IGNORECASE) is not None
    return stated(
        "ENG05",
        text,
        match,
        "cannot connect to a server",
        cause="Another process uses its port (GPU03)." if is_taken else "It is still starting, or it died.",
        remedy=FREE_PORT
        if is_taken
        else "wait until the server answers /get_model_info; if it does not, read the end of its log",
        port_taken=is_taken,
    )


def _died(text: LogText, match: re.Match[str]) -> Diagnosis:
    """ENG03 of a trainer rank or an engine: what ended it is named only if the text says so.

    If one of its processes fails, SGLang ends all of them, including the first one, with signal 9.
    """
    flags = text.flags
    if text.code == WORKER_DIED or RANK.search(text.content[match.start() : match.start() + 400]):
        save = flags.get("save")
        resume = f"resume with --load {save}" if save else "use --save in the next run: nothing was saved"
        cause = (
            "Its process ended: a signal (the out-of-memory killer, a scheduler, a person), or a crash in a library."
        )
        remedy = f"read the end of its log; {OOM_KILLER}; {resume}"
        return stated("ENG03", text, match, "a trainer rank died", remedy=remedy, cause=cause)
    if text.code == ENGINE_HANGS:
        return stated("ENG03", text, match, "an engine hangs", remedy=HANGS_REMEDY, cause=ENGINE_HANGS_CAUSE)
    ended_itself = "kill_process_tree called" in text.content[match.end() :]
    is_killed = (text.code == ENGINE_KILLED or BY_SIGNAL.search(match[0]) is not None) and not ended_itself
    library = CRASHED.search(text.content, match.start())
    of_engine = not is_killed and flags.get("engine") not in ("embedded", "external")
    remedies = [
        OOM_KILLER if is_killed else "read the end of its log",
        f"it crashed in {library['name']}: install that again for this PyTorch (`furlong env`)" if library else "",
        f"if a signal ended it, {OOM_KILLER}" if not is_killed and not ended_itself and library is None else "",
        "lower --sglang-mem-fraction-static or --rollout-batch-size" if of_engine else "",
        "use --sglang-disable-cuda-graph to find the cause" if of_engine else "",
        "" if flags.get("use_fault_tolerance") else "use --use-fault-tolerance to restart engines",
    ]
    cause = None
    if is_killed:
        cause = "A signal from outside ended it: the out-of-memory killer, a scheduler, or a person."
    elif ended_itself:
        cause = "One of its processes failed and SGLang ended the others; the first exception in its log is the reason."
    remedy = "; ".join(filter(None, remedies))
    return stated("ENG03", text, match, "a worker or an engine died", remedy=remedy, cause=cause)


CONSEQUENCES = (
    Signature(
        "KILL01", r"DUE TO (PREEMPTION|TIME LIMIT|NODE FAILURE|NODE_FAIL\w*|JOB REQUEUE)[^\n]*",
        "the scheduler ended the job",
        "resume with --load and the folder of --save; a smaller --save-interval loses fewer steps; request more time "
        "(Slurm: --time) or a partition that does not preempt (--requeue starts the job again)",
        "The job was preempted, its time was over, or a machine failed; the message says which.",
    ),
    Signature(
        "ENG03", r"NodeDiedError[^\n]*|LocalRayletDiedError[^\n]*", "a machine left the cluster",
        "check that it runs (`ray status`), start Ray on it again, and resume with --load",
        "It was shut down or restarted, its Ray processes were ended, or the network to it is down.",
    ),
    Signature(
        "ENG03",
        r"WorkerCrashed\w*|RaySystemError|ActorDiedError|[Rr]eceived sigquit from a child process[^\n]*|"
        r"SIGQUIT received[^\n]*|(scheduler|detokenizer|Scheduler or DataParallelController) [^\n]*(is dead|terminated)"
        r"[^\n]*|Signal \d+ \(SIG\w+\) received by PID \d+|exitcode +: -\d+ [^\n]*|Segfault encountered|"
        r"Segmentation fault[^\n]*|Fatal Python error: (?!Illegal)[^\n]*|"
        r"engine \d+ at \S+: [^\n]* (was ended by|ended with) [^\n]*",
        code="ENG03", diagnose=_died,
    ),
    Signature(
        "ENG05",
        r"Max retries exceeded with url: /\w+|Connection refused|Cannot connect to host \S+|httpx\.ConnectError|"
        r"Server disconnected without sending a response[^\n]*|ServerDisconnectedError|"
        r"ConnectionError: \('Connection aborted\.'[^\n]*",
        diagnose=_unreachable,
    ),
    Signature(
        "SYNC01", r"no socket interface found[^\n]*", "NCCL found no network interface",
        f"{NCCL_REMEDY}; `ip -brief address` lists interfaces",
        "NCCL_SOCKET_IFNAME names an interface that this machine lacks, or the container has no network.",
    ),
    Signature(
        "SYNC01", r"ncclRemoteError[^\n]*|gloo/transport/\S+ Connection (closed by peer|reset)[^\n]*",
        "the other end of a collective is gone",
        f"read the log of the rank or engine at that address: if it ends with an exception, that is the cause; if not, "
        f"{OOM_KILLER} there; if the process is alive, {NCCL_REMEDY}",
        "The other process ended (its log then ends, too), or the network dropped the connection (it is alive).",
    ),
    Signature(
        "SYNC01",
        r"Watchdog caught collective operation timeout|NCCL[^\n]*[Tt]ime(d )?out|collective operation timeout|"
        r"waiting for clients\. \d+/\d+ clients joined|wait timeout after \d+ms|client socket has timed out|"
        r"watchdog got stuck for \d+ seconds|ncclSystemError|ncclInternalError",
        "a collective timed out", f"{RAISE_LIMITS}; {NCCL_REMEDY}", NETWORK_CAUSE,
    ),
    Signature(
        "SYNC01", r"gloo/transport/\S+ Timed out waiting \d+ms for \w+ operation", "a gloo collective timed out",
        f"{RAISE_LIMITS}; {GLOO_REMEDY}", NETWORK_CAUSE,
    ),
    Signature("GPU03", r"[Aa]ddress already in use[^\n]*|EADDRINUSE", "a port is taken", FREE_PORT),
)  # fmt: skip

SIGNATURES: tuple[Signature, ...] = (*MEMORY, *CAUSES, *CONSEQUENCES)
