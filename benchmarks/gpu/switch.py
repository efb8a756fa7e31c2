"""Measure the cost of memory hand-overs between a trainer and an engine that share one GPU.

    python benchmarks/gpu/switch.py --shape 4b -- --attention-backend fa3 --mem-fraction-static 0.35
    python benchmarks/gpu/switch.py --pinning 24                      # compare ways to pin 24 GiB of host memory
    python benchmarks/gpu/switch.py --engine embedded --shape tiny    # check the script on a CPU, where nothing moves

A trainer and an SGLang server started by furlong's launcher share the GPU as with --colocate
(`loop.device_sharing.Colocated`). The trainer has random bfloat16 weights, float32 master weights and AdamW moments,
which a first optimizer step allocates. In each cycle, the engine releases its memory; the trainer wakes, takes an
optimizer step on a few tokens, updates the engine's weights by ipc with full checksum verification, and sleeps; then
the engine resumes its memory.

Each cycle updates the weights twice, the second time (`again`) without a hand-over in between. Both are shown by stage,
and the last one by bucket. The difference between the two is the cost of releasing and reallocating memory. Variants
attribute it: one keeps the packing buffers, one keeps the engine's memory, one keeps the trainer's. Each runs a few
cycles (`--variants 0` skips them).

Switch time excludes training and weight updates: it is the sum of release, wake, sleep, and both steps in which the
engine resumes memory. The target is 2 s in total at 4b. The trainer counts as awake when everything but the moments is
on the device. Moments arrive during the first passes; their remaining time is shown but not counted. The first sleep
also pins host memory; it is shown but not counted. `host` is the rate of raw copies in the same run, for comparison
(`--no-copy` skips them).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from rollout import client_of
from train_mfu import SHAPES, RandomBackend, Task
from update_timing import STAGES, show_stages, traced
from weight_sync import build_launch, servers_of

from furlong.algo.policy_loss import PolicyLoss
from furlong.config.sections import AlgoFlags, SyncFlags, TrainFlags
from furlong.core.batch import pack_micro_batch
from furlong.core.device_memory import DeviceMemory, MemoryTransfer
from furlong.core.weights import WeightSource
from furlong.inference.sglang.engine import HttpEngine
from furlong.inference.supervisor.launch import Launch
from furlong.inference.supervisor.process import HostGpus, LocalHost
from furlong.inference.supervisor.replica import start_server
from furlong.interfaces import SamplingParams
from furlong.loop.device_sharing import Colocated
from furlong.training.offload import HostMemory, device_memory
from furlong.weight_sync.remote_sync import LocalSync
from furlong.weight_sync.transports import ipc
from furlong.weight_sync.transports.ipc import IpcTransport, _CudaPacker
from furlong.weight_sync.transports.transport import TransportContext

GIB = 2**30
SWITCHES = {
    "perf/offload_rollout_time": "engine releases",
    "perf/wake_up_time": "trainer wakes",
    "perf/sleep_time": "trainer sleeps",
    "perf/onload_rollout_time": "engine resumes",
}


class SmallSteps:
    """The subset of `interfaces.Trainer` that device sharing uses, with a backend trained on a few random tokens."""

    def __init__(self, shape: str, device: torch.device, tokens: int) -> None:
        self.backend = RandomBackend(
            SHAPES[shape], dtype=torch.bfloat16, device=device, train=TrainFlags(compile_layers="off")
        )
        batch = Task(tokens, tokens, tokens // 2, 1).batch(SHAPES[shape].vocab_size)
        weights = np.full(len(batch.loss_masks), 1 / len(batch.loss_masks), np.float32)
        self._micro = lambda: pack_micro_batch(batch, np.arange(len(batch)), weights, device=device)
        self.moved = MemoryTransfer(0, 0.0)

    def step(self) -> None:
        """Take one optimizer step."""
        self.backend.forward_backward(self._micro(), PolicyLoss(AlgoFlags()))
        self.backend.optim_step()

    def weights(self) -> WeightSource:
        """Return the policy's weights."""
        return WeightSource(self.backend.named_weights, is_live=self.backend.weights_are_views)

    async def offload(self) -> MemoryTransfer:
        """Move the trainer's memory to the host."""
        self.moved = self.backend.offload()
        return self.moved

    async def onload(self) -> MemoryTransfer:
        """Move the trainer's memory back to the device."""
        return self.backend.onload()

    async def device_memory(self) -> DeviceMemory | None:
        """Return the memory of the device."""
        return device_memory(self.backend.device)


def seconds_of(work: Callable[[], Any]) -> float:
    """Run `work`, wait for the device, and return the seconds."""
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


