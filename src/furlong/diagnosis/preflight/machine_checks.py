"""ENV, DET, DISK and GPU rows: this machine, its libraries, its disk and its ports."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from furlong.config.sections import Config
from furlong.config.topology import Topology, uses_ray
from furlong.core.catalogue import Diagnosis, diagnosis
from furlong.core.transports import transport_spec
from furlong.diagnosis.preflight.context import PreflightContext
from furlong.errors import ConfigError
from furlong.machine import MemoryUse, cpu_quota, has_amx
from furlong.models.hf_folder import read_json
from furlong.tools import memory_plan as plan
from furlong.tools.environment import environment_findings, read_environment
from furlong.tools.gpu_memory import gpus_in_use, local_device
from furlong.tools.memory_plan import cpu_findings, findings, host_findings, plan_memory

CROWDED = 2  # ranks a processor: with fewer a layout is tried out


def versions(context: PreflightContext) -> Iterator[Diagnosis]:
    """ENV01: installed libraries against the tested ranges; `furlong env` loads compiled kernels, too."""
    del context
    yield from environment_findings(read_environment(kernels=()))


def tracker_package(context: PreflightContext) -> Iterator[Diagnosis]:
    """CFG05: --use-wandb without its package."""
    if context.config.track.use_wandb and find_spec("wandb") is None:
        yield diagnosis(
            "CFG05",
            "--use-wandb: the package wandb is not installed",
            cause="It is not among furlong's own.",
            remedy="pip install 'furlong[wandb]'",
        )


def threads(context: PreflightContext, devices: Path = Path("/dev")) -> Iterator[Diagnosis]:
    """ENV02: threads, and ranks without GPUs, against the processors that this process may use."""
    wanted, flag = context.config.cluster.num_threads, "--num-threads"
    given = os.environ.get("OMP_NUM_THREADS", "")
    if wanted is None and given.isdigit():
        wanted, flag = int(given), "OMP_NUM_THREADS"
    quota = cpu_quota()
    cpus = len(os.sched_getaffinity(0))
    usable = max(1, min(cpus, math.floor(quota))) if quota else cpus
    if wanted is not None and wanted > usable:
        limit = f", of which the control group allows {quota:g}" if quota and quota < cpus else ""
        yield diagnosis(
            "ENV02",
            f"{flag} {wanted}: this process may use {cpus} processors{limit}",
            remedy=f"--num-threads {usable}, or leave it out",
            evidence={"threads": wanted, "processors": cpus, "quota": quota},
        )
    ranks = Topology.of(context.config).num_ranks
    if ranks > CROWDED * usable and context.config.cluster.ray_address is None and not _gpu_files(devices):
        yield diagnosis(
            "ENV02",
            f"{ranks} training ranks, each a process on a CPU as this machine has no GPU, share {usable} processors",
            cause="They wait for each other at every collective, and each has the model in memory.",
            remedy=f"--actor-num-nodes 1 --actor-num-gpus-per-node {usable}, or a cluster with --ray-address",
            evidence={"ranks": ranks, "processors": cpus, "quota": quota},
        )


def gpus(context: PreflightContext, devices: Path = Path("/dev")) -> Iterator[Diagnosis]:
    """GPU01: GPUs of this machine against those that the run places, unless a running cluster is named.

    On a machine without GPUs a slot is a process on a CPU, of which there are as many as are asked for. Engines beside
    one trainer share its GPU where there are not enough for both, if weights have a way between processes of one GPU.
    """
    config = context.config
    if config.cluster.ray_address is not None:
        return  # that cluster is asked when the run connects to it
    available = len(_gpu_files(devices))
    topology = Topology.of(config)
    spec = transport_spec(config.sync.update_weight_transport)
    shares = not uses_ray(config) and spec.reaches_servers and not spec.one_gpu_problem
    if shares and available >= topology.num_engine_gpus:
        return
    if available and (why := topology.shortage(available)):
        finding, _, remedy = why.partition("; ")
        evidence = {"needed": topology.num_gpus, "available": available, "sum": topology.sum}
        yield diagnosis("GPU01", finding, remedy=remedy, evidence=evidence)


def _gpu_files(devices: Path) -> list[Path]:
    return [path for path in devices.glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdigit()]


def occupied_gpus(context: PreflightContext) -> Iterator[Diagnosis]:
    """GPU04: memory of the run's GPUs that others have before it begins."""
    if context.config.cluster.ray_address is not None:
        return  # its machines are not looked at from here
    count = max(Topology.of(context.config).num_gpus, 1)
    for gpu in gpus_in_use(count, os.environ.get("CUDA_VISIBLE_DEVICES")):
        who, end = "no process that can be seen from here", "look for it outside this container"
        if gpu.processes:
            who, end = f"process {', '.join(gpu.processes)}", f"end it (`kill {gpu.processes[0].split()[0]}`)"
        yield diagnosis(
            "GPU04",
            f"GPU {gpu.index} ({gpu.name}): {plan.size_text(gpu.used)} of {plan.size_text(gpu.total)} are in use "
            f"before the run begins, by {who}",
            remedy=f"{end}, or name free GPUs with CUDA_VISIBLE_DEVICES",
            severity="warning",
            evidence={"gpu": gpu.index, "used": gpu.used, "total": gpu.total, "processes": list(gpu.processes)},
        )


