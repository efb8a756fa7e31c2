"""The checksums that an SGLang server should report for the weights it received, in the layout of its model.

SGLang joins q, k and v of an attention, and gate and up of an MLP, into one tensor each, and pads the vocabulary with
zeros to a multiple of 64 rows.

With several processes, each has a shard of most tensors (SGLang's `layers/linear.py` and
`layers/vocab_parallel_embedding.py`): q, k, v, gate and up are each split by rows before they are joined; k and v,
which may have fewer heads than there are processes, are replicated as needed. The padded vocabulary is split by rows,
o and down by columns. A bias is split with rows; everything else is replicated.

SGLang receives experts one by one and stores those of a layer in two tensors: `w13_weight` [experts, 2 * width, hidden]
has the gate's rows and then the up projection's rows of each expert, `w2_weight` [experts, hidden, width] the down
projections. This is also their order in memory, unless the server's MoE backend rearranges them
(`layout_facts.PLAIN_EXPERTS`). All pieces of a tensor have the same size, so the position of a piece follows from its
number.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor

from furlong.core.weights import UNSHARDED, EngineSharding, ShardKind, TensorShard, dtype_of
from furlong.transfer.device_checksum import WORD_BYTES, Checksums

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
VOCAB_MULTIPLE = 64
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


class LayoutChecksums:
    """Computes them on the device of the tensors, for servers of several precisions and shardings at once.

    Parts of joined tensors wait until all have been added; those of experts do not. Added tensors are read by `flush`,
    once enough are waiting, and by `digests`, and must not change before that.

    Args:
        dtypes: Precisions that a server may have the weights in. A tensor sent in a 16-bit one of them stays in it;
            others are hashed in each.
        shardings: Shardings of the servers. Every tensor is hashed whole, too.
        num_kv_heads: Number of key/value heads, if known.
        num_experts: Number of experts per layer, if known.

    Attributes:
        unknown_tp_sizes: By number of processes: the tensor whose shards have no known checksum, and why.
        unknown_ep_sizes: By number of processes: why checksums of experts are unknown when split over them.
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
        self._sums = Checksums()  # each under "precision, shard index, shard count, name"
        self.unknown_tp_sizes: dict[int, str] = {}
        self.unknown_ep_sizes: dict[int, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one of the trainer's tensors."""
        if (place := place_of(name)) is not None:
            stack = self._stacks.setdefault(place.whole, Stack(place.whole))
            if not stack.take(place.index, name, tensor.shape, self._precisions(tensor.dtype)):
                self._hash(name, [tensor])
                return
            for [piece] in self._in_precisions([tensor]):
                self._sums.add_piece(_key(place.whole, piece, WHOLE), piece, place.index * piece.nbytes)
                self._add_to_shards(place, piece)
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

    def flush(self) -> None:
        """Launch the reads of all tensors added so far."""
        self._sums.flush()

    def digests(self) -> dict[TensorShard, dict[str, list[str]]]:
        """Return the `Digests` of what was added, except for what `wrong`, `unhashed` and `unknown_*` report."""
        digests: dict[TensorShard, dict[str, list[str]]] = {WHOLE: {}}
        for key, digest in self._sums.digests().items():
            dtype, index, count, name = key.split(" ", 3)
            if name not in self._stacks or dtype_of(dtype) in self._stacks[name].dtypes:
                digests.setdefault(TensorShard(int(index), int(count)), {}).setdefault(name, []).append(digest)
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
        for parts in self._in_precisions(tensors):
            self._sums.add(_key(name, parts[0], WHOLE), _padded(parts[0]) if name in (EMBEDDING, HEAD) else parts)
            for count in counts:
                try:
                    shards = split(name, parts, count, self._num_kv_heads)
                except ValueError as error:
                    self.unknown_tp_sizes.setdefault(count, str(error))
                    continue
                for index, shard in enumerate(shards):
                    self._sums.add(_key(name, parts[0], TensorShard(index, count)), shard)

    def _add_to_shards(self, place: Place, piece: Tensor) -> None:
        for count in self._counts["experts"]:
            if self._num_experts is None or self._num_experts % count:
                number = "unknown" if self._num_experts is None else self._num_experts
                self.unknown_ep_sizes.setdefault(
                    count, f"cannot be split over {count} processes: their number is {number}"
                )
                continue
            index, first = divmod(place.index, self._num_experts // count * place.num_pieces)
            try:
                self._sums.add_piece(_key(place.whole, piece, TensorShard(index, count)), piece, first * piece.nbytes)
            except ValueError as error:
                self.unknown_ep_sizes.setdefault(count, f"cannot be hashed by shard: {error}")

    def _precisions(self, dtype: torch.dtype) -> list[torch.dtype]:
        """Return the precisions in which a server may store a tensor sent in `dtype`."""
        is_kept = not dtype.is_floating_point or (dtype in self._dtypes and dtype.itemsize == 2)
        return [dtype] if is_kept else self._dtypes

    def _in_precisions(self, tensors: list[Tensor]) -> Iterator[list[Tensor]]:
        for dtype in self._precisions(tensors[0].dtype):
            yield [t if t.dtype == dtype else t.detach().to(dtype) for t in tensors]


def _key(name: str, tensor: Tensor, shard: TensorShard) -> str:
    return f"{tensor.dtype} {shard.index} {shard.count} {name}"


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


def split(name: str, parts: Sequence[Tensor], count: int, num_kv_heads: int | None) -> list[list[Tensor]]:
    """Split one of SGLang's tensors, given as the parts it is joined from, into shards, each a list of parts.

    Raises ValueError if the shards would not be equal, or are not known.
    """
    cuts = cuts_of(name, [part.shape for part in parts], count, num_kv_heads)
    if is_cut_by_columns(name):
        [whole] = parts
        return [[shard] for shard in whole.detach().unflatten(1, (count, -1)).transpose(0, 1).contiguous().unbind()]
    cut = [part.detach().split(rows) for part, (_, rows) in zip(parts, cuts, strict=True)]
    shards: list[list[Tensor]] = []
    for index in range(count):
        shard: list[Tensor] = []
        for part, (num_cuts, rows) in zip(cut, cuts, strict=True):
            place = index * num_cuts // count
            shard += part[place : place + 1]
            if missing := rows - sum(map(len, part[place : place + 1])):  # only for the vocabulary
                shard.append(part[0].new_zeros(missing, *part[0].shape[1:]))
        shards.append(shard)
    return shards


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
            raise ValueError(f"shards of {name}, whose number of key/value heads is unknown")
        cuts = [count, *[min(count, num_kv_heads)] * 2]
        if count % cuts[-1] or num_kv_heads % cuts[-1]:
            raise ValueError(f"shards of {name}, whose {num_kv_heads} key/value heads {count} processes cannot share")
    for size, number in zip(sizes, cuts, strict=True):
        if size % number:
            raise ValueError(
                f"shards of {name}, which {count} processes cannot share: {size} is not a multiple of {number}"
            )
    return [(number, size // number) for size, number in zip(sizes, cuts, strict=True)]


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
