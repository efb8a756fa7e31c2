"""Value models: a language model whose output head is one linear map to a scalar per token.

A folder may have such a head under the names of transformers (`score`, of AutoModelForTokenClassification and
AutoModelForSequenceClassification), of TRL (`v_head.summary`) and of OpenRLHF (`value_head`, or config.json's
`value_head_prefix`). Without one, the head is new: bias 0, and weights with a standard deviation of
1 / (width + 1), as in InstructGPT. slime's is 0.02, with which a real model starts with values of several units for
rewards of 0 and 1.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from furlong.core.model_config import read_json
from furlong.errors import ConfigError
from furlong.models import hf_model as hf
from furlong.models.stored_tensors import TensorSource, open_tensors

logger = logging.getLogger(__name__)

HEAD = "lm_head"  # the place of the head in the model
SCORE = "score"  # its name in transformers
PREFIXES = (SCORE, "value_head", "v_head.summary")


class ValueHead(nn.Linear):
    """The scalar head: weight [1, D], bias [1]."""

    def __init__(self, width: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None):
        super().__init__(width, 1, device=device, dtype=dtype)


def values(hidden_RD: Tensor, head_1D: Tensor, bias_1: Tensor | None) -> Tensor:
    """Return the value of each hidden state, [R], in at least float32."""
    dtype = torch.promote_types(hidden_RD.dtype, torch.float32)
    bias = None if bias_1 is None else bias_1.to(dtype)
    return nn.functional.linear(hidden_RD.to(dtype), head_1D.to(dtype), bias).squeeze(-1)


def new_head(width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return weight [1, D] and bias [1] of a new head, float32; they depend only on the seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, width, generator=generator) / (width + 1), torch.zeros(1)


def head_names(folder: Path, names: frozenset[str]) -> tuple[str, str | None] | None:
    """Return the names of weight and bias of a folder's value head; the bias may be missing; None without a head."""
    config = folder / "config.json"
    named = read_json(config).get("value_head_prefix") if config.is_file() else None
    for prefix in (*([str(named)] if named else ()), *PREFIXES):
        if f"{prefix}.weight" in names:
            return f"{prefix}.weight", f"{prefix}.bias" if f"{prefix}.bias" in names else None
    return None


def read_head(folder: Path, stored: TensorSource, width: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Return weight [1, D] and bias [1] of a folder's value head, float32, or a new head if it has none.

    Raises ConfigError for a head with more outputs than one.
    """
    if (names := head_names(folder, stored.names)) is None:
        logger.info("%s has no value head: the critic starts with a new one, or with that of a checkpoint", folder)
        return new_head(width, seed)
    weight = stored.read(names[0]).float()
    if weight.shape != (1, width):
        raise ConfigError(
            f"{folder}: {names[0]} has shape {tuple(weight.shape)}, a value head of this model has (1, {width}); give "
            "a model with one label, or --critic-load a language model to start with a new head"
        )
    bias = torch.zeros(1) if names[1] is None else stored.read(names[1]).float()
    return weight, bias


class ValueTensors:
    """The tensors of a language model or a value model as those of a value model, whose head is named `lm_head`."""

    def __init__(self, folder: Path, stored: TensorSource, width: int, *, seed: int) -> None:
        self._stored = stored
        weight, bias = read_head(folder, stored, width, seed=seed)
        self._head = {f"{HEAD}.weight": weight, f"{HEAD}.bias": bias}
        self._others = stored.names - {name for name in head_names(folder, stored.names) or () if name is not None}

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return self._others | self._head.keys()

    def read(self, name: str) -> Tensor:
        """Read a tensor onto the CPU."""
        return self._head[name] if name in self._head else self._stored.read(name)


def value_config(config: Any) -> Any:
    """Return the config of the value model of a language model: its head is not the embedding."""
    copied = copy.deepcopy(config)
    copied.tie_word_embeddings = False
    copied.is_value_model = True
    return copied


def is_value_config(config: Any) -> bool:
    """Return whether `value_config` made this config."""
    return getattr(config, "is_value_model", False) is True


def with_value_head(model: PreTrainedModel) -> ValueHead:
    """Replace the output head of a model by an uninitialized scalar one, untied from the embedding; returns it."""
    old: Any = model.get_output_embeddings()
    weight: Tensor = old.weight
    head = ValueHead(weight.shape[1], device=weight.device, dtype=weight.dtype)
    model.set_output_embeddings(head)
    model.config.tie_word_embeddings = False
    model.config.num_labels = 1  # which `hf_model.write_config` names a token classifier
    return head


def load_value_model(
    folder: Path | str, *, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """Load a language model or a value model with a scalar head; see `hf_model.load_model`.

    Its head is in the place of the language model's. The global random state is unchanged.
    """
    with torch.random.fork_rng(devices=[]):  # transformers initializes the head that is dropped
        model = hf.load_model(folder, dtype=dtype, device=device, without_head=True)
    head = with_value_head(model)
    with open_tensors(Path(folder)) as stored, torch.no_grad():
        weight, bias = read_head(Path(folder), stored, head.in_features, seed=seed)
        head.weight.copy_(weight)
        head.bias.copy_(bias)
    return model


def exported(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a value model with its head under transformers' name."""
    for name, tensor in tensors:
        yield (f"{SCORE}.{name.rpartition('.')[2]}" if name.startswith(f"{HEAD}.") else name), tensor
