"""Measurements of device memory and of transfers between a device and the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryTransfer:
    """Bytes moved between a device and the host, and the time it took."""

    num_bytes: int
    seconds: float


def total_transfer(parts: Iterable[MemoryTransfer]) -> MemoryTransfer:
    """Return transfers that ran one after the other as one."""
    moved = list(parts)
    return MemoryTransfer(sum(each.num_bytes for each in moved), sum(each.seconds for each in moved))


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one device in bytes.

    used: by all processes. reserved: by the trainer's process. peak: the most that the trainer's tensors occupied
    since the previous measurement.
    """

    used: int
    total: int
    reserved: int
    peak: int = 0
