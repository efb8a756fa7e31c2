"""Ties child processes, and those that they start, to their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends (Linux only; no effect elsewhere)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(0)


def end_group_at_end_of(pipe: int) -> None:
    """Kill the process group of this process when all writers of `pipe` have closed it, for example by dying.

    A shell in the group waits for that, as this process may have been killed by then. Closes `pipe` here.
    """
    subprocess.Popen(
        ["/bin/sh", "-c", "read _; kill -KILL 0"],
        stdin=pipe,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(pipe)


def close_in_forked_children(*descriptors: int) -> None:
    """Close descriptors in processes that user code forks, so that the end of this process closes them everywhere."""

    def close() -> None:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):  # user code closed it, or forks a second time
                os.close(descriptor)

    os.register_at_fork(after_in_child=close)
