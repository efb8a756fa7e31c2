"""Lets tests that run as root see the errors of files that may not be read or written."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Generator

VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
IGNORES_MODES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


@contextlib.contextmanager
def modes_apply() -> Generator[None]:
    """Make the permissions of files apply to this thread, and to threads started in the body, even for root."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(VERSION, 0)
    before = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable; then the same of capabilities from 32 on
    if libc.capget(header, before):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    during = (ctypes.c_uint32 * 6)(*before)
    during[0] &= ~IGNORES_MODES
    if libc.capset(header, during):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        yield
    finally:
        libc.capset(header, before)
