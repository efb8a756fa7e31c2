"""Measure training throughput per GPU on several GPUs of one machine, relative to the first row.

    python benchmarks/gpu/train_scaling.py                              # FSDP2 on 1, 2, 4 and 8 GPUs, if present
    python benchmarks/gpu/train_scaling.py --ways tp2 dp2 --shapes 4b --tokens 8192
    python benchmarks/gpu/train_scaling.py --ways fsdp8 ep8 ep4dp2 --shapes 30b-a3b --routing real balanced
    python benchmarks/gpu/train_scaling.py --ways fsdp8 dp8 tp2dp4 --shapes 8b --plan 79.1     # predictions only
    python benchmarks/gpu/train_scaling.py --device cpu --shapes tiny --tokens 256 --seq-len 64 --prompt-len 16

A step is the same as in `train_mfu.py`, with the GRPO loss. Tokens per GPU are constant across configurations: with TP,
two GPUs share each micro-batch and process twice as many. Each row runs in separate processes, stopped after `--limit`
seconds. `relative` is tokens per second per GPU divided by that of the first row with the same shape, tokens and
routing. Targets: `tp2` at least 0.75 of `dp2`, and `fsdp2` at least 0.90 of `fsdp1`.

A way is `fsdpN`, FSDP2 on N GPUs, or the sizes of a layout of Megatron-core, joined: `dpN`, `tpN` (with sequence
parallelism) and `epN`; their product is the number of GPUs, so `ep4dp2` has two copies of each expert. Ways with EP and
balanced routing are skipped for shapes without experts.

A row that does not fit without them has the flags that the memory plan proposes, recomputation and offloaded moments;
flags after `--` are added to all rows. A row that does not fit with them is not run. `plan` is the predicted and `peak`
the measured peak of allocated memory, on rank 0. Routing is `real` (random routers choose) or `balanced` (experts are
dealt in turn, by routing replay). `busiest` is the load of the busiest expert over the mean, and that of the busiest
expert-parallel rank.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
from train_mfu import PEAK_FLOPS, SHAPES, AnyShape, MoeShape, Task, furlong_result, used_parameters

from furlong.config.command_line import load
from furlong.config.sections import Config
from furlong.config.topology import Topology
from furlong.tools.gpu_memory import local_device
from furlong.tools.memory_formulas import GIB, ModelSize, TrainingSetup, smallest_change, training_phases, usable
from furlong.tools.memory_plan import assumptions, training_of
from furlong.training.ranks import Ranks, join

MEMORY_FLAGS = ("--recompute-activations", "--offload-optimizer-states")
ROUTING = {"real": "--use-routing-replay", "balanced": "--use-rollout-routing-replay"}


@dataclass(frozen=True)
class Way:
    """A backend and its parallel sizes."""

    backend: str
    gpus: int
    tensor: int = 1
    expert: int = 1

    @staticmethod
    def of(name: str) -> Way:
        """Parse a name. Raises ValueError."""
        if match := re.fullmatch(r"fsdp([1-9]\d*)", name):
            return Way("fsdp", int(match[1]))
        if not re.fullmatch(r"((tp|ep|dp)[1-9]\d*)+", name):
            raise ValueError(f"{name} is not a way")
        sizes = {kind: int(size) for kind, size in re.findall(r"(tp|ep|dp)(\d+)", name)}
        return Way("megatron", prod(sizes.values()), sizes.get("tp", 1), sizes.get("ep", 1))

    @property
    def words(self) -> list[str]:
        """Return its flags."""
        if self.backend == "fsdp":
            return ["--train-backend", "fsdp"]
        words = ["--train-backend", "megatron", "--expert-tensor-parallel-size", "1"]
        words += ["--tensor-model-parallel-size", str(self.tensor), "--expert-model-parallel-size", str(self.expert)]
        return [*words, "--sequence-parallel"] if self.tensor > 1 else words


@dataclass(frozen=True)
class Row:
    """A measurement. flags: in addition to those of the way and the routing."""

    shape: str
    way: str
    tokens: int
    routing: str = "real"
    flags: tuple[str, ...] = ()

    def model(self, args: argparse.Namespace) -> AnyShape:
        """Return the model's shape."""
        shape = SHAPES[self.shape]
        return replace(shape, num_hidden_layers=args.layers) if args.layers else shape

    def config(self, args: argparse.Namespace) -> Config:
        """Return the configuration of `furlong train` with these flags."""
        way = Way.of(self.way)
        with tempfile.TemporaryDirectory() as folder:
            self.model(args).config().save_pretrained(folder)
            words = ["--hf-checkpoint", folder, "--lr", "1e-6", *way.words, *self.flags]
            words += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", str(self.tokens)]
            words += ["--rollout-max-context-len", str(min(args.seq_len, self.tokens))]
            if isinstance(SHAPES[self.shape], MoeShape):
                words.append(ROUTING[self.routing])
            return load(words, preset=assumptions(words, gpus=way.gpus, device_bytes=80 * GIB), weights=False).config

    def setup(self, args: argparse.Namespace) -> TrainingSetup:
        """Return what the memory plan needs to know."""
        config = self.config(args)
        return training_of(config, Topology.of(config), self.model(args).num_hidden_layers)