def reproducibility(context: PreflightContext) -> Iterator[Diagnosis]:
    """DET01: with --debug-determinism, what lets two equal commands differ."""
    config = context.config
    if not config.debug.debug_determinism:
        return
    rollout = config.rollout
    loose: list[tuple[str, str]] = []
    if config.cluster.num_threads is None and not os.environ.get("OMP_NUM_THREADS", "").isdigit():
        loose.append(("the number of threads follows the load, and sums depend on it", "--num-threads 1"))
    is_replay = config.debug.replay is not None  # which repeats what timing decided
    if rollout.async_buffer_size and not is_replay:
        loose.append((f"--async-buffer-size {rollout.async_buffer_size}: timing decides", "--async-buffer-size 0"))
    if rollout.partial_rollout and not is_replay:
        loose.append(("--partial-rollout: timing decides what is aborted", "without --partial-rollout"))
    over = None if is_replay else rollout.over_sampling_batch_size
    if over is not None and over > config.data.rollout_batch_size and rollout.dynamic_sampling_filter_path is None:
        size = config.data.rollout_batch_size
        flag = "--over-sampling-batch-size"
        loose.append((f"{flag} {over}: the first to finish are taken", f"{flag} {size}"))
    if config.cluster.engine == "embedded" and has_amx() and (way := _float32_instead(config)):
        loose.append(("bfloat16 products on this CPU (AMX) depend in their last bits on what else is there", way))
    if config.cluster.engine == "external":
        loose.append(("servers batch requests as they come", "--engine embedded"))
    if Path("/dev/nvidia0").exists() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        loose.append(("cuBLAS chooses its workspace", "CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment"))
    if loose:
        yield diagnosis(
            "DET01",
            "--debug-determinism: two runs may differ: " + "; ".join(why for why, _ in loose),
            remedy="; ".join(way for _, way in loose),
            evidence={"reasons": [why for why, _ in loose]},
        )


def _float32_instead(config: Config) -> str:
    """The flag by which an engine on a CPU would compute in float32; "" if it does."""
    if config.cluster.embedded_dtype == "bfloat16":
        return "--embedded-dtype float32"
    follows = config.cluster.embedded_dtype == "auto" and config.train.bf16
    return "--fp32" if follows and not _gpu_files(Path("/dev")) else ""


def outputs(context: PreflightContext) -> Iterator[Diagnosis]:
    """DISK01: folders that the run will write to and cannot."""
    config = context.config
    folders = {
        "--output-dir": config.track.output_dir,
        "--save": config.checkpoint.save,
        "--save-hf": config.checkpoint.save_hf,
        "--update-weight-disk-dir": config.sync.update_weight_disk_dir,
        "--sglang-log-dir": config.engines.sglang_log_dir,
        "--wandb-dir": config.track.wandb_dir,
    }
    files = {
        "--save-debug-rollout-data": config.debug.save_debug_rollout_data,
        "--save-debug-train-data": config.debug.save_debug_train_data,
    }
    given = {flag: Path(path) for flag, path in folders.items() if path is not None}
    given |= {flag: Path(path).parent for flag, path in files.items() if path is not None}
    for flag, path in given.items():
        if (why := _unusable(path) or (_locked_file(path) if flag == "--output-dir" else None)) is not None:
            finding, cause = why
            yield diagnosis("DISK01", f"{flag} {path}: {finding}", cause=cause, remedy=f"give another path with {flag}")


