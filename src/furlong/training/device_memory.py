"""A backend's place on its device, for those who share it."""

from __future__ import annotations

import torch

from furlong.interfaces import DeviceMemory


def empty_cache() -> None:
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
