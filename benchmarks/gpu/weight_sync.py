"""Measure weight update time by stage, and how much of it is verification.

    python benchmarks/gpu/weight_sync.py --shape 4b --step-s 37 -- --attention-backend fa3 --mem-fraction-static 0.3
    python benchmarks/gpu/weight_sync.py --shape 4b --tensor-parallel 2 -- --mem-fraction-static 0.3
    python benchmarks/gpu/weight_sync.py --engine embedded --shape tiny --rounds 2   # check the script on a CPU
    python benchmarks/gpu/weight_sync.py --engine embedded --shape tiny --rounds 2 --tensor-parallel 2

furlong's launcher starts SGLang servers with random weights of the shape and the options after `--`: one on this
process's GPU for `ipc`, and, if there is a second GPU, one there for `nccl`. With `--engine-gpus N` there is a single
server with TP over the N GPUs after this process's, updated by `nccl`. The trainer's weights are random tensors on this
process's GPU, and all of them change before each update. The first update of each transport compiles, allocates and
connects; it is printed but not counted.

The time of an update starts with reading the first tensor. It ends with comparing the last checksum, or, when
verification runs during serving, with loading the last tensor. `--verify` selects when to verify: `before` serving,
`during` serving, or `off`, which only this script supports, as the reference. The cost of verification is
the difference from `off`, as a share of an update and, with `--step-s`, of a training step. `verify` is the time that
this process spends on verification or waits for it, overlapped with sending where possible. Stages overlap; `rest` is
time outside of all stages. `trainer's checksums alone` is their time without a server.

With `--tensor-parallel N` the weights are those of a Megatron trainer with TP over N ranks, one process and GPU each.
The server has one process, on the first rank's GPU (with `--way nccl`, on the second's).

Otherwise the weights are also written to disk: in full, and as a delta after 1 % of all elements changed. The script
prints bytes and seconds; no engine loads these files. `--no-disk` skips this part.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rollout import client_of, options_from, write_model
from torch import Tensor
from train_mfu import SHAPES
from train_mfu import build as build_trainer
from train_scaling import free_port
from transformers import AutoModelForCausalLM
from update_timing import VERIFICATIONS, Series, Verification, cost_of_verification, time_updates

from furlong.config.sections import SyncFlags
from furlong.core.weights import WeightSource
from furlong.inference.sglang.server import ServerInfo, SglangServer
from furlong.inference.supervisor.launch import Launch, ServeLaunch, SglangLaunch
from furlong.inference.supervisor.process import HostGpus, LocalHost, ServerProcess
from furlong.inference.supervisor.replica import start_server
from furlong.machine import disable_nccl_cumem
from furlong.training.ranks import Ranks, join
from furlong.weight_sync.remote_sync import LocalSync, RankSync, RemoteSync
from furlong.weight_sync.transports.broadcast import BroadcastTransport
from furlong.weight_sync.transports.disk import DeltaTransport
from furlong.weight_sync.transports.ipc import IpcTransport
from furlong.weight_sync.transports.transport import Transport, TransportContext
from furlong.weight_sync.verification import record_for


class Weights:
    """Stand-in for a trainer: random weights of a shape."""

    def __init__(self, shape: str, device: str) -> None:
        config = SHAPES[shape].config()
        self.num_kv_heads: int = config.num_key_value_heads
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.state: dict[str, Tensor] = {
            name: torch.empty(tensor.shape, dtype=dtype, device=device).normal_(0, 0.02)
            for name, tensor in model.state_dict().items()
            if name != "lm_head.weight"
        }
        self.num_bytes = sum(tensor.nbytes for tensor in self.state.values())
        self.device = device

    def weights(self) -> WeightSource:
        """Return a source for one pass over the weights."""
        return WeightSource(self.state.items, is_live=True, num_kv_heads=self.num_kv_heads)

    def change(self, fraction: float = 1.0) -> None:
        """Change this fraction of all elements."""
        for tensor in self.state.values():
            if fraction == 1.0:
                tensor.mul_(-1.015625)
            else:
                tensor.mul_(1 + 0.015625 * (torch.rand_like(tensor) < fraction))
        self.wait()

    def wait(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Way:
    """A transport, and the GPU of the server it sends to."""

    name: str
    gpu: int
    transport: Transport


def transport_context(
    bucket_bytes: int, folder: Path = Path(), *, on_gpu: bool = False, ranks: Ranks | None = None
) -> TransportContext:
    """Return the arguments of a transport that sends `bucket_bytes` at a time."""
    rank, world_size = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
    flags = SyncFlags(update_weight_buffer_size=bucket_bytes)
    return TransportContext(flags, folder, folder, on_gpu=on_gpu, rank=rank, world_size=world_size)


def ways(args: argparse.Namespace) -> list[Way]:
    """Return the transports that this machine supports."""
    size = args.bucket_mb << 20
    if args.engine_gpus > 1:
        if torch.cuda.device_count() <= args.engine_gpus:
            raise SystemExit(
                f"--engine-gpus {args.engine_gpus} needs one more GPU, available: {torch.cuda.device_count()}"
            )
        return [Way("nccl", 1, BroadcastTransport(transport_context(size, on_gpu=True)))]
    found = [Way("ipc", 0, IpcTransport(transport_context(size)))]
    if args.engine == "embedded":
        found.append(Way("gloo", 0, BroadcastTransport(transport_context(size))))
    elif torch.cuda.device_count() > 1:
        found.append(Way("nccl", 1, BroadcastTransport(transport_context(size, on_gpu=True))))
    return found


def build_launch(args: argparse.Namespace, folder: Path, *, num_gpus: int = 1, is_colocated: bool = False) -> Launch:
    """Return the server's launch; SGLang starts with dummy weights, which the first update replaces."""
    if args.engine == "embedded":
        return ServeLaunch(write_model(args.shape, folder, "cpu"), dtype="float32", device="cpu", num_slots=4)
    config = SHAPES[args.shape].config()
    config.architectures, config.dtype = ["Qwen3ForCausalLM"], torch.bfloat16
    config.save_pretrained(folder)
    options = {"load_format": "dummy", "dtype": "bfloat16"} | options_from(list(args.options))
    return SglangLaunch(folder, num_gpus=num_gpus, has_text=False, is_colocated=is_colocated, options=options)


