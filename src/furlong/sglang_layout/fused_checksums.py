"""The checksums that an SGLang server should report for the weights it received, in the layout of its model.

SGLang joins q, k and v of an attention, and gate and up of an MLP, into one tensor each, and pads the vocabulary with
zeros to a multiple of 64. With several processes, each has a shard of most tensors (`shard_checksums`).

It receives experts one by one and stores those of a layer in two tensors: `w13_weight` [experts, 2 * width, hidden]
contains the gate's rows and then the up projection's rows of each expert, `w2_weight` [experts, hidden, width] the down
projections. This is also their order in memory, unless the server's MoE backend rearranges them
(`layout_facts.PLAIN_EXPERTS`). All pieces of a tensor have the same size, so the position of a piece follows from its
number.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor

from furlong.core.device_checksum import WORD_BYTES, Checksums
from furlong.core.weights import UNSHARDED, EngineSharding, ShardKind, TensorShard
from furlong.sglang_layout.shard_checksums import EMBEDDING, HEAD, VOCAB_MULTIPLE, ShardChecksums, kind_of

NAME = re.compile(r"(.+\.(?:mlp|block_sparse_moe)\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
WHOLES = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
OF_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # its names of the projections


@dataclass(frozen=True)
class Place:
    """The position of one of the trainer's tensors in the server's tensor `whole`, where an expert has `num_pieces`."""

    whole: str
    index: int
    num_pieces: int


@functools.cache
def place_of(name: str) -> Place | None:
    """Return the place of an expert's tensor by its Hugging Face name; None for other tensors."""
    if (match := NAME.fullmatch(name)) is None:
        return None
    layer, expert, projection = match.groups()
    projection = OF_MIXTRAL.get(projection, projection)
    [(whole, pieces)] = [each for each in WHOLES.items() if projection in each[1]]
    return Place(f"{layer}.{whole}", int(expert) * len(pieces) + pieces.index(projection), len(pieces))


