"""From a checkpoint folder, or a config with a state dict, to a `DecodeModel`."""

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
    """The tensors of a folder of safetensors files. Raises EngineError if it has none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise EngineError(f"{folder} has no safetensors files; give a folder that save_pretrained wrote")

    def read() -> Iterable[NamedTensor]:
        for name in files:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  a safetensors handle does not iterate
                    yield key, file.get_tensor(key)

    return WeightSource(read)


def model_from_folder(
    folder: Path, config: Any, *, dtype: torch.dtype, device: torch.device, max_length: int
) -> DecodeModel:
    """Load a Hugging Face checkpoint folder, of this config, on the fastest path that covers it."""
    reason = unsupported_by_fused(config)
    model: DecodeModel
    if reason:
        model = _any_model().from_folder(str(folder), dtype=dtype, device=device)
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
        model = _any_model().from_config(config, dtype=dtype, device=device)
        model.table.load(WeightSource(state.items))
        model.check()
    else:
        model = FusedDenseModel(config, dtype=dtype, device=device, max_length=max_length)
        model.table.load(WeightSource(state.items))
    _log_path(model, reason)
    return model


def _any_model() -> type[TransformersModel]:
    """The path for every family. It needs transformers' model code, which takes a second to import."""
    from furlong.inference.embedded.transformers_model import TransformersModel

    return TransformersModel


def _log_path(model: DecodeModel, reason: str) -> None:
    why = f" ({reason} is not covered by the fused path)" if reason else ""
    logger.info("embedded engine: %s in %s on %s%s", model.description, model.dtype, model.device, why)


def eos_ids(config: Any, folder: Path | None, tokenizer: Any) -> tuple[int, ...]:
    """End-of-sequence ids of a loaded config and tokenizer, and of the folder's generation_config.json."""
    generation = {} if folder is None else read_json(folder / "generation_config.json")
    return end_ids(generation, getattr(config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None))


def kv_tokens_that_fit(config: Any, *, dtype: torch.dtype, device: torch.device) -> int:
    """Cached tokens that 30 % of the free memory holds."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * width * dtype.itemsize
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return int(free * KV_MEMORY_FRAC) // per_token
