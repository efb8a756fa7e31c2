"""Tunes the scales of INT4 weights, so that a whole model's distribution of tokens comes closer to the unquantized one.

Axes: T tokens of a sequence, E hidden size, R rows of a weight, G its groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

BATCH_TOKENS = 512  # of an optimizer step
LEARNING_RATE, WARMUP = 0.002, 5  # of the scales' ratios to those before; steps


class _Scaled(nn.Module):
    """A weight whose groups are multiplied by ratios."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.ratio_RG = nn.Parameter(torch.ones(shape))

    def forward(self, weight: Tensor) -> Tensor:
        return (weight.unflatten(1, (self.ratio_RG.shape[1], -1)) * self.ratio_RG[:, :, None]).flatten(1)


def tuned_scales(
    model: PreTrainedModel, scales: Mapping[nn.Linear, Tensor], ids: Tensor, targets: Sequence[Tensor]
) -> dict[nn.Linear, Tensor]:
    """Return better scales [R, G] of linear layers, whose weights in `model` are the quantized ones, in one pass.

    ids: sequences [sequences, T]. targets: for each, the last hidden states [T, E] of the unquantized model. The
    divergence (KL) of the tokens' distributions falls; the integers of the weights stay. Changes the modules.
    """
    model.requires_grad_(False)
    ratios: dict[nn.Linear, nn.Parameter] = {}
    for module, scale in scales.items():
        scaled = _Scaled(tuple(scale.shape))
        parametrize.register_parametrization(module, "weight", scaled)
        ratios[module] = scaled.ratio_RG
    optimizer = torch.optim.Adam(ratios.values(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    batches = order.split(max(1, BATCH_TOKENS // ids.shape[1]))
    with torch.enable_grad():
        for step, batch in enumerate(batches):
            for group in optimizer.param_groups:
                cosine = (1 + math.cos(math.pi * step / len(batches))) / 2
                group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP) * cosine
            for sequence in batch.tolist():
                (_divergence(model, ids[sequence], targets[sequence]) / len(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {module: (scale.float() * ratios[module].detach()).to(scale.dtype) for module, scale in scales.items()}


def _divergence(model: PreTrainedModel, ids: Tensor, target_TE: Tensor) -> Tensor:
    """Return the mean KL divergence of the tokens of a sequence; matmuls are computed in bfloat16."""
    head = cast("Any", model).get_output_embeddings()
    with torch.autocast("cpu", torch.bfloat16):
        hidden_TE = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        logits, target = head(hidden_TE).float(), head(target_TE).float()
    return functional.kl_div(logits.log_softmax(-1), target.log_softmax(-1), reduction="batchmean", log_target=True)
