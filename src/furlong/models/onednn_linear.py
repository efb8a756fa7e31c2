"""Linear layers with oneDNN GEMMs, which are faster than MKL in float32 on x86 CPUs.

oneDNN computes the output and the input gradient; for the weight gradient MKL is as fast.
"""

from __future__ import annotations

import platform
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_onednn: Any = torch.ops.mkldnn


class _OneDnnMatmul(torch.autograd.Function):
    """x @ weight.T + bias for x [rows, in] and weight [out, in]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn._linear_pointwise(x, weight, bias, "none", [], "")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  once_differentiable is untyped
        x, weight = ctx.saved_tensors
        (grad,) = grads
        need_x, need_weight, need_bias = ctx.needs_input_grad
        return (
            _onednn._linear_pointwise(grad, weight.t(), None, "none", [], "") if need_x else None,
            grad.t() @ x if need_weight else None,
            grad.sum(0) if need_bias else None,
        )


class OneDnnLinear(nn.Linear):
    """`nn.Linear` with oneDNN; its parameters must be float32 on the CPU."""

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer to [..., in]."""
        if torch.compiler.is_compiling():  # the compiler chooses its own GEMMs and cannot trace these
            return super().forward(input)
        # 2-D inside: autograd forbids in-place writes to a view that a Function returns, and some families do them.
        rows = cast("Tensor", _OneDnnMatmul.apply(input.reshape(-1, self.in_features), self.weight, self.bias))
        return rows.view(*input.shape[:-1], self.out_features)


def use_onednn(model: nn.Module) -> None:
    """Switch the linear layers of `model` to oneDNN where it is faster: float32 on an x86 CPU."""
    if platform.machine().lower() not in ("x86_64", "amd64") or not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.device.type == "cpu" and module.weight.dtype == torch.float32:
            module.__class__ = OneDnnLinear
