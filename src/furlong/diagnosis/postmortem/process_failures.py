"""Failures other than memory: signatures of engines, collectives, GPUs, libraries, files and disks."""

from __future__ import annotations

import re

from furlong.catalogue import Diagnosis, diagnosis
from furlong.core.transports import GLOO_REMEDY, NCCL_REMEDY, NETWORK_CAUSE
from furlong.diagnosis.monitors.machine_monitors import ENGINE_HANGS_CAUSE
from furlong.diagnosis.postmortem.log_text import LogText, Signature, evidence_of, fixed, signature
from furlong.errors import ENGINE_HANGS, ENGINE_KILLED, PLACEMENT_TIMEOUT, WORKER_DIED

RAISE_LIMITS = (
    "raise the limit if a part needs longer: --distributed-timeout-minutes between trainer ranks, "
    "--update-weight-timeout for an engine that loads weights"
)
OOM_KILLER = "check for the out-of-memory killer (`dmesg | grep -i oom`)"
HANGS_REMEDY = (
    "read the end of its log for what it waits for; if a process is in state T, find the program that sends it SIGSTOP"
)
RANK = re.compile(r"\btrainer rank \d+", re.IGNORECASE)
RANK_CLASS, ACTOR = "class_name: TrainerRank", 200  # of Ray, and the characters in which it names the class
RANK_CAUSE = "Its process ended: a signal (the out-of-memory killer, a scheduler, a person), or a crash in a library."
# The innermost frame that faulthandler prints, in a package.
CRASHED = re.compile(r"most recent call first\):\n[^\n]*(?:site|dist)-packages/(?P<name>\w+)")
LIVES_SILENT = re.compile(r"\(process \d+\): it does not answer")  # a server of the run whose process has not ended
SGLANG_ENDS_ITSELF = "kill_process_tree called"
FREE_PORT = (
    "end the process that listens there, or use another port; fewer engines per machine (a larger "
    "--rollout-num-gpus-per-engine) need fewer ports"
)


def _full_disk(text: LogText, match: re.Match[str]) -> Diagnosis:
    """DISK01, with the flag of the file that did not fit: weights for engines, or a checkpoint."""
    evidence = evidence_of(text, match)
    folder, remedy = text.flags.get("update_weight_disk_dir"), None
    if folder and str(folder) in evidence["text"]:
        remedy = "use --update-weight-disk-dir on another disk, without --update-weight-disk-keep-files"
    finding = f"the disk is full ({evidence['source']}, line {evidence['line']}): {evidence['text']}"
    return diagnosis("DISK01", finding, remedy=remedy, evidence=evidence)


def _unreachable(text: LogText, match: re.Match[str]) -> Diagnosis:
    is_taken = re.search(r"address already in use", text.content, re.IGNORECASE) is not None
    return diagnosis(
        "ENG05",
        f"cannot connect to an engine ({text.source}): {evidence_of(text, match)['text']}",
        cause="Its port is used by another process (GPU03)." if is_taken else "It is still starting, or it died.",
        remedy=FREE_PORT
        if is_taken
        else "wait until the server answers /get_model_info; if it does not, read the end of its log",
        evidence=evidence_of(text, match) | {"port_taken": is_taken},
    )


