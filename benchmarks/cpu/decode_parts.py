"""Break down a decode step of the embedded engine, for `decode.py --profile`.

For each model, dtype and number of slots, it prints:

- step time and page faults, and both again with glibc's allocator set to retain freed memory (`mallopt`);
- CPU time of each part of the step, excluding nested parts;
- PyTorch operators by self time, and oneDNN kernels by name;
- alternative implementations of the step's attention over the caches of all layers: time, and the largest difference
  from the engine's result.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from furlong.inference.embedded.decode_model import padded_rows
from furlong.inference.embedded.decode_steps import DecodeLinear, DecodeSteps, attend_slots, decode_mask
from furlong.inference.embedded.slot_batch import SlotBatch

STEPS = 16
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BYTES = 1 << 30


class PartClock:
    """Accumulates the seconds of each named part of a step, excluding nested parts."""

    def __init__(self) -> None:
        self.seconds: collections.Counter[str] = collections.Counter()
        self.calls: collections.Counter[str] = collections.Counter()
        self._inside: list[float] = []

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `function` to add its time to part `name`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                taken = time.thread_time() - began
                self.seconds[name] += taken - self._inside.pop()
                self.calls[name] += 1
                if self._inside:
                    self._inside[-1] += taken

        return call


@contextlib.contextmanager
def on_the_clock(batch: SlotBatch, clock: PartClock) -> Generator[None]:
    """Time the parts of `batch`'s decode steps within the context."""
    model: Any = batch.model
    places: list[tuple[Any, str, str]] = [
        (batch, "_decode_step", "bookkeeping before the model"),
        (batch, "_reserve", "reserving KV cache"),
        (batch, "_draw", "bookkeeping after the model"),
        (batch._sampler, "sample", "sampling"),
        (model, "decode", "embedding, logits, other"),
        (DecodeSteps, "__init__", "step buffers"),
        (DecodeSteps, "move_to", "positions, mask"),
        (DecodeSteps, "norm", "norms"),
        (DecodeSteps, "write_heads", "rotary embedding, cache"),
        (DecodeSteps, "attend", "attention"),
        (DecodeSteps, "gate", "SwiGLU"),
        (DecodeLinear, "__call__", "matmuls"),
        (DecodeLinear, "added_to", "matmuls with residual add"),
    ]
    before = [(owner, name, owner.__dict__.get(name)) for owner, name, _ in places]
    for owner, name, label in places:
        setattr(owner, name, clock.timed(label, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, own in before:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


def steps(batch: SlotBatch, count: int = STEPS) -> tuple[float, float]:
    """Return the median milliseconds and the average page faults of a step."""
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    times: list[float] = []
    for _ in range(count):
        began = time.thread_time()
        batch._decode_step()
        times.append(time.thread_time() - began)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return 1e3 * statistics.median(times), faults / count


def keep_freed_memory() -> bool:
    """Set glibc's allocator to retain freed memory. Return whether the C library supports it."""
    try:
        library = ctypes.CDLL(None)
        return bool(library.mallopt(M_MMAP_THRESHOLD, KEPT_BYTES) and library.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
    except AttributeError:
        return False


def onednn_kernels(step: Callable[[], None]) -> list[tuple[str, int, float]]:
    """Return name, calls and milliseconds of each oneDNN kernel that `step` runs."""
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "verbose"
        terminal, file = os.dup(1), os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        try:
            with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
                step()
            ctypes.CDLL(None).fflush(None)
        finally:
            os.dup2(terminal, 1)
            os.close(terminal)
            os.close(file)
        lines = path.read_text().splitlines()
    calls: collections.Counter[str] = collections.Counter()
    spent: collections.Counter[str] = collections.Counter()
    for line in lines:
        fields = line.split(",")
        if "exec" not in fields:
            continue
        at = fields.index("exec")
        name = f"{fields[at + 2]} {fields[at + 3]}"
        calls[name] += 1
        spent[name] += float(fields[-1])
    return [(name, calls[name], ms) for name, ms in spent.most_common()]


def operators(step: Callable[[], None]) -> list[tuple[str, int, float]]:
    """Return name, calls per step and microseconds per step of PyTorch's operators, sorted by self time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(STEPS):
            step()
    rows = sorted(profile.key_averages(), key=lambda event: -event.self_cpu_time_total)
    return [(row.key, row.count // STEPS, row.self_cpu_time_total / STEPS) for row in rows[:16]]


def _summed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    weights = torch.softmax(torch.add(mask[:, 0], (k * q).sum(-1), alpha=scale), -1)
    return (v * weights[:, :, None]).sum(1, keepdim=True)


def _summed_pieces(piece: int) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        out = torch.empty_like(q)
        scores = mask.new_empty(len(q), k.shape[1])
        scratch = torch.empty_like(k[:piece])
        for i in range(0, len(q), piece):
            part = slice(i, i + piece)
            torch.mul(k[part], q[part], out=scratch)
            torch.sum(scratch, -1, out=scores[part])
        weights = torch.softmax(torch.add(mask[:, 0], scores, alpha=scale), -1)[:, :, None]
        for i in range(0, len(q), piece):
            part = slice(i, i + piece)
            torch.mul(v[part], weights[part], out=scratch)
            torch.sum(scratch, 1, keepdim=True, out=out[part])
        return out

    return attend


def _batched(rows: int) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        own = q.shape[1]
        if own < rows:
            q = q.repeat(1, rows, 1)
        return torch.bmm(torch.softmax(torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale), -1), v)[:, :own]

    return attend


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask[None], scale=scale
    )[0]


def attention_ways(batch: SlotBatch, reps: int = 20) -> list[tuple[str, float, float]]:
    """Return name, microseconds per layer and largest difference of each attention implementation."""
    model: Any = batch.model
    n, K, D = padded_rows(len(batch.running)), model.num_kv_heads, model.head_dim
    length = batch._cache.length
    positions = torch.from_numpy(batch._positions[:n])
    mask = decode_mask(positions, length, model.dtype, K)
    q = torch.randn(n * K, model.num_heads // K, D).to(model.dtype)
    caches = [(keys[:n].flatten(0, 1), values[:n].flatten(0, 1)) for keys, values in batch._cache.layers]
    ways: dict[str, Callable[..., Tensor]] = {
        "the engine's": lambda q, k, v, mask, scale: attend_slots(
            q, k.view(n, K, length, D), v.view(n, K, length, D), mask, scale
        ),
        "batched": _batched(1),
        "SDPA": _sdpa,
    }
    if q.shape[1] == 1:
        ways |= {
            "batched, 2 rows": _batched(2),
            "summed": _summed,
            "summed, 16 at a time": _summed_pieces(16),
            "summed, 4 at a time": _summed_pieces(4),
        }
    wanted = ways["the engine's"](q, *caches[0], mask, model.shape.scale).float()
    results: list[tuple[str, float, float]] = []
    for name, way in ways.items():
        apart = float((way(q, *caches[0], mask, model.shape.scale).float() - wanted).abs().max())
        times: list[float] = []
        for _ in range(reps):
            began = time.thread_time()
            for k, v in caches:
                way(q, k, v, mask, model.shape.scale)
            times.append(time.thread_time() - began)
        results.append((name, 1e6 * statistics.median(times) / len(caches), apart))
    return results


def print_machine() -> None:
    """Print the hardware and library versions that determine which kernels run."""
    model_names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    print(f"{model_names[0].partition(': ')[2] if model_names else platform.processor()}, kernel {platform.release()}")
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, C library {platform.libc_ver()}")
    for line in torch.__config__.show().splitlines():
        if any(name in line for name in ("MKL-DNN", "oneAPI", "OpenMP", "oneDNN")):
            print(line)


def print_profile(title: str, batch: SlotBatch) -> None:
    """Print the step breakdown of a batch with admitted requests."""
    with torch.inference_mode():
        steps(batch, 4)
        ms, faults = steps(batch)
        print(
            f"\n{title}: {ms:.2f} ms per step, {faults:.0f} page faults, attention over {batch._cache.length} positions"
        )
        clock = PartClock()
        with on_the_clock(batch, clock):
            steps(batch)
        for name, seconds in clock.seconds.most_common():
            print(f"  {name:<42}{1e6 * seconds / STEPS:9.0f} us  {clock.calls[name] / STEPS:5.0f} calls")
        print(f"  {'total':<42}{1e6 * sum(clock.seconds.values()) / STEPS:9.0f} us")
        for name, microseconds, apart in attention_ways(batch):
            print(f"  attention per layer, {name:<21}{microseconds:9.0f} us  max difference {apart:.1e}")
        for name, calls, microseconds in operators(batch._decode_step):
            print(f"  {name:<42}{microseconds:9.0f} us  {calls:5d} calls")
        for name, calls, milliseconds in onednn_kernels(batch._decode_step):
            print(f"  {name:<42}{1e3 * milliseconds:9.0f} us  {calls:5d} calls")


def print_step(title: str, batch: SlotBatch) -> None:
    """Print the time and page faults of a step."""
    with torch.inference_mode():
        steps(batch, 4)
        ms, faults = steps(batch)
    print(f"{title}: {ms:.2f} ms per step, {faults:.0f} page faults")
