"""Which parameters of a model are trained, where several tensors of a checkpoint are one of Megatron-core."""

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
    """Set `requires_grad` of a rank's parts by expressions that are searched in both names of a parameter.

    Returns the names of the tensors that are trained, in a Hugging Face checkpoint.

    These are Megatron's in the whole model (`decoder.layers.7.mlp.linear_fc1.weight`), and those of Hugging Face.
    Raises ConfigError for an expression that is found nowhere, or only in a part of what is one parameter here.
    """
    trainable = (found for found in names.parameters_with_local(chunks, hf) if found[0].rule.is_trained)
    every, mine = zip(*trainable, strict=True)
    wanted = _matching(every, train_only, ONLY_TRAIN_FLAG) if train_only else set(range(len(every)))
    frozen = _matching(every, freeze, FREEZE_FLAG) if freeze else set[int]()
    if not wanted - frozen:
        raise ConfigError(f"no parameter is trained; check {ONLY_TRAIN_FLAG}, {FREEZE_FLAG}")
    for number, tensor in enumerate(mine):
        if tensor is not None:
            tensor.requires_grad_(number in wanted - frozen)
    head: Any = dict(chunks[-1].named_parameters()).get("output_layer.weight")
    if hf.tie_word_embeddings and head is not None:  # the last stage's copy of the embedding, which comes first
        head.requires_grad_(0 in wanted - frozen)
    return frozenset(name for number in wanted - frozen for name in every[number].theirs)


def _matching(every: Sequence[Parameter], patterns: Sequence[str], flag: str) -> set[int]:
    """Which parameters, by number, the expressions mean."""
    names_of_both = [name for parameter in every for name in (*parameter.theirs, _name(parameter))]
    found = matching_names(names_of_both, patterns, flag)
    chosen: set[int] = set()
    for number, parameter in enumerate(every):
        named = [name for name in parameter.theirs if name in found]
        if _name(parameter) in found or len(named) == len(parameter.theirs):
            chosen.add(number)
        elif named:
            raise ConfigError(
                f"{flag} means {', '.join(named)} and not {', '.join(sorted({*parameter.theirs} - {*named}))}, which "
                f"are one parameter here, {_name(parameter)}; choose all of them or none"
            )
    return chosen


def _name(parameter: Parameter) -> str:
    """What Megatron-core would call a parameter, were the model in one part."""
    name, theirs = parameter.ours, parameter.theirs[0]
    if layer := re.search(r"\.layers\.(\d+)\.", theirs):
        name = re.sub(r"^decoder\.layers\.\d+\.", f"decoder.layers.{layer[1]}.", name)
    if parameter.expert is not None:
        name = re.sub(r"\.local_experts\.\d+\.", f".local_experts.{parameter.expert}.", name)
    return name
