"""The embedding's row of the pad token, which transformers does not train by what goes in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def keep_row(embedding: Any, token: int) -> None:
    """Give a token's row no gradient where it is looked up, as `padding_idx` of torch.nn.Embedding does.

    With tied embeddings the row keeps the gradient of the head. `embedding` is Megatron-core's VocabParallelEmbedding.
    """

    def without_gradient(_: Any, args: tuple[Tensor], looked_up: Tensor) -> Tensor | None:
        if not looked_up.requires_grad:
            return None
        is_token = args[0] == token  # [samples, tokens], as the result is
        if embedding.reduce_scatter_embeddings:  # but for [tokens of this rank, samples] where ranks split tokens
            group = embedding.tp_group
            is_token = is_token.t().chunk(group.size())[group.rank()]
        return torch.where(is_token[..., None], looked_up.detach(), looked_up)

    embedding.register_forward_hook(without_gradient)
