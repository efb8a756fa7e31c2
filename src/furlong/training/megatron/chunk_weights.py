"""Load a rank's model chunks, choose the trained parameters, and round weights as the engine does."""

from __future__ import annotations

# Megatron-core's annotations do not match what its functions accept and return.
# pyright: reportArgumentType=false
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.models.gpt import GPTModel

from furlong.config.sections import TrainFlags
from furlong.errors import ConfigError
from furlong.models.fake_quantization import fake_quantize, is_rounded, rounding_of
from furlong.quantization.scheme import QuantizationScheme
from furlong.training.megatron import weight_names as names
from furlong.training.megatron.weight_names import Parameter
from furlong.training.megatron_lm import places
from furlong.training.megatron_lm.dist_files import DistReader
from furlong.training.settings import FREEZE_FLAG, NOTHING_TRAINED, ONLY_TRAIN_FLAG, matching_names

logger = logging.getLogger(__name__)


def fill(chunks: list[GPTModel], folder: Path, hf: Any) -> None:
    """Load this rank's model chunks from a checkpoint of `save`, of Megatron-LM, or from a Hugging Face folder."""
    with places.open_source(folder) as source:
        if isinstance(source, DistReader):
            places.load(chunks, source)
        else:
            names.load(chunks, hf, source)
    logger.info("loaded weights from %s", folder)


def set_trainable(chunks: Sequence[GPTModel], hf: Any, flags: TrainFlags) -> frozenset[str]:
    """Set `requires_grad` of a rank's model chunks; returns the Hugging Face names of the trained tensors.

    Expressions are searched in Megatron's name in the whole model (`decoder.layers.7.mlp.linear_fc1.weight`) and in the
    Hugging Face names. Raises ConfigError for an expression that matches nothing, or only some of the tensors that are
    one parameter in Megatron-core.
    """
    pairs = (pair for pair in names.parameters_with_local(chunks, hf) if pair[0].rule.is_trained)
    every, local = zip(*pairs, strict=True)
    train_only, freeze = flags.only_train_params_name_list, flags.freeze_params_name_list
    selected = _matching(every, train_only, ONLY_TRAIN_FLAG) if train_only else set(range(len(every)))
    trained = selected - (_matching(every, freeze, FREEZE_FLAG) if freeze else set[int]())
    if not trained:
        raise ConfigError(NOTHING_TRAINED)
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


def round_chunks(chunks: Sequence[GPTModel], hf: Any, scheme: QuantizationScheme) -> None:
    """Make this rank's model chunks compute with the engine's INT4 values. Raises ConfigError as `round_model` does."""
    rounding = rounding_of(scheme)
    for parameter, local in names.parameters_with_local(chunks, hf):
        if local is None or not is_rounded(parameter.ours, parameter.theirs, local.shape[-1], scheme):
            continue
        if parameter.rule.join in ("packed", "packed_gate_up"):
            raise ConfigError(
                f"--int4-qat: {parameter.ours} is the transpose of the folder's tensors; remove --int4-qat, or use "
                "--train-backend fsdp"
            )
        owner, _, attribute = parameter.ours.rpartition(".")
        fake_quantize(chunks[parameter.chunk].get_submodule(owner), attribute, rounding)