async def up(engine: ServerProcess, timeout_s: float) -> SglangServer:
    """Wait for a server to start and to load its checksum kernels."""
    await engine.while_starting(engine.wait_until_ready(), timeout_s)
    server = await client_of(engine, 1)
    if server.device_dtypes:
        await server.checksums()
    else:
        print(f"{server.url} is {server.info.software}: its checksums do not represent SGLang on a GPU", flush=True)
    return server


def sync_to(server: SglangServer, weights: Any, transport: Transport, verify: Verification) -> LocalSync:
    """Return a sync that sends `weights` to one server."""
    return LocalSync(weights, servers_of(server), transport, verify_while_serving=verify == "during")


def checksums_alone(weights: Weights, server: SglangServer, rounds: int) -> float:
    """Return the median seconds of the trainer's checksums."""
    seconds: list[float] = []
    for _ in range(rounds + 1):
        weights.wait()
        started = time.perf_counter()
        sent = record_for([server])
        for _ in sent.recording(weights.weights()).open():
            pass
        sent.finish()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


async def write_folders(weights: Weights, folder: Path) -> dict[str, float]:
    """Write full weights and a delta; return bytes and seconds of both."""

    async def nobody() -> list[SglangServer]:
        return []

    transport = DeltaTransport(transport_context(1 << 30, folder))
    sync = LocalSync(weights, nobody, transport)  # pyright: ignore[reportArgumentType]  only weights() is called
    whole = await sync.update_weights(1)
    weights.change(0.01)
    delta = await sync.update_weights(2)
    await sync.close()
    assert delta.wire_bytes is not None
    print(f"disk  full  {whole.num_bytes / 1e9:8.3f} GB  {whole.seconds:7.2f} s")
    print(
        f"disk  delta {delta.wire_bytes / 1e9:8.3f} GB  {delta.seconds:7.2f} s  with 1 % of the elements changed: "
        f"{delta.wire_bytes / whole.num_bytes:.2%} of the bytes",
        flush=True,
    )
    return {
        "full_bytes": whole.num_bytes, "full_s": whole.seconds, "delta_bytes": delta.wire_bytes,
        "delta_s": delta.seconds,
    }  # fmt: skip


