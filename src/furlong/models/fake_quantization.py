"""Quantization-aware training: modules that compute with the values that the engine's INT4 weights have.

The parameters stay as they are and are what is optimized, saved and sent. A module whose parameter is marked reads it
rounded; the gradient passes the rounding unchanged (straight-through estimator, Bengio et al. 2013). Rounding is part
of every forward pass, so it also holds for parameters that FSDP gathers and for those of tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from furlong.core.text import abbreviate
from furlong.errors import ConfigError
from furlong.models.hf_model import disk_rows, on_disk
from furlong.quantization.ignore_list import module_of
from furlong.quantization.int4 import Int4Groups
from furlong.quantization.scheme import QuantizationScheme
from furlong.quantization.weight_format import WEIGHT

Rounding = Callable[[Tensor], Tensor]
_ROUNDING = "_rounding_of"  # attribute of a module: the rounding of each marked parameter


class _StraightThrough(torch.autograd.Function):
    """Rounds a weight; its gradient is that of the rounded weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rounding: Rounding) -> Tensor:  # noqa: ARG004  torch's signature
        """Return the rounded weight."""
        return rounding(weight)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,  # noqa: ARG004
        *grads: Tensor,
    ) -> tuple[Tensor, None]:
        """Pass the gradient on."""
        return grads[0], None


def rounding_of(scheme: QuantizationScheme) -> Rounding:
    """Return the function from a weight [..., columns] to the values that an engine computes with; INT4 only."""
    form = cast("Int4Groups", scheme.form)

    def rounding(weight: Tensor) -> Tensor:
        return form.rounded(weight.to(scheme.dtype)).to(weight.dtype)

    return rounding


def is_rounded(name: str, pieces: Iterable[str], columns: int, scheme: QuantizationScheme) -> bool:
    """Return whether the engine stores a parameter quantized.

    pieces: the folder's tensors that are joined, row after row, to the parameter. columns: of this rank's part.
    Raises ConfigError if only some of them are quantized, and if the columns are not whole groups.
    """
    stored = {f"{module_of(piece)}.{WEIGHT}" for piece in pieces}
    quantized = stored & scheme.names
    if not quantized:
        return False
    if quantized != stored:
        raise ConfigError(
            f"--int4-qat: {name} is one parameter of the trainer, but --hf-checkpoint stores "
            f"{abbreviate(sorted(quantized))} quantized and {abbreviate(sorted(stored - quantized))} not; convert the "
            "folder again with all or none of them in the ignore list"
        )
    size = cast("Int4Groups", scheme.form).group_size
    if columns % size:
        raise ConfigError(
            f"--int4-qat: {name} has {columns} columns on each rank, which is not a multiple of the group size {size}; "
            "use a smaller --tensor-model-parallel-size, or a smaller group size"
        )
    return True


def round_model(model: PreTrainedModel, scheme: QuantizationScheme) -> int:
    """Make a transformers model compute with the engine's INT4 values; returns the number of rounded parameters.

    `scheme` is one of `quantized_folder.qat_scheme`. Raises ConfigError as `is_rounded` does, and for parameters that
    are not joined from rows of the folder's tensors.
    """
    rounding, rounded = rounding_of(scheme), 0
    for name, parameter in model.named_parameters():
        owner, _, attribute = name.rpartition(".")
        pieces = [piece for piece, _ in on_disk(model, name, torch.empty(parameter.shape, device="meta"))]
        if is_rounded(name, pieces, parameter.shape[-1], scheme):
            if parameter.ndim > 2 and disk_rows(model, name, parameter).axis == parameter.ndim - 2:
                raise ConfigError(
                    f"--int4-qat: {name} is not joined from rows of the folder's tensors; remove --int4-qat"
                )
            fake_quantize(model.get_submodule(owner), attribute, rounding)
            rounded += 1
    return rounded


@contextmanager
@torch.no_grad()
def quantized_values(model: PreTrainedModel, scheme: QuantizationScheme) -> Generator[None]:
    """Set the weights of an unsharded model to the values that the engine's have, of any format, and restore them.

    Raises QuantizationError for a weight that cannot be quantized, and CheckpointError for parameters whose tensors in
    the folder are not parts of rows.
    """
    saved: list[tuple[Tensor, Tensor]] = []
    try:
        for name, parameter in model.named_parameters():
            for piece, part in _stored_parts(model, name, parameter):
                if piece in scheme.names:
                    saved.append((part, part.clone()))
                    part.copy_(scheme.dequantize(piece, dict(scheme.quantize(piece, part))))
        yield
    finally:
        for part, value in saved:
            part.copy_(value)


def _stored_parts(model: PreTrainedModel, name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield views of a parameter with the names of the folder's tensors that they are."""
    rows = disk_rows(model, name, parameter)
    if rows.axis == -1:
        yield rows.pieces[0][0], parameter
        return
    for row, names in zip(parameter, rows.pieces, strict=True):
        yield from zip(names, row.chunk(len(names), dim=rows.axis), strict=True)


def fake_quantize(module: nn.Module, name: str, rounding: Rounding) -> None:
    """Make `module` compute with its parameter `name` rounded. `named_parameters` and the like are unaffected."""
    known: dict[str, Rounding] = module.__dict__.setdefault(_ROUNDING, {})
    known[name] = rounding
    module.__class__ = _reading_rounded(type(module), name)


@cache
def _reading_rounded(kind: type[nn.Module], name: str) -> type[nn.Module]:

    def read(self: nn.Module) -> Tensor:
        parameter = cast("Tensor", self._parameters[name])  # pyright: ignore[reportPrivateUsage]
        if isinstance(parameter, DTensor):  # a shard outside of the forward pass, which FSDP itself reads
            return parameter
        return cast("Tensor", _StraightThrough.apply(parameter, self.__dict__[_ROUNDING][name]))

    return type(kind.__name__, (kind,), {name: property(read)})
