"""Linear layers for decoding: weights in checkpoint layout, multiplied in oneDNN's blocked layout on x86 CPUs.

A plain matmul converts the weight to the blocked layout in every call, which costs more than the matmul itself for a
few dozen rows. So a blocked copy is kept next to the weight and renewed after each write, at twice the memory.

A row of the result does not depend on the number of rows if there are at least two, except in bfloat16 on CPUs with
AMX, where the summation order of oneDNN does depend on it.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Larger weights have no blocked copy.
MAX_BLOCKED_BYTES = 4 * 2**30

_onednn: Any = torch.ops.mkldnn
_plain, _added = _onednn._linear_pointwise.default, _onednn._linear_pointwise.binary


class DecodeLinear:
    """x @ weight.T + bias, with `weight` [out, in] and `bias` [out] in checkpoint layout.

    `order` [out] permutes the columns of the result; None: no permutation.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, order: Tensor | None = None) -> None:
        self.weight, self.bias, self._order = weight, bias, order
        self._blocked: Tensor | None = None
        self._blocked_bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply at least two rows [T, in]."""
        if self._blocked is None:
            out = functional.linear(x, self.weight, self.bias)
            return out if self._order is None else out.index_select(-1, self._order)
        return _plain(x, self._blocked, self._blocked_bias, "none", [], "")

    def added_to(self, rest: Tensor, x: Tensor) -> Tensor:
        """Return `rest` [T, out] plus the result, rounded once. Not supported with an `order`."""
        if self._blocked is None:
            out = torch.addmm(rest, x, self.weight.t())
            return out if self.bias is None else out.add_(self.bias)
        return _added(x, rest, self._blocked, self._blocked_bias, "add")

    def block(self) -> None:
        """Renew the blocked copy of the weight."""
        weight, self._blocked_bias = self.weight, self.bias
        if self._order is not None:
            weight = weight.index_select(0, self._order)
            self._blocked_bias = None if self.bias is None else self.bias.index_select(0, self._order)
        self._blocked = _onednn._reorder_linear_weight(weight, None)


def supports_blocks(weights: Iterable[Tensor]) -> bool:
    """Whether blocked copies of these weights, all of one dtype and device, pay off."""
    weights = list(weights)
    first = weights[0]
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    if first.device.type != "cpu" or not is_x86 or not torch.backends.mkldnn.is_available():
        return False
    has_kernels = first.dtype == torch.float32 or (first.dtype == torch.bfloat16 and has_bfloat16_matmul())
    return has_kernels and sum(weight.nbytes for weight in weights) <= MAX_BLOCKED_BYTES


@cache
def has_bfloat16_matmul() -> bool:
    """Whether oneDNN supports bfloat16 matmuls on this CPU."""
    return torch.backends.mkldnn.is_available() and bool(_onednn._is_mkldnn_bf16_supported())
