"""Output layer on a GPU: logits stay in the model's dtype, with one compiled kernel after the matmul in each direction.

Computes the same as `logprob` with less memory traffic: between matmuls a chunk's logits are read once or twice in the
model's dtype, and float32 values exist only in registers. The backward pass recomputes the logits (those of a single
chunk are saved), converts them to their gradient in one pass, and accumulates the weight gradient in float32 inside
the matmul.

Axes: R response tokens, C rows of a chunk, V vocabulary, D width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor
from torch.autograd.function import once_differentiable

# Smallest number of logits for which compiling pays off.
MIN_LOGITS = 2**25


@dataclass(frozen=True)
class Head:
    """Settings of the log-prob computation. Logits are computed for `chunk_size` rows at a time; -1 is all rows."""

    temperature: float
    softcap: float | None
    chunk_size: int
    entropy: bool
    entropy_grad: bool

    @property
    def is_plain(self) -> bool:
        """Whether the gradient w.r.t. logits is a row scale times (p - onehot)."""
        return self.softcap is None and not self.entropy_grad

    def chunks(self, num_rows: int) -> Iterator[slice]:
        """Yield row ranges of at most `chunk_size` rows."""
        size = self.chunk_size if self.chunk_size > 0 else max(num_rows, 1)
        for start in range(0, num_rows, size):
            yield slice(start, min(start + size, num_rows))


def accumulator(tensor: Tensor) -> torch.dtype:
    """Return the dtype of sums over the vocabulary."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def is_large(hidden_RD: Tensor, weight_VD: Tensor) -> bool:
    """Return whether there are enough logits to compile, on a device with compiled kernels."""
    return hidden_RD.is_cuda and hidden_RD.shape[0] * weight_VD.shape[0] >= MIN_LOGITS


def chunk_stats(logits_CV: Tensor, targets_C: Tensor, head: Head) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, log denominators and entropies of a chunk, each [C]; entropies [0] if not requested."""
    scaled_CV, _ = scaled(logits_CV, head)
    lse_C = torch.logsumexp(scaled_CV, dim=-1)
    log_probs_C = scaled_CV.gather(1, targets_C[:, None]).squeeze(1) - lse_C
    if not head.entropy:
        return log_probs_C, lse_C, lse_C.new_empty(0)
    logp_CV = scaled_CV - lse_C[:, None]
    return log_probs_C, lse_C, -(logp_CV.exp() * logp_CV).sum(-1)


def chunk_grad(
    logits_CV: Tensor,
    targets_C: Tensor,
    lse_C: Tensor,
    entropy_C: Tensor | None,
    grad_lp_C: Tensor | None,
    grad_entropy_C: Tensor | None,
    head: Head,
) -> Tensor:
    """Return the gradient w.r.t. the logits [C, V], in their dtype (formulas: `logprob`)."""
    scaled_CV, tanh_CV = scaled(logits_CV, head)
    logp_CV = scaled_CV - lse_C[:, None]
    prob_CV = logp_CV.exp()
    grad_CV = torch.zeros_like(prob_CV)
    if grad_lp_C is not None:
        is_target_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == targets_C[:, None]
        grad_CV = (is_target_CV.to(prob_CV.dtype) - prob_CV) * grad_lp_C[:, None]
    if grad_entropy_C is not None and entropy_C is not None:
        grad_CV = grad_CV - prob_CV * (logp_CV + entropy_C[:, None]) * grad_entropy_C[:, None]
    if tanh_CV is not None:
        grad_CV = grad_CV * (1.0 - tanh_CV * tanh_CV)
    return (grad_CV / head.temperature).to(logits_CV.dtype)


def scaled(logits_CV: Tensor, head: Head) -> tuple[Tensor, Tensor | None]:
    """Return softcap(logits) / temperature, and the tanh inside."""
    logits_CV = logits_CV.to(accumulator(logits_CV))
    tanh_CV = None
    if head.softcap is not None:
        tanh_CV = torch.tanh(logits_CV / head.softcap)
        logits_CV = head.softcap * tanh_CV
    return logits_CV / head.temperature, tanh_CV


_number = itertools.count()


@cache
def _compiled(function: Callable[..., Any], head: Head) -> Callable[..., Any]:
    def bound(logits_CV: Tensor, *columns_C: Tensor | None) -> Any:
        return function(logits_CV, *columns_C, head)

    # One code object per head: the compiler limits the number of variants per code object.
    bound.__code__ = bound.__code__.replace(co_name=f"{function.__name__}_{next(_number)}")
    run = torch.compile(bound)

    def for_any_rows(logits_CV: Tensor, *columns_C: Tensor | None) -> Any:
        for tensor in (logits_CV, *columns_C):
            if tensor is not None:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)  # pyright: ignore[reportPrivateUsage]  documented for users
        return run(logits_CV, *columns_C)

    return for_any_rows


def kernel(function: Callable[..., Any], head: Head, device: torch.device) -> Callable[..., Any]:
    """Return `function` of a chunk's logits and columns, compiled if `device` is a GPU."""
    if device.type == "cuda":
        return _compiled(function, replace(head, chunk_size=-1))
    return lambda *tensors: function(*tensors, head)


