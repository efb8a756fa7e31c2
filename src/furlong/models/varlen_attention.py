"""Variable-length causal attention on CUDA with the kernels that PyTorch ships.

    mostly long sequences on Hopper and Blackwell   cuDNN, one sequence at a time: 1.5 times as fast as FlashAttention 2
    others; sliding windows; sinks;                 FlashAttention 2, all sequences at once
    torch.use_deterministic_algorithms(True)

Both operators are opaque to torch.compile, so a decoder layer around them compiles in one piece.

cuDNN needs a tenth of a second to plan a kernel for each length, so lengths are rounded up to a few values. A sequence
then extends into the rows of the next one. Causality hides those keys from its queries, outputs of the extra queries
are discarded, and in the backward pass a huge log denominator makes their probabilities zero.

Attention sinks (gpt-oss) are one more column of scores per head, with value zero. The kernel's outputs are rescaled to
the larger denominator, and its backward pass gets that denominator's logarithm and the rescaled outputs: gradients are
exact, and a sink's gradient is minus its probability times rowsum(dO * O), summed over rows.

Legend: T tokens, H query heads, K key/value heads (a divisor of H), E head width, S sequences, L rounded length of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

# Oldest compute capability of PyTorch's FlashAttention kernels.
MIN_CAPABILITY = (8, 0)
# Where cuDNN is faster: compute capabilities, mean length of a token's sequence, head widths.
CUDNN_MAJORS = (9, 10)
CUDNN_FROM_LEN = 2048
CUDNN_WIDTHS = (64, 128)
HUGE = 1e30
CUDNN_VERSION = 91000  # oldest tested version


@cache
def missing(device: torch.device) -> str:
    """Return why the kernels do not run on `device`, "" if they do."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if not torch.backends.cuda.is_flash_attention_available():
        return f"this build of torch {torch.__version__} has no FlashAttention"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is SM {capability[0]}.{capability[1]}, the kernels need SM 8.0"
    return ""


@cache
def has_cudnn(device: torch.device) -> bool:
    """Whether cuDNN's kernels are faster on `device`."""
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return (version or 0) >= CUDNN_VERSION and torch.cuda.get_device_capability(device)[0] in CUDNN_MAJORS


def varlen_attention(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    cu_seqlens_S1: Tensor,
    cu_host_S1: Tensor,
    max_seqlen: int,
    *,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attend causally within each sequence; [T, H, E] in bf16 or fp16.

    A query attends to itself and the `window - 1` tokens before it, or to all if `window` is None. `cu_host_S1` is
    `cu_seqlens_S1` on the CPU.
    """
    out_THE, _ = _forward(q_THE, k_TKE, v_TKE, cu_seqlens_S1, cu_host_S1, max_seqlen, scale, window or 0, sinks_H)
    return out_THE


@torch.library.custom_op("furlong::varlen_attention", mutates_args=())
def _forward(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    cu_seqlens_S1: Tensor,
    cu_host_S1: Tensor,
    max_seqlen: int,
    scale: float,
    window: int,
    sinks_H: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return outputs and log denominators [H, T]; `window` 0 is none."""
    if sinks_H is None and not window and _uses_cudnn(q_THE, cu_host_S1):
        return _by_sequence(q_THE, k_TKE, v_TKE, cu_host_S1, scale)
    cu = cu_seqlens_S1
    out_THE, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
        q_THE, k_TKE, v_TKE, cu, cu, max_seqlen, max_seqlen, 0.0, not window, False, **_options(scale, window)
    )
    if sinks_H is not None:
        total_HT = torch.logaddexp(lse_HT, sinks_H.float()[:, None])
        out_THE = (out_THE * (lse_HT - total_HT).exp_().t()[:, :, None]).to(q_THE.dtype)
        lse_HT = total_HT
    return out_THE, lse_HT


