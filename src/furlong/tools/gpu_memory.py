"""GPU memory: of known GPU types, and of this machine's GPUs as reported by nvidia-smi."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

import psutil

from furlong.core.text import did_you_mean
from furlong.errors import ConfigError

GIB = 2**30
ANSWER_S = 10.0  # timeout of nvidia-smi
IN_USE_BYTES = 2 * GIB  # a display needs less
DEVICES = {
    "b200": 179.1,
    "h200": 139.8,
    "h100": 79.1,
    "a100-80gb": 79.1,
    "a100-40gb": 39.4,
    "l40s": 44.4,
    "rtx-4090": 23.5,
    "rtx-3090": 23.6,
}


def local_device() -> tuple[str, int] | None:
    """Return name and bytes of this machine's first GPU; None without a GPU or its memory size."""
    first = next(iter(_ask("--query-gpu=name,memory.total")), None)
    if first is None or len(first) != 2 or not first[1].isdigit():  # [N/A] if the GPU shares host memory
        return None
    return first[0], int(first[1]) * 2**20


@dataclass(frozen=True)
class GpuInUse:
    """A GPU that other processes use: bytes, and `PID (NAME)` of the visible processes."""

    index: int
    name: str
    used: int
    total: int
    processes: tuple[str, ...]


def gpus_in_use(count: int, visible: str | None) -> list[GpuInUse]:
    """List the GPUs, among the first `count`, on which other processes use more than `IN_USE_BYTES`.

    Parents and children of this process do not count. visible: CUDA_VISIBLE_DEVICES, a list of indices or UUIDs.
    """
    listed = [
        row
        for row in _ask("--query-gpu=index,uuid,name,memory.used,memory.total")
        if len(row) == 5 and row[0].isdigit()
    ]
    if visible is not None:
        names = [word.strip() for word in visible.split(",") if word.strip()]
        listed = [row for word in names for row in listed if word == row[0] or row[1].startswith(word)]
    taken = [row for row in listed[:count] if row[3].isdigit() and int(row[3]) * 2**20 > IN_USE_BYTES]
    apps = [row for row in _ask("--query-compute-apps=gpu_uuid,pid,process_name") if len(row) == 3] if taken else []
    family, in_use = _process_family(), list[GpuInUse]()
    for index, uuid, name, used, total in taken:
        seen = [(pid, process) for of_gpu, pid, process in apps if of_gpu == uuid]
        others = tuple(f"{pid} ({process})" for pid, process in seen if pid not in family)
        if others or not seen:
            size = int(total) * 2**20 if total.isdigit() else 0
            in_use.append(GpuInUse(int(index), name, int(used) * 2**20, size, others))
    return in_use


def _process_family() -> set[str]:
    process = psutil.Process()
    return {str(each.pid) for each in (process, *process.parents(), *process.children(recursive=True))}


def _ask(query: str) -> list[list[str]]:
    """Return the rows of an nvidia-smi query; [] without a driver."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    words = [command, query, "--format=csv,noheader,nounits"]
    answer = subprocess.run(words, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    if answer.returncode:
        return []
    return [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines() if line.strip()]


def type_bytes(name: str) -> int | None:
    """Return the bytes of a GPU type as Ray names it, of the smaller one if there are several; None if unknown."""
    name = name.lower().removeprefix("geforce-")
    sizes = [size for known, size in DEVICES.items() if known in (name, f"{name}b") or known.startswith(f"{name}-")]
    return int(min(sizes) * GIB) if sizes else None


def device_bytes(name: str) -> int:
    """Return the bytes of a device: one of `DEVICES`, or a number of GiB. Raises ConfigError for anything else."""
    if name.lower() in DEVICES:
        return int(DEVICES[name.lower()] * GIB)
    try:
        size = float(name)
    except ValueError:
        _, hint = did_you_mean(name.lower(), DEVICES)
        known = ", ".join(DEVICES)
        raise ConfigError(f"--device {name}: {hint or f'use {known}, or its memory in GiB'}") from None
    if not size > 0:
        raise ConfigError(f"--device {name}: its memory must be a positive number of GiB")
    return int(size * GIB)
