"""Write model folders with safetensors files of arbitrary names, shapes and dtypes, without building a model."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WIDTH = {"F32": 4, "BF16": 2, "F16": 2, "I32": 4, "I8": 1, "F8_E4M3": 1, "I64": 8}
Tensors = Mapping[str, tuple[str, Sequence[int]]]  # name -> (dtype, shape)


def write_safetensors(path: Path, tensors: Tensors) -> Path:
    """Write a safetensors file of zeros."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        size = WIDTH[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return path


def dense_layer(number: int, *, dtype: str = "BF16", width: int = 8) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensors of one layer of a Qwen3-like model."""
    prefix = f"model.layers.{number}"
    matrices = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        f"{prefix}.{name}.weight": (dtype, (width, width)) for name in matrices
    }
    return tensors | {f"{prefix}.input_layernorm.weight": (dtype, (width,))}


def expert_layer(number: int, *, num_experts: int = 2, width: int = 8) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensors of one MoE layer with experts quantized to 4 bits."""
    prefix = f"model.layers.{number}"
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        f"{prefix}.mlp.gate.weight": ("BF16", (num_experts, width)),
        f"{prefix}.input_layernorm.weight": ("BF16", (width,)),
    }
    for expert in range(num_experts):
        for name in ("gate_proj", "up_proj", "down_proj"):
            base = f"{prefix}.mlp.experts.{expert}.{name}"
            tensors[f"{base}.weight_packed"] = ("I32", (width, width // 8))
            tensors[f"{base}.weight_scale"] = ("BF16", (width, 1))
            tensors[f"{base}.weight_shape"] = ("I64", (2,))
    return tensors


def write_stored_model(
    folder: Path, shards: Sequence[Tensors], *, config: Mapping[str, Any] | None = None, **settings: Any
) -> Path:
    """Write shards with an index and a config.json; `settings` go into the config."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **(config or {}), **settings}))
    return folder
