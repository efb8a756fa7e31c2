"""FP8 weights (E4M3): with a scale per block of 128 x 128, as DeepSeek's models, per row, or per tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from furlong.quantization.weight_format import (
    WEIGHT,
    Check,
    Grid,
    QuantizationError,
    WeightFormat,
    check_finite,
    check_matrix,
    has_kernels,
    largest_magnitudes,
)

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max  # 448
SMALLEST_AMAX = 1e-12  # of a block, so that the scale of a block of zeros is not zero


@dataclass(frozen=True)
class Fp8Blocks(WeightFormat):
    """DeepSeek's format: `weight` in E4M3, and `weight_scale_inv`, by which the values of each block are multiplied.

    Blocks at the right and lower edge may be smaller. With `is_power_of_two`, scales are rounded up to powers of two
    (`scale_fmt` "ue8m0").
    """

    block: tuple[int, int] = (128, 128)
    scale_dtype: torch.dtype = torch.float32
    is_power_of_two: bool = False
    part_names = WEIGHT, "weight_scale_inv"

    @property
    def description(self) -> str:
        """The format in a few words."""
        return f"FP8 E4M3 in blocks of {self.block[0]} x {self.block[1]}"

    @property
    def rows_apart(self) -> int | None:
        """The rows of a block share a scale."""
        return self.block[0]

    def parts(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each part."""
        rows, columns = check_matrix(shape)
        grid = -(-rows // self.block[0]), -(-columns // self.block[1])
        return {WEIGHT: ((rows, columns), E4M3), "weight_scale_inv": (grid, self.scale_dtype)}

    def quantize(self, weight: Tensor, check: Check = check_finite) -> dict[str, Tensor]:
        """Divide each block by its largest magnitude / 448 and round to E4M3."""
        (grid, _) = self.parts(tuple(weight.shape))["weight_scale_inv"]
        if self._has_kernel and has_kernels(weight):
            from furlong.quantization.kernels import fp8_blocks

            values, scales, largest = fp8_blocks(
                weight.detach().contiguous(), self.block, smallest=SMALLEST_AMAX, largest=LARGEST
            )
            check(largest)
            return {WEIGHT: values, "weight_scale_inv": scales}
        height, width = self.block
        padding = (0, grid[1] * width - weight.shape[1], 0, grid[0] * height - weight.shape[0])
        padded = functional.pad(weight.detach(), padding) if any(padding) else weight.detach().contiguous()
        blocks = padded.view(grid[0], height, grid[1], width)
        largest = largest_magnitudes(blocks, (1, 3)).float()
        check(largest)
        scale = largest.clamp(min=SMALLEST_AMAX) / LARGEST
        if self.is_power_of_two:
            mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2 ** exponent with 0.5 <= mantissa < 1
            scale = torch.ldexp(torch.ones_like(scale), torch.where(mantissa == 0.5, exponent - 1, exponent))
        scale = scale.to(self.scale_dtype)
        rounded = _rounded(blocks / scale.float()[:, None, :, None])
        whole = rounded.view(grid[0] * height, grid[1] * width)
        return {WEIGHT: whole[: weight.shape[0], : weight.shape[1]].contiguous(), "weight_scale_inv": scale}

    @property
    def _has_kernel(self) -> bool:
        is_power = all(size & (size - 1) == 0 for size in self.block)  # as Triton needs
        return is_power and self.scale_dtype == torch.float32 and not self.is_power_of_two

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Multiply in float32, and round to `dtype`."""
        weight = parts[WEIGHT]
        return (weight.float() * self._expanded(parts["weight_scale_inv"], weight.shape)).to(dtype)

    def grid(self, weight: Tensor, importance: Tensor) -> Grid:  # noqa: ARG002  the scales of floating-point values
        """Return the values that a weight may have, with the scales of `quantize`."""
        scale = self._expanded(self.quantize(weight)["weight_scale_inv"], weight.shape)
        return Grid(scale.T.contiguous(), _nearest_level, torch.float32)

    def parts_on(self, grid: Grid, values: Tensor) -> dict[str, Tensor]:
        """Return the parts for values [rows, columns] of the grid."""
        scale = grid.scale_CR[:: self.block[1], :: self.block[0]].T.to(self.scale_dtype).contiguous()
        return {WEIGHT: (values / grid.scale_CR.T).to(E4M3), "weight_scale_inv": scale}

    def _expanded(self, scale: Tensor, shape: Sequence[int]) -> Tensor:
        rows = scale.float().repeat_interleave(self.block[0], 0)[: shape[0]]
        return rows.repeat_interleave(self.block[1], 1)[:, : shape[1]]


@dataclass(frozen=True)
class Fp8Scaled(WeightFormat):
    """`weight` in E4M3, and `weight_scale` per output channel [rows, 1] or for the whole tensor [1].

    Computes in `scale_dtype`. That is the weight's own dtype in the folders of compressed-tensors, whose results these
    are bit for bit, and float32 for `quant_method` "fp8".
    """

    per: Literal["channel", "tensor"]
    scale_dtype: torch.dtype = torch.float32
    part_names = WEIGHT, "weight_scale"

    @property
    def description(self) -> str:
        """The format in a few words."""
        return f"FP8 E4M3 per {self.per}"

    @property
    def rows_apart(self) -> int | None:
        """Each row has its own scale, or all share one."""
        return 1 if self.per == "channel" else None

    def parts(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each part."""
        rows, columns = check_matrix(shape)
        scale_shape = (rows, 1) if self.per == "channel" else (1,)
        return {WEIGHT: ((rows, columns), E4M3), "weight_scale": (scale_shape, self.scale_dtype)}

    def quantize(self, weight: Tensor, check: Check = check_finite) -> dict[str, Tensor]:
        """Divide by the largest magnitude / 448 and round to E4M3."""
        check_matrix(tuple(weight.shape))
        values = weight.detach().to(self.scale_dtype)
        is_channel = self.per == "channel"
        largest = (
            largest_magnitudes(values, (1,), keepdim=True) if is_channel else largest_magnitudes(values, (0, 1)).view(1)
        )
        check(largest)
        scale = largest / LARGEST
        scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)  # as compressed-tensors does
        return {WEIGHT: _rounded(values / scale), "weight_scale": scale}

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Multiply in the dtype of the scales, and round to `dtype`."""
        scale = parts["weight_scale"]
        if scale.numel() not in (1, parts[WEIGHT].shape[0]):
            raise QuantizationError(
                f"weight_scale has shape {list(scale.shape)} for a weight {list(parts[WEIGHT].shape)}; expected a "
                "scale per row or one; convert the folder again"
            )
        return (parts[WEIGHT].to(scale.dtype) * scale.reshape(-1, 1)).to(dtype)

    def grid(self, weight: Tensor, importance: Tensor) -> Grid:  # noqa: ARG002  the scales of floating-point values
        """Return the values that a weight may have, with the scales of `quantize`."""
        scale = self.quantize(weight)["weight_scale"].float().reshape(1, -1)
        return Grid(scale.expand(weight.shape[1], weight.shape[0]), _nearest_level, self.scale_dtype)

    def parts_on(self, grid: Grid, values: Tensor) -> dict[str, Tensor]:
        """Return the parts for values [rows, columns] of the grid."""
        scale = grid.scale_CR[0].to(self.scale_dtype)
        scale = scale[:, None].contiguous() if self.per == "channel" else scale[:1].clone()
        return {WEIGHT: (values / grid.scale_CR.T).to(E4M3), "weight_scale": scale}


def _nearest_level(quotients: Tensor) -> Tensor:
    return _rounded(quotients).float()


def _rounded(scaled: Tensor) -> Tensor:
    """Round a tensor that nothing else uses."""
    return scaled.clamp_(-LARGEST, LARGEST).to(E4M3)
