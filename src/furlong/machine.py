"""Resources and limits of this machine, and process-wide settings of threads, memory, NCCL and determinism."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from furlong.errors import ConfigError

# Makes CUDA libraries deterministic; variables that are already set take precedence.
DETERMINISTIC_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
# Folders of what torch, Triton, CUDA and SGLang compile, below --compile-cache-dir.
COMPILE_CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_DG_CACHE_DIR": "deep-gemm",
}
CUBLAS_WORKSPACES = (":4096:8", ":16:8")  # values with which cuBLAS is deterministic

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"

LOG_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"  # used by every process of a run
_CGROUP = Path("/sys/fs/cgroup")
MAX_OPEN_FILES = 1 << 16  # default limit to raise to
MIN_GAIN = 0.8  # several threads are used if they take at most this fraction of the time of one
ARENA_VARIABLE, M_ARENA_MAX = "MALLOC_ARENA_MAX", -8  # of the GNU C library
_NO_LIMIT = 2**60  # bytes; control groups without a limit report a number near 2**63


@dataclass(frozen=True)
class Threads:
    """The number of threads of each computing part, and the reason for it."""

    count: int
    reason: str
    is_given: bool = False


def cpu_quota(cgroup: Path = _CGROUP) -> float | None:
    """Return the CPUs that the control group may use at once; None without a limit."""
    v2 = cgroup / "cpu.max"
    if v2.exists():
        quota, period = v2.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    v1_quota, v1_period = cgroup / "cpu/cpu.cfs_quota_us", cgroup / "cpu/cpu.cfs_period_us"
    if v1_quota.exists() and int(v1_quota.read_text()) > 0:
        return int(v1_quota.read_text()) / int(v1_period.read_text())
    return None


def has_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether this CPU multiplies bfloat16 with AMX, where oneDNN's sums depend on the number of rows."""
    return cpuinfo.exists() and "amx_bf16" in cpuinfo.read_text().split()


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use and their limit; `whose` names what the limit applies to."""

    used: int
    limit: int
    whose: str

    @property
    def share(self) -> float:
        """Fraction of the limit in use."""
        return self.used / self.limit

    @staticmethod
    def of_process() -> MemoryUse | None:
        """Return the memory of this process: virtual if limited (`ulimit -v`), otherwise resident."""
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        memory = psutil.Process().memory_info()
        if limit != resource.RLIM_INFINITY:
            return MemoryUse(memory.vms, limit, "ulimit -v")
        machine = MemoryUse.of_machine()
        return None if machine is None else MemoryUse(memory.rss, machine.limit, machine.whose)

    @staticmethod
    def of_machine(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> MemoryUse | None:
        """Return the memory in use of the control group if it has a limit, otherwise of the machine.

        Reclaimable file pages are not counted. None if neither is known.
        """
        if (group := _group_memory(cgroup)) is not None:
            return MemoryUse(*group, "the control group")
        if (machine := _machine_memory(meminfo)) is None:
            return None
        available, total = machine
        return MemoryUse(total - available, total, "the machine")


def available_memory(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the bytes that this process can still allocate, limited by control group and machine."""
    available: list[int] = []
    if (group := _group_memory(cgroup)) is not None:
        used, limit = group
        available.append(limit - used)
    if (machine := _machine_memory(meminfo)) is not None:
        available.append(machine[0])
    return min(available, default=None)


def _group_memory(cgroup: Path) -> tuple[int, int] | None:
    """Return the bytes in use and the limit of the control group, or None without a limit."""
    for limit, used, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        if not (cgroup / limit).exists():
            continue
        limit_bytes = (cgroup / limit).read_text().strip()
        if limit_bytes.isdigit() and int(limit_bytes) < _NO_LIMIT:
            counts = dict(line.split() for line in (cgroup / stat).read_text().splitlines())
            reclaimable = int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))
            return max(int((cgroup / used).read_text()) - reclaimable, 0), int(limit_bytes)
    return None


def _machine_memory(meminfo: Path) -> tuple[int, int] | None:
    """Return the available and the total bytes."""
    if not meminfo.exists():
        return None
    sizes = {
        name: int(rest.split()[0]) for name, _, rest in (s.partition(":") for s in meminfo.read_text().splitlines())
    }
    return 1024 * sizes["MemAvailable"], 1024 * sizes["MemTotal"]


