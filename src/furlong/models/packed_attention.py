"""Attention over packed sequences, for any transformers model that dispatches through its attention interface.

Registered as `IMPLEMENTATION`, which models select by `attn_implementation`. Their forward is called with batch size 1,
all tokens of the micro-batch in one row, position ids that restart in every sequence, and `packed=PackedLayout`.
transformers builds no mask for a custom implementation, so none is ever materialized.

    device, dtype                     kernel
    CUDA, bf16/fp16                   cuDNN or FlashAttention, unpadded (varlen_attention)
    float32/64; long bf16 on CPU      torch SDPA per bucket, causal without a mask
    short bf16 on CPU, softcap,       explicit softmax per bucket: the CPU flash kernel is 4-7x slower below
    sinks without FlashAttention      about 256 tokens in bf16, and SDPA has neither soft cap nor sinks

Legend: S sequences of a bucket, L padded length, H query heads, K key/value heads, E head width, F that of values,
U tokens that are run, P padded positions; Q, L tokens of a sequence as queries and as keys, where these differ.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor
from transformers import AttentionInterface

from furlong.errors import TrainerError
from furlong.models import varlen_attention
from furlong.models.model_facts import head_width
from furlong.models.packed_layout import PackedLayout

logger = logging.getLogger(__name__)

IMPLEMENTATION = "furlong_packed"
# Below this length the explicit softmax is faster than the CPU flash kernel in half precision.
SHORT_LEN = 256


@dataclass(frozen=True)
class ScoreOptions:
    """Scale of the scores, window in tokens, and soft cap."""

    scale: float
    window: int | None
    softcap: float | None


class _PadRows(torch.autograd.Function):
    """Copy rows [U, ...] to their padded positions [P, ...]; the gradient of a row is the sum over its copies.

    The sum has a fixed order, so steps are reproducible; `index_add_` on a GPU is not.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows_U: Tensor,
        spread_P: Tensor,
        collect_U: Tensor,
        shared_D: Tensor | None,
        copies_C: Tensor | None,
        first_copy_D: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(collect_U, shared_D, copies_C, first_copy_D)
        return rows_U.index_select(0, spread_P)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        collect_U, shared_D, copies_C, first_copy_D = ctx.saved_tensors
        grad_U = grads[0].index_select(0, collect_U)
        if shared_D is not None:
            grad_U.index_copy_(0, shared_D, F.embedding_bag(copies_C, grads[0], first_copy_D, mode="sum"))
        return grad_U, None, None, None, None, None


class _UnpadRows(torch.autograd.Function):
    """Select the output row of each token [U, ...] from the padded positions [P, ...]; others get no gradient."""

    @staticmethod
    def forward(ctx: Any, rows_P: Tensor, collect_U: Tensor) -> Tensor:
        ctx.num_rows = rows_P.shape[0]
        ctx.save_for_backward(collect_U)
        return rows_P.index_select(0, collect_U)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (collect_U,) = ctx.saved_tensors
        grad_P = grads[0].new_zeros((ctx.num_rows, *grads[0].shape[1:]))
        return grad_P.index_copy_(0, collect_U, grads[0]), None


def pad_rows(rows_U: Tensor, packed: PackedLayout) -> Tensor:
    """Copy rows [U, D] to the positions of their sequences [P, D]."""
    if packed.spread_P is None:
        return rows_U
    moves = (packed.spread_P, packed.collect_U, packed.shared_D, packed.copies_C, packed.first_copy_D)
    return cast("Tensor", _PadRows.apply(rows_U, *moves))


def unpad_rows(rows_P: Tensor, packed: PackedLayout) -> Tensor:
    """Return the row of each token [U, D] from the positions of the sequences [P, D]."""
    return rows_P if packed.collect_U is None else cast("Tensor", _UnpadRows.apply(rows_P, packed.collect_U))


def packed_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedLayout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence of `packed`; query [1, H, U, E], key and value [1, K, U, E] -> [1, U, H, E].

    The signature is that of transformers' attention interface. s_aux: [H] attention sinks (gpt-oss). Raises
    TrainerError for a mask, dropout, non-causal attention or a position bias.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    refused = {
        "no packed layout (the model's decoder does not forward keyword arguments)": packed is None,
        "an attention mask": attention_mask is not None,
        "dropout": dropout != 0.0,
        "non-causal attention": not causal,
        "a position bias": kwargs.get("position_bias") is not None,
    }
    if packed is None or any(refused.values()):
        raise TrainerError(
            f"{type(module).__name__} calls packed attention with {', '.join(k for k, v in refused.items() if v)}; "
            "this model family cannot be trained on packed sequences, use another model"
        )
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    window = sliding_window if sliding_window is not None and sliding_window < packed.max_seqlen else None
    options = ScoreOptions(scaling if scaling is not None else query.shape[-1] ** -0.5, window, softcap)
    attend: Any = _attend if packed.context is None else _attend_context_parallel
    return attend(rows, packed, options, s_aux).unsqueeze(0), None


# Not compiled: graphs of different ranks may order collectives differently, which deadlocks.
@torch.compiler.disable
def _attend_context_parallel(
    rows_L: list[Tensor], packed: PackedLayout, options: ScoreOptions, sinks_H: Tensor | None
) -> Tensor:
    """`_attend` with context parallelism, for this rank's tokens: [L, H, E]."""
    context = packed.context
    assert context is not None
    rows_U = [context.heads(row, packed.num_tokens) for row in rows_L]
    return context.tokens(_attend(rows_U, packed, options, None if sinks_H is None else context.local_heads(sinks_H)))