async def measure(args: argparse.Namespace, launch: Launch, folder: Path, device: str) -> dict[str, object]:
    """Run all measurements of a trainer with one process."""
    found: dict[str, object] = {}
    chosen = ways(args)
    engines: dict[int, ServerProcess] = {}
    servers: dict[int, SglangServer] = {}
    try:
        started = time.perf_counter()
        for index, gpu in enumerate(sorted({way.gpu for way in chosen})):
            engines[gpu] = await start_server(
                launch, index, [HostGpus(LocalHost(), gpu, args.engine_gpus)], log_dir=folder
            )
        weights = Weights(args.shape, device)
        opened = await asyncio.gather(*(up(engine, args.start_timeout) for engine in engines.values()))
        servers = dict(zip(engines, opened, strict=True))
        print(f"{len(servers)} servers up after {time.perf_counter() - started:.0f} s", flush=True)
        series: list[Series] = []
        for way, verify in itertools.product(chosen, args.verify):
            sync = sync_to(servers[way.gpu], weights, way.transport, verify)
            series.append(await time_updates(sync, weights.change, way.name, args.rounds, verify))
            series[-1].show()
            found[f"{way.name} {verify}"] = series[-1].figures()
        print("\n".join(cost_of_verification(series, args.step_s)))
        server = servers[chosen[0].gpu]
        alone = checksums_alone(weights, server, args.rounds)
        started = time.perf_counter()
        await server.checksums()
        asked = time.perf_counter() - started
        print(
            f"trainer's checksums alone {alone:.4f} s  {weights.num_bytes / alone / 1e9:.0f} GB/s; "
            f"server's checksums {asked:.4f} s"
        )
        found |= {"checksums_alone_s": alone, "server_checksums_s": asked}
    finally:
        for server in servers.values():
            await server.close()
        for engine in engines.values():
            await engine.stop()
    if args.disk:
        found["disk"] = await write_folders(weights, folder)
    return found


async def measure_ranks(args: argparse.Namespace, launch: Launch, folder: Path) -> dict[str, object]:
    """Start a server and the trainer's ranks; rank 0 measures."""
    gpu = 1 if args.way == "nccl" else 0
    engine = await start_server(launch, 0, [HostGpus(LocalHost(), gpu, 1)], log_dir=folder)
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        server = await up(engine, args.start_timeout)
        await server.close()
        out = folder / "figures.json"
        command = [sys.executable, "-W", "ignore", __file__, "--port", str(free_port()), "--url", engine.url]
        command += ["--json", str(out), "--engine", args.engine, "--way", args.way, "--shape", args.shape, "--verify"]
        command += [*args.verify, "--tensor-parallel", str(args.tensor_parallel), "--rounds", str(args.rounds)]
        command += ["--bucket-mb", str(args.bucket_mb), *(["--step-s", str(args.step_s)] if args.step_s else [])]
        ranks += [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(args.tensor_parallel)]
        deadline = time.monotonic() + args.ranks_timeout
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks) or time.monotonic() > deadline:
                raise SystemExit(
                    f"trainer ranks failed or timed out: exit codes {[rank.poll() for rank in ranks]} (None: running)"
                )
            await asyncio.sleep(0.1)
        return json.loads(out.read_text())
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        await engine.stop()


def rank_main(args: argparse.Namespace, device: str) -> None:
    """Run one rank of the Megatron trainer."""
    rank, world = args.rank, args.tensor_parallel
    ranks = Ranks(rank, world, tensor=world)
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(where)
    backend = "nccl" if device == "cuda" else "gloo"
    timeout = timedelta(seconds=args.ranks_timeout)
    join(rank=rank, world_size=world, address="127.0.0.1", port=args.port, backend=backend, timeout=timeout)
    trainer = build_trainer("megatron", SHAPES[args.shape], where, ranks)
    found = asyncio.run(update_from_rank(args, trainer, ranks))
    if rank == 0:
        print("\n".join(cost_of_verification(found, args.step_s)), flush=True)
        args.json.write_text(json.dumps({f"{one.way} tp{world} {one.verify}": one.figures() for one in found}))
    del trainer  # it refers to the process group
    ranks.leave()


