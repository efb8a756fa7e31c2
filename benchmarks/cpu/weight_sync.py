"""Compare furlong's verified weight updates on a CPU with unverified updates by common libraries.

    OMP_NUM_THREADS=1 python benchmarks/cpu/weight_sync.py [--layers 8] [--rounds 5]

This process is the trainer and has only weights (Qwen3 shape, float32). `furlong serve` in a separate process is the
engine. Each of furlong's transports verifies the checksum of every tensor before the update is complete: `ipc` (shared
memory), `gloo` (broadcast), `disk` (a folder of safetensors) and `delta` (changed elements only; 1 % of all elements
change before each update).

The baselines alternate with them in every round and do not verify. `broadcast` sends one tensor at a time with
torch.distributed.broadcast (gloo) to a process that copies it into its model. `save and load` is safetensors' save_file
here and transformers' from_pretrained in that process.

Seconds are the median time of one weight update; ratios are to the corresponding baseline. `verify s` is the time for
computing checksums here and requesting the engine's (partly overlapped with sending).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils.logging import disable_progress_bar

from furlong.config.sections import SyncFlags
from furlong.core.weights import WeightSource
from furlong.inference.sglang.server import ServerInfo, SglangServer
from furlong.inference.supervisor.launch import ServeLaunch
from furlong.inference.supervisor.process import HostGpus, LocalHost
from furlong.inference.supervisor.replica import start_server
from furlong.models.hf_model import build_model, save_model
from furlong.models.tokenizer import build_tokenizer
from furlong.weight_sync.remote_sync import LocalSync
from furlong.weight_sync.transports.broadcast import BroadcastTransport
from furlong.weight_sync.transports.disk import DeltaTransport, DiskTransport
from furlong.weight_sync.transports.ipc import IpcTransport
from furlong.weight_sync.transports.transport import Transport, TransportContext

Way = Callable[[], Awaitable["Sent"]]

RIVAL_OF = {"ipc": "broadcast", "gloo": "broadcast", "disk": "save and load", "delta": "save and load"}
LIMIT_S = 120.0
BUCKET = 64 << 20


class Weights:
    """A trainer that has only weights."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = {name: tensor.clone() for name, tensor in state.items() if name != "lm_head.weight"}
        self.num_bytes = sum(tensor.nbytes for tensor in self.state.values())

    def weights(self) -> WeightSource:
        """Return a source that iterates over the weights."""
        return WeightSource(self.state.items)

    def change(self, fraction: float) -> None:
        """Change this fraction of all elements."""
        for tensor in self.state.values():
            if fraction == 1.0:
                tensor.mul_(-1.015625)
            else:
                tensor.mul_(1 + 0.015625 * (torch.rand_like(tensor) < fraction))


@dataclass(frozen=True)
class Sent:
    """Measurements of one weight update."""

    seconds: float
    verify_s: float = 0.0
    wire_bytes: int = 0


def receive(folder: Path, port: int, pipe: Connection) -> None:
    """Run the baselines' receiver: load a folder or receive all tensors on each request."""
    torch.set_num_threads(1)
    disable_progress_bar()
    join(port, rank=1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    pipe.send("ready")
    while (told := pipe.recv()) is not None:
        if told == "broadcast":
            for tensor in state.values():
                arrived = torch.empty_like(tensor)
                dist.broadcast(arrived, src=0)
                tensor.copy_(arrived)
        else:
            model = AutoModelForCausalLM.from_pretrained(told, dtype=torch.float32)
        pipe.send("done")


def join(port: int, *, rank: int) -> None:
    """Join the process group of sender and receiver."""
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=limit
    )  # fmt: skip


def rivals(weights: Weights, model_dir: Path, folder: Path, pipe: Connection) -> dict[str, Callable[[], Sent]]:
    """Return the baselines by name."""

    def timed(send: Callable[[], None]) -> Callable[[], Sent]:
        def one() -> Sent:
            weights.change(1.0)
            started = time.perf_counter()
            send()
            assert pipe.recv() == "done"
            return Sent(time.perf_counter() - started, wire_bytes=weights.num_bytes)

        return one

    def broadcast() -> None:
        pipe.send("broadcast")
        for tensor in weights.state.values():
            dist.broadcast(tensor, src=0)

    def save_and_load() -> None:
        save_file(weights.state, folder / "model.safetensors", metadata={"format": "pt"})
        pipe.send(folder)

    for name in ("config.json", "generation_config.json"):
        (folder / name).write_bytes((model_dir / name).read_bytes())
    return {"broadcast": timed(broadcast), "save and load": timed(save_and_load)}


