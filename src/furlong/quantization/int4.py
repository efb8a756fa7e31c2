"""INT4 weights with 16-bit activations (W4A16) in compressed-tensors' layout "pack-quantized", symmetric, in groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from furlong.quantization.weight_format import (
    WEIGHT_SHAPE,
    Check,
    Grid,
    QuantizationError,
    WeightFormat,
    check_finite,
    check_matrix,
    has_kernels,
    largest_magnitudes,
    shape_tensor,
)

PER_WORD = 8  # values in an int32
LOWEST, HIGHEST = -8, 7
Observer = Literal["minmax", "mse"]
SHRINKS = (1.07, 1.03, 0.96, 0.92, 0.88, 0.84, 0.79, 0.73)  # scales that "mse" tries, over that of "minmax"
FINE_SHRINKS = tuple(number / 50 for number in range(30, 56))  # for calibration, which has more time


@dataclass(frozen=True)
class Int4Groups(WeightFormat):
    """`weight_packed`: 8 values per int32, the first in the lowest bits; `weight_scale`: one per row and group.

    `weight_shape` is [rows, columns]. Computes in `scale_dtype`, the weight's own dtype in folders that compressed-
    tensors wrote. observer: how a scale is chosen. "minmax" divides the largest magnitude of the group by 7.5, which
    gives the results of compressed-tensors bit for bit; "mse" tries larger and smaller scales, too, and takes the one
    with the least squared error. The stored format is the same.
    """

    group_size: int
    scale_dtype: torch.dtype = torch.bfloat16
    shape_dtype: torch.dtype = torch.int64
    observer: Observer = "minmax"
    part_names = "weight_packed", "weight_scale", WEIGHT_SHAPE

    @property
    def description(self) -> str:
        """The format in a few words."""
        return f"INT4 in groups of {self.group_size}"

    @property
    def rows_apart(self) -> int | None:
        """Each row has its own scales."""
        return 1

    def parts(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each part."""
        rows, columns = check_matrix(shape)
        if columns % self.group_size:
            raise QuantizationError(
                f"its {columns} columns are not a multiple of the group size {self.group_size}; use another "
                "--group-size, or add it to the ignore list"
            )
        return {
            "weight_packed": ((rows, -(-columns // PER_WORD)), torch.int32),
            "weight_scale": ((rows, columns // self.group_size), self.scale_dtype),
            WEIGHT_SHAPE: ((2,), self.shape_dtype),
        }

    def whole_shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Return the shape of a weight from the shapes of its parts."""
        rows, groups = shapes["weight_scale"]
        return rows, groups * self.group_size

    def quantize(self, weight: Tensor, check: Check = check_finite) -> dict[str, Tensor]:
        """Divide each group by its scale and round to -8 .. 7."""
        self.parts(tuple(weight.shape))
        if self._has_kernel and has_kernels(weight):
            from furlong.quantization.kernels import int4_groups

            words, scale = int4_groups(weight.detach().to(self.scale_dtype).contiguous(), self.group_size)
            check(scale)
            shape = shape_tensor(tuple(weight.shape), self.shape_dtype, weight.device)
            return {"weight_packed": words, "weight_scale": scale, WEIGHT_SHAPE: shape}
        values, scale = self._divided(weight)
        check(scale)
        return self.stored(values, scale)

    @property
    def _has_kernel(self) -> bool:
        is_power = self.group_size >= PER_WORD and self.group_size & (self.group_size - 1) == 0  # as Triton needs
        return is_power and self.observer == "minmax" and self.scale_dtype.itemsize == 2

    def stored(self, values: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """Return the parts for integers [rows, groups, group_size] and their scales [rows, groups]."""
        values = values.to(torch.int8).flatten(1)
        shape = shape_tensor(tuple(values.shape), self.shape_dtype, values.device)
        return {"weight_packed": packed(values), "weight_scale": scale, WEIGHT_SHAPE: shape}

    def grid(self, weight: Tensor, importance: Tensor) -> Grid:
        """Return the values that a weight may have, with the scales of the least error weighted by `importance`."""
        groups = weight.to(self.scale_dtype).unflatten(1, (-1, self.group_size))
        scale = self.scales(groups, importance=importance.view(-1, self.group_size))
        scale_CR = scale.float().repeat_interleave(self.group_size, 1).T.contiguous()
        return Grid(scale_CR, lambda quotients: quotients.clamp(LOWEST, HIGHEST).round_(), self.scale_dtype)

    def parts_on(self, grid: Grid, values: Tensor) -> dict[str, Tensor]:
        """Return the parts for values [rows, columns] of the grid."""
        levels = (values / grid.scale_CR.T).round_().unflatten(1, (-1, self.group_size))
        return self.stored(levels, grid.scale_CR[:: self.group_size].T.to(self.scale_dtype).contiguous())

    def rounded(self, weight: Tensor) -> Tensor:
        """Return what `dequantize` gives for the parts of `quantize`, without packing.

        `weight` [..., columns] may have any number of leading axes, because rows are independent; inf and nan are kept.
        """
        values, scale = self._divided(weight.reshape(-1, weight.shape[-1]))
        return (values * scale[:, :, None]).to(weight.dtype).view(weight.shape)

    def _divided(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the integers [rows, groups, group_size], in the dtype of the scales, and the scales [rows, groups]."""
        groups = weight.detach().to(self.scale_dtype).unflatten(1, (-1, self.group_size))
        scale = self.scales(groups)
        return (groups / scale[:, :, None]).clamp_(LOWEST, HIGHEST).round_(), scale

    def scales(self, groups: Tensor, *, importance: Tensor | None = None) -> Tensor:
        """Return the scales [rows, groups] of weights [rows, groups, group_size].

        importance [groups, group_size]: factors of the squared errors, which are minimized then.
        """
        scale = largest_magnitudes(groups, (2,)) / ((HIGHEST - LOWEST) / 2)
        scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
        if importance is not None:
            return _least_error(groups, scale, FINE_SHRINKS, importance)
        return scale if self.observer == "minmax" else _least_error(groups, scale, SHRINKS)

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Multiply in the dtype of the scales, and round to `dtype`."""
        scale = parts["weight_scale"]
        values = unpacked(parts["weight_packed"], scale.shape[1] * self.group_size)
        return (values.to(scale.dtype).unflatten(1, (-1, self.group_size)) * scale[:, :, None]).flatten(1).to(dtype)


def _least_error(groups: Tensor, scale: Tensor, shrinks: Sequence[float], importance: Tensor | None = None) -> Tensor:
    """Return for each group the one of `scale` and its multiples by `shrinks` with the least squared error.

    The scale of a group with inf or nan stays inf or nan.
    """
    units = groups.float() / scale.float()[:, :, None]

    def error_of(shrink: float) -> Tensor:
        errors = (units / shrink).clamp_(LOWEST, HIGHEST).round_().mul_(shrink).sub_(units).square_()
        return (errors if importance is None else errors * importance).sum(2)

    factor, least = torch.ones_like(units[:, :, 0]), error_of(1.0)
    for shrink in shrinks:
        error = error_of(shrink)
        is_better = error < least
        factor, least = factor.masked_fill_(is_better, shrink), torch.where(is_better, error, least)
    return (scale.float() * factor).to(scale.dtype)


def packed(values: Tensor) -> Tensor:
    """Pack int8 values of -8 .. 7, [rows, columns], into int32 [rows, columns / 8 rounded up]."""
    padded = functional.pad(values, (0, -values.shape[1] % PER_WORD), value=LOWEST)
    nibbles = (padded - LOWEST).view(torch.uint8)
    return (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).contiguous().view(torch.int32)


def unpacked(words: Tensor, columns: int) -> Tensor:
    """Return the int8 values [rows, columns] of `packed`."""
    octets = words.contiguous().view(torch.uint8)
    nibbles = torch.stack((octets & 0xF, octets >> 4), dim=-1).flatten(1)[:, :columns]
    return nibbles.view(torch.int8) + LOWEST
