"""Garbage in reference cycles is released between steps, however high the collector's threshold is."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import weakref

import psutil
import pytest
import torch

from fakes_loop import FakeSync, World, fake_parts
from furlong.core import garbage
from furlong.core.garbage import GarbageCollector
from furlong.loop.checkpoints import Checkpoints
from furlong.loop.schedule import RunSchedule
from furlong.loop.train import train


@pytest.fixture
def rare_gc():
    """Python's own collector never runs, as with the threshold of a large rollout."""
    before = gc.get_threshold()
    gc.set_threshold(garbage.MAX_OBJECTS)
    yield
    gc.set_threshold(*before)


class Failing(FakeSync):
    """Every weight update leaves a tensor in the cycle of an exception and its traceback."""

    def __init__(self, world):
        super().__init__(world)
        self.tensors, self.most = [], 0

    async def update_weights(self, version):
        self.most = max(self.most, sum(tensor() is not None for tensor in self.tensors))
        tensor = torch.zeros(1000)
        self.tensors.append(weakref.ref(tensor))
        try:
            raise ConnectionError("an engine died")
        except ConnectionError as error:
            last = error  # the frame is in the error's traceback
            assert last.__traceback__ is not None
        return await super().update_weights(version)


def test_tensors_of_failed_updates_do_not_accumulate_over_the_steps_of_a_run(rare_gc, monkeypatch):
    monkeypatch.setattr(garbage, "COLLECTION_FRAC", 1e9)  # a step of fakes takes less than a collection
    monkeypatch.setattr(garbage, "FIRST_S", 0.0)
    world = World()
    sync = Failing(world)
    steps = asyncio.run(train(fake_parts(world, sync=sync), RunSchedule(num_rollout=8, ahead=1), Checkpoints()))
    assert (steps, len(sync.tensors)) == (8, 9)
    assert sync.most <= 3


def test_collections_take_a_limited_part_of_the_time(monkeypatch):
    now = [0.0]

    def collect():
        now[0] += 2.0

    monkeypatch.setattr(gc, "collect", collect)
    collector = GarbageCollector(clock=lambda: now[0])
    collected = 0
    for _ in range(10_000):
        now[0] += 1.0
        collected += collector.collect()
    assert 2.0 * collected / now[0] == pytest.approx(garbage.COLLECTION_FRAC, rel=0.05)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs the GNU C library")
def test_gaps_in_the_heap_are_returned_to_the_system():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    places = [
        libc.malloc(ctypes.c_size_t(100_000)) for _ in range(1_000)
    ]  # below the limit from which memory is mapped
    for place in places:
        ctypes.memset(ctypes.c_void_p(place), 1, 100_000)
    for place in places[:-1]:
        libc.free(place)  # the last one keeps the heap from shrinking
    before = psutil.Process().memory_info().rss
    GarbageCollector(clock=iter([0.0, garbage.FIRST_S, garbage.FIRST_S]).__next__).collect()
    freed = before - psutil.Process().memory_info().rss
    libc.free(places[-1])
    assert freed > 50_000_000
