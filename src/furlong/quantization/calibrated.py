"""AWQ and GPTQ weights, whose values come from calibration data: they are read, but no weight is stored in them.

Both store unsigned integers in groups of columns with a zero point: weight = (integer - zero) * scale, computed in the
dtype of the scales. All parts are transposed: the weight's columns are their rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from furlong.quantization.weight_format import QuantizationError, WeightFormat, check_matrix

WORD_BITS = 32
AWQ_BITS = 4
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight integers in a word: the interleaving of AWQ's GEMM kernel


@dataclass(frozen=True)
class AwqGroups(WeightFormat):
    """AutoAWQ's layout "gemm", 4 bits. group_size: columns of a group, -1 for all.

    For a weight [rows, columns], `qweight` [columns, rows / 8] and `qzeros` [groups, rows / 8] have the integers of
    eight rows in an int32, and `scales` is [groups, rows].
    """

    group_size: int
    scale_dtype: torch.dtype = torch.float16
    part_names = "qweight", "qzeros", "scales"

    @property
    def description(self) -> str:
        """The format in a few words."""
        return f"AWQ with {AWQ_BITS} bits, {_groups_text(self.group_size)}"

    def parts(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each part."""
        rows, columns = check_matrix(shape)
        groups, words = _num_groups(columns, self.group_size), _num_words(rows, AWQ_BITS)
        return {
            "qweight": ((columns, words), torch.int32),
            "qzeros": ((groups, words), torch.int32),
            "scales": ((groups, rows), self.scale_dtype),
        }

    def whole_shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Return the shape of a weight from the shapes of its parts."""
        return shapes["scales"][1], shapes["qweight"][0]

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Compute in the dtype of the scales, and round to `dtype`."""
        scales = parts["scales"]
        values = _unpacked(parts["qweight"], AWQ_BITS, AWQ_PLACES)
        zeros = _unpacked(parts["qzeros"], AWQ_BITS, AWQ_PLACES)
        groups = values.unflatten(0, (len(scales), -1)) - zeros[:, None]
        return (groups.to(scales.dtype) * scales[:, None]).flatten(0, 1).t().to(dtype).contiguous()


@dataclass(frozen=True)
class GptqGroups(WeightFormat):
    """GPTQ's layout with 4 or 8 bits. group_size: columns of a group, -1 for all.

    For a weight [rows, columns] and `n` integers in an int32, `qweight` is [columns / n, rows], `qzeros` [groups,
    rows / n], `scales` [groups, rows], and `g_idx` [columns] has the group of each column, in any order (act-order).
    Version 1 stores zero points minus one, modulo 2 ** bits; `is_v2`: as they are.
    """

    bits: int
    group_size: int
    is_v2: bool = False
    scale_dtype: torch.dtype = torch.float16
    part_names = "qweight", "qzeros", "scales", "g_idx"

    @property
    def description(self) -> str:
        """The format in a few words."""
        return f"GPTQ with {self.bits} bits, {_groups_text(self.group_size)}"

    def parts(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each part."""
        rows, columns = check_matrix(shape)
        groups = _num_groups(columns, self.group_size)
        return {
            "qweight": ((_num_words(columns, self.bits), rows), torch.int32),
            "qzeros": ((groups, _num_words(rows, self.bits)), torch.int32),
            "scales": ((groups, rows), self.scale_dtype),
            "g_idx": ((columns,), torch.int32),
        }

    def whole_shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Return the shape of a weight from the shapes of its parts."""
        return shapes["scales"][1], shapes["g_idx"][0]

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Compute in the dtype of the scales, and round to `dtype`. Raises QuantizationError for unknown groups."""
        scales, group_of = parts["scales"], parts["g_idx"].long()
        if bool(((group_of < 0) | (group_of >= len(scales))).any()):
            raise QuantizationError(
                f"g_idx has groups {int(group_of.min())} .. {int(group_of.max())}, but there are {len(scales)}; "
                "download the folder again"
            )
        places = range(WORD_BITS // self.bits)
        values = _unpacked(parts["qweight"].t(), self.bits, places).t()
        zeros = _unpacked(parts["qzeros"], self.bits, places)
        if not self.is_v2:
            zeros = (zeros + 1) % 2**self.bits
        whole = (values - zeros[group_of]).to(scales.dtype) * scales[group_of]
        return whole.t().to(dtype).contiguous()


CALIBRATED = (AwqGroups, GptqGroups)


def _unpacked(words: Tensor, bits: int, places: Sequence[int]) -> Tensor:
    """Return the integers of int32 words along the last axis, as int16. places: in a word, of the first, second, ..."""
    shifts = torch.tensor(places, device=words.device, dtype=torch.int32) * bits
    return ((words[..., None] >> shifts) & (2**bits - 1)).to(torch.int16).flatten(-2)


def _num_groups(columns: int, group_size: int) -> int:
    size = columns if group_size == -1 else group_size
    if columns % size:
        raise QuantizationError(
            f"its {columns} columns are not a multiple of the group size {size}; correct config.json, or download the "
            "folder again"
        )
    return columns // size


def _num_words(count: int, bits: int) -> int:
    if count * bits % WORD_BITS:
        raise QuantizationError(f"{count} integers of {bits} bits do not fill 32-bit words; use a folder in bfloat16")
    return count * bits // WORD_BITS


def _groups_text(group_size: int) -> str:
    return "one group per row" if group_size == -1 else f"groups of {group_size}"
