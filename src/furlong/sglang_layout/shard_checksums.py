"""The checksums of the shares that SGLang's processes have of tensors, where several have a model together.

q, k, v, gate and up are cut by rows, each for itself, before they are joined; of k and v, which may have fewer heads
than there are processes, several of these have the same. The vocabulary is filled up to a multiple of 64 and cut by
rows, too. o and down are cut by columns. A bias of what is cut by rows is cut with it; everything else is whole in all.
(SGLang's `layers/linear.py` and `layers/vocab_parallel_embedding.py`.)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from furlong.core.device_checksum import Checksums, is_kernel_usable
from furlong.core.weights import Shard, ShardKind

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
VOCAB_MULTIPLE = 64
COPY_BYTES = 128 << 20  # of columns at a time


class ShardChecksums:
    """Collects checksums of shares of many tensors, of one precision.

    Nothing is done with a tensor before `flush`. Shares by rows are read where they are. Those by columns are copied
    then, each tensor by one operation and so many at a time that the copies take `COPY_BYTES`.

    Args:
        num_kv_heads: Key/value heads of each attention, if they are known.
    """

    def __init__(self, num_kv_heads: int | None) -> None:
        self._num_kv_heads = num_kv_heads
        self._uncut: list[tuple[str, Sequence[Tensor], int]] = []
        self._rows, self._columns = Checksums(flush_bytes=None), Checksums(flush_bytes=COPY_BYTES)

    def add(self, name: str, parts: Sequence[Tensor], count: int) -> None:
        """Take one of SGLang's tensors, as the parts that it is joined of, to be cut into `count` shares.

        Raises ValueError if it does not fall into these.
        """
        cuts_of(name, [part.shape for part in parts], count, self._num_kv_heads)
        self._uncut.append((name, parts, count))

    def add_piece(self, name: str, share: Shard, piece: Tensor, first_byte: int) -> None:
        """Take a piece of this share of a tensor, which begins at this byte of the share, as `Checksums.add_piece`."""
        self._rows.add_piece(f"{share.index} {share.count} {name}", piece, first_byte)

    @property
    def waiting(self) -> list[Tensor]:
        """The tensors that `flush` will read."""
        return [*(part for _, parts, _ in self._uncut for part in parts), *self._rows.waiting]

    @property
    def waiting_bytes(self) -> int:
        """Their bytes."""
        return sum(part.nbytes for part in self.waiting)

    def prepare(self) -> None:
        """Have the kernel built that `flush` launches, as `Checksums.prepare`."""
        if any(part.is_cuda for part in self.waiting):
            is_kernel_usable()

    def flush(self) -> None:
        """Have the device read what waits."""
        uncut, self._uncut = self._uncut, []
        for name, parts, count in uncut:
            sums = self._columns if is_cut_by_columns(name) else self._rows
            for index, share in enumerate(self._shares(name, parts, count)):
                sums.add(f"{index} {count} {name}", share)
        self._rows.flush()
        self._columns.flush()

    def digests(self) -> Iterator[tuple[Shard, str, str]]:
        """Yield the shares of all tensors added: which one, of which tensor, and its checksum."""
        self.flush()
        for key, digest in (self._rows.digests() | self._columns.digests()).items():
            index, count, name = key.split(" ", 2)
            yield Shard(int(index), int(count)), name, digest

    def _shares(self, name: str, parts: Sequence[Tensor], count: int) -> Iterator[list[Tensor]]:
        if is_cut_by_columns(name):
            [whole] = parts
            columns = whole.detach().unflatten(1, (count, -1)).transpose(0, 1).contiguous()
            yield from ([share] for share in columns.unbind())
            return
        cuts = cuts_of(name, [part.shape for part in parts], count, self._num_kv_heads)
        cut = [part.detach().split(rows) for part, (_, rows) in zip(parts, cuts, strict=True)]
        for index in range(count):
            share: list[Tensor] = []
            for part, (num_cuts, rows) in zip(cut, cuts, strict=True):
                place = index * num_cuts // count
                share += part[place : place + 1]
                if missing := rows - sum(map(len, part[place : place + 1])):  # of a vocabulary only
                    share.append(part[0].new_zeros(missing, *part[0].shape[1:]))
            yield share


@functools.cache
def kind_of(name: str) -> ShardKind:
    """How one of SGLang's tensors is shared, by its name."""
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
    """Whether shares of this tensor are columns of it."""
    return name.endswith((".o_proj.weight", ".down_proj.weight"))


def cuts_of(name: str, shapes: Sequence[torch.Size], count: int, num_kv_heads: int | None) -> list[tuple[int, int]]:
    """Into how many different shares each part of this tensor falls, and their rows, or columns.

    Raises ValueError if they would not be equal, or not be known.
    """
    sizes = [shape[1] if is_cut_by_columns(name) else shape[0] for shape in shapes]
    cuts = [count] * len(sizes)
    if name in (EMBEDDING, HEAD):
        sizes = [-(-size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE for size in sizes]
    elif ".qkv_proj." in name:
        if num_kv_heads is None:
            raise ValueError(f"of {name}, whose key/value heads are not known")
        cuts = [count, *[min(count, num_kv_heads)] * 2]
        if count % cuts[-1] or num_kv_heads % cuts[-1]:
            raise ValueError(f"of {name}, whose {num_kv_heads} key/value heads {count} processes cannot share")
    for size, number in zip(sizes, cuts, strict=True):
        if size % number:
            raise ValueError(f"of {name}, which {count} processes cannot share: {size} is no multiple of {number}")
    return [(number, size // number) for size, number in zip(sizes, cuts, strict=True)]
