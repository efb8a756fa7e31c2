"""Memory of GPUs: by name, as the driver reports it, and of those of this machine."""

from __future__ import annotations

import shutil
import subprocess

from furlong.config.closest import did_you_mean
from furlong.errors import ConfigError

GIB = 2**30
ANSWER_S = 10.0  # for the driver to answer
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
    """Name and bytes of this machine's first GPU, from the driver's own command; None where it tells of no memory."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    first = answer.stdout.strip().splitlines()[:1]
    if answer.returncode or not first:
        return None
    name, _, mebibytes = first[0].rpartition(",")
    if not mebibytes.strip().isdigit():  # [N/A] of a GPU that shares the machine's memory
        return None
    return name.strip(), int(mebibytes) * 2**20


def device_bytes(name: str) -> int:
    """Memory of a device: one of `DEVICES`, or a number of GiB. Raises ConfigError for anything else."""
    if name.lower() in DEVICES:
        return int(DEVICES[name.lower()] * GIB)
    try:
        size = float(name)
    except ValueError:
        _, hint = did_you_mean(name.lower(), DEVICES)
        known = ", ".join(DEVICES)
        raise ConfigError(f"--device {name}: {hint or f'give {known}, or its memory in GiB'}") from None
    if not size > 0:
        raise ConfigError(f"--device {name}: a device has a positive number of GiB")
    return int(size * GIB)
