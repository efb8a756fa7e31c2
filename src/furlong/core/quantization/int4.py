"""INT4 weights with 16-bit activations (W4A16) in compressed-tensors' layout "pack-quantized", symmetric, in groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from furlong.core.quantization.weight_format import (
    Check,
    QuantizationError,
    check_finite,
    check_matrix,
    largest_magnitudes,
)

PER_WORD = 8  # values in an int32
LOWEST, HIGHEST = -8, 7


@dataclass(frozen=True)
class Int4Groups:
    """`weight_packed`: 8 values per int32, the first in the lowest bits; `weight_scale`: one per row and group.

    `weight_shape` is [rows, columns]. Computes in `scale_dtype`, the weight's own dtype in folders that compressed-
    tensors wrote, whose results these are bit for bit.
    """

    group_size: int
    scale_dtype: torch.dtype = torch.bfloat16
    shape_dtype: torch.dtype = torch.int64

    @property
    def description(self) -> str:
        """The format in a few words."""
        return f"INT4 in groups of {self.group_size}"

    @property
    def part_names(self) -> tuple[str, ...]:
        """The names of the parts."""
        return "weight_packed", "weight_scale", "weight_shape"

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
            "weight_shape": ((2,), self.shape_dtype),
        }

    def whole_shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Return the shape of a weight from the shapes of its parts."""
        rows, groups = shapes["weight_scale"]
        return rows, groups * self.group_size

    def quantize(self, weight: Tensor, check: Check = check_finite) -> dict[str, Tensor]:
        """Divide each group by its largest magnitude / 7.5 and round to -8 .. 7."""
        self.parts(tuple(weight.shape))
        values, scale = self._divided(weight)
        check(scale)
        shape = torch.tensor(weight.shape, device=weight.device, dtype=self.shape_dtype)
        return {"weight_packed": packed(values.to(torch.int8).flatten(1)), "weight_scale": scale, "weight_shape": shape}

    def rounded(self, weight: Tensor) -> Tensor:
        """Return what `dequantize` gives for the parts of `quantize`, without packing.

        `weight` [..., columns] may have any number of leading axes, because rows are independent; inf and nan are kept.
        """
        values, scale = self._divided(weight.reshape(-1, weight.shape[-1]))
        return (values * scale[:, :, None]).to(weight.dtype).view(weight.shape)

    def _divided(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the integers [rows, groups, group_size], in the dtype of the scales, and the scales [rows, groups]."""
        groups = weight.detach().to(self.scale_dtype).unflatten(1, (-1, self.group_size))
        scale = largest_magnitudes(groups, (2,)) / ((HIGHEST - LOWEST) / 2)
        scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
        return (groups / scale[:, :, None]).clamp_(LOWEST, HIGHEST).round_(), scale

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Multiply in the dtype of the scales, and round to `dtype`."""
        scale = parts["weight_scale"]
        values = unpacked(parts["weight_packed"], scale.shape[1] * self.group_size)
        return (values.to(scale.dtype).unflatten(1, (-1, self.group_size)) * scale[:, :, None]).flatten(1).to(dtype)


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
