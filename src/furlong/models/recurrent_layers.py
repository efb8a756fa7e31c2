"""Gated delta nets (Qwen3-Next, Qwen3.5, OLMo Hybrid; arXiv:2412.06464) over packed sequences.

Such a layer has a causal convolution and a recurrent state, which would leak from a sequence into the next one of the
row. Both get the offsets of the sequences here, and each sequence starts from an empty state (`delta_rule`).
Projections and the gated norm run on the tokens of the micro-batch. A prompt that samples share is projected once, and
its convolution and states are computed for each sample.

Legend: U tokens that are run, P positions of the sequences, D width of the model, H heads of values, E width of keys,
F width of values, C channels of the convolution: queries, keys and values.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn

from furlong.errors import TrainerError
from furlong.models.delta_rule import causal_conv, gated_delta_rule
from furlong.models.model_facts import delta_nets
from furlong.models.packed_attention import pad_rows, unpad_rows
from furlong.models.packed_layout import PackedLayout


def pack_delta_nets(model: nn.Module) -> None:
    """Let the gated delta nets of `model` run packed sequences, as its `packed` argument describes."""
    for module in delta_nets(model):
        module.__class__ = _packed(type(module))


@cache
def _packed(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a gated delta net whose forward receives a packed row."""

    @torch.compiler.disable  # shapes differ in every micro-batch
    def forward(self: Any, hidden_states: Tensor, *_: Any, packed: PackedLayout | None = None, **__: Any) -> Tensor:
        if packed is None or hidden_states.shape[0] != 1:
            raise TrainerError(
                f"{kind.__name__} received no layout of the packed sequences, so their states would mix; this is a bug "
                "in furlong, or the installed transformers no longer passes arguments to this layer: report it"
            )
        return _mix(self, hidden_states[0], packed)[None]

    return type(kind.__name__, (kind,), {"forward": forward})


def _mix(net: Any, x_UD: Tensor, packed: PackedLayout) -> Tensor:
    """Run a gated delta net on the tokens of a micro-batch: [U, D]."""
    mixed_UC, gate_UG, strength_UH, step_UH = _projected(net, x_UD)
    is_spread = packed.run_U is not None
    rows = torch.cat([mixed_UC, strength_UH, step_UH], dim=-1)
    rows = pad_rows(rows, packed) if is_spread else rows
    sizes = [each.shape[-1] for each in (mixed_UC, strength_UH, step_UH)]
    mixed, strength, step = rows.split(sizes, dim=-1)
    sequences = packed.sequences
    mixed = causal_conv(mixed, net.conv1d.weight[:, 0], sequences)
    query, key, value = mixed.split([net.key_dim, net.key_dim, net.value_dim], dim=-1)
    query, key = (
        each.unflatten(-1, (-1, net.head_k_dim)).repeat_interleave(net.num_v_heads // net.num_k_heads, dim=1)
        for each in (query, key)
    )
    beta = strength.sigmoid() * (2.0 if getattr(net, "allow_neg_eigval", False) else 1.0)
    decay = -net.A_log.float().exp() * F.softplus(step.float() + net.dt_bias)
    value = value.unflatten(-1, (-1, net.head_v_dim))
    out = gated_delta_rule(query, key, value, decay, beta, sequences).flatten(1)
    out = unpad_rows(out, packed) if is_spread else out
    norm, project = (net.norm, net.out_proj) if hasattr(net, "norm") else (net.o_norm, net.o_proj)
    normed = norm(out.reshape(-1, net.head_v_dim), gate_UG.reshape(-1, net.head_v_dim))
    return project(normed.view(len(x_UD), -1))


def _projected(net: Any, x_UD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys and values [U, C], gates of the output [U, H * F], and strengths and steps [U, H]."""
    if hasattr(net, "in_proj_qkvz"):  # Qwen3-Next orders the rows by key head
        parts = net.fix_query_key_value_ordering(net.in_proj_qkvz(x_UD)[None], net.in_proj_ba(x_UD)[None])
        query, key, value, gate, strength, step = (each[0].flatten(1) for each in parts)
        return torch.cat([query, key, value], dim=-1), gate, strength, step
    if hasattr(net, "in_proj_qkv"):
        return net.in_proj_qkv(x_UD), net.in_proj_z(x_UD), net.in_proj_b(x_UD), net.in_proj_a(x_UD)
    mixed_UC = torch.cat([net.q_proj(x_UD), net.k_proj(x_UD), net.v_proj(x_UD)], dim=-1)
    return mixed_UC, net.g_proj(x_UD), net.b_proj(x_UD), net.a_proj(x_UD)
