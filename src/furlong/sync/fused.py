"""The checksums that an SGLang server has of the weights it was sent, in the layout of its own model.

SGLang joins q, k and v of an attention, and gate and up of an MLP, into one tensor each, and fills the vocabulary up to
a multiple of 64 with zeros. Experts come one by one and are two tensors of a layer there (`sync.experts`). A server of
one process has them whole.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from furlong.core.device_checksum import Checksums
from furlong.sync.experts import Stack, place_of

DENSE = frozenset({"llama", "mistral", "qwen2", "qwen3"})  # `model_type`s of which the layout is known
WITH_EXPERTS = frozenset({"qwen3_moe"})  # those that have experts
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
OWNER = {part: whole for whole, parts in JOINED.items() for part in parts}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
VOCAB_MULTIPLE = 64


class FusedChecksums:
    """Computes them on the device of the tensors. Parts wait until their tensor is complete, those of experts do not.

    What is added is read when the caller flushes `sums`, or by `digests`, and stays as it is until then.

    Args:
        dtypes: Precisions that a server may have the weights in. A tensor that comes in one of 16 bits stays in it,
            others are hashed in each.
    """

    def __init__(self, dtypes: frozenset[torch.dtype]) -> None:
        self._dtypes = sorted(dtypes, key=str)
        self._parts: dict[str, dict[str, Tensor]] = {}
        self._stacks: dict[str, Stack] = {}
        self._sums: dict[torch.dtype, Checksums] = {}

    @property
    def sums(self) -> list[Checksums]:
        """What collects them."""
        return list(self._sums.values())

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
            else:
                self._hash(name, [tensor])
            return
        joined, piece = _place(name)
        if not piece:
            self._hash(name, _filled_up(tensor) if name in (EMBEDDING, HEAD) else [tensor])
            return
        pieces = JOINED[OWNER[piece]]
        parts = self._parts.setdefault(joined, {})
        parts[piece] = tensor
        if len(parts) == len(pieces):
            self._hash(joined, [parts[each] for each in pieces])
            del self._parts[joined]

    def digests(self) -> dict[str, list[str]]:
        """Checksums that are right for each of the server's tensors, by its name; but see `wrong` and `unhashed`."""
        found: dict[str, list[str]] = {}
        for dtype, sums in self._sums.items():
            for name, digest in sums.digests().items():
                if name not in self._stacks or dtype in self._stacks[name].dtypes:
                    found.setdefault(name, []).append(digest)
        return found

    def wrong(self) -> dict[str, str]:
        """What is wrong with the pieces of which a tensor of the server's is made, by its name, once all came."""
        return {name: why for name, stack in self._stacks.items() if (why := stack.wrong())}

    def unhashed(self) -> dict[str, str]:
        """Why the checksum of a tensor of the server's cannot be known, by its name."""
        return {name: stack.unhashed for name, stack in self._stacks.items() if stack.unhashed}

    def _hash(self, name: str, tensors: list[Tensor]) -> None:
        for sums, held in self._in_precisions(tensors):
            sums.add(name, held)

    def _precisions(self, own: torch.dtype) -> list[torch.dtype]:
        """Those in which a server may have a tensor that comes in this one."""
        return [own] if self.keeps(own) else self._dtypes

    def _in_precisions(self, tensors: list[Tensor]) -> Iterator[tuple[Checksums, list[Tensor]]]:
        """Yield these in each of them, with what collects its checksums."""
        for dtype in self._precisions(tensors[0].dtype):
            if dtype not in self._sums:
                self._sums[dtype] = Checksums(flush_bytes=None)
            yield self._sums[dtype], [t if t.dtype == dtype else t.detach().to(dtype) for t in tensors]


def expected(right: dict[str, list[str]], loaded: dict[str, str]) -> dict[str, str]:
    """What the server must have: of several right checksums its own, if that is one; no head that is its embedding."""
    is_tied = HEAD not in loaded and right.get(HEAD) == right.get(EMBEDDING)
    return {
        name: loaded[name] if loaded.get(name) in digests else digests[0]
        for name, digests in right.items()
        if not (is_tied and name == HEAD)
    }


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
