"""What an engine is built from: model, weights, context length, stop tokens and cache size."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from furlong.core.model_config import read_json
from furlong.core.text import abbreviate
from furlong.core.weights import NamedTensor, WeightSource
from furlong.errors import CheckpointError, EngineError, SyncError
from furlong.files.tensor_file import read_file, read_header
from furlong.inference.embedded.decode_model import DecodeModel, FusedDenseModel, unsupported_by_fused
from furlong.inference.embedded.weight_table import WeightLoad, WeightTable
from furlong.models.hf_config import register_model
from furlong.models.hf_folder import end_ids
from furlong.models.model_facts import GPU_KV_FRAC, length_limit
from furlong.models.onednn_caches import bound_onednn_caches
from furlong.models.quantized_folder import trained_scheme
from furlong.models.untrained_tensors import is_untrained, text_name
from furlong.quantization.scheme import QuantizationScheme
from furlong.quantization.weight_format import QuantizationError

logger = logging.getLogger(__name__)

KV_MEMORY_FRAC = 0.3  # of the free memory of a CPU


def source_from_folder(folder: Path, config: Any = None) -> WeightSource:
    """The tensors of the safetensors files in a folder. Raises EngineError if there are none.

    With the model's `config`, tensors that are not trained are left out.
    """
    files = _weight_files(folder)

    def read() -> Iterable[NamedTensor]:
        for name in files:
            for key, tensor in read_file(folder / name, lambda key: config is None or not is_untrained(key, config)):
                yield text_name(key), tensor

    return WeightSource(read)


def check_weight_files(folder: Path, table: WeightTable, config: Any) -> None:
    """Raise EngineError or SyncError unless the files of a folder contain every tensor in its shape.

    Only headers are read, so that files which do not fit are refused before any weight is replaced.
    """
    load = WeightLoad(table)
    for name in _weight_files(folder):
        try:
            shapes = {key: stored.shape for key, stored in read_header(folder / name).tensors.items()}
        except CheckpointError as error:
            raise EngineError(f"{error}; write the folder again") from error
        for key, shape in shapes.items():
            if not is_untrained(key, config):
                load.expect(text_name(key), shape)
    if missing := load.missing():
        raise SyncError(f"{folder} lacks {len(missing)} tensors: {abbreviate(missing)}; write the whole model")


def _weight_files(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if os.path.lexists(index):
        try:
            files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            if any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
                raise ValueError("a file outside the folder")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineError(f"{index} is not an index of weights: {error!r}; write the folder again") from error
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise EngineError(f"{folder} has no safetensors files; pass a folder written by save_pretrained")
    return files


def build_model(
    config: Any, weights: Path | Mapping[str, Tensor], *, dtype: torch.dtype, device: torch.device, max_length: int
) -> DecodeModel:
    """Build the fastest implementation that supports `config`.

    `weights` is a Hugging Face folder, or a complete state dict under Hugging Face names.
    """
    bound_onednn_caches()
    scheme = trained_scheme(weights, config) if isinstance(weights, Path) else None
    reason = unsupported_by_fused(config)
    model: DecodeModel
    if reason:
        # Imported only here, because transformers' model code takes a second.
        from transformers import AutoModelForCausalLM

        from furlong.inference.embedded.transformers_model import TransformersModel
        from furlong.models.hf_model import load_network

        register_model(type(config))
        if isinstance(weights, Path) and scheme is None:
            network = load_network(weights, copy.deepcopy(config), dtype=dtype)
            model = TransformersModel(network, dtype=dtype, device=device)
        else:
            network = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
            model = TransformersModel(network, dtype=dtype, device=device)
            load_weights(model.table, config, weights, scheme)
        model.check()
    else:
        model = FusedDenseModel(config, dtype=dtype, device=device, max_length=max_length)
        load_weights(model.table, config, weights, scheme)
    why = f" (the fused implementation does not support {reason})" if reason else ""
    stored = "" if scheme is None else f", {len(scheme.names)} weights stored in {scheme.form.description}"
    logger.info("embedded engine: %s in %s on %s%s%s", model.description, model.dtype, model.device, stored, why)
    return model


def load_weights(
    table: WeightTable, config: Any, weights: Path | Mapping[str, Tensor], scheme: QuantizationScheme | None
) -> None:
    """Load a folder or a state dict; with a scheme, the weights are stored quantized from then on."""
    try:
        if scheme is not None:
            table.quantize(scheme, sorted(scheme.names))
        table.load(source_from_folder(weights, config) if isinstance(weights, Path) else WeightSource(weights.items))
    except QuantizationError as error:
        raise EngineError(str(error)) from error


def chosen_context_len(config: Any, requested: int | None) -> int:
    """Return the context length: the requested one, or that of the model. Raises EngineError if it is unsupported."""
    longest = getattr(config, "max_position_embeddings", None)
    if requested is None and longest is None:
        raise EngineError(f"model type {config.model_type} has no max_position_embeddings; pass context_len")
    if requested is not None and (requested < 2 or (longest is not None and requested > longest)):
        raise EngineError(f"context_len is {requested}, but the model supports 2 .. {longest} positions")
    chosen = requested if requested is not None else int(longest or 0)
    limit = length_limit(config)
    if limit is not None and chosen > limit:
        raise EngineError(
            f"the context length is {chosen}, but model type {config.model_type} changes its rotary frequencies beyond "
            f"{limit} tokens, also for tokens that are already cached; use --rollout-max-context-len {limit} "
            f"(`furlong serve`: --context-length {limit}), or use SGLang"
        )
    return chosen


def eos_ids(config: Any, folder: Path | None, tokenizer: Any) -> tuple[int, ...]:
    """End-of-sequence ids of the config, the tokenizer and the folder's generation_config.json."""
    generation = {} if folder is None else read_json(folder / "generation_config.json")
    return end_ids(generation, getattr(config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None))


def kv_tokens_that_fit(config: Any, *, dtype: torch.dtype, device: torch.device) -> int:
    """Number of cached tokens that fit into 30 % of the free memory, or 40 % on a GPU."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * width * dtype.itemsize
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * GPU_KV_FRAC) // per_token
    return int(psutil.virtual_memory().available * KV_MEMORY_FRAC) // per_token