def planned(row: Row, args: argparse.Namespace, device_bytes: int) -> tuple[Row, float, bool]:
    """Return the row with the flags that it needs, the predicted peak in GiB, and whether that fits."""
    model, limit = ModelSize.read(row.model(args).config().to_dict()), usable(device_bytes)
    setup = row.setup(args)
    if needed := smallest_change(model, setup, limit, longest=row.tokens).split():
        more = needed if {*needed} <= {*MEMORY_FLAGS} else MEMORY_FLAGS  # else it will not fit
        row = replace(row, flags=(*row.flags, *(flag for flag in more if flag not in row.flags)))
        setup = row.setup(args)
    peak = max(phase.total for phase in training_phases(model, setup, limit))
    return row, peak / GIB, peak <= limit


def rank_main(args: argparse.Namespace) -> None:
    """Run one rank of a row; rank 0 writes the measurements."""
    row, rank = Row(**json.loads(args.row)), args.rank
    way = Way.of(row.way)
    device = torch.device(args.device)
    if args.device == "cuda":
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    if way.gpus > 1:
        backend, timeout = "nccl" if args.device == "cuda" else "gloo", timedelta(seconds=args.limit)
        join(rank=rank, world_size=way.gpus, address="127.0.0.1", port=args.port, backend=backend, timeout=timeout)
    ranks, config, shape = Ranks(rank, way.gpus, tensor=way.tensor), row.config(args), row.model(args)
    task = Task(row.tokens, min(args.seq_len, row.tokens), args.prompt_len, args.micro_batches * way.tensor)
    sections: dict[str, Any] = {
        "train": config.train,
        "optim": config.optim,
        "moe": config.moe,
        "megatron": config.megatron,
    }
    result = furlong_result(way.backend, shape, task, args.steps, device, ranks=ranks, **sections)
    if rank == 0:
        tokens = task.tokens * task.micro_batches / way.tensor  # per GPU
        flops = task.flops(shape, used_parameters(shape)) / way.tensor
        measured = {
            "seconds": result.seconds,
            "tokens_per_gpu": tokens / result.median,
            "tflops": flops / result.median / 1e12,
            "mfu": flops / result.median / PEAK_FLOPS,
            "gib": result.peak_bytes / GIB,
            "busiest": result.imbalance,
            "how": result.how,
        }
        args.out.write_text(json.dumps(measured))
    ranks.leave()


