"""ENV, DET, DISK, GPU, MEM01 and ENG05 rows: this machine's libraries, CPUs, GPUs, memory and disk, and servers."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from furlong.catalogue import Diagnosis, diagnosis
from furlong.config.checks.engine_checks import device_problems, start_problems
from furlong.config.facts import model_folder, without_engines
from furlong.config.sections import Config
from furlong.config.topology import Topology, uses_ray
from furlong.core.addresses import split_port
from furlong.core.model_config import read_json
from furlong.core.transports import transport_spec
from furlong.diagnosis.preflight.context import PreflightContext
from furlong.diagnosis.preflight.flag_checks import from_problem
from furlong.errors import ConfigError
from furlong.machine import MemoryUse, cpu_quota, has_amx
from furlong.tools import memory_plan as plan
from furlong.tools.chosen_sizes import with_chosen_sizes
from furlong.tools.environment import environment_findings, read_environment
from furlong.tools.gpu_memory import gpus_in_use, local_device
from furlong.tools.memory_plan import cpu_findings, findings, host_findings, plan_memory
from furlong.tracking.trackers import OPTIONAL, not_installed
from furlong.training.megatron.parallel_layout import NOT_INSTALLED

RAY_CONNECT_S = 3.0  # to connect to a running cluster, and for its answer


def versions(context: PreflightContext) -> Iterator[Diagnosis]:
    """ENV01: installed libraries against the tested ranges (`furlong env` also loads compiled kernels)."""
    del context
    yield from environment_findings(read_environment(kernels={}))


def threads(context: PreflightContext) -> Iterator[Diagnosis]:
    """ENV02: threads against the CPUs that this process may use."""
    num_threads, flag = context.config.cluster.num_threads, "--num-threads"
    omp_threads = os.environ.get("OMP_NUM_THREADS", "")
    if num_threads is None and omp_threads.isdigit():
        num_threads, flag = int(omp_threads), "OMP_NUM_THREADS"
    quota = cpu_quota()
    cpus = len(os.sched_getaffinity(0))
    usable = max(1, min(cpus, math.floor(quota))) if quota else cpus
    if num_threads is not None and num_threads > usable:
        limit = f" (the control group allows {quota:g})" if quota and quota < cpus else ""
        yield diagnosis(
            "ENV02",
            f"{flag} {num_threads}: this process may use {cpus} CPUs{limit}",
            remedy=f"use --num-threads {usable}, or remove {flag}",
            evidence={"threads": num_threads, "processors": cpus, "quota": quota},
        )


def gpus(context: PreflightContext, devices: Path = Path("/dev")) -> Iterator[Diagnosis]:
    """GPU01: GPUs that the run needs against those of this machine, unless --ray-address names a cluster.

    On a machine without GPUs, slots are CPU processes, in any number. Engines share a single trainer's GPU if there are
    too few for both and the transport works between processes on one GPU.
    """
    config = context.config
    if config.cluster.ray_address is not None:
        return  # checked when the run connects to that cluster
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
    """GPU04: memory of the run's GPUs that other processes use before it starts."""
    if context.config.cluster.ray_address is not None:
        return  # its machines cannot be inspected from here
    count = max(Topology.of(context.config).num_gpus, 1)
    for gpu in gpus_in_use(count, os.environ.get("CUDA_VISIBLE_DEVICES")):
        user, fix = "a process that is not visible from here", "look for it outside this container"
        if gpu.processes:
            user, fix = f"process {', '.join(gpu.processes)}", f"end it (`kill {gpu.processes[0].split()[0]}`)"
        yield diagnosis(
            "GPU04",
            f"GPU {gpu.index} ({gpu.name}): {plan.size_text(gpu.used)} of {plan.size_text(gpu.total)} are in use "
            f"before the run starts, by {user}",
            remedy=f"{fix}, or select free GPUs with CUDA_VISIBLE_DEVICES",
            severity="warning",
            evidence={"gpu": gpu.index, "used": gpu.used, "total": gpu.total, "processes": list(gpu.processes)},
        )


def reproducibility(context: PreflightContext) -> Iterator[Diagnosis]:
    """DET01: with --debug-determinism, what can make two identical commands differ."""
    config = context.config
    if not config.debug.debug_determinism:
        return
    rollout = config.rollout
    reasons: list[tuple[str, str]] = []  # with their remedies
    if config.cluster.num_threads is None and not os.environ.get("OMP_NUM_THREADS", "").isdigit():
        reasons.append(("the number of threads depends on the load, and sums depend on it", "use --num-threads 1"))
    if rollout.async_buffer_size:
        reasons.append(
            (f"--async-buffer-size {rollout.async_buffer_size} depends on timing", "use --async-buffer-size 0")
        )
    if rollout.partial_rollout:
        reasons.append(("--partial-rollout depends on timing: which samples are aborted", "remove --partial-rollout"))
    over = rollout.over_sampling_batch_size
    if over is not None and over > config.data.rollout_batch_size and rollout.dynamic_sampling_filter_path is None:
        size = config.data.rollout_batch_size
        flag = "--over-sampling-batch-size"
        reasons.append((f"{flag} {over} depends on timing: which groups finish first", f"use {flag} {size}"))
    if config.cluster.engine == "embedded" and has_amx() and (way := _float32_instead(config)):
        reasons.append(("bfloat16 matmuls on this CPU (AMX) depend on the batch in their last bits", f"use {way}"))
    if config.cluster.engine == "external":
        reasons.append(("servers batch requests as they arrive", "use --engine embedded"))
    if Path("/dev/nvidia0").exists() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        reasons.append(("cuBLAS chooses its workspace", "set CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment"))
    if reasons:
        yield diagnosis(
            "DET01",
            "--debug-determinism: two runs can differ: " + "; ".join(reason for reason, _ in reasons),
            remedy="; ".join(remedy for _, remedy in reasons),
            evidence={"reasons": [reason for reason, _ in reasons]},
        )