def _unusable(path: Path) -> tuple[str, str] | None:
    """Why nothing can be written under `path`, and the cause; None if something can."""
    folder = _existing(path)
    if not folder.is_dir():
        if folder.is_symlink() and not os.path.exists(folder):
            target = os.readlink(folder)
            return f"{folder} is a link to {target}, which is not there", "A disk is not mounted, or moved."
        return f"{folder} is a file", "A folder is made there, which needs another name."
    if not os.access(folder, os.W_OK):
        cause = "The folder belongs to another user, or the disk is mounted read-only."
        return f"{folder} is not writable", cause
    return None


def _locked_file(folder: Path) -> tuple[str, str] | None:
    """A file that an earlier run left there and that may not be written again, and the cause; None if there is none."""
    files = sorted(path for path in folder.glob("*") if path.is_file()) if folder.is_dir() else []
    locked = next((path for path in files if not os.access(path, os.W_OK)), None)
    return None if locked is None else (f"{locked.name} in it is not writable", "An earlier run was another user's.")


def disk(context: PreflightContext) -> Iterator[Diagnosis]:
    """DISK01: free space against the checkpoints that the run will keep."""
    flags, model = context.config.checkpoint, context.model
    if flags.save is None or model is None or not model.num_parameters or _unusable(Path(flags.save)):
        return
    folder = _existing(Path(flags.save))
    one = checkpoint_bytes(context)
    rollouts, every = context.config.data.num_rollout, flags.save_interval
    count = max(1, rollouts // every) if rollouts and every else 1
    kept = (
        min(count, flags.keep_checkpoints + 1) if flags.keep_checkpoints else count
    )  # the new one before the old goes
    free = shutil.disk_usage(folder).free
    if one * kept <= free:
        return
    fits = free // one
    each, all_of_them, left = (plan.size_text(size) for size in (one, one * kept, free))
    finding = (
        f"--save {flags.save}: {kept} checkpoints of {each} need {all_of_them}, {left} are free on the disk of {folder}"
    )
    remedy = f"--keep-checkpoints {fits - 1}, or another folder" if fits > 1 else "another folder with --save"
    if fits == 1 and not flags.no_save_optim:
        remedy += ", or --no-save-optim"
    evidence = {"checkpoint_bytes": one, "kept": kept, "free_bytes": free}
    yield diagnosis("DISK01", finding, remedy=remedy, evidence=evidence)


def checkpoint_bytes(context: PreflightContext) -> int:
    """Predicted size of one checkpoint: float32 weights, the optimizer's moments, and the Hugging Face model."""
    model, config = context.model, context.config
    assert model is not None
    each = plan.checkpoint_bytes_per_parameter(config) + (4 if config.checkpoint.save_hf else 0)
    return model.num_parameters * each


def _existing(path: Path) -> Path:
    """What exists of `path`: it, or the nearest folder above it. A link that leads nowhere exists."""
    path = path.absolute()
    while not os.path.lexists(path):  # False for what may not be looked at
        path = path.parent
    return path


def training_fits(context: PreflightContext) -> Iterator[Diagnosis]:
    """MEM01: the largest phase of training against the first GPU of this machine, or where it has none its memory."""
    if context.model_dir is None or context.config.debug.debug_rollout_only:
        return
    path = context.model_dir / "config.json"
    device, machine = local_device(), MemoryUse.of_machine()
    if not path.exists():
        return
    model = read_json(path)
    try:
        if device is not None:
            plan = plan_memory(context.config, model, device[1])
            yield from findings(plan, device[0])
            if machine is not None:
                yield from host_findings(plan, context.config, machine.limit)
        elif machine is not None:
            yield from cpu_findings(context.config, model, machine)
    except ConfigError:
        return  # a kind of model whose dimensions are not known here; `furlong plan` says which one is missing
