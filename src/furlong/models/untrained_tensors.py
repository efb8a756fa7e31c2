"""Names of checkpoint tensors that are not trained: layers for multi-token prediction (MTP), and vision encoders.

Engines loaded them with the model and keep them; saved folders get them from the model's folder, unchanged.

DeepSeek-V3 and GLM store MTP layers after the last layer, MiMo in `model.mtp_layers`, Qwen3-Next in `mtp`. They draft
later tokens, and no model of transformers builds them.

Qwen3.5 is released with a vision encoder in `model.visual`: config.json has the language model in `text_config`, whose
tensors are named `model.language_model.*`. Here such a folder is its language model, with the names of a text model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from furlong.core.model_config import read_json

PREFIXES = ("mtp.", "model.mtp_layers.")
VISION = "model.visual."
WITH_VISION = ("qwen3_5", "qwen3_5_moe")  # `model_type`s whose language model is in `text_config`
INNER, OUTER = "model.language_model.", "model."


def is_untrained(name: str, config: Any) -> bool:
    """Whether a checkpoint tensor is copied unchanged (MTP layers, vision encoder); `config` is transformers'."""
    if name.startswith((*PREFIXES, VISION)):
        return True
    text = config.get_text_config()
    count = getattr(text, "num_nextn_predict_layers", None) or 0
    layer = name.removeprefix("model.layers.").partition(".")[0]
    return name != layer and layer.isdecimal() and 0 <= int(layer) - text.num_hidden_layers < count


def text_config(config: Any) -> Any:
    """Return the config of a model's language model: a part of it if the model has vision, otherwise itself."""
    return config.text_config if config.model_type in WITH_VISION else config


def is_with_vision(folder: Path) -> bool:
    """Whether a folder's config.json is of a model with vision."""
    return read_json(folder / "config.json").get("model_type") in WITH_VISION


def text_name(name: str) -> str:
    """Return the name that a stored tensor has in the text model.

    >>> text_name("model.language_model.norm.weight"), text_name("lm_head.weight")
    ('model.norm.weight', 'lm_head.weight')
    """
    return OUTER + name.removeprefix(INNER) if name.startswith(INNER) else name


def stored_name(name: str) -> str:
    """Inverse of `text_name`, for a model with vision."""
    is_inner = name.startswith(OUTER) and not name.startswith((INNER, VISION))
    return INNER + name.removeprefix(OUTER) if is_inner else name
