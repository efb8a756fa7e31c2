"""A backend's place on its device, for those who share it."""

from __future__ import annotations

import torch

from furlong.errors import TrainerError
from furlong.interfaces import Backend, DeviceMemory, Sleeps


def sleeping(backend: Backend) -> Sleeps:
    """The backend, if it can leave its device. Raises TrainerError if it cannot."""
    if not isinstance(backend, Sleeps):
        raise TrainerError(
            f"{type(backend).__name__} cannot leave its device; add --no-offload-train if both fit on it, or give the "
            "engines GPUs of their own"
        )
    return backend


def trim() -> None:
    """Give memory of CUDA devices back that no tensor has, and that of publications, which the engines have read."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Memory of a CUDA device; None for a CPU. The next call's peak begins here."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return DeviceMemory(used=total - free, total=total, own=torch.cuda.memory_reserved(device), peak=peak)
