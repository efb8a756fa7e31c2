"""Which share of a model's tensors each process of an engine has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["whole", "mlp", "attention", "head", "experts"]
"""What is shared alike: nothing; MLPs; attentions, and embeddings with them; the head; the experts of a layer."""


@dataclass(frozen=True)
class Share:
    """The part `index` of `count` that a tensor falls into."""

    index: int
    count: int


@dataclass(frozen=True)
class Processes:
    """The processes of an engine that have one copy of a model together; of an MLP each has a share of its own.

    With data-parallel attention `attention` of them share an attention, and the next ones have the same parts again.
    `head` is the same of the output layer. Each of `experts` processes has as many whole experts of a layer as the
    others; where these are fewer than `num`, several cut the same experts.

    >>> Processes(num=4, attention=2, head=4).share("attention", 3)
    Share(index=1, count=2)
    """

    num: int = 1
    attention: int = 1
    head: int = 1
    experts: int = 1

    def count(self, kind: Kind) -> int:
        """Shares that tensors of this kind fall into."""
        return {"whole": 1, "mlp": self.num, "attention": self.attention, "head": self.head, "experts": self.experts}[
            kind
        ]

    def share(self, kind: Kind, rank: int) -> Share:
        """The one that a process has."""
        count = self.count(kind)
        return Share(rank % count, count)


ONE = Processes()  # process that has everything