def _float32_instead(config: Config) -> str:
    if config.cluster.embedded_dtype == "bfloat16":
        return "--embedded-dtype float32"
    follows = config.cluster.embedded_dtype == "auto" and config.train.bf16
    return "--fp32" if follows and not _gpu_files(Path("/dev")) else ""


def outputs(context: PreflightContext) -> Iterator[Diagnosis]:
    """DISK01: folders that the run cannot write to."""
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
    paths = {flag: Path(path) for flag, path in folders.items() if path is not None}
    paths |= {flag: Path(path).parent for flag, path in files.items() if path is not None}
    for flag, path in paths.items():
        if (problem := _unusable(path)) is not None:
            finding, cause = problem
            yield diagnosis("DISK01", f"{flag} {path}: {finding}", cause=cause, remedy=f"use another path with {flag}")


def _unusable(path: Path) -> tuple[str, str] | None:
    folder = _existing(path)
    if not folder.is_dir():
        return f"{folder} is not a folder", "It is a file, or a link to what does not exist."
    if not os.access(folder, os.W_OK):
        cause = "The folder belongs to another user, or the disk is mounted read-only."
        return f"{folder} is not writable", cause
    return None


def disk(context: PreflightContext) -> Iterator[Diagnosis]:
    """DISK01: free disk space against the checkpoints that the run will keep."""
    flags, model = context.config.checkpoint, context.model
    if model is None or not model.num_parameters:
        return
    kept_model = model_folder(context.config, Path(str(context.config.track.output_dir)))
    if kept_model is not None and not _unusable(kept_model):
        size, free = model.num_parameters * 2, shutil.disk_usage(_existing(kept_model)).free
        if size > free:
            yield diagnosis(
                "DISK01",
                f"{kept_model}: the trained model needs at least {plan.size_text(size)}, but the disk has "
                f"{plan.size_text(free)} free",
                remedy="use --save-hf with a folder on another disk, or --no-save-model",
                evidence={"model_bytes": size, "free_bytes": free},
            )
    if flags.save is None or _unusable(Path(flags.save)):
        return
    folder = _existing(Path(flags.save))
    per_parameter = plan.checkpoint_bytes_per_parameter(context.config)
    per_parameter += 4 if "{rollout_id}" in (flags.save_hf or "") else 0
    one = model.num_parameters * per_parameter  # float32 weights, optimizer states, and the Hugging Face model
    rollouts, every = context.config.data.num_rollout, flags.save_interval
    count = max(1, rollouts // every) if rollouts and every else 1
    # The new checkpoint is written before the oldest is removed.
    kept = min(count, flags.keep_checkpoints + 1) if flags.keep_checkpoints else count
    free = shutil.disk_usage(folder).free
    if one * kept <= free:
        return
    fits = free // one
    each, total, left = (plan.size_text(size) for size in (one, one * kept, free))
    finding = (
        f"--save {flags.save}: {kept} checkpoints of {each} need {total}, but the disk of {folder} has {left} free"
    )
    remedy = f"use {f'--keep-checkpoints {fits - 1}, or ' if fits > 1 else ''}another --save folder"
    if fits == 1 and not flags.no_save_optim:
        remedy += ", or --no-save-optim"
    evidence = {"checkpoint_bytes": one, "kept": kept, "free_bytes": free}
    yield diagnosis("DISK01", finding, remedy=remedy, evidence=evidence)


def _existing(path: Path) -> Path:
    """Return `path`, or its nearest existing parent. A dangling link counts as existing."""
    path = path.absolute()
    while not os.path.lexists(path):  # False without permission
        path = path.parent
    return path


def training_fits(context: PreflightContext) -> Iterator[Diagnosis]:
    """MEM01: the largest phase of training against this machine's first GPU, or its memory if it has none."""
    if context.model_dir is None or context.config.debug.debug_rollout_only:
        return
    path = context.model_dir / "config.json"
    device, machine = local_device(), MemoryUse.of_machine()
    if not path.exists():
        return
    try:
        model = read_json(path)
        if device is not None:
            config = context.config
            num_gpus = max(len(_gpu_files(Path("/dev"))), 1)
            if uses_ray(config) or num_gpus >= Topology.of(config).num_gpus:  # a run with fewer chooses nothing
                config, _, _ = with_chosen_sizes(config, context.sources, model, device[1])
            memory = plan_memory(config, model, device[1])
            yield from findings(memory, device[0])
            if machine is not None:
                yield from host_findings(memory, config, machine.limit)
        elif machine is not None:
            yield from cpu_findings(context.config, model, machine)
    except ConfigError:
        return  # unknown dimensions, which `furlong plan` names, or a damaged file, reported by model.model_folder


def ray_cluster(context: PreflightContext) -> Iterator[Diagnosis]:
    """GPU05: Ray is not installed, or there is no cluster at --ray-address; Ray itself would retry for minutes."""
    address = context.config.cluster.ray_address
    if not uses_ray(context.config):
        return
    if importlib.util.find_spec("ray") is None:
        yield from_problem(
            "the trainer runs on Ray, which is not installed; pip install 'furlong-rl[ray]'", row="GPU05"
        )
        return
    if address is None:
        return
    if address.startswith("ray://"):
        yield diagnosis(
            "GPU05",
            f"--ray-address {address} is the address of a Ray client, which tensors cannot pass",
            cause="",
            remedy="run on a machine of the cluster with --ray-address HOST:PORT or auto, or submit the command with "
            "`ray job submit`",
            evidence={"address": address},
        )
        return
    host, port = split_port(address)
    if not host or not port.isdecimal():
        return  # `auto`: Ray finds a cluster on this machine
    try:
        socket.create_connection((host, int(port)), RAY_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        name, cause, remedy = "--ray-address", None, None
        if "RAY_ADDRESS" in context.sources.get("ray_address", ""):
            name = "RAY_ADDRESS of the environment"
            cause = "Nothing listens there: Ray is not running at that address, or a setting of an earlier job is left."
            remedy = "`unset RAY_ADDRESS` for a cluster of this run on this machine, or `ray start` on that one"
        yield diagnosis(
            "GPU05", f"{name} {address}: cannot connect ({error})", cause=cause, remedy=remedy,
            evidence={"address": address},
        )  # fmt: skip


def engine_servers(context: PreflightContext) -> Iterator[Diagnosis]:
    """ENG05: external engines that do not answer, or that this run cannot use."""
    config, cluster = context.config, context.config.cluster
    if cluster.engine != "external" or config.debug.debug_train_only or not context.generates:
        return
    from furlong.inference.sglang.external import external_addresses, read_external  # imports torch

    try:
        addresses, _ = external_addresses(config)
    except ConfigError as error:
        yield unusable_engine(str(error))
        return
    for url in addresses:
        try:
            read_external(config, url)
        except ConfigError as error:
            yield unusable_engine(str(error))


def unusable_engine(problem: str) -> Diagnosis:
    """ENG05: an engine, or a teacher, that does not answer as one; a remedy follows the last semicolon."""
    finding, _, remedy = problem.rpartition("; ")
    if not finding:
        finding, remedy = remedy, "use the address of an SGLang or `furlong serve` server"
    return diagnosis("ENG05", finding, cause="", remedy=remedy, evidence={"problem": problem})


def device(context: PreflightContext, devices: Path = Path("/dev")) -> Iterator[Diagnosis]:
    """CFG05 and CFG02: flags that need GPUs, or none. Assumes that the run uses the machine of the doctor."""
    config = context.config
    if config.cluster.ray_address is not None:
        return  # checked when the run connects to that cluster
    trains = not config.debug.debug_rollout_only
    if trains and config.train.train_backend == "megatron" and importlib.util.find_spec("megatron") is None:
        yield from_problem(NOT_INSTALLED)
    kind = visible_device(devices)
    problems = list(device_problems(config, kind))
    if not without_engines(config):
        problems += start_problems(config, kind)
    assumed = "no GPU" if kind == "cpu" else "a GPU"
    for problem in problems:
        found = from_problem(problem, {"device": kind, "is_assumed": True})
        yield dataclasses.replace(found, cause=f"Assumed: the run uses this machine, which has {assumed}.")


def tracker_packages(context: PreflightContext) -> Iterator[Diagnosis]:
    """CFG05: trackers whose packages are not installed. Assumes that the run uses the machine of the doctor."""
    for field, package in OPTIONAL.items():
        if getattr(context.config.track, field) and importlib.util.find_spec(package) is None:
            yield from_problem(not_installed(package, f"--{field.replace('_', '-')}"))


def visible_device(devices: Path = Path("/dev")) -> str:
    """Return "cuda" if this process may use a GPU, else "cpu". Does not import torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "cuda" if _gpu_files(devices) and visible not in ("", "-1") else "cpu"


CHECKS = (
    versions,
    threads,
    gpus,
    ray_cluster,
    occupied_gpus,
    engine_servers,
    device,
    tracker_packages,
    reproducibility,
    outputs,
    disk,
    training_fits,
)
