"""Named weights on their way from a trainer to an engine, their checksums, and how engines shard them.

Names are Hugging Face names. A checksum is over the raw bytes of a tensor, so it is equal on both sides only if every
bit is; it does not depend on bucketing.
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
    """Tensors that are sent together; `is_last` if no bucket follows."""

    index: int
    tensors: list[NamedTensor]
    is_last: bool


@dataclass(frozen=True)
class WeightSource:
    """A trainer's current weights: `open()` starts one pass over (HF name, tensor).

    Tensors may be views of live parameters: copy them before training continues. Others are never written to again.
    `is_live`: all are such views, so keeping them takes no extra memory. `num_kv_heads`: key/value heads per attention
    layer, `num_experts`: experts per layer; None if unknown.
    """

    open: Callable[[], Iterable[NamedTensor]]
    is_live: bool = False
    num_kv_heads: int | None = None
    num_experts: int | None = None

    def buckets(self, max_bytes: int) -> Iterator[Bucket]:
        """Yield buckets of at most `max_bytes` bytes; a larger tensor gets its own bucket."""
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
    """Return the torch dtype with a name such as bfloat16. Raises ValueError for an unknown name."""
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown torch dtype {name!r}")
    return dtype


def host_copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy in host memory that never shares storage with `tensor`."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def checksum(tensor: Tensor) -> str:
    """Return the xxh3-128 of the tensor's bytes, in hex. GPU tensors are copied to the host first."""
    return xxhash.xxh3_128_hexdigest(host_bytes(tensor.detach().contiguous().cpu()))


def host_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, which stays allocated as long as the view.

    Unlike `tensor.numpy()`, it does not make the storage permanently non-resizable (`UntypedStorage.resizable`).
    """
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    if not tensor.nbytes:
        return memoryview(bytearray())
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # pyright: ignore[reportAttributeAccessIssue]
    return memoryview(memory).cast("B")


@dataclass(frozen=True)
class EngineAddress:
    """An engine server as seen by a trainer rank, as plain values that can be sent between processes.

    info: `inference.sglang.server.ServerInfo` as a dict.
    num_running: running requests, whose KV cache must not be flushed.
    first_rank: the trainer rank on the GPU of the server's first process, if trainer and engines share GPUs.
    """

    url: str
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    num_running: int = 0
    first_rank: int = 0


@dataclass(frozen=True)
class SyncReport:
    """The result of one weight update. `checksums` are the trainer's, verified against every engine's.

    If verification runs while engines already generate, `WeightSync.finish_verification` returns them.
    `wire_bytes`: bytes sent to each engine, if not `num_bytes`.
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
class TensorShard:
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
    TensorShard(index=1, count=2)
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

    def shard(self, kind: ShardKind, rank: int) -> TensorShard:
        """Return the shard of one rank."""
        count = self.count(kind)
        return TensorShard(rank % count, count)


UNSHARDED = EngineSharding()
