"""Reads how the weights of a Hugging Face folder are quantized."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from furlong.config.facts import frozen_models
from furlong.config.sections import Config
from furlong.core.model_config import read_json
from furlong.errors import CheckpointError, ConfigError
from furlong.files.checkpoint_folder import find_foreign_weights, is_first_start
from furlong.files.tensor_file import read_header
from furlong.models.hf_folder import WEIGHT_FILES, quantization_seen, read_weight_map
from furlong.models.untrained_tensors import WITH_VISION, is_untrained
from furlong.quantization.int4 import Int4Groups
from furlong.quantization.scheme import QuantizationScheme, quantization_settings, read_scheme

QAT_VARIABLE, QAT_GROUP_SIZE = "OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "OPEN_TRAINING_INT4_GROUP_SIZE"  # slime's
TWO_WAYS = (
    "give the trainer's weights in bfloat16 with --ref-load or --load and keep --hf-checkpoint for the engines, or "
    "train from the quantized values with --dequantize"
)


def is_quantized(folder: Path) -> bool:
    """Whether the config.json of a folder says that its weights are quantized."""
    return bool(quantization_settings(read_json(folder / "config.json")))


def trainer_folders(config: Config, model_dir: Path) -> dict[str, Path]:
    """Return the folders that initial policy and frozen models are loaded from, by the flag that names them.

    --hf-checkpoint is left out if all weights come from --load or --ref-load. Raises CheckpointError if a named
    checkpoint is missing.
    """
    flags, load = config.checkpoint, config.checkpoint.load
    folders: dict[str, Path] = {}
    if load is not None and (start := find_foreign_weights(Path(load), step=flags.ckpt_step)) is not None:
        folders["--load"] = start
    has_start = bool(folders) or (
        load is not None and not is_first_start(Path(load), None if flags.save is None else Path(flags.save))
    )
    for model in frozen_models(config):
        if (frozen := find_foreign_weights(Path(model.load), step=model.step)) is not None:
            folders[model.flag] = frozen
    if flags.ref_load is None and (config.algo.uses_reference or not has_start):
        folders["--hf-checkpoint"] = model_dir
    return folders


def qat_source(*, flag: bool, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return what asks for quantization-aware training, --int4-qat or slime's variable; None without it."""
    if flag:
        return "--int4-qat"
    value = environment.get(QAT_VARIABLE, "0")
    return None if value in ("", "0") else f"{QAT_VARIABLE}={value}"


def check_qat(
    source: str, folder: Path, scheme: QuantizationScheme | None, environment: Mapping[str, str] = os.environ
) -> None:
    """Raise ConfigError unless the folder of --hf-checkpoint is quantized as quantization-aware training needs it.

    source: what asks for it. scheme: that of the folder, which must be INT4, in groups of the size that slime's
    variable names, if it is set.
    """
    form = None if scheme is None else scheme.form
    if not isinstance(form, Int4Groups):
        seen = "its weights are not quantized" if form is None else f"its weights are in {form.description}"
        raise ConfigError(
            f"{source} rounds weights as an INT4 engine does, but --hf-checkpoint is {folder}: {seen}; name a folder "
            "of `furlong convert hf-to-int4` and give the trainer's weights with --ref-load, or remove it"
        )
    if (size := environment.get(QAT_GROUP_SIZE)) not in (None, "", str(form.group_size)):
        raise ConfigError(
            f"{QAT_GROUP_SIZE}={size}, but --hf-checkpoint {folder} has groups of {form.group_size}; unset the "
            "variable, or convert the model with that --group-size"
        )


def training_problem(flag: str, folder: Path, config: Mapping[str, Any], dtypes: Mapping[str, str]) -> str | None:
    """Return why a folder that a flag names cannot be trained from without --dequantize; None if it can be."""
    seen = quantization_seen(config, dtypes)
    return None if seen is None else f"{flag} {folder}: its weights are quantized ({seen}); {TWO_WAYS}"


def update_problem(folder: Path, scheme: QuantizationScheme) -> str | None:
    """Return why engines with this folder as --hf-checkpoint cannot get weight updates; None if they can."""
    if not scheme.is_fixed:
        return None
    return (
        f"--hf-checkpoint {folder}: its weights are in {scheme.form.description}, whose values come from calibration "
        "data that weight updates do not have, so it is only for engines without updates (`furlong serve`, `furlong "
        "eval`, --debug-rollout-only); to train, write whole weights with `furlong convert dequantize`, and give "
        "engines that folder, or one of `furlong convert hf-to-int4`"
    )


def stored_dtypes(folder: Path) -> dict[str, str]:
    """Return the dtype of each stored tensor. Raises CheckpointError that names a damaged or missing file."""
    dtypes: dict[str, str] = {}
    index = folder / WEIGHT_FILES[1]
    named = {folder / name for name in read_weight_map(index).values()} if index.is_file() else set[Path]()
    for path in sorted(named or folder.glob("*.safetensors")):
        try:
            shard = read_header(path)
        except CheckpointError as error:
            raise CheckpointError(f"cannot load the weights of {folder}: {error}; download the file again") from error
        dtypes |= {name: tensor.dtype for name, tensor in shard.tensors.items()}
    return dtypes


def folder_scheme(folder: Path) -> QuantizationScheme | None:
    """Return how a folder's weights are quantized; None if they are not. Raises what `scheme_of` raises."""
    return scheme_of(folder, read_json(folder / "config.json"), stored_dtypes(folder))


def trained_scheme(folder: Path, config: Any) -> QuantizationScheme | None:
    """Return how a folder's weights are quantized, without those that are not trained.

    `config` is the model's transformers config. Returns None and raises as `folder_scheme`.
    """
    scheme = folder_scheme(folder)
    if scheme is None:
        return None
    return dataclasses.replace(scheme, names=frozenset(name for name in scheme.names if not is_untrained(name, config)))


def scheme_of(folder: Path, config: Mapping[str, Any], dtypes: Mapping[str, str]) -> QuantizationScheme | None:
    """Return how weights are quantized; None if they are not. `config` and `dtypes` are those of the folder.

    Raises ConfigError, naming the folder, for a format that is not supported, and for missing scales.
    """
    seen = quantization_seen(config, dtypes)
    if seen is None:
        return None
    if config.get("model_type") in WITH_VISION:
        raise ConfigError(
            f"{folder}: its weights are quantized ({seen}), but quantized models with a vision encoder are not "
            "supported; use the model's folder in bfloat16"
        )
    if not quantization_settings(config):
        raise ConfigError(
            f"{folder}: its weights are quantized ({seen}), but config.json has no quantization_config; copy it from "
            "the model's source, or use the model's folder in bfloat16"
        )
    try:
        return read_scheme(config, dtypes)
    except ConfigError as error:
        raise ConfigError(f"{folder}: its weights are quantized ({seen}), but {error}") from error
