"""Checksums of the shards of tensors in tensor-parallel SGLang processes.

q, k, v, gate and up are each split by rows before they are joined; k and v, which may have fewer heads than there are
processes, are replicated as needed. The vocabulary is padded to a multiple of 64 and split by rows, too. o and down are
split by columns. A bias is split with rows; everything else is replicated.
(SGLang's `layers/linear.py` and `layers/vocab_parallel_embedding.py`.)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from furlong.core.device_checksum import Checksums, is_kernel_usable
from furlong.core.weights import ShardKind, TensorShard

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
VOCAB_MULTIPLE = 64
COPY_BYTES = 128 << 20  # most bytes of column shards copied at a time


class ShardChecksums:
    """Collects checksums of shards of many tensors of one precision.

    Tensors are not read before `flush`. Row shards are then read in place. Column shards are copied first, with one
    operation per tensor and at most `COPY_BYTES` at a time.

    Args:
        num_kv_heads: Number of key/value heads, if known.
    """

    def __init__(self, num_kv_heads: int | None) -> None:
        self._num_kv_heads = num_kv_heads
        self._uncut: list[tuple[str, Sequence[Tensor], int]] = []
        self._rows, self._columns = Checksums(flush_bytes=None), Checksums(flush_bytes=COPY_BYTES)

    def add(self, name: str, parts: Sequence[Tensor], count: int) -> None:
        """Add one of SGLang's tensors, given as the parts it is joined from, to be split into `count` shards.

        Raises ValueError if it cannot be split evenly.
        """
        cuts_of(name, [part.shape for part in parts], count, self._num_kv_heads)
        self._uncut.append((name, parts, count))

    def add_piece(self, name: str, shard: TensorShard, piece: Tensor, first_byte: int) -> None:
        """Add a piece of a shard, which begins at `first_byte` of the shard, as in `Checksums.add_piece`."""
        self._rows.add_piece(f"{shard.index} {shard.count} {name}", piece, first_byte)

    @property
    def waiting(self) -> list[Tensor]:
        """The tensors that `flush` will read."""
        return [*(part for _, parts, _ in self._uncut for part in parts), *self._rows.waiting]

    @property
    def waiting_bytes(self) -> int:
        """Their total size."""
        return sum(part.nbytes for part in self.waiting)

    def prepare(self) -> None:
        """Build the kernel that `flush` launches, as in `Checksums.prepare`."""
        if any(part.is_cuda for part in self.waiting):
            is_kernel_usable()

    def flush(self) -> None:
        """Queue the hashing of all waiting tensors on the device."""
        uncut, self._uncut = self._uncut, []
        for name, parts, count in uncut:
            sums = self._columns if is_cut_by_columns(name) else self._rows
            for index, shard in enumerate(self._split(name, parts, count)):
                sums.add(f"{index} {count} {name}", shard)
        self._rows.flush()
        self._columns.flush()

    def digests(self) -> Iterator[tuple[TensorShard, str, str]]:
        """Yield (shard, tensor name, checksum) of all tensors added."""
        self.flush()
        for key, digest in (self._rows.digests() | self._columns.digests()).items():
            index, count, name = key.split(" ", 2)
            yield TensorShard(int(index), int(count)), name, digest

    def _split(self, name: str, parts: Sequence[Tensor], count: int) -> Iterator[list[Tensor]]:
        if is_cut_by_columns(name):
            [whole] = parts
            columns = whole.detach().unflatten(1, (count, -1)).transpose(0, 1).contiguous()
            yield from ([shard] for shard in columns.unbind())
            return
        cuts = cuts_of(name, [part.shape for part in parts], count, self._num_kv_heads)
        cut = [part.detach().split(rows) for part, (_, rows) in zip(parts, cuts, strict=True)]
        for index in range(count):
            shard: list[Tensor] = []
            for part, (num_cuts, rows) in zip(cut, cuts, strict=True):
                place = index * num_cuts // count
                shard += part[place : place + 1]
                if missing := rows - sum(map(len, part[place : place + 1])):  # only for the vocabulary
                    shard.append(part[0].new_zeros(missing, *part[0].shape[1:]))
            yield shard


@functools.cache
def kind_of(name: str) -> ShardKind:
    """Return how one of SGLang's tensors is split, by its name."""
    if name == HEAD:
        return "head"
    module, _, what = name.rpartition(".")
    match module.rpartition(".")[2]:
        case "experts":
            return "experts"
        case "embed_tokens" | "qkv_proj":
            return "attention"
        case "gate_up_proj":
            return "mlp"
        case "o_proj":
            return "attention" if what == "weight" else "whole"
        case "down_proj":
            return "mlp" if what == "weight" else "whole"
        case _:
            return "whole"


def is_cut_by_columns(name: str) -> bool:
    """Whether this tensor is split by columns."""
    return name.endswith((".o_proj.weight", ".down_proj.weight"))


def cuts_of(name: str, shapes: Sequence[torch.Size], count: int, num_kv_heads: int | None) -> list[tuple[int, int]]:
    """Return, for each part of a tensor, the number of distinct shards and their rows (or columns).

    Raises ValueError if the shards would not be equal, or are not known.
    """
    sizes = [shape[1] if is_cut_by_columns(name) else shape[0] for shape in shapes]
    cuts = [count] * len(sizes)
    if name in (EMBEDDING, HEAD):
        sizes = [-(-size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE for size in sizes]
    elif ".qkv_proj." in name:
        if num_kv_heads is None:
            raise ValueError(f"of {name}, whose number of key/value heads is unknown")
        cuts = [count, *[min(count, num_kv_heads)] * 2]
        if count % cuts[-1] or num_kv_heads % cuts[-1]:
            raise ValueError(f"of {name}, whose {num_kv_heads} key/value heads {count} processes cannot share")
    for size, number in zip(sizes, cuts, strict=True):
        if size % number:
            raise ValueError(f"of {name}, which {count} processes cannot share: {size} is not a multiple of {number}")
    return [(number, size // number) for size, number in zip(sizes, cuts, strict=True)]
