"""Named weights on their way from a trainer to an engine, and the checksum that proves they arrived.

Names are Hugging Face names. A checksum is over the raw bytes of a tensor, so it is equal on both sides only if every
bit is; it is independent of how tensors were bucketed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import xxhash
from torch import Tensor

NamedTensor = tuple[str, Tensor]


@dataclass(frozen=True)
class Bucket:
    """Tensors that go together; `is_last` if none come after them."""

    index: int
    tensors: list[NamedTensor]
    is_last: bool


@dataclass(frozen=True)
class WeightSource:
    """A trainer's current weights: `open()` starts one pass over (HF name, tensor).

    Tensors may be views of live parameters: a consumer copies them before the trainer goes on. Those that are not have
    memory of their own, which the source does not write to again. `is_live`: all are such views, so that to hold them
    takes no memory. `num_kv_heads`: key/value heads of each attention of the model, None where that is not known;
    `num_experts` the same of the experts of a layer.
    """

    open: Callable[[], Iterable[NamedTensor]]
    is_live: bool = False
    num_kv_heads: int | None = None
    num_experts: int | None = None

    def buckets(self, max_bytes: int) -> Iterator[Bucket]:
        """Yield buckets of at most `max_bytes` bytes; a larger tensor comes alone."""
        tensors: list[NamedTensor] = []
        index = size = 0
        for name, tensor in self.open():
            if tensors and size + tensor.nbytes > max_bytes:
                yield Bucket(index, tensors, is_last=False)
                tensors, size, index = [], 0, index + 1
            tensors.append((name, tensor))
            size += tensor.nbytes
        if tensors:
            yield Bucket(index, tensors, is_last=True)


def dtype_of(name: Any) -> torch.dtype:
    """The dtype of a name such as bfloat16. Raises ValueError for a name that is none."""
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {name!r} is none of torch's")
    return dtype


def checksum(tensor: Tensor) -> str:
    """xxh3-128 over the tensor's bytes, in hex. A tensor on a GPU is copied to the host first."""
    flat = tensor.detach().contiguous().view(-1).cpu()
    # Read in place: a tensor that numpy has seen can never give its memory back (`UntypedStorage.resizable`).
    data = (ctypes.c_ubyte * flat.nbytes).from_address(flat.data_ptr()) if flat.nbytes else b""
    return xxhash.xxh3_128_hexdigest(data)


@dataclass(frozen=True)
class EngineAddress:
    """An engine's server as a trainer rank reaches it: plain values, which go between processes.

    info: what the server says of itself (`inference.sglang.server_info.ServerInfo` as a dict); num_running: requests that it
    holds, whose cache must not be flushed; first_rank: the trainer rank on the GPU of the server's first process, where
    trainer and engines share GPUs.
    """

    url: str
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    num_running: int = 0
    first_rank: int = 0


@dataclass(frozen=True)
class SyncReport:
    """What one weight publication did. `checksums` are the trainer's, verified against every engine's.

    Of one that is verified while engines generate with it, `WeightSync.finish_verification` returns them.
    `wire_bytes` is what was sent for each engine, where that is not `num_bytes`.
    """

    version: int
    num_tensors: int
    num_bytes: int
    seconds: float
    verify_s: float = 0.0
    checksums: dict[str, str] = field(default_factory=dict[str, str])
    wire_bytes: int | None = None


ShardKind = Literal["whole", "mlp", "attention", "head", "experts"]
"""How a tensor is sharded: not at all, like MLPs, like attention and embeddings, like the LM head, or by expert."""


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` equal parts of a tensor."""

    index: int
    count: int


@dataclass(frozen=True)
class EngineSharding:
    """How one copy of a model is sharded over the ranks of an engine.

    MLPs are sharded over all `tp_size` ranks. With data-parallel attention, attention and embeddings are sharded over
    `attention_tp_size` ranks and replicated over the rest; `head_tp_size` is the same for the LM head. With expert
    parallelism each of `ep_size` groups has an equal number of whole experts; if `ep_size` < `tp_size`, the ranks of a
    group shard the same experts.

    >>> EngineSharding(tp_size=4, attention_tp_size=2, head_tp_size=4).shard("attention", 3)
    Shard(index=1, count=2)
    """

    tp_size: int = 1
    attention_tp_size: int = 1
    head_tp_size: int = 1
    ep_size: int = 1

    def count(self, kind: ShardKind) -> int:
        """Return the number of shards of tensors of this kind."""
        return {
            "whole": 1,
            "mlp": self.tp_size,
            "attention": self.attention_tp_size,
            "head": self.head_tp_size,
            "experts": self.ep_size,
        }[kind]

    def shard(self, kind: ShardKind, rank: int) -> Shard:
        """Return the shard of one rank."""
        count = self.count(kind)
        return Shard(rank % count, count)


UNSHARDED = EngineSharding()
