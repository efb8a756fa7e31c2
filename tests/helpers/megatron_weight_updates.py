"""Functions that the ranks of a Megatron trainer run to update the weights of a running server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from backends import megatron_backend
from furlong.core.weights import EngineAddress, WeightSource
from furlong.inference.sglang.server import ServerInfo, SglangServer, connected, probe
from furlong.training.megatron.parallel_layout import Layout
from furlong.training.ranks import Ranks
from furlong.weight_sync.remote_sync import RankSync, RemoteSync
from furlong.weight_sync.transports.broadcast import BroadcastTransport
from furlong.weight_sync.transports.ipc import IpcTransport
from megatron_cases import OPTIM
from transport_context import transport_context

TIMEOUT_S = 60.0


@contextlib.contextmanager
def messages_of(name: str) -> Generator[list[str]]:
    """Collect the messages of a logger within the context."""
    messages: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, listener = logging.getLogger(name), Listener()
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)


def update_weights(
    ranks: Ranks,
    folder: Path,
    *,
    family: str,
    url: str,
    transport: Literal["ipc", "gloo", "nccl"],
    version: int,
    device: str,
    **sizes: Any,
) -> dict[str, Any]:
    """Send the model in `folder` / `family` by `transport`, and return the verification report on the first rank."""
    layout = Layout(ranks.tensor, ranks.pipeline, ranks.context, **sizes)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    trained = megatron_backend(folder / family, ranks, optim=OPTIM, layout=layout, dtype=dtype, device=device)
    weights = WeightSource(trained.named_weights, num_kv_heads=trained.hf.num_key_value_heads)
    context = transport_context(1 << 20, on_gpu=transport == "nccl", rank=ranks.rank, world_size=ranks.world_size)
    way = IpcTransport(context) if transport == "ipc" else BroadcastTransport(context)
    rank = RankSync(lambda: weights, way, connect=connected, rank=ranks.rank, world_size=ranks.world_size)

    async def at_server() -> dict[str, Any]:
        info = ServerInfo.read(await asyncio.to_thread(probe, url, api_key=None))
        address = EngineAddress(url, dataclasses.asdict(info))
        if ranks.rank:
            await rank.send_weights([address], version)
            await rank.close_sync()
            return {}
        async with connected([address]) as (server,):

            async def servers() -> Sequence[SglangServer]:
                return [server]

            sync = RemoteSync(rank, servers, name=way.name, timeout_s=TIMEOUT_S)
            with messages_of("furlong.weight_sync.remote_sync") as messages:
                report = await sync.update_weights(version)
            await sync.close()
        verification = messages[-1].rpartition(", ")[2]
        return {
            "tensors": report.num_tensors,
            "bytes": report.num_bytes,
            "seconds": report.seconds,
            "verification": verification,
        }

    return asyncio.run(at_server())
