"""Folders in the layouts of AWQ and GPTQ, packed integer by integer as the formats describe them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Method = Literal["awq", "gptq", "gptq_v2"]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the integer that each nibble of a word has, from the lowest


def signed(word: int) -> int:
    """Return an int32 with the bits of an unsigned word."""
    return word - 2**32 if word >= 2**31 else word


def packed_along(values: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack integers along the last axis into int32 words, the first into the lowest bits or in `order`."""
    count = 32 // bits
    order = order or tuple(range(count))
    words = [
        [signed(sum(row[at + n] << (bits * i) for i, n in enumerate(order))) for at in range(0, len(row), count)]
        for row in values.tolist()
    ]
    return torch.tensor(words, dtype=torch.int32)


def rounded_groups(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return integers [columns, rows], zero points and scales [groups, rows] of a weight [rows, columns]."""
    groups = weight.float().t().unflatten(0, (-1, group_size))
    low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).clamp(min=1e-6).half()
    zeros = (-low / scales.float()).round().clamp(0, 2**bits - 1)
    values = (groups / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 2**bits - 1)
    return values.flatten(0, 1).int(), zeros.int(), scales


def calibrated_parts(
    weight: Tensor, method: Method, *, bits: int = 4, group_size: int = 16, order: Tensor | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the stored tensors of a weight [rows, columns], and the weight that they stand for, in float16.

    order: permutation of the columns in which groups are taken (act-order of GPTQ).
    """
    columns = weight.shape[1]
    order = torch.arange(columns) if order is None else order
    values, zeros, scales = rounded_groups(weight[:, order], bits, group_size)
    group_of = torch.empty(columns, dtype=torch.int32)
    group_of[order] = torch.arange(columns, dtype=torch.int32) // group_size
    values = values[torch.argsort(order)]
    whole = torch.stack([(values[i] - zeros[group_of[i]]).half() * scales[group_of[i]] for i in range(columns)], dim=1)
    if method == "awq":
        nibbles = packed_along(values, 4, AWQ_ORDER), packed_along(zeros, 4, AWQ_ORDER)
        return {"qweight": nibbles[0], "qzeros": nibbles[1], "scales": scales}, whole
    stored = zeros if method == "gptq_v2" else (zeros - 1) % 2**bits
    parts = {"qweight": packed_along(values.t(), bits).t().contiguous(), "qzeros": packed_along(stored, bits)}
    return {**parts, "scales": scales, "g_idx": group_of}, whole


def write_calibrated(source: Path, target: Path, method: Method, *, group_size: int = 16) -> dict[str, Tensor]:
    """Write the linear layers of `source` in AWQ or GPTQ; return the weights that `target` stands for, by name."""
    target.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    stored: dict[str, Tensor] = {}
    whole: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            parts, whole[name] = calibrated_parts(tensor, method, group_size=group_size)
            stored |= {f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()}
        else:
            stored[name] = whole[name] = tensor.half()
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    settings: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": group_size}
    if method == "awq":
        settings |= {"version": "gemm", "zero_point": True, "modules_to_not_convert": None}
    else:
        settings |= {"quant_method": "gptq", "desc_act": False, "sym": False, "checkpoint_format": method}
    config |= {"dtype": "float16", "quantization_config": settings}
    (target / "config.json").write_text(json.dumps(config))
    return whole
