"""The interface of formats that store a weight matrix quantized."""

from __future__ import annotations

import functools
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

WEIGHT, WEIGHT_SHAPE = "weight", "weight_shape"
Check = Callable[[Tensor], None]
"""Checks the largest magnitudes of a weight, as `check_finite`, or keeps them to be checked later."""


class QuantizationError(ValueError):
    """A weight cannot be quantized; the message has the reason and the fix, without the weight's name."""


def check_finite(largest: Tensor) -> None:
    """Raise QuantizationError unless these largest magnitudes are finite: a scale would turn others into zeros."""
    if not bool(torch.isfinite(largest).all()):
        count = int((~torch.isfinite(largest)).sum())
        raise QuantizationError(
            f"{count} of {largest.numel()} scales would be inf or nan, because the weight has such values; check the "
            "checkpoint with `furlong check`, or load one from before training diverged"
        )


class WeightFormat(ABC):
    """A format of quantized weight matrices.

    A weight `x.weight` is stored as some parts; `part_names` are what follows `x.`.
    """

    part_names: ClassVar[tuple[str, ...]]

    @property
    @abstractmethod
    def description(self) -> str:
        """The format in a few words, for messages."""

    @property
    def rows_apart(self) -> int | None:
        """Rows after each multiple of this number share no scale with those before; None if all rows share one."""
        return None

    @abstractmethod
    def parts(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each part of a weight [rows, columns]. Raises QuantizationError if it has none."""

    def whole_shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Return the shape of a weight from the shapes of its parts."""
        return shapes[WEIGHT]

    def quantize(self, weight: Tensor, check: Check = check_finite) -> dict[str, Tensor]:
        """Quantize a weight [rows, columns] on its device. Raises QuantizationError for values or sizes that it cannot.

        Every value is rounded to the nearest one of its block, group, row or tensor. `check` is `check_finite` unless
        given, which waits for the device.
        """
        del check
        raise QuantizationError(
            "the values of AWQ and GPTQ come from calibration data, which a weight of shape "
            f"{list(weight.shape)} does not have; use `furlong convert hf-to-int4`"
        )

    @abstractmethod
    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return the weight [rows, columns] that the parts stand for."""


def shape_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the part `weight_shape`, copied on the device: copying it from the host would wait for a GPU."""
    return _shape_tensor(shape, dtype, device).clone()


@functools.cache
def _shape_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(shape, dtype=dtype, device=device)


@functools.lru_cache(maxsize=1024)
def parts_of(form: WeightFormat, shape: tuple[int, ...]) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return `form.parts(shape)`, remembered: a mixture of experts has thousands of weights of few shapes."""
    return form.parts(shape)


def quantize_stacked(form: WeightFormat, weights: Sequence[Tensor], check: Check) -> dict[str, Sequence[Tensor]]:
    """Quantize weights of one width by the operations of a single one.

    Returns by name of the part that of each weight, as `form.quantize` gives it. The rows of all but the last must be
    multiples of `form.rows_apart`, unless there is only one weight.
    """
    if len(weights) == 1:
        return {part: [tensor] for part, tensor in form.quantize(weights[0], check).items()}
    whole = form.quantize(torch.cat(list(weights)), check)
    places = [parts_of(form, tuple(weight.shape)) for weight in weights]
    columns: dict[str, Sequence[Tensor]] = {}
    for part, stacked in whole.items():
        if part == WEIGHT_SHAPE:
            shapes = [_shape_tensor(tuple(weight.shape), stacked.dtype, stacked.device) for weight in weights]
            columns[part] = torch.stack(shapes).unbind()
        else:
            columns[part] = stacked.split([each[part][0][0] for each in places])
    return columns


def has_kernels(weight: Tensor) -> bool:
    """Whether `kernels` quantize a weight: it is on a GPU that has E4M3 (SM 8.9), with Triton."""
    return weight.is_cuda and _has_kernels(weight.device)


@functools.cache
def _has_kernels(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 9) and importlib.util.find_spec("triton") is not None


@dataclass(frozen=True)
class Grid:
    """The values that a quantized weight may have, transposed: levels times scales.

    scale_CR: the scale of each value, float32. nearest_level: rounds quotients. dtype: what products are rounded to.
    """

    scale_CR: Tensor
    nearest_level: Callable[[Tensor], Tensor]
    dtype: torch.dtype

    def nearest(self, values: Tensor, columns: int | slice) -> Tensor:
        """Return the values of the grid that are nearest to these of some columns."""
        return self.products(self.nearest_level(values / self.scale_CR[columns]), columns)

    def products(self, levels: Tensor, columns: int | slice) -> Tensor:
        """Return the values that levels of some columns stand for."""
        return (levels * self.scale_CR[columns]).to(self.dtype).float()


def largest_magnitudes(values: Tensor, dim: tuple[int, ...], *, keepdim: bool = False) -> Tensor:
    """Return `values.abs().amax(dim)` without a tensor of the magnitudes."""
    return torch.maximum(values.amax(dim, keepdim=keepdim), -values.amin(dim, keepdim=keepdim))


def check_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns. Raises QuantizationError unless the shape is that of a matrix with elements."""
    if len(shape) != 2 or 0 in shape:
        raise QuantizationError(
            f"its shape is {list(shape)}, but only matrices are quantized; add it to the ignore list"
        )
    return shape[0], shape[1]
