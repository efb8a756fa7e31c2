"""Garbage collection of the driver, rare while a rollout runs and complete between two steps, and of its heap."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import time
from collections.abc import Callable, Generator

YOUNG_OBJECTS = 50_000  # minimum number of new objects between garbage collections
OBJECTS_PER_SAMPLE = 100  # the same per sample of a rollout
MAX_OBJECTS = 2**31 - 1  # the largest threshold of the collector
COLLECTION_FRAC = 0.01  # of the time, at most, for complete collections
FIRST_S = 10.0  # after the start of a run: a collection takes about 0.1 s, and little has accumulated before


@contextlib.contextmanager
def import_without_gc(module: str) -> Generator[None]:
    """Import `module` in the body without garbage collection, and exclude its objects from later collections.

    torch and transformers create 600,000 permanent objects; collecting during their import takes a fifth of the
    start-up time. No effect if the module is already imported.
    """
    if module in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def raise_gc_threshold(num_samples: int) -> None:
    """Raise the garbage-collection threshold to about the number of objects that a rollout of `num_samples` creates.

    A rollout creates about a hundred objects per sample, which live until its end. With Python's default threshold of
    700 new objects, traversing them takes half of the driver's time. Older garbage would then live for thousands of
    steps, so `GarbageCollector` collects it between steps.
    """
    gc.set_threshold(min(max(YOUNG_OBJECTS, OBJECTS_PER_SAMPLE * num_samples), MAX_OBJECTS), 10, 10)


def return_free_memory() -> None:
    """Return memory that the allocator keeps to the system (glibc only).

    Batches of ever new sizes leave gaps in the heap, which otherwise grows by some MB per thousand steps.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


class GarbageCollector:
    """Collects all garbage between two steps and returns its memory, for at most `COLLECTION_FRAC` of the time.

    A reference cycle counts as a few objects for Python's own collector, but it may retain a copy of the weights or a
    process group with its threads: the traceback of a failed weight update does.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._next_s = clock() + FIRST_S

    def collect(self) -> bool:
        """Collect garbage of all generations, unless the last collection was too recent; return whether it did."""
        started_s = self._clock()
        if started_s < self._next_s:
            return False
        gc.collect()
        return_free_memory()
        ended_s = self._clock()
        self._next_s = ended_s + (ended_s - started_s) / COLLECTION_FRAC
        return True
