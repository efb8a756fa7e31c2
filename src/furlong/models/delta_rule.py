"""The gated delta rule (arXiv:2412.06464) and its causal convolution over packed sequences.

Every sequence starts from an empty state: neither the recurrent state nor the inputs of the convolution reach another
one. A head's state S [E, F] maps keys to values. Token t multiplies it by the decay exp(g_t), moves the value that it
has for the key k_t toward v_t by the fraction beta_t, and reads it with the query q_t:

    S_t = exp(g_t) S_(t-1) + beta_t k_t (v_t - exp(g_t) S_(t-1)^T k_t)^T        o_t = S_t^T q_t / sqrt(E)

with keys and queries of length one. `chunked_delta_rule` computes the tokens of a chunk together: a triangular system
gives what each of them writes, and only the state is passed from chunk to chunk, for all sequences at once. In 16 bits
on a GPU, flash-linear-attention's kernel does the same, if it is installed.

Legend: T packed tokens, S sequences, H heads of values, E width of keys, F width of values, C channels, W kernel width;
M chunks, L tokens of a chunk.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from packaging.version import Version
from torch import Tensor

logger = logging.getLogger(__name__)

CHUNK = 64  # tokens
EPS = 1e-6  # under the root of a key's length
Kernel = Literal["torch", "flash-linear-attention"]


@dataclass(frozen=True)
class PackedSequences:
    """The sequences of a packed micro-batch, with the chunks in which the delta rule computes them.

    cu_S1: offsets on the device. tokens_ML: the token at each place of each chunk, T for padding; chunks are ordered by
    their number within the sequence, then by sequence, longest first. places_T: the place of each token in M * L.
    counts: sequences that have a chunk of each number. since_T: number of tokens before each one in its sequence.
    """

    cu_S1: Tensor
    tokens_ML: Tensor
    places_T: Tensor
    counts: tuple[int, ...]
    since_T: Tensor

    @staticmethod
    def of(cu_host_S1: Tensor, device: torch.device, *, chunk: int = CHUNK) -> PackedSequences:
        """Return the sequences with these offsets, which are on the host."""
        cu = cu_host_S1.numpy().astype(np.int64)
        lengths = np.diff(cu)
        order = np.argsort(-lengths, kind="stable")
        chunks = -(-lengths[order] // chunk)
        counts = [int((chunks > number).sum()) for number in range(int(chunks.max(initial=0)))]
        first = np.concatenate([cu[:-1][order[:count]] + number * chunk for number, count in enumerate(counts)])
        ends = np.concatenate([cu[1:][order[:count]] for count in counts])
        tokens = first[:, None] + np.arange(chunk)
        tokens = np.where(tokens < ends[:, None], tokens, cu[-1])
        places = np.empty(cu[-1] + 1, np.int64)
        places[tokens.ravel()] = np.arange(tokens.size)
        since = np.arange(cu[-1]) - np.repeat(cu[:-1], lengths)

        def put(array: Any) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

        return PackedSequences(
            cu_host_S1.to(device, non_blocking=True), put(tokens), put(places[:-1]), tuple(counts), put(since)
        )


def causal_conv(x_TC: Tensor, weight_CW: Tensor, sequences: PackedSequences) -> Tensor:
    """Convolve each channel with its kernel over the last W tokens of the same sequence, then apply SiLU: [T, C]."""
    width = weight_CW.shape[1]
    out = x_TC * weight_CW[:, -1]
    for back in range(1, min(width, len(x_TC))):
        earlier = F.pad(x_TC[:-back], (0, 0, back, 0))
        is_same_T1 = (sequences.since_T >= back)[:, None]
        out = out + torch.where(is_same_T1, earlier, 0.0) * weight_CW[:, -1 - back]
    return F.silu(out)


def gated_delta_rule(
    q_THE: Tensor, k_THE: Tensor, v_THF: Tensor, g_TH: Tensor, beta_TH: Tensor, sequences: PackedSequences
) -> Tensor:
    """Return the outputs [T, H, F] with the kernel of the device; decays `g_TH` are logarithms, in float32."""
    if delta_kernel(v_THF.device.type, v_THF.dtype) == "torch":
        return chunked_delta_rule(q_THE, k_THE, v_THF, g_TH, beta_TH, sequences)
    rule: Any = _flash_linear_attention()
    out, _ = rule(
        *(each[None].contiguous() for each in (q_THE, k_THE, v_THF)),
        g=g_TH[None].contiguous(),
        beta=beta_TH[None].contiguous(),
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=sequences.cu_S1.long(),
    )
    return out[0]


@cache
def delta_kernel(device: str, dtype: torch.dtype) -> Kernel:
    """Return the kernel that computes the rule on "cpu" or "cuda" in this precision, and log it with the reason."""
    if device != "cuda":
        logger.info("gated delta rule: PyTorch's operations, as on every device but CUDA")
        return "torch"
    if _flash_linear_attention() is None:
        logger.warning(
            "gated delta rule: PyTorch's operations, several times slower than the kernels of flash-linear-attention, "
            "which is not installed; pip install flash-linear-attention"
        )
        return "torch"
    if (reason := _unusable_kernels(dtype)) is not None:
        logger.info("gated delta rule: PyTorch's operations, as %s", reason)
        return "torch"
    version = importlib.metadata.version("flash-linear-attention")
    logger.info("gated delta rule: kernels of flash-linear-attention %s", version)
    return "flash-linear-attention"


def _unusable_kernels(dtype: torch.dtype) -> str | None:
    """Return why flash-linear-attention's kernels are not used here; None if they are."""
    if dtype.itemsize > 2:
        return f"flash-linear-attention multiplies {dtype} in TF32"
    version = Version(importlib.metadata.version("triton"))
    if torch.cuda.get_device_capability()[0] == 9 and Version("3.4.0") <= version < Version("3.7.1"):
        return (
            f"flash-linear-attention's gradients are wrong on Hopper GPUs with Triton {version} (its issue 640); "
            "install Triton 3.7.1 or later"
        )
    return None


