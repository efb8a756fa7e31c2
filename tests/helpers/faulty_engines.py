"""Faults of an engine's process, each a function that is called in it before it serves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
import traceback
from itertools import count
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace

import torch
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from furlong.inference.embedded import EmbeddedEngine
from furlong.inference.embedded.slot_batch import SlotBatch

FEW = 6  # requests at once that a faulty engine bears
BUFFER_BYTES = 12 << 20  # that it keeps of each of them
DEVICE_BYTES = 6 << 30  # that one on a GPU keeps at a time
_kept: list[object] = []


def dies_of_many_requests() -> None:
    """End the process as SGLang ends it where a kernel wrote out of bounds."""
    run = SlotBatch.run

    def runs_out(self, *args, **kwargs):
        if len(self.running) + len(self.waiting) > FEW:
            try:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            except RuntimeError:
                traceback.print_exc()
                os._exit(1)
        run(self, *args, **kwargs)

    SlotBatch.run = runs_out


def has_a_signal_while_it_generates(number: signal.Signals, once: Path) -> None:
    """Send the process a signal when it has requests of a rollout; the first one that makes this file does."""
    run = SlotBatch.run

    def has_a_signal(self, *args, **kwargs):
        if len(self.running) + len(self.waiting) > 1:  # who asks how it is asks alone
            with contextlib.suppress(FileExistsError):
                once.touch(exist_ok=False)
                os.kill(os.getpid(), number)
        run(self, *args, **kwargs)

    SlotBatch.run = has_a_signal


def keeps_buffers_of_requests() -> None:
    """Keep a buffer of each request beyond a few that ever ran at once, each time that memory is released."""
    run, release = SlotBatch.run, EmbeddedEngine.release_memory
    most = 0

    def counted(self, *args, **kwargs):
        nonlocal most
        most = max(most, len(self.running) + len(self.waiting))
        run(self, *args, **kwargs)

    async def keeps(self, **what):
        freed = await release(self, **what)
        if what["weights"]:
            _kept.extend(b"x" * BUFFER_BYTES for _ in range(max(most - FEW, 0)))
        return freed

    SlotBatch.run = counted
    EmbeddedEngine.release_memory = keeps


LAST_WORDS = """Traceback (most recent call last):
  File "sglang/srt/managers/scheduler.py", line 841, in init_all_cuda_graphs
    self.tp_worker.init_cuda_graphs()
Exception: Capture cuda graph failed: CUDA error: out of memory
"""


def dies_capturing_graphs() -> None:
    """End the process before it serves, with what SGLang says where its graphs do not fit."""
    sys.stderr.write(LAST_WORDS)
    sys.stderr.flush()
    os._exit(1)


def stops_while_it_loads() -> None:
    """Stop the process in the middle of the first publication after training."""
    load = EmbeddedEngine.load_bucket

    async def stops(self, tensors, version):
        if version == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return await load(self, tensors, version)

    EmbeddedEngine.load_bucket = stops


def hangs_in(method: str, once: Path) -> None:
    """Never end the second call of a method of the engine, and answer all else; the first process that makes this file.

    What is called once in each publication hangs in that after the first step.
    """
    called, number = getattr(EmbeddedEngine, method), count(1)

    async def hangs(self, *args, **kwargs):
        if next(number) == 2:
            with contextlib.suppress(FileExistsError):
                once.touch(exist_ok=False)
                await asyncio.Event().wait()
        return await called(self, *args, **kwargs)

    setattr(EmbeddedEngine, method, hangs)


def closes_connections_of(path: str, once: Path) -> None:
    """Close the connection of the second request to a path without an answer; the first process that makes this file.

    What is asked is not done, and all else is answered.
    """
    requests = sys.modules[AutoHTTPProtocol.__module__].RequestResponseCycle
    run, number = requests.run_asgi, count(1)

    async def closes(self, app):
        if self.scope["path"] == path and next(number) == 2:
            with contextlib.suppress(FileExistsError):
                once.touch(exist_ok=False)
                self.transport.abort()
                return
        await run(self, app)

    requests.run_asgi = closes


def writes_where_nothing_is() -> None:
    """Have a kernel write to memory that was given back, once many requests run; on a GPU."""
    run = SlotBatch.run

    def runs_out(self, *args, **kwargs):
        if len(self.running) + len(self.waiting) > FEW:
            try:
                _write_to_freed_memory()
            except RuntimeError:
                traceback.print_exc()
                os._exit(1)
        run(self, *args, **kwargs)

    SlotBatch.run = runs_out


def _write_to_freed_memory() -> None:
    num_bytes = 1 << 28
    where = torch.cuda.caching_allocator_alloc(num_bytes)

    described = {"shape": (num_bytes,), "typestr": "|u1", "data": (where, False), "version": 2}
    region = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=described), device="cuda")
    torch.cuda.caching_allocator_delete(where)
    torch.cuda.empty_cache()
    region.fill_(1)
    torch.cuda.synchronize()


def hold_memory(num_bytes: int, is_held: Event) -> None:
    """Body of a process that has this much of the GPU until it is ended."""
    held = torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    is_held.set()
    while held.numel():
        time.sleep(1)


def keeps_memory_of_the_device() -> None:
    """Keep some of the GPU each time that all is released."""
    release = EmbeddedEngine.release_memory

    async def keeps(self, **what):
        freed = await release(self, **what)
        if what["weights"]:
            _kept.append(torch.empty(DEVICE_BYTES, dtype=torch.uint8, device="cuda"))
        return freed

    EmbeddedEngine.release_memory = keeps
