"""The processes that train one model together, and how they share it."""

from __future__ import annotations

import gc
import json
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  documented

from furlong.errors import CheckpointError, FurlongError


@dataclass(frozen=True)
class Ranks:
    """This process among `world_size` trainer processes; one process alone needs no process group.

    replicate: copies of the sharded model (HSDP), each over world_size / replicate ranks; context: ranks that share
    one sequence (context parallelism); tensor, pipeline: ranks that share a layer, and the layers (Megatron-core).
    Neighbours by rank share a layer, then a sequence; then come the data-parallel ranks, then the next layers. Ranks
    with the same `data_rank` train on the same samples.

    The methods are collectives: every rank calls them, in the same order.
    """

    rank: int = 0
    world_size: int = 1
    _: KW_ONLY
    replicate: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def num_data(self) -> int:
        """Data-parallel ranks: parts that a batch is cut into."""
        return self.world_size // self.num_sharers

    @property
    def num_sharers(self) -> int:
        """Ranks that train on the same part."""
        return self.tensor * self.context * self.pipeline

    @property
    def data_rank(self) -> int:
        """Which of these parts is this rank's."""
        return self.rank // (self.tensor * self.context) % self.num_data

    @property
    def context_rank(self) -> int:
        """Which part of its sequences is this rank's."""
        return self.rank // self.tensor % self.context

    def reduce(self, tensor: Tensor) -> Tensor:
        """Sum over all data-parallel ranks; for statistics of a batch that is spread over them."""
        if self.world_size == 1:
            return tensor
        summed = tensor.clone()
        dist.all_reduce(summed)
        return summed / self.num_sharers

    def first(self, text: str) -> str:
        """The text of the lowest rank that gave one, as "rank 3: text"; "" if none did.

        So a rank that failed makes all of them fail, and none waits for it.
        """
        if self.world_size == 1:
            return text
        lowest = torch.tensor(self.rank if text else self.world_size)
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        source = int(lowest)
        if source == self.world_size:
            return ""
        return f"rank {source}: {self.share(text, source)}"

    @contextmanager
    def agreed(self, error: type[FurlongError] = CheckpointError) -> Generator[None]:
        """Make what fails on one rank within this block fail on all: what each reads on its own, say.

        A rank that failed raises what it met, the others `error` with that rank's reason. Nothing within may be a
        collective: the first one after it is the end of the block.
        """
        try:
            yield
        except Exception as met:
            self.first(str(met) if isinstance(met, FurlongError) else f"{type(met).__name__}: {met}")
            raise
        if reason := self.first(""):
            raise error(reason)

    def share(self, value: Any, source: int = 0) -> Any:
        """Give every rank what `source` has; anything that JSON holds."""
        if self.world_size == 1:
            return value
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        size = torch.tensor(len(data))
        dist.broadcast(size, source)
        if self.rank != source:
            data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, source)
        return json.loads(bytes(data.tolist()))

    def wait(self) -> None:
        """Wait until every rank is here."""
        self.first("")

    def leave(self) -> None:
        """Wait until every rank is here, and leave the process group: how a process of ranks ends by itself.

        gloo's threads let go of a collective's tensors some time after it is done, and want the interpreter for that.
        If that has begun to end by then, the process aborts ("terminate called without an active exception"). Only
        the end of a group waits for its threads: so nothing of this process may hold it any longer. The caller drops
        sharded models before; what torch remembers of them is dropped here. Models of Megatron-core live on, and some
        of its groups with them: their threads have the time of the last `wait`, which is of the default group.
        """
        self.wait()
        if not dist.is_initialized():
            return
        if (megatron := sys.modules.get("megatron.core.parallel_state")) is not None:
            megatron.destroy_model_parallel()
        if "torch.distributed.tensor" in sys.modules:  # which remembers layouts, and with them the group
            from torch.distributed.tensor import debug

            debug._clear_sharding_prop_cache()  # pyright: ignore[reportPrivateUsage]  there is no public way
        gc.collect()  # sharded modules are in cycles
        dist.destroy_process_group()


def join(
    *,
    rank: int,
    world_size: int,
    address: str,
    port: int,
    backend: Literal["gloo", "nccl"],
    timeout: timedelta,
    listener: socket.socket | None = None,
) -> None:
    """Make this process rank `rank` of the default process group; rank 0 listens at address:port.

    Tensors on the CPU always go through gloo: flags and messages need no GPU. `listener` is of rank 0, which then has
    the port already, so that nobody else takes it before.
    """
    store = TCPStore(
        address,
        port,
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