async def update_from_rank(args: argparse.Namespace, trainer: Any, ranks: Ranks) -> list[Series]:
    """Run this rank's part of all weight updates; return the measurements on rank 0."""
    server = SglangServer(args.url, ServerInfo.read({}))
    server.info = ServerInfo.read(await server.ask("/server_info"))
    name = "gloo" if args.way == "nccl" and trainer.device.type == "cpu" else args.way
    context = transport_context(args.bucket_mb << 20, on_gpu=name == "nccl", ranks=ranks)
    transport: Transport = IpcTransport(context) if name == "ipc" else BroadcastTransport(context)

    @contextlib.asynccontextmanager
    async def connect(addresses: object) -> AsyncGenerator[list[SglangServer]]:
        del addresses
        yield [server]

    rank = RankSync(
        lambda: WeightSource(trainer.named_weights), transport, connect=connect, rank=ranks.rank,
        world_size=ranks.world_size,
    )  # fmt: skip

    def change() -> None:
        with torch.no_grad():
            for tensor in trainer.resident():
                if tensor.is_floating_point() and tensor.dtype == trainer.settings.dtype:
                    tensor.mul_(-1.015625)
        ranks.wait()
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()

    found: list[Series] = []
    for verify in args.verify:
        if ranks.rank == 0:
            sync = RemoteSync(rank, servers_of(server), name=name, verify_while_serving=verify == "during")
            found.append(await time_updates(sync, change, name, args.rounds, verify))
            found[-1].show()
        else:
            for version in range(args.rounds + 1):
                change()
                await rank.send_weights([server.address], version + 1)
    await server.close()
    return found


def servers_of(server: SglangServer) -> Callable[[], Awaitable[list[SglangServer]]]:
    """Return a callable that lists the engines in use."""

    async def servers() -> list[SglangServer]:
        return [server]

    return servers


def main() -> None:
    """Start the servers, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["sglang", "embedded"], default="sglang")
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--verify", nargs="+", choices=VERIFICATIONS, default=VERIFICATIONS)
    parser.add_argument("--step-s", type=float, help="seconds per training step, to compare with")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="TP size of a Megatron trainer")
    parser.add_argument("--engine-gpus", type=int, default=1, help="GPUs of the server; not with --tensor-parallel")
    parser.add_argument(
        "--way", choices=["ipc", "nccl"], default="ipc", help="transport with --tensor-parallel, on GPUs"
    )
    parser.add_argument("--bucket-mb", type=int, default=512)
    parser.add_argument("--start-timeout", type=float, default=400.0)
    parser.add_argument(
        "--ranks-timeout", type=float, default=300.0, help="time limit of the trainer's ranks in seconds"
    )
    parser.add_argument("--disk", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--verbose", action="store_true", help="print furlong's log, with the verification of each update"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("options", nargs="*", help="options of the SGLang server, after `--`")
    for name, kind in (("rank", int), ("port", int), ("url", str)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine_gpus > 1 and (args.tensor_parallel > 1 or args.engine != "sglang"):
        parser.error("--engine-gpus above 1 requires --engine sglang and --tensor-parallel 1")
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING)
    device = "cuda" if args.engine == "sglang" else "cpu"
    disable_nccl_cumem()
    if args.rank is not None:
        rank_main(args, device)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        launch = build_launch(args, folder / "model", num_gpus=args.engine_gpus)
        if args.tensor_parallel == 1:
            found = asyncio.run(measure(args, launch, folder / "logs", device))
        else:
            found = asyncio.run(measure_ranks(args, launch, folder / "logs"))
    if args.json is not None:
        args.json.write_text(json.dumps({"settings": vars(args) | {"json": None}, **found}, default=str))


if __name__ == "__main__":
    main()
