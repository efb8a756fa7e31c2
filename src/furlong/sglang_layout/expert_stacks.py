"""Where SGLang has the experts of a layer that come to it one by one: all of them in two tensors.

`w13_weight` [experts, 2 * width, hidden] has of each expert the gate's rows and then the up projection's, `w2_weight`
[experts, hidden, width] the down projection. Both lie in memory as they are written here, unless the server's MoE
backend wants them otherwise, which `inference.sglang.server` reads from what the server says of itself. So all pieces of
such a tensor are of one size, and where one begins follows from its number.
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
    """Which piece of the server's tensor `whole` one of the trainer's is; each expert has `num_pieces` there."""

    whole: str
    index: int
    num_pieces: int


@functools.cache
def place_of(name: str) -> Place | None:
    """The place of an expert's tensor, by its Hugging Face name; None for other tensors."""
    if (found := NAME.fullmatch(name)) is None:
        return None
    layer, expert, projection = found.groups()
    [(whole, pieces)] = [each for each in WHOLES.items() if projection in each[1]]
    return Place(f"{layer}.{whole}", int(expert) * len(pieces) + pieces.index(projection), len(pieces))


@dataclass
class Stack:
    """Which pieces of the server's tensor `whole` came.

    `dtypes` are the precisions in which all of them are hashed; `unhashed` says why the whole's checksum cannot be
    known from them, "" if it can.
    """

    whole: str
    dtypes: frozenset[torch.dtype] = frozenset()
    unhashed: str = ""
    _wrong: str = ""
    _shape: torch.Size | None = None
    _came: set[int] = field(default_factory=set[int])

    def take(self, index: int, name: str, shape: torch.Size, dtypes: Collection[torch.dtype]) -> bool:
        """Note that a piece of this name and shape came, to be hashed in `dtypes`; False if it has no place."""
        if self._shape is None:
            self._shape, self.dtypes = shape, frozenset(dtypes)
        shared, begin = self.dtypes.intersection(dtypes), index * shape.numel()
        if index in self._came:
            self._wrong = self._wrong or f"{name} came twice"
        elif shape != self._shape:
            self._wrong = self._wrong or f"{name} has shape {tuple(shape)}, others have {tuple(self._shape)}"
        elif not shared:
            self.unhashed = self.unhashed or f"{name} came in another precision than others"
        elif any(begin * dtype.itemsize % WORD_BYTES for dtype in shared):
            self.unhashed = self.unhashed or (
                f"{name} of shape {tuple(shape)} would begin within one of the words of {WORD_BYTES} bytes that are "
                "hashed"
            )
        else:
            self.dtypes = shared
            self._came.add(index)
            return True
        return False

    def wrong(self) -> str:
        """What must not be, once all came: a piece twice, not at all, or of another shape; "" if there is nothing."""
        if self._wrong or self.unhashed:
            return self._wrong
        layer, _, kind = self.whole.rpartition(".")
        pieces = WHOLES[kind]
        num_pieces = (max(self._came) // len(pieces) + 1) * len(pieces)
        missing = [index for index in range(num_pieces) if index not in self._came]
        if not missing:
            return ""
        expert, piece = divmod(missing[0], len(pieces))
        return (
            f"{len(missing)} of its {num_pieces} pieces did not come, the first of them is "
            f"{layer}.{expert}.{pieces[piece]}.weight"
        )
