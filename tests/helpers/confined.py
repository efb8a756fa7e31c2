"""Runs in processes that have little: memory, or room on a disk. What is missing is really missing."""

from __future__ import annotations

import ctypes
import os
import resource
import threading
from pathlib import Path

import psutil

from runs import print_to

NEW_USER, NEW_MOUNTS = 0x10000000, 0x00020000  # of unshare(2)
MOST_HEAPS = -8  # of mallopt(3)
REFUSED = 77  # exit code where this machine gives no small disk


def with_little_memory(argv: list[str], log: Path, num_bytes: int) -> None:
    """Body of a forked process: `train.py argv` with so much more memory than the process begins with (`ulimit -v`).

    Threads, of which there are more on a machine with more CPUs, share heaps and have small stacks: both are addresses.
    """
    from furlong.cli import main_train

    print_to(log)
    ctypes.CDLL(None).mallopt(MOST_HEAPS, 2)
    threading.stack_size(1 << 20)
    limit = psutil.Process().memory_info().vms + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    raise SystemExit(main_train(argv))


def on_a_small_disk(argv: list[str], log: Path, folder: Path, size: str) -> None:
    """Body of a forked process: `train.py argv` while `folder` is a disk of `size`, such as 30m, that only it sees."""
    from furlong.cli import main_train

    print_to(log)
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(NEW_USER | NEW_MOUNTS):
        raise SystemExit(REFUSED)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", name).write_text(text)
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode()):
        raise SystemExit(REFUSED)
    raise SystemExit(main_train(argv))
