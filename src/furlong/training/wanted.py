"""What a forward pass is to find of each response token."""

from __future__ import annotations

from dataclasses import dataclass

from furlong.interfaces import LossFn


@dataclass(frozen=True)
class Wanted:
    """Beside the log-prob: its entropy, one that gradients flow through, and the logits of all words."""

    entropy: bool = False
    entropy_grad: bool = False
    logits: bool = False

    @staticmethod
    def by(loss: LossFn) -> Wanted:
        """What a loss reads."""
        return Wanted(loss.needs_entropy, loss.entropy_grad, loss.needs_logits)