def free_port() -> int:
    """Return a free TCP port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run(row: Row, number: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure one row in separate processes; return a dict with `error` if it fails or times out."""
    out, port = folder / f"{number}.json", free_port()
    options = ["--row", json.dumps(vars(row)), "--out", str(out), "--port", str(port)]
    for key in ("seq_len", "prompt_len", "micro_batches", "steps", "device", "limit", "layers"):
        options += [f"--{key.replace('_', '-')}", str(getattr(args, key))]
    deadline = time.monotonic() + args.limit
    logs = [(folder / f"{number}-{rank}.log").open("w+") for rank in range(Way.of(row.way).gpus)]
    command = [sys.executable, "-W", "ignore", __file__, *options]
    ranks = [
        subprocess.Popen([*command, "--rank", str(rank)], stdout=log, stderr=subprocess.STDOUT, env=os.environ)
        for rank, log in enumerate(logs)
    ]
    is_late = False
    while not is_late and any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        time.sleep(0.2)
        is_late = time.monotonic() > deadline
    time.sleep(0 if all(rank.poll() == 0 for rank in ranks) else 2)  # let the other ranks log their errors
    codes = [rank.poll() for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.wait()
    texts: list[str] = []
    for log in logs:
        log.seek(0)
        texts.append(log.read()[-3000:])
        log.close()
    if any(codes) or not out.exists():
        tail = "\n".join(
            f"--- rank {rank}, exit {code}\n{text}" for rank, (code, text) in enumerate(zip(codes, texts, strict=True))
        )
        return {"error": f"timed out after {args.limit} s" if is_late else "failed", "log": tail}
    return json.loads(out.read_text())


def rows_of(args: argparse.Namespace, ways: list[str]) -> Iterator[Row]:
    """Yield the rows that apply to their shapes."""
    for shape, tokens, routing, way in itertools.product(args.shapes, args.tokens, args.routing, ways):
        has_experts = isinstance(SHAPES[shape], MoeShape)
        if has_experts or (routing == args.routing[0] and Way.of(way).expert == 1):
            yield Row(shape, way, tokens, routing if has_experts else "real", tuple(args.furlong))


def line_of(result: dict[str, Any], first: float) -> str:
    """Return the columns of a measurement."""
    speed, busiest = result["tokens_per_gpu"], result["busiest"]
    experts = f"busiest {busiest[0]:.2f}, rank {busiest[1]:.2f}  " if busiest else ""
    return (
        f"peak {result['gib']:6.1f} GiB  {speed:9,.0f} tokens/s per GPU  relative {speed / first:5.3f}  "
        f"{result['tflops']:5.0f} TFLOP/s  {result['mfu']:6.1%} MFU  {experts}{result['how']}"
    )


def main() -> None:
    """Measure all rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.6b", "1.7b", "4b"])
    parser.add_argument("--ways", nargs="+", help="default: FSDP2 on 1, 2, 4 and 8 GPUs")
    parser.add_argument("--tokens", nargs="+", type=int, default=[32768], help="tokens per micro-batch")
    parser.add_argument("--routing", nargs="+", choices=ROUTING, default=["real"], help="of shapes with experts")
    parser.add_argument("--seq-len", type=int, default=8192, help="at most the tokens of a micro-batch")
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--micro-batches", type=int, default=2, help="micro-batches per GPU and step")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--layers", type=int, default=0, help="decoder layers (default: those of the shape)")
    parser.add_argument("--limit", type=int, default=240, help="time limit of a row in seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plan", type=float, metavar="GIB", help="only predict the memory, on GPUs of this size")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("furlong", nargs="*", help="flags of `furlong train` for all rows, after `--`")
    for name, kind in (("rank", int), ("port", int), ("out", Path), ("row", str)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank_main(args)
        return
    count = 8 if args.plan or args.device == "cpu" else torch.cuda.device_count()
    ways = args.ways or [f"fsdp{n}" for n in (1, 2, 4, 8) if n <= count]
    for way in ways:
        try:
            needed = Way.of(way).gpus
        except ValueError:
            parser.error(f"--ways {way}: use fsdpN, or sizes of dp, tp and ep such as dp8, tp2dp4 or ep4dp2")
        if needed > count:
            parser.error(f"{way} needs {needed} GPUs, but only {count} are available")
    device = local_device()
    device_bytes = int(args.plan * GIB) if args.plan else device[1] if device else 1 << 60
    results: list[dict[str, Any]] = []
    firsts: dict[tuple[str, int, str], float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, row in enumerate(rows_of(args, ways)):
            row, predicted, fits = planned(row, args, device_bytes)
            what = f"{row.shape:>7}  {row.way:<7} {row.tokens:>6,} tokens  {row.routing:<8} plan {predicted:6.1f} GiB"
            flags = " ".join(row.flags)
            results.append({**vars(row), "layers": args.layers, "plan_gib": predicted, "fits": fits})
            if args.plan or not fits:
                print(f"{what}  {'' if fits else 'does not fit  '}{flags}", flush=True)
                continue
            started = time.monotonic()
            results[-1] |= (result := run(row, number, args, Path(folder)))
            took = f"({time.monotonic() - started:.0f} s total)"
            if "error" in result:
                print(f"{what}  {result['error']} {flags} {took}\n{result.pop('log')}", flush=True)
                continue
            first = firsts.setdefault((row.shape, row.tokens, row.routing), result["tokens_per_gpu"])
            print(f"{what}  {line_of(result, first)}  {flags}  {took}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
