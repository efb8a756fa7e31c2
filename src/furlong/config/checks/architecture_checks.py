"""Comparison of architecture flags with config.json: one row per flag."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from furlong.config.checks.value_checks import read_model_config
from furlong.config.flag_spec import FlagSpec, flag_specs
from furlong.config.sections import Config
from furlong.core.routing import NUM_EXPERTS, TOP_K

HF = Mapping[str, Any]  # config.json; of a multimodal model, the part of the text model

# gpt-oss' gated activation: bound of its inputs if config.json has no `swiglu_limit`, and offset of the linear half.
GPT_OSS_CLAMP, GPT_OSS_OFFSET = 7.0, 1.0
ANYTHING = object()  # the flag has no meaning for this model, so that any value is accepted
LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
NORMALIZED_FAMILIES = ("qwen3", "qwen3_moe", *LATENT_FAMILIES)
SIGMOID_FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
# Families with known layers: all use RMSNorm, RoPE and, except for gpt-oss, SwiGLU.
FAMILIES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "glm4", "glm4_moe", "gpt_oss"),
    *NORMALIZED_FAMILIES,
)
ROPE = ("rope_parameters", "rope_scaling")


@dataclass(frozen=True)
class Fact:
    """One row: the keys of config.json that determine the value, the value, and its comparison with the flag.

    `value` returns None if config.json does not determine it; keys with a dot are nested.
    """

    keys: tuple[str, ...]
    value: Callable[[HF], Any]
    agrees: Callable[[Any, Any], bool] = lambda given, own: given == own


def architecture_problems(config: Config) -> Iterator[str]:
    """Yield flags that contradict config.json. Without that file, nothing is compared."""
    specs = [spec for spec in flag_specs(Config).values() if spec.section == "architecture"]
    given = {spec: value for spec in specs if (value := getattr(config.architecture, spec.field)) != spec.default}
    if not given:
        return
    try:
        path, read = read_model_config(config.rollout.hf_checkpoint)
    except ValueError as error:
        yield f"config.json of --hf-checkpoint {config.rollout.hf_checkpoint} is not JSON: {error}; download it again"
        return
    hf: HF = read.get("text_config") or read
    if not hf:
        return  # reported for --hf-checkpoint
    for spec, value in given.items():
        fact = FACTS[spec.field]
        own, compared = fact.value(hf), value
        if own is ANYTHING:
            continue
        if spec.field == "moe_layer_freq":
            layers = layers_with_experts(value, int(hf.get("num_hidden_layers") or 0))
            if layers is None:
                yield f"{spec.flag} {value} is not a layer pattern; write a number, or a list such as [0]*3+[1]*58"
                continue
            compared = _pattern(layers)
        if own is None or not fact.agrees(compared, own):
            yield _mismatch(spec, value, own, str(path), _said(hf, fact.keys))


def _mismatch(spec: FlagSpec, value: Any, own: Any, path: str, found: str) -> str:
    is_switch = spec.type is bool
    given = spec.flag if is_switch else f"{spec.flag} {_shown(value)}"
    makes = "" if own is None or is_switch or found.endswith(f" {json.dumps(own)}") else f", that is {_shown(own)}"
    return (
        f"{given} does not match the model: {path} has {found}{makes}; remove {spec.flag}, as the model is built from "
        "config.json, or give another model with --hf-checkpoint"
    )


def _said(hf: HF, keys: tuple[str, ...]) -> str:
    """Return the keys of config.json with their values, or that it has none of them."""
    held = [f"{key} {json.dumps(value)}" for key in keys if (value := _at(hf, key)) is not None]
    if held:
        return ", ".join(held)
    return "no " + " or ".join(key for key in keys if "." not in key or len(keys) == 1)


def _shown(value: Any) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _at(hf: HF, key: str) -> Any:
    found: Any = hf
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _first(*keys: str, default: Any = None) -> Fact:
    """Return the fact of the first of these keys in config.json."""

    def value(hf: HF) -> Any:
        return next((found for key in keys if (found := _at(hf, key)) is not None), default)

    return Fact(keys, value)


def _near(fact: Fact) -> Fact:
    """Return the fact with a tolerance for rounding."""
    return Fact(fact.keys, fact.value, lambda given, own: math.isclose(given, own, rel_tol=1e-9))


def _of_experts(fact: Fact, otherwise: Any = None) -> Fact:
    """Return the fact for models with experts only; `otherwise` is their value without the key."""

    def value(hf: HF) -> Any:
        if not _has_experts(hf):
            return None
        own = fact.value(hf)
        return otherwise if own is None else own

    return Fact((*fact.keys, *NUM_EXPERTS[:1]) if fact.keys[0] not in NUM_EXPERTS else fact.keys, value, fact.agrees)


def _has_experts(hf: HF) -> bool:
    return any(hf.get(key) for key in NUM_EXPERTS)


def _is_latent(hf: HF) -> bool:
    return bool(hf.get("kv_lora_rank"))


def _known(hf: HF, value: Any) -> Any:
    """Return `value` for families with known layers; None for others."""
    return value if hf.get("model_type") in FAMILIES else None


def _heads(hf: HF) -> Any:
    return hf.get("num_attention_heads")


def _groups(hf: HF) -> Any:
    return hf.get("num_key_value_heads") or _heads(hf)


def _head_width(hf: HF) -> Any:
    if _is_latent(hf):
        return hf.get("v_head_dim")  # their `head_dim` is the part with RoPE
    if hf.get("head_dim"):
        return hf["head_dim"]
    return hf["hidden_size"] // hf["num_attention_heads"] if hf.get("hidden_size") and _heads(hf) else None


def _normalizes_heads(hf: HF) -> Any:
    return _known(hf, hf.get("model_type") in NORMALIZED_FAMILIES or bool(hf.get("use_qk_norm")))


def _has_qkv_bias(hf: HF) -> Any:
    if hf.get("model_type") in ("qwen2", "qwen2_moe"):
        return hf.get("qkv_bias") is not False
    return _known(hf, bool(hf.get("attention_bias", hf.get("model_type") == "gpt_oss")))


def _has_no_other_bias(hf: HF) -> Any:
    """Whether experts, feed-forward layers and the attention output have no biases."""
    family = hf.get("model_type")
    after = bool(hf.get("attention_bias")) and family not in ("glm4", "glm4_moe", "qwen2", "qwen2_moe")
    return _known(hf, family != "gpt_oss" and not hf.get("mlp_bias") and not after)


def _is_swiglu(hf: HF) -> Any:
    return _known(hf, hf.get("model_type") != "gpt_oss" and hf.get("hidden_act", "silu") in ("silu", "swish"))


def _is_gpt_oss(hf: HF) -> bool:
    return hf.get("model_type") == "gpt_oss"


def _window(hf: HF) -> Any:
    """Return the sliding window including the query's own token; Megatron's scripts count with or without it."""
    return hf.get("sliding_window") if hf.get("use_sliding_window", True) else None


def _sees(given: str) -> int | None:
    """Return the first number of Megatron's `before,after`; None if the window looks ahead or is malformed.

    >>> _sees("127,0"), _sees("(128, 0)"), _sees("128,128")
    (127, 128, None)
    """
    match = re.fullmatch(r"\(?\s*(\d+)\s*,\s*0\s*\)?", given)
    return int(match[1]) if match else None


def _whole_layers(hf: HF) -> Any:
    """Return N if exactly every Nth layer has full attention; None for other patterns."""
    layers = [kind == "full_attention" for kind in hf.get("layer_types") or ()]
    every = layers.index(True) + 1 if any(layers) else 0
    return every if every and layers == [layer % every == 0 for layer in range(1, len(layers) + 1)] else None


def _normalization(hf: HF) -> Any:
    if "rms_norm_eps" in hf:
        return "RMSNorm"
    has_mean = any(key in hf for key in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"))
    return "LayerNorm" if has_mean else _known(hf, "RMSNorm")


def _is_untied(hf: HF) -> Any:
    return not hf["tie_word_embeddings"] if "tie_word_embeddings" in hf else _known(hf, True)


def _base(hf: HF) -> Any:
    return next((found for key in BASE if (found := _at(hf, key)) is not None), None)


def _stretching(hf: HF) -> Any:
    """Return the type of RoPE scaling: default, linear, llama3, yarn and others."""
    kinds = (_at(hf, f"{key}.{name}") for key in ROPE for name in ("rope_type", "type"))
    return next((kind for kind in kinds if kind is not None), "default")


def _factor(hf: HF) -> float:
    factor = next((found for key in ROPE if (found := _at(hf, f"{key}.factor")) is not None), 1.0)
    return float(factor)


def _positions(hf: HF) -> Any:
    if _base(hf) is None:
        return _known(hf, "rope")
    return "yarn" if _stretching(hf) == "yarn" and not _is_latent(hf) else "rope"


def _rotated(hf: HF) -> Any:
    if _base(hf) is None and _known(hf, True) is None:
        return None
    share = next((found for key in SHARE if (found := _at(hf, key)) is not None), None)
    return (0.5 if hf.get("model_type") in ("glm4", "glm4_moe") else 1.0) if share is None else share


def _yarn_scale(name: str) -> Callable[[HF], Any]:
    def value(hf: HF) -> Any:
        if _stretching(hf) != "yarn" or _factor(hf) == 1.0:
            return ANYTHING
        return next((found for key in ROPE if (found := _at(hf, f"{key}.{name}")) is not None), None)

    return value


def _score_function(hf: HF) -> Any:
    if not _has_experts(hf):
        return None
    return hf.get("scoring_func") or _known(hf, "sigmoid" if hf.get("model_type") in SIGMOID_FAMILIES else "softmax")


def _weighs_all(hf: HF) -> Any:
    """Whether expert weights are a softmax over all experts, without renormalization."""
    if _score_function(hf) == "sigmoid":
        return ANYTHING
    if not _has_experts(hf):
        return None
    by_family = hf.get("model_type") not in ("qwen2_moe", "qwen3_moe", "deepseek_v2")
    return _known(hf, not hf.get("norm_topk_prob", by_family))


def _expert_width(hf: HF) -> Any:
    if hf.get("moe_intermediate_size") is not None:
        return hf["moe_intermediate_size"]
    return hf.get("intermediate_size") if hf.get("model_type") in ("gpt_oss", "mixtral") else None


def _shared_width(hf: HF) -> Any:
    if hf.get("shared_expert_intermediate_size") is not None:
        return hf["shared_expert_intermediate_size"]
    width = (hf.get("moe_intermediate_size") or 0) * (hf.get("n_shared_experts") or 0)
    return width or None


def _expert_layers(hf: HF) -> Any:
    num_layers = hf.get("num_hidden_layers")
    if num_layers is None or not _has_experts(hf):
        return None
    if hf.get("first_k_dense_replace") is not None:
        first, every = hf["first_k_dense_replace"], hf.get("moe_layer_freq") or 1
        return _pattern([layer >= first and layer % every == 0 for layer in range(num_layers)])
    dense: set[int] = set(hf.get("mlp_only_layers") or ())
    every = hf.get("decoder_sparse_step") or 1
    return _known(hf, _pattern([layer not in dense and (layer + 1) % every == 0 for layer in range(num_layers)]))


def layers_with_experts(text: str, num_layers: int) -> list[bool] | None:
    """Parse --moe-layer-freq as Megatron does, without evaluating code; None if it is not a pattern.

    >>> layers_with_experts("[0]*2+[1]*1", 3), layers_with_experts("2", 3)
    ([False, False, True], [True, False, True])
    """
    text = re.sub(r"[\s()]", "", text)
    if re.fullmatch(r"[1-9]\d*", text):
        return [layer % int(text) == 0 for layer in range(num_layers)]
    layers: list[bool] = []
    for part in text.split("+"):
        match = re.fullmatch(r"\[([01](?:,[01])*)\](?:\*(\d{1,4}))?", part)
        if match is None:
            return None
        layers += [number == "1" for number in match[1].split(",")] * int(match[2] or 1)
    return layers


def _pattern(layers: list[bool]) -> str:
    """Return the shortest pattern of a list of layers.

    >>> _pattern([False, True, True])
    '[0]*1+[1]*2'
    """
    runs = re.findall(r"0+|1+", "".join(str(int(layer)) for layer in layers))
    return "+".join(f"[{run[0]}]*{len(run)}" for run in runs)


BASE = ("rope_parameters.rope_theta", "rope_theta", "rope_scaling.rope_theta")
SHARE = ("rope_parameters.partial_rotary_factor", "partial_rotary_factor")
STRETCHING = tuple(f"{key}.{name}" for key in ROPE for name in ("rope_type", "type"))
FACTOR = tuple(f"{key}.factor" for key in ROPE)
_NOTHING = Fact((), lambda _: ANYTHING)

FACTS: dict[str, Fact] = {
    "num_layers": _first("num_hidden_layers"),
    "hidden_size": _first("hidden_size"),
    "ffn_hidden_size": _first("intermediate_size"),
    "num_attention_heads": _first("num_attention_heads"),
    "group_query_attention": Fact(
        ("num_attention_heads", "num_key_value_heads"), lambda hf: not _is_latent(hf) and _groups(hf) != _heads(hf)
    ),
    "num_query_groups": Fact(("num_key_value_heads", "num_attention_heads"), _groups),
    "kv_channels": Fact(("head_dim", "v_head_dim", "hidden_size", "num_attention_heads"), _head_width),
    "qk_layernorm": Fact(("model_type", "use_qk_norm"), _normalizes_heads),
    "add_qkv_bias": Fact(("model_type", "attention_bias", "qkv_bias"), _has_qkv_bias),
    "disable_bias_linear": Fact(("model_type", "attention_bias", "mlp_bias"), _has_no_other_bias),
    "swiglu": Fact(("model_type", "hidden_act"), _is_swiglu),
    "quick_geglu": Fact(("model_type",), _is_gpt_oss),
    "glu_linear_offset": _near(
        Fact(("model_type",), lambda hf: _known(hf, GPT_OSS_OFFSET if _is_gpt_oss(hf) else 0.0))
    ),
    "activation_func_clamp_value": _near(
        Fact(
            ("model_type", "swiglu_limit"),
            lambda hf: hf.get("swiglu_limit", GPT_OSS_CLAMP if _is_gpt_oss(hf) else None),
        )
    ),
    "softmax_type": Fact(("model_type",), lambda hf: _known(hf, "learnable" if _is_gpt_oss(hf) else "vanilla")),
    "window_size": Fact(("sliding_window",), _window, lambda given, own: _sees(given) in (own, own - 1)),
    "window_attn_skip_freq": Fact(("layer_types",), _whole_layers),
    "enable_gpt_oss": Fact(("model_type",), _is_gpt_oss),
    "normalization": Fact(("model_type", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), _normalization),
    "norm_epsilon": _near(_first("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")),
    "attention_dropout": _near(_first("attention_dropout", "attn_pdrop", default=0.0)),
    "hidden_dropout": _near(_first("hidden_dropout", "resid_pdrop", default=0.0)),
    "vocab_size": _first("vocab_size"),
    "padded_vocab_size": _first("vocab_size"),
    "make_vocab_size_divisible_by": Fact(
        ("vocab_size",), lambda hf: hf.get("vocab_size"), lambda given, own: own % given == 0
    ),
    "untie_embeddings_and_output_weights": Fact(("model_type", "tie_word_embeddings"), _is_untied),
    "max_position_embeddings": _first("max_position_embeddings"),
    "position_embedding_type": Fact(
        (*BASE, *STRETCHING, "model_type"),
        _positions,
        lambda given, own: given == own or (given, own) == ("rope", "yarn"),
    ),
    "use_rotary_position_embeddings": Fact((*BASE, "model_type"), lambda hf: _positions(hf) is not None),
    "rotary_base": _near(Fact(BASE, _base)),
    "rotary_percent": _near(Fact((*SHARE, "model_type"), _rotated)),
    "rotary_scaling_factor": _near(
        Fact((*FACTOR, "kv_lora_rank"), lambda hf: _factor(hf) if _is_latent(hf) or _stretching(hf) == "yarn" else None)
    ),
    "mscale": _near(Fact(("rope_parameters.mscale", "rope_scaling.mscale"), _yarn_scale("mscale"))),
    "mscale_all_dim": _near(
        Fact(("rope_parameters.mscale_all_dim", "rope_scaling.mscale_all_dim"), _yarn_scale("mscale_all_dim"))
    ),
    "use_rope_scaling": Fact((*STRETCHING, "model_type"), lambda hf: _stretching(hf) == "llama3"),
    "rope_scaling_factor": _near(
        Fact((*STRETCHING, *FACTOR, "model_type"), lambda hf: _factor(hf) if _stretching(hf) == "llama3" else None)
    ),
    "multi_latent_attention": Fact(("kv_lora_rank",), _is_latent),
    "q_lora_rank": _first("q_lora_rank"),
    "kv_lora_rank": _first("kv_lora_rank"),
    "qk_head_dim": _first("qk_nope_head_dim"),
    "qk_pos_emb_head_dim": _first("qk_rope_head_dim"),
    "v_head_dim": _first("v_head_dim"),
    "num_experts": _first(*NUM_EXPERTS),
    "moe_layer_freq": Fact(
        (*NUM_EXPERTS, "num_hidden_layers", "first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step"),
        _expert_layers,
    ),
    "moe_ffn_hidden_size": Fact(("moe_intermediate_size", "intermediate_size"), _expert_width),
    "moe_shared_expert_intermediate_size": Fact(
        ("shared_expert_intermediate_size", "n_shared_experts", "moe_intermediate_size"), _shared_width
    ),
    "moe_router_topk": _first(*TOP_K),
    "moe_router_score_function": Fact(("model_type", "scoring_func"), _score_function),
    "moe_router_pre_softmax": Fact(("model_type", "norm_topk_prob"), _weighs_all),
    "moe_router_topk_scaling_factor": _near(_of_experts(_first("routed_scaling_factor"), 1.0)),
    "moe_router_num_groups": _of_experts(_first("n_group"), 1),
    "moe_router_group_topk": _of_experts(_first("topk_group"), 1),
    "moe_token_drop_policy": _NOTHING,
    "no_masked_softmax_fusion": _NOTHING,
    "no_rope_fusion": _NOTHING,
    "no_bias_swiglu_fusion": _NOTHING,
    "no_bias_gelu_fusion": _NOTHING,
    "no_bias_dropout_fusion": _NOTHING,
    "no_position_embedding": Fact((*BASE, "model_type"), lambda hf: _positions(hf) is not None),
    "attention_softmax_in_fp32": _NOTHING,
}
