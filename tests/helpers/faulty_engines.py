"""Faults of engine processes: functions to call in the process before it serves."""

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
from furlong.inference.server import generate_api
from furlong.inference.server.app import EngineServer

FEW = 6  # concurrent requests that a faulty engine survives
BUFFER_BYTES = 12 << 20  # leaked per request beyond FEW
DEVICE_BYTES = 6 << 30  # leaked on a GPU per release
_kept: list[object] = []


def exits_with_many_requests() -> None:
    """Exit like SGLang after a kernel wrote out of bounds."""
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


def sends_a_signal_while_generating(number: signal.Signals, once: Path) -> None:
    """Send the process a signal during a rollout, in the first process that creates the file `once`."""
    run = SlotBatch.run

    def has_a_signal(self, *args, **kwargs):
        if len(self.running) + len(self.waiting) > 1:  # a single request may be a health check
            with contextlib.suppress(FileExistsError):
                once.touch(exist_ok=False)
                os.kill(os.getpid(), number)
        run(self, *args, **kwargs)

    SlotBatch.run = has_a_signal


def leaks_request_buffers() -> None:
    """On each release of memory, leak a buffer for every concurrent request beyond `FEW`."""
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


def exits_capturing_graphs() -> None:
    """Exit before serving, with SGLang's error for CUDA graphs that do not fit."""
    sys.stderr.write(LAST_WORDS)
    sys.stderr.flush()
    os._exit(1)


def stops_while_loading() -> None:
    """Stop the process during the first weight update after training."""
    load = EmbeddedEngine.load_bucket

    async def stops(self, tensors, version):
        if version == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return await load(self, tensors, version)

    EmbeddedEngine.load_bucket = stops


def hangs_in(method: str, once: Path) -> None:
    """Hang in the second call of a method of the engine or its server, in the first process that creates `once`.

    A method called once per weight update hangs in the update after the first step.
    """
    owner = EmbeddedEngine if hasattr(EmbeddedEngine, method) else EngineServer
    called, number = getattr(owner, method), count(1)

    async def hangs(self, *args, **kwargs):
        if next(number) == 2:
            with contextlib.suppress(FileExistsError):
                once.touch(exist_ok=False)
                await asyncio.Event().wait()
        return await called(self, *args, **kwargs)

    setattr(owner, method, hangs)


def closes_connections_of(path: str, once: Path) -> None:
    """Close the connection of the second request to a path, in the first process that creates the file `once`.

    The request is not executed; all others are answered.
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


def writes_to_freed_memory() -> None:
    """Make a GPU kernel write to freed memory once many requests run."""
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
    """Body of a process that occupies GPU memory until it is killed."""
    held = torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    is_held.set()
    while held.numel():
        time.sleep(1)


def leaks_device_memory() -> None:
    """Leak GPU memory on each release of all memory."""
    release = EmbeddedEngine.release_memory

    async def keeps(self, **what):
        freed = await release(self, **what)
        if what["weights"]:
            _kept.append(torch.empty(DEVICE_BYTES, dtype=torch.uint8, device="cuda"))
        return freed

    EmbeddedEngine.release_memory = keeps


def answers_with_other_version(once: Path) -> None:
    """Answer a request of the second rollout with a weight version of another program, unless `once` exists."""
    answered = generate_api.reply

    def changed(request, finished, *, version, with_log_probs):
        answer = answered(request, finished, version=version, with_log_probs=with_log_probs)
        if version == "1" and not once.exists():
            once.touch()
            answer["meta_info"]["weight_version"] = "999"
        return answer

    generate_api.reply = changed