@_forward.register_fake
def _(q_THE: Tensor, *_args: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = q_THE.shape
    return q_THE.new_empty(q_THE.shape), q_THE.new_empty((heads, tokens), dtype=torch.float32)


@torch.library.custom_op("furlong::varlen_attention_backward", mutates_args=())
def _backward(
    grad_THE: Tensor,
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    out_THE: Tensor,
    lse_HT: Tensor,
    cu_seqlens_S1: Tensor,
    cu_host_S1: Tensor,
    max_seqlen: int,
    scale: float,
    window: int,
    has_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = (grad_THE.contiguous(), q_THE, k_TKE, v_TKE, out_THE)
    if not has_sinks and not window and _uses_cudnn(q_THE, cu_host_S1):
        return _by_sequence_backward(rows, lse_HT, cu_host_S1, scale)
    cu = cu_seqlens_S1
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q_THE.device), torch.empty(0, device=q_THE.device)
    return torch.ops.aten._flash_attention_backward(
        *rows, lse_HT, cu, cu, max_seqlen, max_seqlen, 0.0, not window, *no_dropout, **_options(scale, window)
    )


@_backward.register_fake
def _(_grad: Tensor, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, *_args: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (tensor.new_empty(tensor.shape) for tensor in (q_THE, k_TKE, v_TKE))
    return q, k, v


def _options(scale: float, window: int) -> dict[str, Any]:
    left = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
    return {"scale": scale, **left}


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.max_seqlen, ctx.scale, ctx.window, sinks_H = inputs
    ctx.save_for_backward(*tensors, *output, sinks_H)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad_THE: Tensor | None, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q_THE, k_TKE, v_TKE, cu_seqlens_S1, cu_host_S1, out_THE, lse_HT, sinks_H = ctx.saved_tensors
    if grad_THE is None:
        return (None,) * 9
    options = (cu_seqlens_S1, cu_host_S1, ctx.max_seqlen, ctx.scale, ctx.window, sinks_H is not None)
    grads = _backward(grad_THE, q_THE, k_TKE, v_TKE, out_THE, lse_HT, *options)
    grad_sinks_H = None
    if sinks_H is not None:
        inner_HT = torch.linalg.vecdot(grad_THE.float(), out_THE.float()).t()
        grad_sinks_H = -((sinks_H.float()[:, None] - lse_HT).exp() * inner_HT).sum(1).to(sinks_H.dtype)
    return (*grads, None, None, None, None, None, grad_sinks_H)


_forward.register_autograd(_gradients, setup_context=_save)


def _uses_cudnn(q_THE: Tensor, cu_host_S1: Tensor) -> bool:
    if q_THE.shape[-1] not in CUDNN_WIDTHS or torch.are_deterministic_algorithms_enabled():
        return False
    lengths_S = cu_host_S1.diff().double()
    is_long = float(lengths_S.square().sum()) >= CUDNN_FROM_LEN * float(lengths_S.sum())
    return is_long and has_cudnn(q_THE.device)


def _by_sequence(
    q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, cu_host_S1: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    out_THE = torch.empty_like(q_THE)
    lse_HT = q_THE.new_empty((q_THE.shape[1], q_THE.shape[0]), dtype=torch.float32)
    for start, end, length in _sequences(cu_host_S1):
        rows = (pad_rows(tensor[start : start + length], length) for tensor in (q_THE, k_TKE, v_TKE))
        out_LHE, lse_HL = _dense(*rows, scale=scale)
        out_THE[start:end] = out_LHE[: end - start]
        lse_HT[:, start:end] = lse_HL[:, : end - start]
    return out_THE, lse_HT


def _by_sequence_backward(
    rows: tuple[Tensor, ...], lse_HT: Tensor, cu_host_S1: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    _, q_THE, k_TKE, v_TKE, _ = rows
    grads = (torch.empty_like(q_THE), torch.empty_like(k_TKE), torch.empty_like(v_TKE))
    for start, end, length in _sequences(cu_host_S1):
        lse_HL = lse_HT.new_full((len(lse_HT), length), HUGE)
        lse_HL[:, : end - start] = lse_HT[:, start:end]
        padded = (pad_rows(tensor[start : start + length], length) for tensor in rows)
        parts = _dense_backward(*padded, lse_HL=lse_HL, scale=scale)
        for grad, part in zip(grads, parts, strict=True):
            grad[start:end] = part[: end - start]
    return grads


def _sequences(cu_host_S1: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield start, end and rounded length of each non-empty sequence."""
    for start, end in pairwise(cu_host_S1.tolist()):
        if end > start:
            yield start, end, round_up_length(end - start)


def round_up_length(length: int) -> int:
    """Round up to one of sixteen lengths per power of two, all multiples of 64."""
    step = max(64, 1 << max(length.bit_length() - 5, 0))
    return -(-length // step) * step


def pad_rows(rows: Tensor, length: int) -> Tensor:
    """Pad with rows of zeros to `length` rows."""
    if len(rows) == length:
        return rows
    padded = rows.new_zeros((length, *rows.shape[1:]))
    padded[: len(rows)] = rows
    return padded


def _dense(q_LHE: Tensor, k_LKE: Tensor, v_LKE: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention of one sequence by cuDNN: outputs [L, H, E] and log denominators [H, L]."""
    q, k, v = (tensor[None].transpose(1, 2) for tensor in (q_LHE, k_LKE, v_LKE))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False, scale=scale
    )
    return out[0].transpose(0, 1), lse.reshape(q.shape[1], q.shape[2])


def _dense_backward(
    grad_LHE: Tensor, q_LHE: Tensor, k_LKE: Tensor, v_LKE: Tensor, out_LHE: Tensor, *, lse_HL: Tensor, scale: float
) -> tuple[Tensor, ...]:
    grad, q, k, v, out = (tensor[None].transpose(1, 2) for tensor in (grad_LHE, q_LHE, k_LKE, v_LKE, out_LHE))
    no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
    length = q.shape[2]
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse_HL[None, :, :, None], no_dropout, no_dropout, None, None, None, length, length,
        0.0, True, scale=scale,
    )  # fmt: skip
    return tuple(tensor[0].transpose(0, 1) for tensor in grads)
