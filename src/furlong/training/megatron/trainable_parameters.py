"""Choose the trainable parameters of a Megatron-core model by regular expressions over their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from megatron.core.models.gpt import GPTModel

from furlong.errors import ConfigError
from furlong.training.megatron import weight_names as names
from furlong.training.megatron.weight_names import Parameter
from furlong.training.settings import FREEZE_FLAG, ONLY_TRAIN_FLAG, matching_names


def set_trainable(
    chunks: Sequence[GPTModel], hf: Any, *, train_only: Sequence[str] | None = None, freeze: Sequence[str] | None = None
) -> frozenset[str]:
    """Set `requires_grad` of a rank's model chunks; returns the Hugging Face names of the trained tensors.

    Expressions are searched in Megatron's name in the whole model (`decoder.layers.7.mlp.linear_fc1.weight`) and in the
    Hugging Face names. Raises ConfigError for an expression that matches nothing, or only some of the tensors that are
    one parameter in Megatron-core.
    """
    pairs = (pair for pair in names.parameters_with_local(chunks, hf) if pair[0].rule.is_trained)
    every, local = zip(*pairs, strict=True)
    selected = _matching(every, train_only, ONLY_TRAIN_FLAG) if train_only else set(range(len(every)))
    trained = selected - (_matching(every, freeze, FREEZE_FLAG) if freeze else set[int]())
    if not trained:
        raise ConfigError(f"no parameter is trained; check {ONLY_TRAIN_FLAG}, {FREEZE_FLAG}")
    for number, tensor in enumerate(local):
        if tensor is not None:
            tensor.requires_grad_(number in trained)
    head: Any = dict(chunks[-1].named_parameters()).get("output_layer.weight")
    if hf.tie_word_embeddings and head is not None:  # the last stage's copy of the embedding, which comes first
        head.requires_grad_(0 in trained)
    return frozenset(name for number in trained for name in every[number].theirs)


def _matching(every: Sequence[Parameter], patterns: Sequence[str], flag: str) -> set[int]:
    """Return the indices of the parameters that the expressions match."""
    all_names = [name for parameter in every for name in (*parameter.theirs, _name(parameter))]
    matched = matching_names(all_names, patterns, flag)
    indices: set[int] = set()
    for number, parameter in enumerate(every):
        named = [name for name in parameter.theirs if name in matched]
        if _name(parameter) in matched or len(named) == len(parameter.theirs):
            indices.add(number)
        elif named:
            raise ConfigError(
                f"{flag} matches {', '.join(named)} but not {', '.join(sorted({*parameter.theirs} - {*named}))}, which "
                f"are one parameter in Megatron-core, {_name(parameter)}; match all of them or none"
            )
    return indices


def _name(parameter: Parameter) -> str:
    """Return Megatron-core's name of a parameter in the whole model."""
    name, theirs = parameter.ours, parameter.theirs[0]
    if layer := re.search(r"\.layers\.(\d+)\.", theirs):
        name = re.sub(r"^decoder\.layers\.\d+\.", f"decoder.layers.{layer[1]}.", name)
    if parameter.expert is not None:
        name = re.sub(r"\.local_experts\.\d+\.", f".local_experts.{parameter.expert}.", name)
    return name