def kernel_if_large(
    function: Callable[..., Any], head: Head, hidden_RD: Tensor, weight_VD: Tensor
) -> Callable[..., Any]:
    """Return `kernel` of the device, not compiled if there are too few logits for it."""
    return kernel(function, head, hidden_RD.device if is_large(hidden_RD, weight_VD) else torch.device("cpu"))


def stats(
    hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_R: Tensor, head: Head
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return log-probs, log denominators and entropies [R], and the logits [R, V] if they came in one chunk."""
    run = kernel(chunk_stats, head, hidden_RD.device)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    logits_CV: Tensor | None = None
    for rows in head.chunks(hidden_RD.shape[0]):
        logits_CV = F.linear(hidden_RD[rows], weight_VD, bias_V)
        parts.append(run(logits_CV, targets_R[rows]))
    log_probs_R, lse_R, entropy_R = (torch.cat(column) for column in zip(*parts, strict=True))
    return log_probs_R, lse_R, entropy_R, logits_CV if len(parts) == 1 else None


class CompiledHead(torch.autograd.Function):
    """Log-probs and entropies; needs at least one row."""

    @staticmethod
    def forward(
        ctx: Any, hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_R: Tensor, head: Head
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs [R] and entropies, [R] or [0]."""
        log_probs_R, lse_R, entropy_R, logits_RV = stats(hidden_RD, weight_VD, bias_V, targets_R, head)
        ctx.head = head
        ctx.save_for_backward(hidden_RD, weight_VD, bias_V, targets_R, lse_R, entropy_R, logits_RV)
        if not head.entropy_grad:
            ctx.mark_non_differentiable(entropy_R)
        ctx.set_materialize_grads(False)
        return log_probs_R, entropy_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  once_differentiable is untyped
        """Return the gradients of hidden states, weight and bias."""
        hidden_RD, weight_VD, bias_V, targets_R, lse_R, entropy_R, logits_RV = ctx.saved_tensors
        head: Head = ctx.head
        run = kernel(chunk_grad, head, hidden_RD.device)
        columns = (targets_R, lse_R, entropy_R.detach() if head.entropy_grad else None, *grads)

        def logits_grad(rows: slice) -> Tensor:
            logits_CV = logits_RV if logits_RV is not None else F.linear(hidden_RD[rows], weight_VD, bias_V)
            return run(logits_CV, *(None if column is None else column[rows] for column in columns))

        inputs = hidden_RD, weight_VD, bias_V
        return (*head_gradients(head, inputs, ctx.needs_input_grad[:3], logits_grad), None, None)


def head_gradients(
    head: Head,
    inputs: tuple[Tensor, Tensor, Tensor | None],
    needed: Sequence[bool],
    logits_grad: Callable[[slice], Tensor],
) -> list[Tensor | None]:
    """Return the gradients of hidden states, weight and bias that are `needed`, from those of each chunk's logits."""
    hidden_RD, weight_VD, bias_V = inputs
    total = accumulator(weight_VD)
    grad_hidden = torch.empty_like(hidden_RD) if needed[0] else None
    grad_weight = torch.zeros_like(weight_VD, dtype=total) if needed[1] else None
    grad_bias = torch.zeros_like(bias_V, dtype=total) if bias_V is not None and needed[2] else None
    for rows in head.chunks(len(hidden_RD)):
        grad_CV = logits_grad(rows)
        if grad_hidden is not None:
            torch.mm(grad_CV, weight_VD, out=grad_hidden[rows])
        if grad_weight is not None:
            accumulate_matmul(grad_weight, grad_CV.t(), hidden_RD[rows])
        if grad_bias is not None:
            grad_bias += grad_CV.sum(0, dtype=total)
    return [
        grad_hidden,
        None if grad_weight is None else grad_weight.to(weight_VD.dtype),
        None if grad_bias is None or bias_V is None else grad_bias.to(bias_V.dtype),
    ]


def accumulate_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`, which may have higher precision; on a GPU the matmul accumulates in it."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right