@cache
def _flash_linear_attention() -> Any:
    try:
        return importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "fla":
            raise
        return None


def chunked_delta_rule(
    q_THE: Tensor, k_THE: Tensor, v_THF: Tensor, g_TH: Tensor, beta_TH: Tensor, sequences: PackedSequences
) -> Tensor:
    """`gated_delta_rule` in PyTorch's operations, in float32 at least."""
    dtype = torch.promote_types(v_THF.dtype, torch.float32)

    def chunked(x: Tensor) -> Tensor:
        """Return [M, H, L, ...], zero at padding."""
        padded = torch.cat([x.to(dtype), x.new_zeros(1, *x.shape[1:], dtype=dtype)])
        return padded[sequences.tokens_ML].transpose(1, 2)

    query = chunked(_unit(q_THE.to(dtype)) * q_THE.shape[-1] ** -0.5)
    key, value = chunked(_unit(k_THE.to(dtype))), chunked(v_THF)
    beta, decay = chunked(beta_TH)[..., None], chunked(g_TH).cumsum(-1)[..., None]
    later = torch.ones(decay.shape[-2], decay.shape[-2], dtype=torch.bool, device=decay.device).triu(1)
    between = (decay - decay.transpose(-1, -2)).masked_fill(later, float("-inf")).exp()  # from column to row
    system = beta * (key @ key.transpose(-1, -2)) * between  # its diagonal is ignored below
    wanted = torch.cat([beta * value, beta * key * decay.exp()], dim=-1)
    written, erased = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True).split(
        [value.shape[-1], key.shape[-1]], dim=-1
    )
    within = (query @ key.transpose(-1, -2)) * between
    query = query * decay.exp()
    total = decay[..., -1:, :]
    key = (key * (total - decay).exp()).transpose(-1, -2)
    total = total.exp()

    outputs: list[Tensor] = []
    state = value.new_zeros(*key.shape[:-1], value.shape[-1])[: sequences.counts[0]]
    start = 0
    for count in sequences.counts:
        now, start = slice(start, start + count), start + count
        state = state[:count]
        new = written[now] - erased[now] @ state
        outputs.append(query[now] @ state + within[now] @ new)
        state = state * total[now] + key[now] @ new
    out = torch.cat(outputs).transpose(1, 2).flatten(0, 1)
    return out[sequences.places_T].to(v_THF.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