@dataclass(frozen=True)
class Cycle:
    """Seconds and metrics by name, stages of both weight updates, and seconds per bucket of the first."""

    row: dict[str, float]
    stages: dict[str, float]
    again: dict[str, float]
    buckets: dict[str, list[float]]


class Kept(_CudaPacker):
    """Packer whose buffers stay allocated after a weight update and while the trainer sleeps."""

    def close(self) -> None:
        """Keep the buffers."""


@dataclass(frozen=True)
class Variant:
    """Differences from a training run."""

    name: str
    keeps_buffers: bool = False
    offload_rollout: bool = True
    offload_train: bool = True


VARIANTS = (
    Variant("pack buffers kept", keeps_buffers=True),
    Variant("engine keeps its memory", offload_rollout=False),
    Variant("trainer keeps its memory", offload_train=False),
)


async def cycle(trainer: SmallSteps, http: HttpEngine, sync: LocalSync, shared: Colocated, version: int) -> Cycle:
    """Train, update weights to `version` and `version + 1`, and generate."""
    async with shared.training():
        row = {"moments": seconds_of(lambda: None), "step": seconds_of(trainer.step)}
    async with shared.updating_weights():
        report, stages, parts = await traced(sync, version)
        repeated, again, _ = await traced(sync, version + 1)
    async with shared.generating():
        done = await http.generate([5, 6, 7], SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert len(done.tokens) == 4
    found = {name: metric.value for name, metric in shared.metrics().items()}
    row |= {what: found.get(name, 0.0) for name, what in SWITCHES.items()}
    row |= {"weight update": report.seconds, "repeated weight update": repeated.seconds}
    row["switch"] = sum(row[what] for what in SWITCHES.values())
    row |= {name: value for name, value in found.items() if name.startswith("memory/")}
    return Cycle(row, stages, again, parts)


async def cycles(args: argparse.Namespace, launch: Launch, folder: Path, device: torch.device) -> dict[str, Any]:
    """Measure cycles after one warm-up, then those of the variants; return medians by name."""
    trainer = SmallSteps(args.shape, device, args.tokens)
    trainer.step()
    first = await trainer.offload()
    print(
        f"first sleep {first.num_bytes / GIB:.2f} GiB in {first.seconds:.2f} s, including pinning host memory",
        flush=True,
    )
    engine = await start_server(launch, 0, [HostGpus(LocalHost(), 0, 1)], log_dir=folder)
    try:
        await engine.while_starting(engine.wait_until_ready(), args.start_timeout)
        server = await client_of(engine, 8)
        http = HttpEngine([server])
        flags = SyncFlags(update_weight_buffer_size=args.bucket_mb << 20)
        context = TransportContext(flags, folder, folder, on_gpu=True)
        sync = LocalSync(trainer, servers_of(server), IpcTransport(context))  # pyright: ignore[reportArgumentType]  only weights() is called
        versions = itertools.count(1, 2)

        async def run(variant: Variant, num_cycles: int) -> list[Cycle]:
            """Run cycles that start and end with a sleeping trainer."""
            shared = Colocated(
                trainer, http, offload_rollout=variant.offload_rollout, offload_train=variant.offload_train
            )
            shared._is_awake = False
            found: list[Cycle] = []
            packer = Kept()
            kept = mock.patch.object(ipc, "_CudaPacker", return_value=packer)
            with kept if variant.keeps_buffers else nullcontext():
                for number in range(num_cycles + 1):
                    found.append(await cycle(trainer, http, sync, shared, next(versions)))
                    shown = "  ".join(f"{name} {value:.3f}" for name, value in found[-1].row.items())
                    print(f"{number or 'first'!s:>5s}  {shown}", flush=True)
            if not variant.offload_train:
                await trainer.offload()
            _CudaPacker.close(packer)
            show_updates(variant.name, found)
            return found

        usual = await run(Variant("as in a run"), args.cycles)
        medians = medians_of([each.row for each in usual])
        others = {each.name: await run(each, args.variants) for each in VARIANTS if args.variants}
        await sync.close()
        await http.close()
    finally:
        await engine.stop()
    stages = {name: medians_of([each.stages for each in found]) for name, found in others.items()}
    stages |= {"as in a run": medians_of([each.stages for each in usual])}
    return {"medians": medians, "num_bytes": trainer.moved.num_bytes, "first_s": first.seconds, "stages": stages}


def medians_of(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each name, without the first row."""
    return {name: statistics.median(row.get(name, 0.0) for row in rows[1:]) for name in rows[-1]}


def show_updates(name: str, found: list[Cycle]) -> None:
    """Print weight update time: median seconds per stage, and per bucket of the last cycle."""
    row = medians_of([each.row for each in found])
    print(f"{name}: weight update {row['weight update']:.4f} s, by stage")
    show_stages(medians_of([each.stages for each in found]))
    print(f"{name}: again without a hand-over {row['repeated weight update']:.4f} s")
    show_stages(medians_of([each.again for each in found]))
    for stage, seconds in found[-1].buckets.items():
        print(f"      {STAGES[stage]}, ms per bucket: " + " ".join(f"{1e3 * each:.1f}" for each in seconds), flush=True)


def show(found: dict[str, Any], copy: tuple[float, float] | None) -> None:
    """Print the medians, transfer rates and the target."""
    medians, num_bytes = found["medians"], found["num_bytes"]
    for name, seconds in medians.items():
        print(f"{seconds:9.3f} {'' if name.startswith('memory/') else 's'} {name}")
    asleep, awake = medians["trainer sleeps"], medians["trainer wakes"] + medians["moments"]
    if num_bytes:
        print(
            f"{num_bytes / GIB:.2f} GiB to the host at {num_bytes / asleep / 1e9:.1f} GB/s, back at "
            f"{num_bytes / awake / 1e9:.1f} GB/s (completed after {awake:.3f} s)"
        )
        if copy is not None:
            print(f"host: raw copies at {copy[0] / 1e9:.1f} GB/s to the host and {copy[1] / 1e9:.1f} GB/s back")
    print(f"switch: {medians['switch']:.3f} s in total; the target at 4b is 2 s")


def bare_copies(device: torch.device, num_bytes: int = 4 * GIB) -> tuple[float, float]:
    """Return the bytes per second of copies to and from pinned host memory."""
    host = HostMemory(device)  # unpins its memory when deleted
    here = host.place([num_bytes])[0]
    there = torch.empty(here.numel(), dtype=torch.uint8, device=device)
    copies = (lambda: here.copy_(there, non_blocking=True), lambda: there.copy_(here, non_blocking=True))
    to_host, to_device = (min(seconds_of(copy) for _ in range(4)) for copy in copies)
    return num_bytes / to_host, num_bytes / to_device


def pinning(gib: int, device: torch.device) -> dict[str, float]:
    """Time several ways to allocate this much pinned host memory; return seconds by name."""
    ways: dict[str, Callable[[], Any]] = {
        "by furlong: huge pages, pieces in threads": lambda: by_furlong([2 * GIB] * (gib // 2), device),
        "huge pages, one piece": lambda: by_furlong([gib * GIB], device),
        "by CUDA (torch's pin_memory), in threads": lambda: by_cuda([2 * GIB] * (gib // 2)),
        "by CUDA (torch's pin_memory), one piece": lambda: by_cuda([gib * GIB]),
    }
    torch.empty(1, device=device)
    found: dict[str, float] = {}
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    print(f"{os.cpu_count()} cores; transparent huge pages: {huge.read_text().strip() if huge.exists() else 'none'}")
    for name, way in ways.items():
        started = time.perf_counter()
        kept = way()
        found[name] = time.perf_counter() - started
        print(f"{found[name]:8.2f} s  {gib * GIB / found[name] / 1e9:6.2f} GB/s  {name}", flush=True)
        del kept
        getattr(torch._C, "_host_emptyCache", gc.collect)()  # torch with CUDA caches pinned memory
    return found


def by_furlong(sizes: list[int], device: torch.device) -> HostMemory:
    """Allocate pinned memory like a sleeping trainer does."""
    host = HostMemory(device)
    host.place(sizes)
    return host


def by_cuda(sizes: list[int]) -> list[torch.Tensor]:
    """Allocate pinned memory with torch's `pin_memory`."""
    with ThreadPoolExecutor(min(len(sizes), os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True), sizes))


def main() -> None:
    """Run the measurements and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["sglang", "embedded"], default="sglang")
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6b")
    parser.add_argument("--cycles", type=int, default=5, help="timed cycles, after one warm-up")
    parser.add_argument(
        "--variants", type=int, default=2, help="timed cycles per variant, after one warm-up; 0: no variants"
    )
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per training step")
    parser.add_argument("--bucket-mb", type=int, default=512)
    parser.add_argument("--start-timeout", type=float, default=300.0)
    parser.add_argument("--copy", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--pinning", type=int, metavar="GIB", help="only compare ways to pin this much host memory")
    parser.add_argument("--verbose", action="store_true", help="print furlong's log")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("options", nargs="*", help="options of the SGLang server, after `--`")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING)
    device = torch.device("cuda" if args.engine == "sglang" else "cpu")
    if args.pinning is not None:
        found: dict[str, Any] = pinning(args.pinning, device)
    else:
        copy = bare_copies(device) if args.copy and device.type == "cuda" else None
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            launch = build_launch(args, folder / "model", is_colocated=True)
            found = asyncio.run(cycles(args, launch, folder / "logs", device))
        show(found, copy)
    if args.json is not None:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
