"""Read the config of a Hugging Face model folder, without a model or weights."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any, cast

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, PretrainedConfig, Qwen2Config
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from furlong.core.model_config import read_json
from furlong.errors import ConfigError
from furlong.models.hf_folder import check_folder
from furlong.models.untrained_tensors import text_config

log = logging.getLogger(__name__)

NOISE_FIELDS = (
    "attention_dropout",
    "attention_probs_dropout_prob",
    "activation_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "residual_dropout",
    "embedding_dropout",
    "mlp_dropout",
    "attn_pdrop",
    "resid_pdrop",
    "embd_pdrop",
    "emb_pdrop",
    "dropout",
    "layerdrop",
    "decoder_layerdrop",
    "input_jitter_noise",
    "router_jitter_noise",
)


def unreadable_errors() -> tuple[type[Exception], ...]:
    """Return the errors that transformers raises for a config or tokenizer with invalid values."""
    from huggingface_hub.errors import StrictDataclassError

    builtin = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError, RecursionError)
    return *builtin, StrictDataclassError


def load_config(folder: Path | str) -> PretrainedConfig:
    """Read `config.json`; of a model with vision, the part of its language model.

    Raises ConfigError if it is missing, unreadable, or of an unknown family.
    """
    whole = load_whole_config(folder)
    config = text_config(whole)
    if config is not whole:
        _report_vision(Path(folder))
    register_model(type(config))
    if getattr(config, "quantization_config", None) is not None:
        delattr(config, "quantization_config")  # `furlong.quantization` makes weights whole, not transformers
    return config


@cache
def _report_vision(folder: Path) -> None:
    log.info("%s has a vision encoder: only text is used, and saved folders get its weights unchanged", folder)


def load_whole_config(folder: Path | str) -> PretrainedConfig:
    """Read `config.json`, vision included. Raises as `load_config`."""
    path = check_folder(folder)
    read_json(path / "config.json")  # raises for values of the wrong type, many of which transformers accepts
    try:
        return cast(
            "PretrainedConfig", AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        )
    except unreadable_errors() as error:
        raise ConfigError(
            f"cannot read {path / 'config.json'} with transformers {transformers.__version__}: {error}"
        ) from error


def context_length(folder: Path | str) -> int:
    """Return max_position_embeddings, the longest prompt + response in tokens. Raises ConfigError without it."""
    length = getattr(load_config(folder), "max_position_embeddings", None)
    if not isinstance(length, int):
        raise ConfigError(f"{folder}: config.json has no max_position_embeddings; give --rollout-max-context-len")
    return length


def vocabulary_size(folder: Path | str) -> int:
    """Return the vocabulary size; token ids are below it."""
    return load_config(folder).get_text_config().vocab_size


def num_kv_heads(folder: Path | str) -> int | None:
    """Return the key/value heads per layer; None if the config has no such field."""
    config = load_config(folder).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    return heads if isinstance(heads, int) else None


def num_experts(folder: Path | str) -> int | None:
    """Return the routed experts per MoE layer; None for a dense model."""
    config = load_config(folder).get_text_config()
    counts = (getattr(config, name, None) for name in ("num_experts", "n_routed_experts", "num_local_experts"))
    return next((number for number in counts if isinstance(number, int)), None)


def without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """Disable dropout and router noise in `config`, so that training computes the policy that generated."""
    text = config.get_text_config()
    for part in (config,) if text is config else (config, text):
        for name in NOISE_FIELDS:
            if name == "router_jitter_noise" and part.model_type == "phimoe":
                continue  # there it is a threshold for choosing experts, in evaluation, too
            if isinstance(value := getattr(part, name, None), float) and value:
                log.info("%s %g is disabled, so that training computes the policy that generates", name, value)
                setattr(part, name, 0.0)
    return config


# -- families that transformers lacks although it has their architecture: Kimi-K2 is DeepSeek-V3, MiMo is Qwen2
#
# Their folders name remote code, which is never run; transformers' own classes compute the same. MiMo's layers for
# multi-token prediction are not part of the model (`untrained_tensors`). A saved folder has the model type and the
# class name of the released one.


class KimiK2Config(DeepseekV3Config):
    """config.json of Kimi-K2."""

    model_type = "kimi_k2"


class MiMoConfig(Qwen2Config):
    """config.json of MiMo-7B."""

    model_type = "mimo"


CLASS_NAMES = {KimiK2Config: "DeepseekV3ForCausalLM", MiMoConfig: "MiMoForCausalLM"}
for _config in CLASS_NAMES:
    AutoConfig.register(_config.model_type, _config)


@cache
def register_model(config: type[Any]) -> None:
    """Register the model of an added family, given its config class, with transformers; ignores other families.

    Importing the models takes longer than importing their configs.
    """
    if config not in CLASS_NAMES:
        return
    known: Any = config.__base__
    causal: Any = AutoModelForCausalLM._model_mapping[known]  # pyright: ignore[reportPrivateUsage]  no public name
    members = {"config_class": config, "__module__": __name__}
    AutoModelForCausalLM.register(config, type(CLASS_NAMES[config], (causal,), members))
    mapping: Any = get_checkpoint_conversion_mapping(known.model_type)
    if mapping:
        register_checkpoint_conversion_mapping(config.model_type, mapping)