def _attend(rows_U: list[Tensor], packed: PackedLayout, options: ScoreOptions, sinks_H: Tensor | None) -> Tensor:
    """Attend for queries [U, H, E], keys and values [U, K, E] -> [U, H, E]."""
    q_PHE, k_PKE, v_PKE = (pad_rows(row.flatten(1), packed).unflatten(1, row.shape[1:]) for row in rows_U)
    if not packed.buckets:
        out_PHE = varlen_attention.varlen_attention(
            q_PHE,
            k_PKE,
            v_PKE,
            packed.cu_seqlens_S1,
            packed.cu_host_S1,
            packed.max_seqlen,
            scale=options.scale,
            window=options.window,
            sinks_H=sinks_H,
        )
    else:
        parts: list[Tensor] = []
        start = 0
        for count, width in packed.buckets:
            q, k, v = (
                row[start : start + count * width].unflatten(0, (count, width)).transpose(1, 2)
                for row in (q_PHE, k_PKE, v_PKE)
            )
            if sinks_H is not None or options.softcap is not None or prefers_explicit_attention(q):
                allowed = allowed_keys(width, width, options.window, q.device)
                out = explicit_attention(q, k, v, allowed, options.scale, softcap=options.softcap, sinks_H=sinks_H)
            else:
                out = _sdpa(q, k, v, options.scale, options.window)
            parts.append(out.transpose(1, 2).flatten(0, 1))
            start += count * width
        out_PHE = parts[0] if len(parts) == 1 else torch.cat(parts)
    return unpad_rows(out_PHE.flatten(1), packed).unflatten(1, out_PHE.shape[1:])


def needs_padding(device: torch.device, dtype: torch.dtype, config: Any) -> bool:
    """Whether sequences are padded into buckets; otherwise a variable-length kernel runs them unpadded."""
    return bool(_why_padded(device, dtype, _traits(config)))


@cache
def _why_padded(device: torch.device, dtype: torch.dtype, traits: tuple[str, ...]) -> str:
    """Return why sequences are padded, "" if they are not. Logged once on CUDA, where padding costs time and memory."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    reason = ", ".join(traits) or varlen_attention.missing(device)
    if not reason and dtype not in (torch.bfloat16, torch.float16):
        reason = f"FlashAttention has no {dtype}"
    if reason:
        logger.warning("attention pads sequences into buckets of similar length: %s", reason)
    else:
        kernels = "cuDNN for long sequences, else FlashAttention"
        logger.info("attention: unpadded, %s", kernels if varlen_attention.has_cudnn(device) else "FlashAttention")
    return reason


def _traits(config: Any) -> tuple[str, ...]:
    softcap = getattr(config, "attn_logit_softcapping", None) is not None
    is_mla = getattr(config, "kv_lora_rank", None) is not None
    width = head_width(config)
    return tuple(
        name
        for name, is_so in {
            "attention scores have a soft cap": softcap,
            "values have another width than keys": is_mla,
            f"heads are {width} wide": width % 8 or width > 256,
        }.items()
        if is_so
    )


def prefers_explicit_attention(q_SHQE: Tensor) -> bool:
    """Whether explicit attention is faster than SDPA: on a CPU, in half precision, for short sequences."""
    is_half = q_SHQE.dtype not in (torch.float32, torch.float64)
    return q_SHQE.device.type == "cpu" and is_half and q_SHQE.shape[2] <= SHORT_LEN


def allowed_keys(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return the [Q, L] mask, True where a query attends to a key; the last query is aligned with the last key."""
    last = num_keys - num_queries  # key index of the first query
    causal = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril_(last)
    return causal if window is None else causal.triu_(last - window + 1)


def _sdpa(q_SHLE: Tensor, k_SKLE: Tensor, v_SKLE: Tensor, scale: float, window: int | None) -> Tensor:
    width = q_SHLE.shape[2]
    if window is not None and window < width:
        mask = allowed_keys(width, width, window, q_SHLE.device)
        return F.scaled_dot_product_attention(q_SHLE, k_SKLE, v_SKLE, attn_mask=mask, scale=scale, enable_gqa=True)
    return F.scaled_dot_product_attention(q_SHLE, k_SKLE, v_SKLE, is_causal=True, scale=scale, enable_gqa=True)


def explicit_attention(
    q_SHQE: Tensor,
    k_SKLE: Tensor,
    v_SKLF: Tensor,
    allowed_QL: Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Compute attention with an explicit softmax: [S, H, Q, F].

    `sinks_H`: logits of a key whose value is zero.
    """
    S, H, Q, E = q_SHQE.shape
    K, L = k_SKLE.shape[1:3]
    q = q_SHQE.reshape(S, K, H // K * Q, E)
    scores = torch.matmul(q * scale, k_SKLE.transpose(-1, -2)).view(S, H, Q, L)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed_QL, float("-inf"))
    if sinks_H is not None:
        sink = sinks_H.to(scores.dtype).view(1, H, 1, 1).expand(S, H, Q, 1)
        probs = torch.cat([scores, sink], dim=-1).softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        probs = probs[..., :-1].to(v_SKLF.dtype)
    else:
        probs = scores.softmax(-1)
    return torch.matmul(probs.reshape(S, K, H // K * Q, L), v_SKLF).view(S, H, Q, v_SKLF.shape[-1])


AttentionInterface.register(IMPLEMENTATION, packed_attention_forward)
