"""What this machine gives to a run: how many threads pay, and how its processes log."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import resource
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from furlong.errors import ConfigError

# What makes CUDA libraries repeat themselves, unless the caller has set it already.
DETERMINISTIC_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
CUBLAS_WORKSPACES = (":4096:8", ":16:8")  # those with which cuBLAS is deterministic

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"

LOG_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"  # of every process of a run
_CGROUP = Path("/sys/fs/cgroup")
MOST_FILES = 1 << 16  # that a server is allowed to open
_NO_LIMIT = 2**60  # bytes; control groups without a limit say a number near 2**63


@dataclass(frozen=True)
class Threads:
    """How many threads each computing part gets, and why."""

    count: int
    reason: str
    is_given: bool = False


def cpu_quota(cgroup: Path = _CGROUP) -> float | None:
    """CPUs that the control group may use at once; None where there is no limit."""
    v2 = cgroup / "cpu.max"
    if v2.exists():
        quota, period = v2.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    v1_quota, v1_period = cgroup / "cpu/cpu.cfs_quota_us", cgroup / "cpu/cpu.cfs_period_us"
    if v1_quota.exists() and int(v1_quota.read_text()) > 0:
        return int(v1_quota.read_text()) / int(v1_period.read_text())
    return None


def has_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU multiplies bfloat16 by AMX, where sums of oneDNN depend on how many rows are multiplied."""
    return cpuinfo.exists() and "amx_bf16" in cpuinfo.read_text().split()


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that are in use, and how many there can be; `whose` says of what that is the limit."""

    used: int
    limit: int
    whose: str

    @property
    def share(self) -> float:
        """Used part of the limit."""
        return self.used / self.limit

    @staticmethod
    def of_process() -> MemoryUse | None:
        """What this process has, and may have: of addresses where they are limited (`ulimit -v`), else of memory."""
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        own = psutil.Process().memory_info()
        if limit != resource.RLIM_INFINITY:
            return MemoryUse(own.vms, limit, "ulimit -v")
        machine = MemoryUse.of_machine()
        return None if machine is None else MemoryUse(own.rss, machine.limit, machine.whose)

    @staticmethod
    def of_machine(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> MemoryUse | None:
        """Memory in use: of the control group where it has a limit, else of the machine.

        Pages of files that can be dropped are not counted. None where neither is known.
        """
        if (group := _group_memory(cgroup)) is not None:
            return MemoryUse(*group, "the control group")
        if (machine := _machine_memory(meminfo)) is None:
            return None
        available, most = machine
        return MemoryUse(most - available, most, "the machine")


def available_memory(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that this process can still take: what the control group and the machine have, whichever is less."""
    found: list[int] = []
    if (group := _group_memory(cgroup)) is not None:
        used, most = group
        found.append(most - used)
    if (machine := _machine_memory(meminfo)) is not None:
        found.append(machine[0])
    return min(found, default=None)


def _group_memory(cgroup: Path) -> tuple[int, int] | None:
    """Bytes in use and the limit, where the control group has one."""
    for limit, used, kind in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        if not (cgroup / limit).exists():
            continue
        most = (cgroup / limit).read_text().strip()
        if most.isdigit() and int(most) < _NO_LIMIT:
            counts = dict(line.split() for line in (cgroup / kind).read_text().splitlines())
            droppable = int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))
            return max(int((cgroup / used).read_text()) - droppable, 0), int(most)
    return None


def _machine_memory(meminfo: Path) -> tuple[int, int] | None:
    """Bytes available and in all."""
    if not meminfo.exists():
        return None
    sizes = {
        name: int(rest.split()[0]) for name, _, rest in (s.partition(":") for s in meminfo.read_text().splitlines())
    }
    return 1024 * sizes["MemAvailable"], 1024 * sizes["MemTotal"]


def raise_open_file_limit(wanted: int | None = None) -> None:
    """Raise this process's limit of open files, of which each connection is one; None is as far as it goes.

    Raises ConfigError if the system forbids what is wanted.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if wanted is None:
        wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise ConfigError(
                f"{wanted} open files are needed for the connections, the limit is {hard}; raise it (ulimit -n) or "
                "lower --sglang-server-concurrency"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def set_gloo_interface(address: str) -> None:
    """Have gloo use the network interface that has `address`, unless the caller has chosen one.

    By itself it takes what the machine's name resolves to: often 127.0.1.1, which no other machine reaches, or another
    network than the one that the address was found on. An address of this machine alone says nothing about others.
    """
    if address.startswith("127."):
        return
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            os.environ.setdefault(GLOO_INTERFACE, name)
            return


def choose_threads(
    wanted: int | None, *, num_parts: int, cgroup: Path = _CGROUP, load: float | None = None, cpus: int | None = None
) -> Threads:
    """Choose the number of threads of each of `num_parts` parts that compute at the same time.

    Threads of one part wait for each other by spinning, so one thread too many on a busy machine costs far more than
    it brings: what others use (the one-minute load average, in CPUs) is left to them.
    """
    if wanted is not None:
        return Threads(wanted, "--num-threads", is_given=True)
    if (limit := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        return Threads(int(limit), "OMP_NUM_THREADS", is_given=True)
    cpus = cpus or len(os.sched_getaffinity(0))
    quota = cpu_quota(cgroup)
    usable = min(cpus, math.floor(quota)) if quota else cpus
    busy = round(os.getloadavg()[0] if load is None else load)
    free = max(usable - busy, 1)
    count = max(free // num_parts, 1)
    limit = f", the control group allows {quota:g}" if quota is not None else ""
    shared = f", shared by {num_parts} parts" if num_parts > 1 else ""
    return Threads(count, f"{cpus} CPUs{limit}, about {busy} in use{shared}")


def disable_nccl_cumem() -> None:
    """Let NCCL of this process take memory as SGLang's does, unless the environment says how.

    SGLang switches cuMem off. A group in which some processes have it and others do not fails in its first broadcast
    with "invalid argument". To be called before NCCL is used; processes that are started inherit it.
    """
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")


@contextlib.contextmanager
def deterministic_kernels() -> Generator[None]:
    """Let this process, and those it starts, compute in ways that give the same bits again; undone at the end.

    To be entered before anything ran on a GPU: cuBLAS reads its variable then. Raises ConfigError for a value of
    CUBLAS_WORKSPACE_CONFIG with which cuBLAS is not deterministic.
    """
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if workspace is not None and workspace not in CUBLAS_WORKSPACES:
        raise ConfigError(
            f"--deterministic-mode with CUBLAS_WORKSPACE_CONFIG={workspace}: cuBLAS is not deterministic with it; "
            f"unset it, or use {' or '.join(CUBLAS_WORKSPACES)}"
        )
    added = {name: value for name, value in DETERMINISTIC_ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(added)
    import torch

    was = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    filling: Any = torch.utils.deterministic
    cudnn, memory = torch.backends.cudnn.benchmark, filling.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    filling.fill_uninitialized_memory = False  # only costs time: nothing reads what it has not set
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])
        torch.backends.cudnn.benchmark, filling.fill_uninitialized_memory = cudnn, memory
        for name in added:
            os.environ.pop(name, None)


@contextlib.contextmanager
def import_without_gc(module: str) -> Generator[None]:
    """Import `module` inside without garbage collection, and leave what was imported out of later collections.

    torch and transformers make 600,000 objects that stay; going over them while they come takes a fifth of the start.
    Nothing is changed if the module is there already.
    """
    if module in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
