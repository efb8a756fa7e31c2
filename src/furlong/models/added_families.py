"""Families that transformers lacks although it has their architecture: Kimi-K2 is DeepSeek-V3, MiMo is Qwen2.

Their folders name remote code, which is never run; transformers' own classes compute the same. MiMo's layers for
multi-token prediction are not part of the model (see `untrained_tensors`). A saved folder has the model type and the
class name of the released one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, Qwen2Config
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping


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
