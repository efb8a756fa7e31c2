"""Quantized weights from calibration data (GPTQ, arXiv:2210.17323): later columns compensate the rounding of earlier.

The result has the format's usual layout, without another order of columns, so engines read it like any other.

Axes: R rows of a weight, C its columns, B columns of a block. Weights are transposed, so that columns are contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from furlong.quantization.fp8 import Fp8Blocks, Fp8Scaled
from furlong.quantization.int4 import Int4Groups
from furlong.quantization.weight_format import Grid

DAMPING = 0.01  # of the mean square of the inputs, added to each, so that the moments can be inverted
BLOCK = 64  # columns whose errors are added to the rest together
NUM_SWEEPS = 6  # over scales and columns, after the first rounding

Compensable = Int4Groups | Fp8Blocks | Fp8Scaled


def compensated(form: Compensable, weight_RC: Tensor, moment_CC: Tensor) -> dict[str, Tensor]:
    """Quantize a finite weight so that its products with a layer's inputs x change little; returns its parts.

    moment_CC: sum of x x^T over the inputs. Columns are rounded in order of falling squares of the inputs, and the
    error of each is distributed over those left. Then each scale of INT4, and each value, is set to the best one given
    all others, in a few sweeps.
    """
    damped_CC = moment_CC.double()
    damped_CC.diagonal().add_(DAMPING * float(damped_CC.diagonal().mean()) or 1.0)
    grid = form.grid(weight_RC, moment_CC.diagonal().float())
    order_C = moment_CC.diagonal().argsort(descending=True)
    whole_CR = weight_RC.float().T.contiguous()
    values_CR = _rounded_in_order(whole_CR, grid, order_C, _inverse_factor(damped_CC[order_C][:, order_C]))
    damped_CC = damped_CC.float()
    for _ in range(NUM_SWEEPS):
        gradient_CR = damped_CC @ (whole_CR - values_CR)
        if isinstance(form, Int4Groups):
            _refit_scales(form.group_size, values_CR, grid, gradient_CR, damped_CC)
        _refit_values(values_CR, grid, gradient_CR, damped_CC, order_C)
    return form.parts_on(grid, values_CR.T)


def _inverse_factor(damped_CC: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of the damped moments."""
    inverse_CC = torch.cholesky_inverse(torch.linalg.cholesky(damped_CC))
    return torch.linalg.cholesky(inverse_CC, upper=True).float()


def _rounded_in_order(whole_CR: Tensor, grid: Grid, order_C: Tensor, factor_CC: Tensor) -> Tensor:
    left_CR, columns = whole_CR[order_C], order_C.tolist()
    values_CR = torch.empty_like(whole_CR)
    for start in range(0, len(columns), BLOCK):
        end = min(start + BLOCK, len(columns))
        errors_BR = torch.empty_like(left_CR[start:end])
        for place in range(start, end):
            column, factor_C = columns[place], factor_CC[place]
            values_CR[column] = grid.nearest(left_CR[place], column)
            error_R = (left_CR[place] - values_CR[column]) / factor_C[place]
            left_CR[place:end].addr_(factor_C[place:end], error_R, alpha=-1)
            errors_BR[place - start] = error_R
        left_CR[end:].addmm_(factor_CC[start:end, end:].T, errors_BR, alpha=-1)
    return values_CR


def _refit_scales(size: int, values_CR: Tensor, grid: Grid, gradient_CR: Tensor, moment_CC: Tensor) -> None:
    """Set the scale of each group of columns to the one with the least error, given all other values.

    gradient_CR: moments times the errors. Changes the values, the grid and the gradient.
    """
    for start in range(0, len(values_CR), size):
        group = slice(start, start + size)
        levels_BR = (values_CR[group] / grid.scale_CR[group]).round_()
        curvature_R = (levels_BR * (moment_CC[group, group] @ levels_BR)).sum(0)
        step_R = (levels_BR * gradient_CR[group]).sum(0) / curvature_R.clamp(min=torch.finfo(torch.float32).tiny)
        scale_R = (grid.scale_CR[start] + step_R).to(grid.dtype).float()
        grid.scale_CR[group] = torch.where(scale_R > 0, scale_R, grid.scale_CR[start])
        change_BR = grid.products(levels_BR, group) - values_CR[group]
        values_CR[group] += change_BR
        gradient_CR.addmm_(moment_CC[:, group], change_BR, alpha=-1)


def _refit_values(values_CR: Tensor, grid: Grid, gradient_CR: Tensor, moment_CC: Tensor, order_C: Tensor) -> None:
    """Set each column to the values on the grid with the least error, given all others. Changes values and gradient."""
    for block_B in order_C.split(BLOCK):
        moment_BB, gradient_BR = moment_CC[block_B][:, block_B], gradient_CR[block_B]
        change_BR = torch.empty_like(gradient_BR)
        for place, column in enumerate(block_B.tolist()):
            best_R = values_CR[column] + gradient_BR[place] / moment_BB[place, place]
            change_BR[place] = grid.nearest(best_R, column) - values_CR[column]
            values_CR[column] += change_BR[place]
            gradient_BR[place:].addr_(moment_BB[place, place:], change_BR[place], alpha=-1)
        gradient_CR.addmm_(moment_CC[:, block_B], change_BR, alpha=-1)
