"""Layers for multi-token prediction (MTP): drafts of later tokens, which no model of transformers builds.

They are not trained. Engines loaded them with the model and keep them; saved folders get them from the model's folder,
unchanged. DeepSeek-V3 and GLM store them after the last layer, MiMo in `model.mtp_layers`, Qwen3-Next in `mtp`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

PREFIXES = ("mtp.", "model.mtp_layers.")


def is_mtp(name: str, config: Any) -> bool:
    """Whether a tensor of a checkpoint belongs to an MTP layer; `config` is the model's transformers config."""
    if name.startswith(PREFIXES):
        return True
    text = config.get_text_config()
    count = getattr(text, "num_nextn_predict_layers", None) or 0
    layer = name.removeprefix("model.layers.").partition(".")[0]
    return name != layer and layer.isdecimal() and 0 <= int(layer) - text.num_hidden_layers < count


def with_mtp(tensors: Iterable[tuple[str, Tensor]], folder: Path, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield `tensors`, then the MTP tensors of a Hugging Face folder that are not among them."""
    from furlong.models.hf_model import open_tensors

    written: set[str] = set()
    for name, tensor in tensors:
        written.add(name)
        yield name, tensor
    with open_tensors(folder) as stored:
        for name in sorted(stored.names - written):
            if is_mtp(name, config):
                yield name, stored.read(name)
