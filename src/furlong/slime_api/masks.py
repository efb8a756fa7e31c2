"""Loss masks of conversations: `slime.utils.mask_utils`, with the tokens and masks of `--loss-type sft_loss`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from furlong.rollout.sft import conversation_tokens


def get_response_lengths(loss_masks: Sequence[Sequence[int]]) -> list[int]:
    """Return the number of tokens from the first 1 of each mask to its end; 0 for a mask without one."""
    return [len(mask) - list(mask).index(1) if 1 in mask else 0 for mask in loss_masks]


class MultiTurnLossMaskGenerator:
    """Tokenizes conversations, with a mask that is 1 on assistant turns.

    `tokenizer_type` is not used: positions come from rendering the conversation with the tokenizer's own template.
    """

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        self.tokenizer, self.tokenizer_type = tokenizer, tokenizer_type

    def get_loss_mask(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None
    ) -> tuple[list[int], list[int]]:
        """Return token ids and mask. Raises DataError if the template rewrites history or nothing is trained on."""
        return conversation_tokens(messages, self.tokenizer, tools=tools)

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """Return the lengths from the first trained token on."""
        return get_response_lengths(loss_masks)

    def get_text_from_loss_mask(self, token_ids: Sequence[int], loss_masks: Sequence[int]) -> list[str]:
        """Return the text of each run of trained tokens."""
        pairs = zip(token_ids, loss_masks, strict=True)
        runs = [(key, list(run)) for key, run in itertools.groupby(pairs, key=lambda pair: pair[1])]
        return [str(self.tokenizer.decode([token for token, _ in run])) for key, run in runs if key]
