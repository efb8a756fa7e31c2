"""Rotary embeddings as transformers computes them: frequencies, and what cosines and sines are multiplied with."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def frequencies(hf: Any) -> tuple[Tensor, float]:
    """Return inverse frequencies, float32, and the factor of cosines and sines (YaRN, arXiv:2309.00071 sec. 3.4)."""
    rope: dict[str, Any] = hf.rope_parameters
    if rope["rope_type"] != "default":
        with torch.device("cpu"):  # also where a model without memory is built
            inverse, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](hf, torch.device("cpu"))
        return inverse.float(), float(factor)
    width = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    rotated = int(width * rope.get("partial_rotary_factor", 1.0))
    return 1.0 / rope["rope_theta"] ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated), 1.0


def latent_scale(hf: Any) -> float:
    """What scores are multiplied with in attention from compressed vectors, with YaRN's correction."""
    rope: dict[str, Any] = hf.rope_parameters
    scale = (hf.qk_nope_head_dim + hf.qk_rope_head_dim) ** -0.5
    all_dims = rope.get("mscale_all_dim", 0)
    if rope["rope_type"] == "default" or not all_dims or rope["factor"] <= 1:
        return scale
    return scale * (0.1 * all_dims * math.log(rope["factor"]) + 1.0) ** 2
