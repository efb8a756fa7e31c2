"""Measure training throughput per GPU on several GPUs of one machine, relative to a single GPU.

    python benchmarks/gpu/train_scaling.py                                 # FSDP2 on 1, 2, 4 GPUs, up to those present
    python benchmarks/gpu/train_scaling.py --ways tp2 dp2 --shapes 4b --tokens 8192
    python benchmarks/gpu/train_scaling.py --ways moe-fsdp2 moe-ep2 --tokens 16384
    python benchmarks/gpu/train_scaling.py --device cpu --shapes tiny --tokens 256 --seq-len 64 --prompt-len 16

A step is the same as in `train_mfu.py`. Tokens per GPU are constant across configurations: with TP, two GPUs share each
micro-batch and process twice as many. Each row runs in separate processes, stopped after `--limit` seconds. `relative`
is tokens per second per GPU divided by that of the first row with the same shape. Targets: `tp2` at least 0.75 of
`dp2`, and `fsdp2` at least 0.90 of `fsdp1`.

    fsdpN       --train-backend fsdp on N GPUs
    dpN, tp2    --train-backend megatron with DP over N GPUs, or TP 2 with sequence parallelism
    moe-...     Qwen3-30B-A3B with `--moe-layers` layers; epN: EP over N GPUs
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from train_mfu import PEAK_FLOPS, SHAPES, AnyShape, MoeShape, Task, furlong_result, used_parameters

from furlong.training.ranks import Ranks, join

TINY_MOE = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}  # fmt: skip


@dataclass(frozen=True)
class Way:
    """A backend and its parallel sizes."""

    backend: str
    gpus: int
    tensor: int = 1
    expert: int = 1
    is_moe: bool = False


WAYS = {
    **{f"fsdp{n}": Way("fsdp", n) for n in (1, 2, 4)},
    **{f"dp{n}": Way("megatron", n) for n in (1, 2, 4)},
    "tp2": Way("megatron", 2, tensor=2),
    **{f"moe-fsdp{n}": Way("fsdp", n, is_moe=True) for n in (2, 4)},
    **{f"moe-dp{n}": Way("megatron", n, is_moe=True) for n in (2, 4)},
    **{f"moe-ep{n}": Way("megatron", n, expert=n, is_moe=True) for n in (2, 4)},
}


def shape_of(name: str, way: Way, args: argparse.Namespace) -> AnyShape:
    """Return the model shape of a row."""
    if not way.is_moe:
        return SHAPES[name]
    return MoeShape(args.moe_layers, **TINY_MOE) if name == "tiny" else MoeShape(args.moe_layers)


def rank_main(args: argparse.Namespace) -> None:
    """Run one rank of a row; rank 0 writes the measurements."""
    way, rank = WAYS[args.ways[0]], args.rank
    ranks = Ranks(rank, way.gpus, tensor=way.tensor)
    device = torch.device(args.device)
    if args.device == "cuda":
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    if way.gpus > 1:
        backend, timeout = "nccl" if args.device == "cuda" else "gloo", timedelta(seconds=args.limit)
        join(rank=rank, world_size=way.gpus, address="127.0.0.1", port=args.port, backend=backend, timeout=timeout)
    shape = shape_of(args.shapes[0], way, args)
    task = Task(args.tokens, args.seq_len, args.prompt_len, args.micro_batches * way.tensor)
    result = furlong_result(way.backend, shape, task, args.steps, device, ranks=ranks, expert=way.expert)
    if rank == 0:
        tokens = task.tokens * task.micro_batches / way.tensor  # per GPU
        flops = task.flops(shape, used_parameters(shape)) / way.tensor
        row = {
            "seconds": result.seconds,
            "tokens_per_gpu": tokens / result.median,
            "mfu": flops / result.median / PEAK_FLOPS,
            "gib": result.peak_bytes / 2**30,
            "how": result.how,
        }
        args.out.write_text(json.dumps(row))
    ranks.leave()


def free_port() -> int:
    """Return a free TCP port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run(name: str, way_name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure one row in separate processes; return a dict with `error` if it fails or times out."""
    out, port = folder / f"{name}-{way_name}.json", free_port()
    options = ["--shapes", name, "--ways", way_name, "--out", str(out), "--port", str(port)]
    for key in ("tokens", "seq_len", "prompt_len", "micro_batches", "steps", "device", "limit", "moe_layers"):
        options += [f"--{key.replace('_', '-')}", str(getattr(args, key))]
    deadline = time.monotonic() + args.limit
    logs = [(folder / f"{name}-{way_name}-{rank}.log").open("w+") for rank in range(WAYS[way_name].gpus)]
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


def main() -> None:
    """Measure all rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.6b", "1.7b", "4b"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="default: FSDP2 on 1, 2 and 4 GPUs")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens per micro-batch")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--micro-batches", type=int, default=2, help="micro-batches per GPU and step")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--moe-layers", type=int, default=8)
    parser.add_argument("--limit", type=int, default=240, help="time limit of a row in seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    for name, kind in (("rank", int), ("port", int), ("out", Path)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank_main(args)
        return
    count = torch.cuda.device_count() if args.device == "cuda" else 2
    ways = args.ways or [f"fsdp{n}" for n in (1, 2, 4) if n <= count]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for shape in args.shapes:
            first = None
            for way in ways:
                if WAYS[way].gpus > count:
                    parser.error(f"{way} needs {WAYS[way].gpus} GPUs, but only {count} are available")
                started = time.monotonic()
                row = {"shape": shape, "way": way, **run(shape, way, args, Path(folder))}
                rows.append(row)
                took = f"({time.monotonic() - started:.0f} s total)"
                if "error" in row:
                    print(f"{shape:>5}  {way:<10} {row['error']} {took}\n{row.pop('log')}", flush=True)
                    continue
                first = first or row["tokens_per_gpu"]
                each = row["tokens_per_gpu"] / first
                print(
                    f"{shape:>5}  {way:<10} {row['tokens_per_gpu']:9,.0f} tokens/s per GPU  relative {each:5.3f}"
                    f"  {row['mfu']:6.1%} MFU  {row['gib']:6.1f} GiB  {row['how']}  {took}",
                    flush=True,
                )
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
