"""Run training in processes with a real limit on memory or disk space."""

from __future__ import annotations

import ctypes
import os
import resource
import threading
from pathlib import Path

import psutil

from runs import print_to

NEW_USER, NEW_MOUNTS = 0x10000000, 0x00020000  # flags of unshare(2)
MOST_HEAPS = -8  # M_ARENA_MAX of mallopt(3)
REFUSED = 77  # exit code if the small disk cannot be mounted


def with_little_memory(argv: list[str], log: Path, num_bytes: int) -> None:
    """Body of a forked process: run `train.py argv` with `num_bytes` of address space beyond current use (`ulimit -v`).

    Threads share heaps and have small stacks, so that address space does not depend on the number of CPUs.
    """
    from furlong.cli import main_train

    print_to(log)
    ctypes.CDLL(None).mallopt(MOST_HEAPS, 2)
    threading.stack_size(1 << 20)
    limit = psutil.Process().memory_info().vms + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    raise SystemExit(main_train(argv))


def on_a_small_disk(argv: list[str], log: Path, folder: Path, size: str) -> None:
    """Body of a forked process: run `train.py argv` with a private disk of `size`, such as 30m, mounted at `folder`."""
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
