"""The checksums that an SGLang server has of the weights it was sent, in the layout of its own model.

SGLang joins q, k and v of an attention, and gate and up of an MLP, into one tensor each, and fills the vocabulary up to
a multiple of 64 with zeros. Experts come one by one and are two tensors of a layer there (`sglang_layout.expert_stacks`). A server of
one process has them whole, each of several processes a share of most (`sglang_layout.shard_checksums`).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from typing import get_args

import torch
from torch import Tensor

from furlong.core.device_checksum import Checksums
from furlong.core.weights import UNSHARDED, EngineSharding, Shard, ShardKind
from furlong.sglang_layout.expert_stacks import Place, Stack, place_of
from furlong.sglang_layout.shard_checksums import EMBEDDING, HEAD, VOCAB_MULTIPLE, ShardChecksums, kind_of

DENSE = frozenset({"llama", "mistral", "qwen2", "qwen3"})  # `model_type`s of which the layout is known
APART = frozenset({"qwen3"})  # those of them that SGLang shares by `EngineSharding.attention` where it is not `num`
WITH_EXPERTS = frozenset({"qwen3_moe"})  # others, which have experts
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
OWNER = {part: whole for whole, parts in JOINED.items() for part in parts}
WHOLE = Shard(0, 1)
Digests = Mapping[Shard, Mapping[str, list[str]]]
"""Checksums that are right for each share, by the name of its tensor."""


class FusedChecksums:
    """Computes them on the device of the tensors. Parts wait until their tensor is complete, those of experts do not.

    What is added is read when the caller flushes `sums`, or by `digests`, and stays as it is until then.

    Args:
        dtypes: Precisions that a server may have the weights in. A tensor that comes in one of 16 bits stays in it,
            others are hashed in each.
        processes: Of the servers. Every tensor is hashed whole, too.
        num_kv_heads: Key/value heads of each attention, if they are known.
        num_experts: Experts of a layer, if they are known.
    """

    def __init__(
        self,
        dtypes: frozenset[torch.dtype],
        processes: Collection[EngineSharding] = (UNSHARDED,),
        *,
        num_kv_heads: int | None = None,
        num_experts: int | None = None,
    ) -> None:
        self._dtypes, self._num_kv_heads, self._num_experts = sorted(dtypes, key=str), num_kv_heads, num_experts
        self._counts: dict[ShardKind, set[int]] = {
            kind: {each.count(kind) for each in processes} - {1} for kind in get_args(ShardKind)
        }
        self._parts: dict[str, dict[str, Tensor]] = {}
        self._stacks: dict[str, Stack] = {}
        self._sums: dict[torch.dtype, Checksums] = {}
        self._shards: dict[torch.dtype, ShardChecksums] = {}
        self.uncut: dict[int, str] = {}
        """Of what the checksums are not known where so many processes share it, and why."""
        self.uncut_experts: dict[int, str] = {}
        """Why experts' are not where so many processes have some of them each."""

    @property
    def sums(self) -> list[Checksums | ShardChecksums]:
        """What collects them."""
        return [*self._sums.values(), *self._shards.values()]

    def keeps(self, dtype: torch.dtype) -> bool:
        """Whether tensors of this precision are read as they are, without a copy in another one."""
        return not dtype.is_floating_point or (dtype in self._dtypes and dtype.itemsize == 2)

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one of the trainer's tensors."""
        if (place := place_of(name)) is not None:
            stack = self._stacks.setdefault(place.whole, Stack(place.whole))
            if stack.take(place.index, name, tensor.shape, self._precisions(tensor.dtype)):
                for sums, [held] in self._in_precisions([tensor]):
                    sums.add_piece(place.whole, held, place.index * held.nbytes)
                    self._share_piece(place, held)
            else:
                self._hash(name, [tensor])
            return
        joined, piece = _place(name)
        if not piece:
            self._hash(name, [tensor])
            return
        pieces = JOINED[OWNER[piece]]
        parts = self._parts.setdefault(joined, {})
        parts[piece] = tensor
        if len(parts) == len(pieces):
            self._hash(joined, [parts[each] for each in pieces])
            del self._parts[joined]

    def digests(self) -> dict[Shard, dict[str, list[str]]]:
        """The `Digests` of what was added; but see `wrong`, `unhashed`, `uncut` and `uncut_experts`."""
        found: dict[Shard, dict[str, list[str]]] = {WHOLE: {}}
        for dtype, sums in self._sums.items():
            for name, digest in sums.digests().items():
                if name not in self._stacks or dtype in self._stacks[name].dtypes:
                    found[WHOLE].setdefault(name, []).append(digest)
        for shards in self._shards.values():
            for share, name, digest in shards.digests():
                found.setdefault(share, {}).setdefault(name, []).append(digest)
        return found

    def wrong(self) -> dict[str, str]:
        """What is wrong with the pieces of which a tensor of the server's is made, by its name, once all came."""
        return {name: why for name, stack in self._stacks.items() if (why := stack.wrong())}

    def unhashed(self) -> dict[str, str]:
        """Why the checksum of a tensor of the server's cannot be known, by its name."""
        return {name: stack.unhashed for name, stack in self._stacks.items() if stack.unhashed}

    def _hash(self, name: str, tensors: list[Tensor]) -> None:
        """Take one of the server's tensors, as the parts that it is joined of."""
        counts = self._counts[kind_of(name)]
        if name == HEAD:
            counts = counts | self._counts["attention"]  # as the embedding, which it may be
        for sums, held in self._in_precisions(tensors):
            sums.add(name, _filled_up(held[0]) if name in (EMBEDDING, HEAD) else held)
            for count in counts:
                try:
                    self._shards_of(held[0].dtype).add(name, held, count)
                except ValueError as error:
                    self.uncut.setdefault(count, str(error))

    def _share_piece(self, place: Place, held: Tensor) -> None:
        """Take a piece for the process that has its expert."""
        for count in self._counts["experts"]:
            if self._num_experts is None or self._num_experts % count:
                number = "unknown" if self._num_experts is None else self._num_experts
                self.uncut_experts.setdefault(count, f"{count} processes cannot share: their number is {number}")
                continue
            index, first = divmod(place.index, self._num_experts // count * place.num_pieces)
            try:
                self._shards_of(held.dtype).add_piece(place.whole, Shard(index, count), held, first * held.nbytes)
            except ValueError as error:
                self.uncut_experts.setdefault(count, f"cannot be hashed apart: {error}")

    def _shards_of(self, dtype: torch.dtype) -> ShardChecksums:
        return self._shards.setdefault(dtype, ShardChecksums(self._num_kv_heads))

    def _precisions(self, own: torch.dtype) -> list[torch.dtype]:
        """Those in which a server may have a tensor that comes in this one."""
        return [own] if self.keeps(own) else self._dtypes

    def _in_precisions(self, tensors: list[Tensor]) -> Iterator[tuple[Checksums, list[Tensor]]]:
        """Yield these in each of them, with what collects its checksums."""
        for dtype in self._precisions(tensors[0].dtype):
            if dtype not in self._sums:
                self._sums[dtype] = Checksums(flush_bytes=None)
            yield self._sums[dtype], [t if t.dtype == dtype else t.detach().to(dtype) for t in tensors]


def expected(
    right: Digests,
    loaded: Mapping[str, str],
    processes: EngineSharding = UNSHARDED,
    rank: int = 0,
    *,
    without_experts: bool = False,
) -> dict[str, str]:
    """What a process must have: of several right checksums its own, if that is one; no head that is its embedding."""
    as_embedding = right.get(processes.shard(kind_of(EMBEDDING), rank), {})
    is_tied = HEAD not in loaded and as_embedding.get(HEAD) == as_embedding.get(EMBEDDING)
    found: dict[str, str] = {}
    for name in right[WHOLE]:
        if (is_tied and name == HEAD) or (without_experts and kind_of(name) == "experts"):
            continue
        digests = right[processes.shard(kind_of(name), rank)][name]
        found[name] = loaded[name] if loaded.get(name) in digests else digests[0]
    return found


@functools.cache
def _place(name: str) -> tuple[str, str]:
    """The server's name of the tensor that has this one, and which of its parts this is: "" if it is not joined."""
    pieces = name.split(".")
    which = next((i for i, piece in enumerate(pieces) if piece in OWNER), None)
    if which is None:
        return name, ""
    return ".".join([*pieces[:which], OWNER[pieces[which]], *pieces[which + 1 :]]), pieces[which]


def _filled_up(tensor: Tensor) -> list[Tensor]:
    missing = -tensor.shape[0] % VOCAB_MULTIPLE
    return [tensor, tensor.detach().new_zeros(missing, *tensor.shape[1:])] if missing else [tensor]
