"""INT4 weights from calibration data (GPTQ, arXiv:2210.17323): later columns compensate the rounding of earlier ones.

The result has the format of `Int4Groups`, without another order of columns, so engines read it like any other.

Axes: R rows of a weight, C its columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from furlong.core.quantization.int4 import HIGHEST, LOWEST, Int4Groups

DAMPING = 0.01  # of the mean square of the inputs, added to each, so that the moments can be inverted
BLOCK = 64  # columns whose errors are added to the rest together


def compensated(form: Int4Groups, weight_RC: Tensor, moment_CC: Tensor) -> dict[str, Tensor]:
    """Quantize a finite weight so that its products with a layer's inputs x change little; returns its parts.

    moment_CC: sum of x x^T over the inputs. Scales are those with the least error weighted by the inputs' squares.
    Columns are then rounded in order of falling squares, and the error of each is distributed over those left.
    """
    size, squares_C = form.group_size, moment_CC.diagonal().float()
    groups = weight_RC.to(form.scale_dtype).unflatten(1, (-1, size))
    scale = form.scales(groups, importance=squares_C.view(-1, size))
    order_C = squares_C.argsort(descending=True)
    values_RC = _rounded_in_order(
        weight_RC.float()[:, order_C],
        scale.float().repeat_interleave(size, 1)[:, order_C],
        _inverse_factor(moment_CC[order_C][:, order_C]),
    )
    return form.stored(values_RC[:, order_C.argsort()].unflatten(1, (-1, size)), scale)


def _inverse_factor(moment_CC: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of the damped moments."""
    moment_CC = moment_CC.double()
    mean = float(moment_CC.diagonal().mean())
    damped_CC = moment_CC + torch.eye(len(moment_CC), dtype=torch.float64) * (DAMPING * mean or 1.0)
    inverse_CC = torch.cholesky_inverse(torch.linalg.cholesky(damped_CC))
    return torch.linalg.cholesky(inverse_CC, upper=True).float()


def _rounded_in_order(left_RC: Tensor, scale_RC: Tensor, factor_CC: Tensor) -> Tensor:
    """Return the integers of the columns, rounded from the first to the last. Changes `left_RC`."""
    values_RC, columns = torch.empty_like(left_RC), left_RC.shape[1]
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        errors = torch.empty_like(left_RC[:, start:end])
        for column in range(start, end):
            scale_R, row_C = scale_RC[:, column], factor_CC[column]
            values_RC[:, column] = (left_RC[:, column] / scale_R).clamp(LOWEST, HIGHEST).round()
            error_R = (left_RC[:, column] - values_RC[:, column] * scale_R) / row_C[column]
            left_RC[:, column:end] -= error_R[:, None] * row_C[column:end]
            errors[:, column - start] = error_R
        left_RC[:, end:] -= errors @ factor_CC[start:end, end:]
    return values_RC
