"""What an actor's process has of its machine: an end when that's Ray ends, and an address."""

from __future__ import annotations

import ctypes
import signal

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel end this process when the one that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def own_address() -> str:
    """The address by which other machines of the cluster reach this one."""
    import ray

    return str(ray.util.get_node_ip_address())