def _died(text: LogText, match: re.Match[str]) -> Diagnosis:
    """ENG03: a process that a signal ended from outside, or that exited by itself.

    If one of its processes fails, SGLang ends all of them, including the first one, with signal 9.
    --use-fault-tolerance does not restart trainer ranks.
    """
    actor = text.content[match.start() : match.start() + ACTOR]
    if text.code == WORKER_DIED or RANK.search(evidence_of(text, match)["text"]) or RANK_CLASS in actor:
        return fixed("ENG03", "a trainer rank died", _rank_remedy(text), RANK_CAUSE)(text, match)
    if text.code == ENGINE_HANGS or LIVES_SILENT.search(text.content, match.start()) is not None:
        return fixed("ENG03", "an engine hangs", HANGS_REMEDY, ENGINE_HANGS_CAUSE)(text, match)
    ended_itself = SGLANG_ENDS_ITSELF in text.content[match.end() :]
    is_killed = (
        text.code == ENGINE_KILLED
        or re.search(r"(ended by signal |Signal |exitcode +: -)(9|15)\b", match[0]) is not None
    )
    is_killed = is_killed and not ended_itself
    remedies = [OOM_KILLER if is_killed else "read the end of its log"]
    if (library := CRASHED.search(text.content, match.start())) is not None:
        remedies.append(f"it crashed in {library['name']}: install that again for this PyTorch (`furlong env`)")
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
    return fixed("ENG03", "a worker or an engine died", "; ".join(remedies), cause)(text, match)


def _rank_remedy(text: LogText) -> str:
    save = text.flags.get("save")
    resume = f"resume with --load {save}" if save else "use --save in the next run: nothing was saved"
    return f"read the end of its log; {OOM_KILLER}; {resume}"


def _other_shapes(text: LogText, match: re.Match[str]) -> Diagnosis:
    """CKPT01 of a checkpoint to resume from, otherwise CKPT04: tensors of another model."""
    load = text.flags.get("load")
    evidence = evidence_of(text, match)
    where = f"({text.source}, line {evidence['line']}): {evidence['text']}"
    return diagnosis(
        "CKPT01" if load else "CKPT04",
        f"stored tensors do not fit the model {where}",
        cause="The files were saved from a model of another size or vocabulary, or config.json is that of another one.",
        remedy=f"use the checkpoint of this model in place of --load {load}, or the --hf-checkpoint that it was "
        "trained from"
        if load
        else "download or convert the model again with its own config.json; `furlong check DIR` names the tensors",
        evidence=evidence,
    )


def _too_long(text: LogText, match: re.Match[str]) -> Diagnosis:
    """DATA04 of a prompt, or TOOL02 of a conversation that a custom function extends."""
    id = "TOOL02" if text.flags.get("custom_generate_function_path") else "DATA04"
    return fixed(
        id,
        "a request exceeds the engine's context",
        "lower --rollout-max-prompt-len so that longer prompts are dropped, or raise --rollout-max-context-len and "
        "--sglang-context-length up to the model's context length",
    )(text, match)


MEMORY_ROWS = frozenset({"MEM02", "MEM03"})
# Failures that end a process; connections and collectives of other processes then fail, too.
ROOTS = MEMORY_ROWS | {
    "ENG01",
    "ENG02",
    "GPU01",
    "GPU04",
    "ENV01",
    "NUM04",
    "DISK01",
    "CKPT01",
    "CKPT04",
    "CKPT07",
    "NET01",
}

