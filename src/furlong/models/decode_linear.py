"""Linear maps of an engine's model: loaded in a checkpoint's layout, multiplied in oneDNN's own on x86 CPUs.

A plain product brings the weight into the library's blocked layout in every call, which costs more than the product
itself while a few dozen rows decode. So the blocks are kept beside the weight, and made again after it was written:
that takes the memory of the weights twice.

A row of such a product does not depend on the number of rows, as long as there are two.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Weights of this size are kept once only, multiplied as they are.
MAX_BLOCKED_BYTES = 4 * 2**30

_onednn: Any = torch.ops.mkldnn


class DecodeLinear:
    """x @ weight.T + bias, with `weight` [out, in] and `bias` [out] as names of a checkpoint view them."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self._blocked: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply rows [T, in]; at least two of them."""
        if self._blocked is None:
            return functional.linear(x, self.weight, self.bias)
        return _onednn._linear_pointwise(x, self._blocked, self.bias, "none", [], "")

    def added_to(self, rest: Tensor, x: Tensor) -> Tensor:
        """Return `rest` [T, out] plus the product, rounded once."""
        if self._blocked is None:
            out = torch.addmm(rest, x, self.weight.t())
            return out if self.bias is None else out.add_(self.bias)
        return _onednn._linear_pointwise.binary(x, rest, self._blocked, self.bias, "add")

    def block(self) -> None:
        """Bring the weight into the library's layout, as it is now."""
        self._blocked = _onednn._reorder_linear_weight(self.weight, None)


def takes_blocks(weights: Iterable[Tensor]) -> bool:
    """Whether products with these weights, all of one dtype and device, are worth blocks."""
    weights = list(weights)
    first = weights[0]
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    if first.device.type != "cpu" or not is_x86 or not torch.backends.mkldnn.is_available():
        return False
    has_kernels = first.dtype == torch.float32 or (first.dtype == torch.bfloat16 and has_bfloat16_products())
    return has_kernels and sum(weight.nbytes for weight in weights) <= MAX_BLOCKED_BYTES


@cache
def has_bfloat16_products() -> bool:
    """Whether oneDNN multiplies in bfloat16 on this CPU."""
    return torch.backends.mkldnn.is_available() and bool(_onednn._is_mkldnn_bf16_supported())
