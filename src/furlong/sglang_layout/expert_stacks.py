"""SGLang's layout of experts: it receives them one by one and stores those of a layer in two tensors.

`w13_weight` [experts, 2 * width, hidden] contains the gate's rows and then the up projection's rows of each expert,
`w2_weight` [experts, hidden, width] the down projections. This is also their order in memory, unless the server's MoE
backend rearranges them (`layout_facts.PLAIN_EXPERTS`). All pieces of a tensor have the same size, so the position of a
piece follows from its number.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from furlong.core.device_checksum import WORD_BYTES

NAME = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
WHOLES = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}


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
        return (
            f"{len(missing)} of its {num_pieces} pieces are missing, the first is "
            f"{layer}.{expert}.{pieces[piece]}.weight"
        )
