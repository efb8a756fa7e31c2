"""How long a publication of weights takes, and how much of it is the proof that they arrived.

    python benchmarks/gpu/weight_sync.py --shape 4b -- --attention-backend fa3 --mem-fraction-static 0.3
    python benchmarks/gpu/weight_sync.py --engine embedded --shape tiny --rounds 2   # the whole script on a CPU

SGLang servers with random weights of the shape are started by furlong's launcher, with whatever options follow `--`:
one on the GPU of this process for `ipc`, and, where there is a second GPU, one there for `nccl`. The weights published
are random tensors on this process's GPU, all of which change before each publication. The first by each way compiles,
allocates and connects; it is shown and not counted.

Seconds are of `WeightSync.publish`: from the first tensor read to the last checksum compared, or with the proof beside
serving to the last tensor loaded. `verify` is what recording checksums here and asking the server for its own took,
which runs beside sending where it can. `checksums alone` is the work that the
device does for them in this process, timed without a server.

Then weights are written as a folder, and, with 1 % of all elements changed, as a delta to it: bytes and seconds, with
no engine that loads them (`--no-disk` leaves that out).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rollout import client_of, options_from, write_model
from torch import Tensor
from train_mfu import SHAPES
from transformers import AutoModelForCausalLM

from furlong.core.weights import SyncReport, WeightSource
from furlong.engines.host import LocalHost
from furlong.engines.launch import Launch, LaunchedEngine, Place, ServeLaunch, SglangLaunch, start_engine
from furlong.engines.sglang_server import SglangServer
from furlong.machine import nccl_as_engines_have_it
from furlong.sync.broadcast import BroadcastTransport
from furlong.sync.delta import DeltaTransport
from furlong.sync.disk import VersionFolders
from furlong.sync.ipc import IpcTransport
from furlong.sync.rank import Transport
from furlong.sync.remote import LocalSync
from furlong.sync.served import Sent


class Weights:
    """A trainer that has nothing but weights: random ones of a shape."""

    def __init__(self, shape: str, device: str) -> None:
        config = SHAPES[shape].config()
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
        """One pass over them."""
        return WeightSource(self.state.items)

    def change(self, fraction: float = 1.0) -> None:
        """Change this part of all elements."""
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
    """A transport, and the GPU of the server that it goes to."""

    name: str
    gpu: int
    transport: Transport


def ways(args: argparse.Namespace, device: str) -> list[Way]:
    """Those that this machine can do."""
    size = args.bucket_mb << 20
    found = [Way("ipc", 0, IpcTransport(bucket_bytes=size))]
    if args.engine == "embedded":
        found.append(Way("gloo", 0, BroadcastTransport(bucket_bytes=size, backend="gloo")))
    elif torch.cuda.device_count() > 1:
        found.append(Way("nccl", 1, BroadcastTransport(bucket_bytes=size, backend="nccl", device=device)))
    return found


def build_launch(args: argparse.Namespace, folder: Path) -> Launch:
    """The server: SGLang makes weights of its own, which the first publication replaces."""
    if args.engine == "embedded":
        return ServeLaunch(write_model(args.shape, folder, "cpu"), dtype="float32", device="cpu", num_slots=4)
    config = SHAPES[args.shape].config()
    config.architectures, config.dtype = ["Qwen3ForCausalLM"], torch.bfloat16
    config.save_pretrained(folder)
    options = {"load_format": "dummy", "dtype": "bfloat16"} | options_from(list(args.options))
    return SglangLaunch(folder, num_gpus=1, has_text=False, options=options)


async def up(engine: LaunchedEngine, timeout_s: float) -> SglangServer:
    """Wait for a server, and for its kernels."""
    await engine.wait_until_up(timeout_s)
    server = await client_of(engine, 1)
    if server.device_dtypes:
        await server.checksums()
    else:
        print(f"{server.url} is {server.info.software}: its checksums are not SGLang's on a GPU", flush=True)
    return server


async def publications(
    weights: Weights, way: Way, server: SglangServer, rounds: int, *, beside: bool
) -> list[SyncReport]:
    """Reports of all publications but the first; `beside`: verified while the server serves."""

    async def servers() -> list[SglangServer]:
        return [server]

    sync = LocalSync(weights, servers, way.transport, proves_beside=beside)  # pyright: ignore[reportArgumentType]  it asks for weights only
    reports: list[SyncReport] = []
    for version in range(rounds + 1):
        weights.change()
        reports.append(await sync.publish(version + 1))
        report = reports[-1]
        started = time.perf_counter()
        await sync.settle()
        later = f", verified after {time.perf_counter() - started:.4f} s more" if beside else ""
        print(
            f"{way.name:5s} {version or 'first'!s:>5s} {report.seconds:8.3f} s  verify "
            f"{report.verify_s:7.4f} s  {report.num_tensors} tensors, {report.num_bytes / 1e9:.3f} GB{later}",
            flush=True,
        )
    await sync.close()
    return reports[1:]


def checksums_alone(weights: Weights, server: SglangServer, rounds: int) -> float:
    """Median seconds of what is computed here for the comparison."""
    seconds: list[float] = []
    for _ in range(rounds + 1):
        weights.wait()
        started = time.perf_counter()
        sent = Sent.to([server])
        for _ in sent.watched(weights.weights()).open():
            pass
        sent.finish()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


async def write_folders(weights: Weights, folder: Path) -> dict[str, float]:
    """Bytes and seconds of a whole folder and of a delta."""

    async def nobody() -> list[SglangServer]:
        return []

    transport = DeltaTransport(VersionFolders(folder / "w", model_dir=folder, file_bytes=1 << 30))
    sync = LocalSync(weights, nobody, transport)  # pyright: ignore[reportArgumentType]  it asks for weights only
    whole = await sync.publish(1)
    weights.change(0.01)
    delta = await sync.publish(2)
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
    """All figures."""
    found: dict[str, object] = {}
    chosen = ways(args, device)
    engines: dict[int, LaunchedEngine] = {}
    servers: dict[int, SglangServer] = {}
    try:
        started = time.perf_counter()
        for index, gpu in enumerate(sorted({way.gpu for way in chosen})):
            engines[gpu] = await start_engine(launch, index, [Place(LocalHost(), gpu, 1)], log_dir=folder)
        weights = Weights(args.shape, device)
        opened = await asyncio.gather(*(up(engine, args.start_timeout) for engine in engines.values()))
        servers = dict(zip(engines, opened, strict=True))
        print(f"{len(servers)} servers up after {time.perf_counter() - started:.0f} s", flush=True)
        for way, proof in itertools.product(chosen, args.proof):
            beside = proof == "beside"
            reports = await publications(weights, way, servers[way.gpu], args.rounds, beside=beside)
            seconds = statistics.median(report.seconds for report in reports)
            share = statistics.median(report.verify_s / report.seconds for report in reports)
            print(
                f"{way.name:5s} proof {proof}: median {seconds:.3f} s  {weights.num_bytes / seconds / 1e9:.2f} GB/s  "
                f"verify {share:.1%}",
                flush=True,
            )
            found[f"{way.name} {proof}"] = {
                "seconds": seconds, "verify_share": share, "num_bytes": weights.num_bytes,
            }  # fmt: skip
        server = servers[chosen[0].gpu]
        alone = checksums_alone(weights, server, args.rounds)
        started = time.perf_counter()
        await server.checksums()
        asked = time.perf_counter() - started
        print(f"checksums alone {alone:.4f} s  {weights.num_bytes / alone / 1e9:.0f} GB/s; the server's {asked:.4f} s")
        found |= {"checksums_alone_s": alone, "server_checksums_s": asked}
    finally:
        for server in servers.values():
            await server.close()
        for engine in engines.values():
            await engine.stop()
    if args.disk:
        found["disk"] = await write_folders(weights, folder)
    return found


def main() -> None:
    """Start the servers, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["sglang", "embedded"], default="sglang")
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--proof", nargs="+", choices=["before", "beside"], default=["before", "beside"])
    parser.add_argument("--bucket-mb", type=int, default=512)
    parser.add_argument("--start-timeout", type=float, default=400.0)
    parser.add_argument("--disk", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--verbose", action="store_true", help="furlong's own log, with each publication's proof")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("options", nargs="*", help="after --: options of SGLang's server")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING)
    device = "cuda" if args.engine == "sglang" else "cpu"
    nccl_as_engines_have_it()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        launch = build_launch(args, folder / "model")
        found = asyncio.run(measure(args, launch, folder / "logs", device))
    if args.json is not None:
        args.json.write_text(json.dumps({"settings": vars(args) | {"json": None}, **found}, default=str))


if __name__ == "__main__":
    main()