def own_ways(weights: Weights, server: SglangServer, model_dir: Path, folder: Path) -> dict[str, LocalSync]:
    """Return a LocalSync for each of furlong's transports."""

    async def servers() -> list[SglangServer]:
        return [server]

    def context(name: str) -> TransportContext:
        return TransportContext(SyncFlags(update_weight_buffer_size=BUCKET), model_dir, folder / name, on_gpu=False)

    transports: dict[str, Transport] = {
        "ipc": IpcTransport(context("ipc")),
        "gloo": BroadcastTransport(context("gloo")),
        "disk": DiskTransport(context("disk")),
        "delta": DeltaTransport(context("delta")),
    }
    return {name: LocalSync(weights, servers, way) for name, way in transports.items()}  # pyright: ignore[reportArgumentType]  only weights() is used


async def measure(args: argparse.Namespace, scratch: Path) -> tuple[Weights, dict[str, list[Sent]]]:
    """Return the measured updates by method, excluding the first update of each method."""
    config = Qwen3Config(
        vocab_size=16_384, hidden_size=args.width, intermediate_size=3 * args.width, num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64, num_key_value_heads=args.width // 128, head_dim=64,
        max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = build_model(config, seed=0, dtype=torch.float32)
    save_model(model, scratch / "model")
    build_tokenizer("0123456789+=").save_pretrained(scratch / "model")
    weights, host = Weights(dict(model.state_dict())), LocalHost()
    [port] = await host.reserve_ports(1)
    await host.release_ports([port])
    pipe, other = multiprocessing.get_context("spawn").Pipe()
    receiver = multiprocessing.get_context("spawn").Process(
        target=receive, args=(scratch / "model", port, other), daemon=True
    )  # fmt: skip
    receiver.start()
    launch = ServeLaunch(scratch / "model", num_slots=2, num_threads=1)
    engine = await start_server(launch, 0, [HostGpus(host)], log_dir=scratch / "logs")
    found: dict[str, list[Sent]] = {}
    syncs: dict[str, LocalSync] = {}
    try:
        join(port, rank=0)
        assert pipe.recv() == "ready"
        await engine.while_starting(engine.wait_until_ready(), LIMIT_S)
        server = SglangServer(engine.url, ServerInfo.read({}))
        server.info = ServerInfo.read(await server.ask("/server_info"))
        syncs = own_ways(weights, server, scratch / "model", scratch)
        (scratch / "rival").mkdir()
        theirs = rivals(weights, scratch / "model", scratch / "rival", pipe)
        versions = itertools.count(1)
        ways = {name: _updating(weights, sync, versions, is_delta=name == "delta") for name, sync in syncs.items()}
        ways |= {name: _in_thread(one) for name, one in theirs.items()}
        for number in range(args.rounds + 1):
            for name, way in ways.items():
                sent = await way()
                if number:  # the first update connects and allocates, and the first delta is a full copy
                    found.setdefault(name, []).append(sent)
        pipe.send(None)
        await server.close()
    finally:
        for sync in syncs.values():
            await sync.close()
        await engine.stop()
        receiver.kill()
    return weights, found


def _updating(weights: Weights, sync: LocalSync, versions: Iterator[int], *, is_delta: bool) -> Way:
    async def one() -> Sent:
        if is_delta:  # other methods have updated the server, so resynchronize it first
            await sync.update_weights(next(versions))
        weights.change(0.01 if is_delta else 1.0)
        started = time.perf_counter()
        report = await sync.update_weights(next(versions))
        return Sent(time.perf_counter() - started, report.verify_s, report.wire_bytes or report.num_bytes)

    return one


def _in_thread(one: Callable[[], Sent]) -> Way:
    async def way() -> Sent:
        return await asyncio.to_thread(one)

    return way


def main() -> None:
    """Measure, then print one row per method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        weights, found = asyncio.run(measure(args, Path(scratch)))
    print(f"{weights.num_bytes / 1e6:.0f} MB in {len(weights.state)} tensors, medians of {args.rounds} rounds")
    print(f"{'method':14s} {'seconds':>8s} {'verify s':>8s} {'MB sent':>8s}  ratio to the baseline (range)")
    for name, sents in found.items():
        seconds = statistics.median(sent.seconds for sent in sents)
        verify, wire = statistics.median(s.verify_s for s in sents), statistics.median(s.wire_bytes for s in sents)
        line = f"{name:14s} {seconds:8.3f} {verify:8.3f} {wire / 1e6:8.1f}"
        if rival := RIVAL_OF.get(name):
            ratios = sorted(a.seconds / b.seconds for a, b in zip(sents, found[rival], strict=True))
            line += f"  {statistics.median(ratios):.2f} x `{rival}` ({ratios[0]:.2f}-{ratios[-1]:.2f})"
        print(line)


if __name__ == "__main__":
    main()