@dataclass
class Stack:
    """The pieces of the server's tensor `whole` that were sent so far.

    dtypes: precisions in which all of them are hashed. unhashed: why the checksum of the whole tensor cannot be derived
    from them, "" if it can.
    """

    whole: str
    dtypes: frozenset[torch.dtype] = frozenset()
    unhashed: str = ""
    _wrong: str = ""
    _shape: torch.Size | None = None
    _received: set[int] = field(default_factory=set[int])

    def take(self, index: int, name: str, shape: torch.Size, dtypes: Collection[torch.dtype]) -> bool:
        """Register a piece that will be hashed in `dtypes`; False if it does not fit."""
        if self._shape is None:
            self._shape, self.dtypes = shape, frozenset(dtypes)
        shared, begin = self.dtypes.intersection(dtypes), index * shape.numel()
        if index in self._received:
            self._wrong = self._wrong or f"{name} was sent twice"
        elif shape != self._shape:
            self._wrong = self._wrong or f"{name} has shape {tuple(shape)}, others have {tuple(self._shape)}"
        elif not shared:
            self.unhashed = self.unhashed or f"{name} was sent in another precision than others"
        elif any(begin * dtype.itemsize % WORD_BYTES for dtype in shared):
            self.unhashed = self.unhashed or (
                f"{name} of shape {tuple(shape)} would not begin at a multiple of {WORD_BYTES} bytes, the unit of the "
                "hash"
            )
        else:
            self.dtypes = shared
            self._received.add(index)
            return True
        return False

    def wrong(self) -> str:
        """Return what is wrong after all were sent: a piece sent twice, missing, or of another shape; "" if nothing."""
        if self._wrong or self.unhashed:
            return self._wrong
        layer, _, kind = self.whole.rpartition(".")
        pieces = WHOLES[kind]
        num_pieces = (max(self._received) // len(pieces) + 1) * len(pieces)
        missing = [index for index in range(num_pieces) if index not in self._received]
        if not missing:
            return ""
        expert, piece = divmod(missing[0], len(pieces))
        names = {ours: theirs for theirs, ours in OF_MIXTRAL.items()} if ".block_sparse_moe." in layer else {}
        return (
            f"{len(missing)} of its {num_pieces} pieces are missing, the first is "
            f"{layer}.{expert}.{names.get(pieces[piece], pieces[piece])}.weight"
        )


DENSE = frozenset({"glm4", "llama", "mimo", "mistral", "qwen2", "qwen3"})  # dense `model_type`s whose layout is known
APART = frozenset({"qwen3"})  # those whose layout is also known with data-parallel attention
WITH_EXPERTS = frozenset({"mixtral", "qwen3_moe"})  # `model_type`s with experts whose layout is known
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
OWNER = {part: whole for whole, parts in JOINED.items() for part in parts}
WHOLE = TensorShard(0, 1)
Digests = Mapping[TensorShard, Mapping[str, list[str]]]
"""By shard and tensor name: the checksums that would be correct."""


class FusedChecksums:
    """Computes them on the device of the tensors.

    Parts of joined tensors wait until all have been added; those of experts do not. Added tensors are read when the
    caller flushes `sums` or calls `digests`, and must not change before that.

    Args:
        dtypes: Precisions that a server may have the weights in. A tensor sent in a 16-bit one of them stays in it;
            others are hashed in each.
        shardings: Shardings of the servers. Every tensor is hashed whole, too.
        num_kv_heads: Number of key/value heads, if known.
        num_experts: Number of experts per layer, if known.
    """

    def __init__(
        self,
        dtypes: frozenset[torch.dtype],
        shardings: Collection[EngineSharding] = (UNSHARDED,),
        *,
        num_kv_heads: int | None = None,
        num_experts: int | None = None,
    ) -> None:
        self._dtypes, self._num_kv_heads, self._num_experts = sorted(dtypes, key=str), num_kv_heads, num_experts
        self._counts: dict[ShardKind, set[int]] = {
            kind: {each.count(kind) for each in shardings} - {1} for kind in get_args(ShardKind)
        }
        self._parts: dict[str, dict[str, Tensor]] = {}
        self._stacks: dict[str, Stack] = {}
        self._sums: dict[torch.dtype, Checksums] = {}
        self._shards: dict[torch.dtype, ShardChecksums] = {}
        self.uncut: dict[int, str] = {}
        """By number of processes: the tensor whose shards have no known checksum, and why."""
        self.uncut_experts: dict[int, str] = {}
        """By number of processes: why checksums of experts are unknown when split over them."""

    @property
    def sums(self) -> list[Checksums | ShardChecksums]:
        """The collectors of checksums."""
        return [*self._sums.values(), *self._shards.values()]

    def keeps(self, dtype: torch.dtype) -> bool:
        """Whether tensors of this precision are hashed in place, without a copy in another one."""
        return not dtype.is_floating_point or (dtype in self._dtypes and dtype.itemsize == 2)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one of the trainer's tensors."""
        if (place := place_of(name)) is not None:
            stack = self._stacks.setdefault(place.whole, Stack(place.whole))
            if stack.take(place.index, name, tensor.shape, self._precisions(tensor.dtype)):
                for sums, [piece] in self._in_precisions([tensor]):
                    sums.add_piece(place.whole, piece, place.index * piece.nbytes)
                    self._shard_piece(place, piece)
            else:
                self._hash(name, [tensor])
            return
        joined, part = _joined_name(name)
        if not part:
            is_fused = ".gate_up_proj." in name  # GLM-4 has the server's form, split by halves
            self._hash(name, list(tensor.chunk(2)) if is_fused else [tensor])
            return
        all_parts = JOINED[OWNER[part]]
        parts = self._parts.setdefault(joined, {})
        parts[part] = tensor
        if len(parts) == len(all_parts):
            self._hash(joined, [parts[each] for each in all_parts])
            del self._parts[joined]

    def digests(self) -> dict[TensorShard, dict[str, list[str]]]:
        """Return the `Digests` of what was added, except for what `wrong`, `unhashed` and `uncut*` report."""
        digests: dict[TensorShard, dict[str, list[str]]] = {WHOLE: {}}
        for dtype, sums in self._sums.items():
            for name, digest in sums.digests().items():
                if name not in self._stacks or dtype in self._stacks[name].dtypes:
                    digests[WHOLE].setdefault(name, []).append(digest)
        for shards in self._shards.values():
            for shard, name, digest in shards.digests():
                digests.setdefault(shard, {}).setdefault(name, []).append(digest)
        return digests

    def wrong(self) -> dict[str, str]:
        """Return what is wrong with the pieces of the server's tensors, by tensor name, after all were sent."""
        return {name: why for name, stack in self._stacks.items() if (why := stack.wrong())}

    def unhashed(self) -> dict[str, str]:
        """Return why checksums of the server's tensors cannot be known, by tensor name."""
        return {name: stack.unhashed for name, stack in self._stacks.items() if stack.unhashed}

    def _hash(self, name: str, tensors: list[Tensor]) -> None:
        """Add one of the server's tensors, given as the parts it is joined from."""
        counts = self._counts[kind_of(name)]
        if name == HEAD:
            counts = counts | self._counts["attention"]  # like the embedding, to which it may be tied
        for sums, parts in self._in_precisions(tensors):
            sums.add(name, _padded(parts[0]) if name in (EMBEDDING, HEAD) else parts)
            for count in counts:
                try:
                    self._shards_of(parts[0].dtype).add(name, parts, count)
                except ValueError as error:
                    self.uncut.setdefault(count, str(error))

    def _shard_piece(self, place: Place, piece: Tensor) -> None:
        """Add a piece for the process that has its expert."""
        for count in self._counts["experts"]:
            if self._num_experts is None or self._num_experts % count:
                number = "unknown" if self._num_experts is None else self._num_experts
                self.uncut_experts.setdefault(
                    count, f"cannot be split over {count} processes: their number is {number}"
                )
                continue
            index, first = divmod(place.index, self._num_experts // count * place.num_pieces)
            try:
                self._shards_of(piece.dtype).add_piece(
                    place.whole, TensorShard(index, count), piece, first * piece.nbytes
                )
            except ValueError as error:
                self.uncut_experts.setdefault(count, f"cannot be hashed by shard: {error}")

    def _shards_of(self, dtype: torch.dtype) -> ShardChecksums:
        return self._shards.setdefault(dtype, ShardChecksums(self._num_kv_heads))

    def _precisions(self, dtype: torch.dtype) -> list[torch.dtype]:
        """Return the precisions in which a server may store a tensor sent in `dtype`."""
        return [dtype] if self.keeps(dtype) else self._dtypes

    def _in_precisions(self, tensors: list[Tensor]) -> Iterator[tuple[Checksums, list[Tensor]]]:
        """Yield the collector of each possible precision, and the tensors in it."""
        for dtype in self._precisions(tensors[0].dtype):
            if dtype not in self._sums:
                self._sums[dtype] = Checksums(flush_bytes=None)
            yield self._sums[dtype], [t if t.dtype == dtype else t.detach().to(dtype) for t in tensors]


def expected(
    right: Digests,
    loaded: Mapping[str, str],
    sharding: EngineSharding = UNSHARDED,
    rank: int = 0,
    *,
    without_experts: bool = False,
) -> dict[str, str]:
    """Return the checksums that a process should report, given the correct ones and those it reported.

    Where several are correct, this is the reported one if it is among them. An output layer tied to the embedding is
    left out.
    """
    by_name = accepted(right, sharding, rank, has_head=HEAD in loaded, without_experts=without_experts)
    return {name: loaded[name] if loaded.get(name) in digests else digests[0] for name, digests in by_name.items()}


def accepted(
    right: Digests, sharding: EngineSharding, rank: int, *, has_head: bool, without_experts: bool = False
) -> dict[str, list[str]]:
    """Return the checksums that are correct for each tensor of a process; `has_head`: it has an output layer."""
    as_embedding = right.get(sharding.shard(kind_of(EMBEDDING), rank), {})
    is_tied = not has_head and as_embedding.get(HEAD) == as_embedding.get(EMBEDDING)
    return {
        name: right[sharding.shard(kind_of(name), rank)][name]
        for name in right[WHOLE]
        if not (is_tied and name == HEAD) and not (without_experts and kind_of(name) == "experts")
    }


@functools.cache
def _joined_name(name: str) -> tuple[str, str]:
    """Return the server's tensor that contains this one, and which of its parts this is ("" if it is not joined)."""
    pieces = name.split(".")
    which = next((i for i, piece in enumerate(pieces) if piece in OWNER), None)
    if which is None:
        return name, ""
    return ".".join([*pieces[:which], OWNER[pieces[which]], *pieces[which + 1 :]]), pieces[which]


def _padded(tensor: Tensor) -> list[Tensor]:
    missing = -tensor.shape[0] % VOCAB_MULTIPLE
    return [tensor, tensor.detach().new_zeros(missing, *tensor.shape[1:])] if missing else [tensor]