def raise_open_file_limit(requested: int | None = None) -> None:
    """Raise this process's open-file limit to `requested`; None raises it as far as possible, up to MAX_OPEN_FILES.

    Raises ConfigError if the hard limit is lower than `requested`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if requested is None:
        requested = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < requested:
        if hard != resource.RLIM_INFINITY and hard < requested:
            raise ConfigError(
                f"the connections need {requested} open files, the limit is {hard}; raise it (ulimit -n) or "
                "lower --sglang-server-concurrency"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (requested, hard))


def chosen_log_level(level: str) -> str:
    """Return DEBUG if FURLONG_DEBUG=1 or SLIME_DEBUG=1 is in the environment, else `level`."""
    return "DEBUG" if "1" in (os.environ.get("FURLONG_DEBUG"), os.environ.get("SLIME_DEBUG")) else level


def set_gloo_interface(address: str) -> None:
    """Make gloo use the network interface that has `address`, unless GLOO_SOCKET_IFNAME is set.

    By default gloo uses the address that the hostname resolves to, which is often 127.0.1.1 or on another network.
    Loopback addresses are ignored.
    """
    if address.startswith("127.") or address == "::1":
        return
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            os.environ.setdefault(GLOO_INTERFACE, name)
            return


def choose_threads(
    num_threads: int | None,
    *,
    num_parts: int,
    cgroup: Path = _CGROUP,
    load: float | None = None,
    cpus: int | None = None,
) -> Threads:
    """Choose the number of threads of each of `num_parts` parts that compute at the same time.

    The threads of a part spin while they wait for each other, so one thread too many on a busy machine costs more than
    it gains. CPUs in use by other processes (the one-minute load average) are left to them.
    """
    if num_threads is not None:
        return Threads(num_threads, "--num-threads", is_given=True)
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


def set_threads(threads: Threads) -> Threads:
    """Set PyTorch's thread count. Several threads that were not asked for are used only if a short trial is faster."""
    import torch

    if threads.count > 1 and not threads.is_given:
        one, several = (_matmul_seconds(count) for count in (1, threads.count))
        if several > MIN_GAIN * one:
            threads = Threads(
                1, f"{threads.reason}; {threads.count} threads take {several / one:.2f} of the time of one"
            )
    torch.set_num_threads(threads.count)
    return threads


def _matmul_seconds(num_threads: int) -> float:
    """Time matmuls of the size of a tiny model's layers, where threads pay least; the best of several tries."""
    import torch

    torch.set_num_threads(num_threads)
    x, weight = torch.ones(256, 256), torch.ones(768, 256)
    best = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        for _ in range(10):
            torch.nn.functional.silu(torch.nn.functional.linear(x, weight))
        best = min(best, time.perf_counter() - started)
    return best


def disable_nccl_cumem() -> None:
    """Disable NCCL's cuMem in this process and its children, as SGLang does, unless NCCL_CUMEM_ENABLE is set.

    If only some processes of a group use it, the first broadcast fails with "invalid argument". Call before NCCL is
    used.
    """
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")


def keep_compile_caches(folder: str | None) -> None:
    """Keep what this process and its children compile in `folder`, for the next run; variables that are set win."""
    if folder is not None:
        for name, part in COMPILE_CACHES.items():
            os.environ.setdefault(name, str(Path(folder).expanduser().resolve() / part))


@contextlib.contextmanager
def deterministic_kernels() -> Generator[None]:
    """Make this process and its children compute deterministically; restores the settings on exit.

    Enter before anything runs on a GPU, because cuBLAS reads its variable then. Raises ConfigError for a value of
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

    before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    settings: Any = torch.utils.deterministic
    cudnn, memory = torch.backends.cudnn.benchmark, settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    settings.fill_uninitialized_memory = False  # not needed: uninitialized memory is never read
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark, settings.fill_uninitialized_memory = cudnn, memory
        for name in added:
            os.environ.pop(name, None)


def limit_malloc_arenas() -> None:
    """Let the C library have one heap per CPU. Call this before threads start.

    By default it has up to eight per CPU, and each retains what its busiest thread once needed, such as a copy of a
    small model during a weight update. No effect with another C library or if the environment sets the number.
    """
    if ARENA_VARIABLE not in os.environ and sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_ARENA_MAX, max(2, len(os.sched_getaffinity(0))))
