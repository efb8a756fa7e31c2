"""Build a `DecodeModel` from a checkpoint folder, or from a config and a state dict."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from safetensors import safe_open
from torch import Tensor

from furlong.core.weights import NamedTensor, WeightSource
from furlong.errors import EngineError
from furlong.inference.embedded.decode_model import DecodeModel, FusedDenseModel, unsupported_by_fused
from furlong.models.hf_folder import end_ids, read_json

if TYPE_CHECKING:
    from furlong.inference.embedded.transformers_model import TransformersModel

logger = logging.getLogger(__name__)

KV_MEMORY_FRAC = 0.3


def source_from_folder(folder: Path) -> WeightSource:
    """The tensors of the safetensors files in a folder. Raises EngineError if there are none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise EngineError(f"{folder} has no safetensors files; pass a folder written by save_pretrained")

    def read() -> Iterable[NamedTensor]:
        for name in files:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  a safetensors handle does not iterate
                    yield key, file.get_tensor(key)

    return WeightSource(read)


def model_from_folder(
    folder: Path, config: Any, *, dtype: torch.dtype, device: torch.device, max_length: int
) -> DecodeModel:
    """Load a Hugging Face checkpoint folder into the fastest implementation that supports its config."""
    reason = unsupported_by_fused(config)
    model: DecodeModel
    if reason:
        model = _transformers_model().from_folder(str(folder), dtype=dtype, device=device)
        model.check()
    else:
        model = FusedDenseModel(config, dtype=dtype, device=device, max_length=max_length)
        model.table.load(source_from_folder(folder))
    _log_path(model, reason)
    return model


def model_from_state(
    config: Any, state: Mapping[str, Tensor], *, dtype: torch.dtype, device: torch.device, max_length: int
) -> DecodeModel:
    """Build from a config and a complete state dict under Hugging Face names."""
    reason = unsupported_by_fused(config)
    model: DecodeModel
    if reason:
        model = _transformers_model().from_config(config, dtype=dtype, device=device)
        model.table.load(WeightSource(state.items))
        model.check()
    else:
        model = FusedDenseModel(config, dtype=dtype, device=device, max_length=max_length)
        model.table.load(WeightSource(state.items))
    _log_path(model, reason)
    return model


def _transformers_model() -> type[TransformersModel]:
    """The implementation for every family, imported lazily because transformers' model code takes a second."""
    from furlong.inference.embedded.transformers_model import TransformersModel

    return TransformersModel


def _log_path(model: DecodeModel, reason: str) -> None:
    why = f" (the fused implementation does not support {reason})" if reason else ""
    logger.info("embedded engine: %s in %s on %s%s", model.description, model.dtype, model.device, why)


def eos_ids(config: Any, folder: Path | None, tokenizer: Any) -> tuple[int, ...]:
    """End-of-sequence ids of the config, the tokenizer and the folder's generation_config.json."""
    generation = {} if folder is None else read_json(folder / "generation_config.json")
    return end_ids(generation, getattr(config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None))


def kv_tokens_that_fit(config: Any, *, dtype: torch.dtype, device: torch.device) -> int:
    """Number of cached tokens that fit into 30 % of the free memory."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * width * dtype.itemsize
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return int(free * KV_MEMORY_FRAC) // per_token
