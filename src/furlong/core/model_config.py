"""Read JSON files of Hugging Face model folders, and check the types of the values that a model is built from."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from furlong.core.text import shortened
from furlong.errors import ConfigError

CONFIG_FILES = ("config.json", "generation_config.json")
RANDOM = "random_weights"  # key of config.json: the weights are random, as those of furlong's presets
MAX_SIZE = 2**31 - 1
MAX_LAYERS = 10_000  # all are built before weights are read


class _Kind(NamedTuple):
    expected: str
    accepts: Callable[[Any], bool]


def _is_integer(value: Any) -> bool:
    return type(value) is int


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_list(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(accepts, cast("list[Any]", value)))


def _per_layer(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Accept a value, or a list of one per layer, as a few families have."""
    many = _is_list(accepts)
    return lambda value: accepts(value) or many(value)


def _is_from(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: _is_integer(value) and low <= value <= high


_SIZE = _Kind("an integer from 1 to 2^31 - 1", _is_from(1, MAX_SIZE))
_SIZES = _Kind("an integer from 1 to 2^31 - 1", _per_layer(_is_from(1, MAX_SIZE)))
_COUNT = _Kind("an integer from 0 to 2^31 - 1", _per_layer(_is_from(0, MAX_SIZE)))
_LAYERS = _Kind(f"an integer from 1 to {MAX_LAYERS}", _is_from(1, MAX_LAYERS))
_POSITIVE = _Kind("a number above 0", lambda value: _is_number(value) and value > 0)
_FRACTION = _Kind("a number of at least 0", lambda value: _is_number(value) and value >= 0)
_NUMBER = _Kind("a number", _is_number)
_TEXT = _Kind("a string", lambda value: isinstance(value, str))
_TEXTS = _Kind("a list of strings", _is_list(lambda value: isinstance(value, str)))
_DTYPE = _Kind("the name of a dtype", lambda value: isinstance(value, (str, dict)))  # an object: one per part
_SWITCH = _Kind("true or false", lambda value: isinstance(value, bool))
_OBJECT = _Kind("an object", lambda value: isinstance(value, dict))
_TOKENS = _Kind(
    "a token id or a list of token ids", _per_layer(lambda value: _is_integer(value) and -1 <= value <= MAX_SIZE)
)

# A null is accepted everywhere, like a missing key.
_KINDS: dict[_Kind, str] = {
    _LAYERS: "num_hidden_layers",
    _SIZE: "vocab_size hidden_size max_position_embeddings",
    _SIZES: "num_attention_heads num_key_value_heads head_dim original_max_position_embeddings",
    _COUNT: (
        "intermediate_size sliding_window num_experts num_local_experts "
        "n_routed_experts moe_num_experts num_experts_per_tok num_experts_per_token moe_topk top_k_experts "
        "moe_intermediate_size shared_expert_intermediate_size n_shared_experts kv_lora_rank q_lora_rank "
        "qk_rope_head_dim qk_nope_head_dim v_head_dim n_group topk_group first_k_dense_replace max_window_layers"
    ),
    _POSITIVE: "rope_theta rotary_emb_base factor",
    _FRACTION: "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon initializer_range attention_dropout",
    _NUMBER: "routed_scaling_factor attention_multiplier embedding_multiplier logits_scaling",
    _TEXT: "model_type hidden_act rope_type",
    _DTYPE: "torch_dtype dtype",
    _TEXTS: "architectures layer_types",
    _SWITCH: (
        "tie_word_embeddings use_cache attention_bias mlp_bias use_sliding_window norm_topk_prob use_qk_norm "
        "is_encoder_decoder"
    ),
    _OBJECT: "text_config rope_scaling rope_parameters quantization_config",
    _TOKENS: "eos_token_id bos_token_id pad_token_id",
}
_KIND_OF = {key: kind for kind, keys in _KINDS.items() for key in keys.split()}
_NESTED = ("text_config", "rope_scaling", "rope_parameters")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model folder; {} if the file does not exist.

    Raises ConfigError that names the file if it is not a JSON object and, for config.json and generation_config.json,
    every key whose value has another type than models expect.
    """
    content = _json_object(path)
    if path.name in CONFIG_FILES and (problems := list(_problems(content))):
        raise ConfigError(
            f"{path}: {'; '.join(problems)}; the model is built from these values: correct the file, or download the "
            "model again"
        )
    return content


def _json_object(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            return {}
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror or error}; download it again or check its permissions"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}; download or write it again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} contains a {type(content).__name__}, not an object; download or write it again")
    return cast("dict[str, Any]", content)


def _problems(content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in content.items():
        kind = _KIND_OF.get(key)
        if value is None or kind is None:
            continue
        if not kind.accepts(value):
            yield f"{prefix}{key} is {shortened(value)}, expected {kind.expected}"
        elif key in _NESTED:
            yield from _problems(value, f"{prefix}{key}.")
            for name, part in value.items():  # rope_parameters may have an object per kind of layer
                if isinstance(part, dict) and name not in _KIND_OF:
                    yield from _problems(cast("Mapping[str, Any]", part), f"{prefix}{key}.{name}.")
