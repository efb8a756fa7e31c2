"""The ranks that train one model: parallel sizes and collectives."""

from __future__ import annotations

import gc
import json
import socket
import sys
from collections.abc import Generator, Iterable
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
    """This process among `world_size` trainer processes. A single process needs no process group.

    replicate: HSDP replicas of the sharded model, each over world_size / replicate ranks; context, tensor, pipeline:
    sizes of context, tensor and pipeline parallelism (the last two with Megatron-core). Rank order is TP, CP, DP, PP,
    innermost first. Ranks with the same `data_rank` train on the same samples.

    The methods are collectives: every rank calls them in the same order.
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
        """Data-parallel size: the number of parts of a batch."""
        return self.world_size // self.num_sharers

    @property
    def num_sharers(self) -> int:
        """Ranks that train on the same part of a batch."""
        return self.tensor * self.context * self.pipeline

    @property
    def data_rank(self) -> int:
        """Data-parallel rank: the index of this rank's part."""
        return self.rank // (self.tensor * self.context) % self.num_data

    @property
    def context_rank(self) -> int:
        """Context-parallel rank."""
        return self.rank // self.tensor % self.context

    def reduce(self, tensor: Tensor) -> Tensor:
        """Sum over all data-parallel ranks, for statistics of the whole batch."""
        if self.world_size == 1:
            return tensor
        summed = tensor.clone()
        dist.all_reduce(summed)
        return summed / self.num_sharers

    def first(self, text: str) -> str:
        """Return the text of the lowest rank with a non-empty one, as "rank 3: text"; "" if there is none.

        Used to raise an error of one rank on all ranks, so that none waits for it.
        """
        if self.world_size == 1:
            return text
        lowest = torch.tensor(self.rank if text else self.world_size)
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        source = int(lowest)
        if source == self.world_size:
            return ""
        return f"rank {source}: {self.share(text, source)}"

    def first_not_finite(self, gradients: Iterable[tuple[str, Tensor | None]]) -> str:
        """Return the name of the first parameter with a non-finite gradient, on the lowest rank with one."""
        bad = (name for name, grad in gradients if grad is not None and not bool(torch.isfinite(grad).all()))
        return self.first(next(bad, "")) or "the sum over all parameters (each is finite)"

    @contextmanager
    def agreed(self, error: type[FurlongError] = CheckpointError) -> Generator[None]:
        """Raise an exception of one rank inside the block on all ranks, for example of reading files.

        The failed rank raises its exception, the others `error` with its message. The block must not contain
        collectives: its end is one.
        """
        try:
            yield
        except Exception as exception:
            message = str(exception)
            self.first(message if isinstance(exception, FurlongError) else f"{type(exception).__name__}: {message}")
            raise
        if reason := self.first(""):
            raise error(reason)

    def share(self, value: Any, source: int = 0) -> Any:
        """Broadcast a JSON value from rank `source`."""
        return value if self.world_size == 1 else broadcast_json(value, source)

    def wait(self) -> None:
        """Wait for all ranks (a barrier)."""
        self.first("")

    def leave(self) -> None:
        """Wait for all ranks and destroy the process group, before the process exits.

        gloo threads release the tensors of a collective some time after it is done, which needs the interpreter. If the
        interpreter is already shutting down, the process aborts ("terminate called without an active exception"). Only
        destroying a group joins its threads, so nothing may reference the group any longer: the caller drops sharded
        models first, and torch's caches of them are cleared here. Megatron-core models keep some of their groups alive;
        the threads of those have until the end of the last `wait`.
        """
        self.wait()
        if not dist.is_initialized():
            return
        if (megatron := sys.modules.get("megatron.core.parallel_state")) is not None:
            megatron.destroy_model_parallel()
        if "torch.distributed.tensor" in sys.modules:  # its cache of layouts references the group
            from torch.distributed.tensor import debug

            debug._clear_sharding_prop_cache()  # pyright: ignore[reportPrivateUsage]  no public API
        gc.collect()  # sharded modules are in reference cycles
        dist.destroy_process_group()


def broadcast_json(value: Any, source: int, *, group: Any = None, device: torch.device | None = None) -> Any:
    """Broadcast a JSON value from rank `source` over a group whose tensors are on `device`."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    size = torch.tensor(len(data), device=device)
    dist.broadcast(size, source, group=group)
    if dist.get_rank() != source:
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, source, group=group)
    return json.loads(bytes(data.tolist()))


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

    CPU tensors always use gloo, so flags and messages need no GPU. `listener`: rank 0's socket, already bound to the
    port.
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