FAILURES: tuple[Signature, ...] = (
    signature(
        "GPU04",
        r"memory capacity is unbalanced[^\n]*",
        (
            "another process uses memory of an engine's GPUs",
            "end it (`nvidia-smi`, or `furlong doctor` with the same flags, lists it), or select free GPUs with "
            "CUDA_VISIBLE_DEVICES",
        ),
    ),
    signature(
        "GPU04",
        r"device\(s\) is/are busy or unavailable[^\n]*",
        (
            "a GPU accepts no further process",
            "end the process that uses it (`nvidia-smi` lists it), or set the compute mode to default with "
            "`nvidia-smi -c 0`",
            "Another process uses the GPU, and its compute mode is exclusive; or the GPU needs a reset.",
        ),
    ),
    signature(
        "GPU01",
        r"No CUDA GPUs are available|no CUDA-capable device is detected|invalid device ordinal",
        (
            "a process found no GPU",
            "check `nvidia-smi` and CUDA_VISIBLE_DEVICES there, start a container with access to the GPUs, or lower "
            "--actor-num-gpus-per-node and --rollout-num-gpus to the GPUs of the machine",
            "CUDA_VISIBLE_DEVICES hides the GPUs, the container has none, or the flags need more than there are.",
        ),
    ),
    signature(
        "GPU01",
        r"Duplicate GPU detected[^\n]*",
        (
            "two ranks use the same GPU",
            "lower --actor-num-gpus-per-node to the GPUs of a machine, and do not set CUDA_VISIBLE_DEVICES for "
            "single ranks",
            "More ranks were started on a machine than it has GPUs.",
        ),
    ),
    signature(
        "ENG01",
        r"an illegal (memory access|instruction) was encountered|(cudaError|CUDA_ERROR_)(Illegal|ILLEGAL_)\w+|"
        r"unspecified launch failure|misaligned address",
        ("illegal memory access",),
    ),
    signature(
        "ENG02",
        r"JSONDecodeError|EOFError: Ran out of input|UnpicklingError|file too short|invalid ELF header|"
        r"FileNotFoundError: [^\n]*(torchinductor|\.triton)",
        ("torch's compiler could not read its cache",),
        also=r"inductor|torch[/.]_dynamo|triton",
    ),
    signature(
        "ENV01",
        r"driver on your system is too old[^\n]*|driver version is insufficient[^\n]*",
        (
            "the GPU's driver is older than PyTorch's CUDA",
            "update the driver, or install PyTorch for the CUDA version that `nvidia-smi` prints",
            "PyTorch was built for a newer CUDA than the driver supports.",
        ),
    ),
    signature(
        "ENV01",
        r"no kernel image is available for execution[^\n]*",
        (
            "a compiled library does not fit this PyTorch, GPU or system",
            "run `furlong env`, which imports each one, and install it again for this PyTorch and GPU",
            "It was built for another version of PyTorch, another GPU architecture, or a newer system.",
        ),
    ),
    signature(
        "ENV01",
        r"out of resource: shared memory[^\n]*",
        (
            "a Triton kernel is too large for this GPU",
            "select other kernels (for attention: --sglang-attention-backend), or use a GPU with more shared memory "
            "per block",
            "Its block sizes were chosen for another GPU, such as an H100.",
        ),
    ),
    signature(
        "GPU02",
        r"No available node types can fulfill[^\n]*|resource request[^\n]* cannot be scheduled[^\n]*",
        (
            "no node of the cluster has what a process requests",
            "lower --actor-num-gpus-per-node or --rollout-num-gpus-per-engine to the GPUs of a node, or add nodes; "
            "`ray status` lists them",
            "A single node must have all GPUs of a bundle.",
        ),
    ),
    signature(
        "GPU02",
        "",
        (
            "the placement group did not get its GPUs",
            "end the job that uses them, request fewer, share them with --colocate, or wait longer with "
            "--placement-timeout",
        ),
        codes=PLACEMENT_TIMEOUT,
        before_codes=r"waiting for [^\n]* are missing [^\n]*",
    ),
    signature(
        "GPU05",
        r"Could not find any running Ray instance[^\n]*|Failed to connect to GCS[^\n]*|"
        r"[Uu]nable to connect to GCS[^\n]*|GCS[^\n]* (is|to become) (un)?available[^\n]*",
        ("Ray does not answer",),
    ),
    signature(
        "GPU05",
        r"Version mismatch: The cluster was started with[^\n]*",
        (
            "the cluster runs another version of Ray or Python",
            "install the same versions of Ray and Python on every machine, and restart the cluster",
            "Ray requires the same versions on all machines.",
        ),
    ),
    signature(
        "NUM04",
        r"found (NaN|Inf) in local[^\n]*|Unexpected result (nan|inf)[^\n]*",
        ("loss or gradient is not finite",),
    ),
    signature(
        "NUM04",
        r"\[NUM04\] [^\n]*|probability tensor contains either[^\n]*|NaN in the logits[^\n]*",
        (
            "the engine got non-finite weights",
            "lower --lr or --clip-grad; resume from a checkpoint before the last step",
        ),
        before_codes=r"logits of request \S+ are not finite[^\n]*",
    ),
    signature(
        "DISK01",
        r"OutOfDiskError[^\n]*|object store is full and the local disk[^\n]*",
        (
            "the disk of Ray's objects is full",
            "delete old sessions in /tmp/ray, or set RAY_TMPDIR to another disk before `ray start`",
            "Ray writes its logs and objects that do not fit into memory below /tmp/ray.",
        ),
    ),
    signature(
        "DISK01",
        r"(?m:^)(?![^\n]*/dev/shm)[^\n]*No space left on device|StorageFull|unexpected pos \d+ vs \d+|"
        r"PytorchStreamWriter failed writing",
        _full_disk,
    ),
    signature(
        "DISK01",
        r"File too large",
        (
            "a file exceeds the size limit",
            "raise `ulimit -f`, or use --save on another file system",
            "The shell, the scheduler or the file system limits file sizes.",
        ),
    ),
    signature(
        "DISK01",
        r"Read-only file system",
        ("a folder cannot be written", "use --save on a disk that is mounted for writing", "Its disk is read-only."),
    ),
    signature(
        "CKPT04",
        r"Error while deserializing header[^\n]*",
        (
            "a safetensors file is cut off, or is not one",
            "download or convert the model again; `furlong check DIR` names the file",
        ),
    ),
    signature(
        "CKPT04",
        r"no file named [^\n]* found in directory[^\n]*|No such file or directory: [^\n]*\.safetensors[^\n]*",
        (
            "a weight file is missing",
            "download or convert the model again; `furlong check DIR` names what is missing",
        ),
    ),
    signature(
        "CFG05",
        r"[^\n]*must be divisible by (the )?(tensor|pipeline|expert)[- _](model[- _])?parallel[^\n]*",
        (
            "the model cannot be split over that many GPUs",
            "choose a --rollout-num-gpus-per-engine (of an engine) or a --tensor-model-parallel-size (of the trainer) "
            "that divides the model's attention heads and experts",
            "Each GPU gets the same number of heads, layers or experts.",
        ),
    ),
    signature(
        "CKPT01",
        r"size mismatch for \S+:[^\n]*|Global shape mismatch for loaded[^\n]*|Missing key\(s\) in state_dict[^\n]*",
        _other_shapes,
    ),
    signature(
        "CKPT07",
        r"does not recognize this architecture|Unrecognized model in[^\n]*",
        (
            "transformers does not know the model's architecture",
            "use a model that furlong supports (docs: Models), or a version of transformers in the range that "
            "`furlong env` prints and that knows it",
            "The model is newer than the installed transformers, or config.json has another model_type.",
        ),
    ),
    signature(
        "CKPT07",
        r"[Gg]ated ?[Rr]epo[^\n]*",
        (
            "the hub does not give access to a model",
            "ask for access on the model's page, set HF_TOKEN (`hf auth login`) of the account that has it, and "
            "download the model: `hf download NAME --local-dir DIR`",
            "The model is gated: its owner grants access to accounts.",
        ),
    ),
    signature(
        "CKPT07",
        r"is not a valid model identifier[^\n]*|Can't load (tokenizer|the configuration|config)\w* (for|of)[^\n]*|"
        r"RepositoryNotFoundError[^\n]*|"
        r"couldn't connect to 'https://huggingface\.co'[^\n]*|LocalEntryNotFoundError[^\n]*",
        ("a model is read from the hub",),
    ),
    signature(
        "TPL01",
        r"Conversation roles must alternate[^\n]*|chat_template is not set[^\n]*|System role not supported[^\n]*",
        (
            "the chat template refuses the messages",
            "change the messages to the roles that the template accepts, or give another one with "
            "--chat-template-path; without a template, remove --apply-chat-template",
            "The model's template has rules for roles, or the tokenizer has no template.",
        ),
    ),
    signature(
        "DATA04",
        r"longer than the model's context length[^\n]*|exceeds the (maximum allowed length|model's[^\n]* context)"
        r"[^\n]*|maximum context length is \d+ tokens[^\n]*",
        _too_long,
    ),
    signature(
        "ENG05",
        r"Max retries exceeded with url: /\w+|Connection refused|Cannot connect to host \S+|"
        r"httpx\.ConnectError(?![^\n]*(unreachable|[Nn]o route|timed out))[^\n]*|"
        r"Server disconnected without sending a response[^\n]*|ServerDisconnectedError|"
        r"ConnectionError: \('Connection aborted\.'[^\n]*",
        _unreachable,
        causes=ROOTS - {"ENG02"} | {"GPU05"},
    ),
    signature(
        "ENG03",
        r"NodeDiedError[^\n]*|LocalRayletDiedError[^\n]*",
        (
            "a machine left the cluster",
            "check that it runs (`ray status`), start Ray on it again, and resume with --load",
            "It was shut down or restarted, its Ray processes were ended, or the network to it is down.",
        ),
        causes=ROOTS,
    ),
    signature(
        "ENG03",
        r"WorkerCrashed\w*|RaySystemError|ActorDiedError|[Rr]eceived sigquit from a child process[^\n]*|"
        r"SIGQUIT received[^\n]*|(scheduler|detokenizer|Scheduler or DataParallelController) [^\n]*(is dead|terminated)"
        r"[^\n]*|Signal \d+ \(SIG\w+\) received by PID \d+|exitcode +: -\d+ [^\n]*|Segfault encountered|"
        r"Segmentation fault[^\n]*|Fatal Python error: (?!Illegal)[^\n]*",
        _died,
        codes="ENG03",
        before_codes=r"engine \S+ (died|is gone|exited)[^\n]*|"
        r"engine \d+ at \S+: [^\n]* (was ended by|ended with) [^\n]*",
        causes=ROOTS,
    ),
    signature(
        "SYNC01",
        r"no socket interface found[^\n]*",
        (
            "NCCL found no network interface",
            f"{NCCL_REMEDY}; `ip -brief address` lists interfaces",
            "NCCL_SOCKET_IFNAME names an interface that this machine lacks, or the container has no network.",
        ),
    ),
    signature(
        "SYNC01",
        r"ncclRemoteError[^\n]*|gloo/transport/\S+ Connection (closed by peer|reset)[^\n]*",
        (
            "the other end of a collective is gone",
            f"read the log of the rank or engine at that address: if it ends with an exception, that is the cause; "
            f"if not, {OOM_KILLER} there; if the process is alive, {NCCL_REMEDY}",
            "The other process ended (its log then ends, too), or the network dropped the connection (it is alive).",
        ),
        causes=ROOTS | {"ENG03"},
    ),
    signature(
        "SYNC01",
        r"Watchdog caught collective operation timeout|NCCL[^\n]*[Tt]ime(d )?out|collective operation timeout|"
        r"waiting for clients\. \d+/\d+ clients joined|wait timeout after \d+ms|client socket has timed out|"
        r"watchdog got stuck for \d+ seconds|ncclSystemError|ncclInternalError",
        ("a collective timed out", f"{RAISE_LIMITS}; {NCCL_REMEDY}", NETWORK_CAUSE),
        causes=ROOTS,
    ),
    signature(
        "SYNC01",
        r"gloo/transport/\S+ Timed out waiting \d+ms for \w+ operation",
        ("a gloo collective timed out", f"{RAISE_LIMITS}; {GLOO_REMEDY}", NETWORK_CAUSE),
        causes=ROOTS,
    ),
    signature("GPU03", r"[Aa]ddress already in use[^\n]*|EADDRINUSE", ("a port is taken", FREE_PORT)),
)
