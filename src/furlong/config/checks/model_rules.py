"""Rules of the model: architecture flags against config.json, one row per flag, and expert routing."""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from furlong.config.checks.engine_checks import is_served
from furlong.config.checks.value_checks import read_model_config
from furlong.config.flag_spec import FlagSpec, flag_specs
from furlong.config.sections import Config
from furlong.core.routing import NUM_EXPERTS, TOP_K, RoutingShape
from furlong.errors import ConfigError

HF = Mapping[str, Any]  # config.json; of a multimodal model, the part of the text model

# gpt-oss' gated activation: bound of its inputs if config.json has no `swiglu_limit`, and offset of the linear half.
GPT_OSS_CLAMP, GPT_OSS_OFFSET = 7.0, 1.0
ANYTHING = object()  # the flag has no meaning for this model, so that any value is accepted
LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2")
# Attention with an output gate, norms stored as the difference from 1; the second also has gated shared experts.
GATED_FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
GATED_EXPERT_FAMILIES = ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text")
NORMALIZED_FAMILIES = ("minimax_m2", "qwen3", "qwen3_moe", *GATED_FAMILIES, *LATENT_FAMILIES)
# Their routers also have a selection bias.
SIGMOID_FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "minimax_m2")
WITH_PLAIN_OUTPUT = ("glm4", "glm4_moe", "mimo", "qwen2", "qwen2_moe")  # `attention_bias` is of q, k and v only
# Families with known layers: all use RMSNorm, RoPE and, except for gpt-oss, SwiGLU.
FAMILIES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "glm4", "glm4_moe", "gpt_oss", "mimo", "minimax_m2"),
    *NORMALIZED_FAMILIES,
)
PLUGINS = "slime_plugins.models."
# Modules of `slime_plugins.models`, whose layers --spec names, and the families that they are for.
SPECS = {
    "glm4": ("glm4",),
    "glm5": ("glm_moe_dsa",),
    "minimax_m2": ("minimax_m2",),
    "qwen3_5": ("qwen3_5_text", "qwen3_5_moe_text"),
    "qwen3_next": ("qwen3_next",),
}


@dataclass(frozen=True)
class Fact:
    """One row: the keys of config.json that determine the value, the value, and its comparison with the flag.

    `value` returns None if config.json does not determine it. Keys are separated by spaces; a dot is a nested key.
    """

    keys: str
    value: Callable[[HF], Any]
    agrees: Callable[[Any, Any], bool] = operator.eq


def model_problems(config: Config) -> Iterator[str]:
    """Yield flags that contradict config.json, or have no effect with this model."""
    flags = {
        spec: value
        for spec in flag_specs(Config).values()
        if spec.section in ("architecture", "moe") and (value := spec.value_in(config)) != spec.default
    }
    if not flags:
        return
    try:
        path, hf = read_model_config(config.rollout.hf_checkpoint)
    except ConfigError as error:
        yield f"--hf-checkpoint: {error}"
        return
    if routers := [spec for spec in flags if spec.section == "moe"]:
        yield from _routing_problems(config, routers, hf)
    hf = hf.get("text_config") or hf
    if not hf:
        return  # reported for --hf-checkpoint
    for spec, value in flags.items():
        if spec.section == "architecture":
            yield from _mismatch(spec, value, hf, str(path))


def _mismatch(spec: FlagSpec, value: Any, hf: HF, path: str) -> Iterator[str]:
    """Yield the problem if an architecture flag differs from config.json."""
    fact = FACTS[spec.field]
    actual = fact.value(hf)
    if spec.field == "moe_layer_freq" and layers_with_experts(value, 0) is None:
        yield f"{spec.flag} {value} is not a layer pattern; write a number, or a list such as [0]*3+[1]*58"
    elif actual is not ANYTHING and (actual is None or not fact.agrees(value, actual)):
        is_switch, content = spec.type is bool, _content(hf, fact.keys.split())
        written = spec.flag if is_switch else f"{spec.flag} {_shown(value)}"
        is_plain = actual is None or is_switch or content.endswith(f" {json.dumps(actual)}")
        meaning = "" if is_plain else f", that is {_shown(actual)}"
        yield (
            f"{written} does not match the model: {path} has {content}{meaning}; remove {spec.flag}, as the model is "
            "built from config.json, or give another model with --hf-checkpoint"
        )


def _content(hf: HF, keys: Sequence[str]) -> str:
    """Return the keys of config.json with their values, or that it has none of them."""
    present = [f"{key} {json.dumps(value)}" for key in keys if (value := _first(hf, key)) is not None]
    return ", ".join(present) or "no " + " or ".join(key for key in keys if "." not in key or len(keys) == 1)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _routing_problems(config: Config, flags: Sequence[FlagSpec], hf: HF) -> Iterator[str]:
    """Yield problems of the flags of expert routing that are set."""
    moe = config.moe
    if hf and RoutingShape.of(hf) is None:
        for spec in flags:
            yield f"{spec.flag} has no effect: {config.rollout.hf_checkpoint} has no experts; remove it"
        return
    if moe.moe_router_enable_expert_bias and hf.get("model_type") not in SIGMOID_FAMILIES:
        yield (
            f"--moe-router-enable-expert-bias: routers of {hf.get('model_type')} have no selection bias, so "
            "transformers and engines would ignore it; remove it, or use --moe-aux-loss-coeff"
        )
    if moe.use_rollout_routing_replay and moe.log_routing_agreement is not None:
        no = "" if moe.log_routing_agreement else "no-"
        yield f"--{no}log-routing-agreement has no effect: --use-rollout-routing-replay logs it; remove one of them"


def routing_of(config: Config) -> RoutingShape | None:
    """Return the routing shape from config.json; None for a dense model or without the file."""
    _, hf = read_model_config(config.rollout.hf_checkpoint)
    return RoutingShape.of(hf)


def returns_routes(config: Config) -> bool:
    """Whether the engine returns its expert choices; never for a dense model."""
    moe = config.moe
    if routing_of(config) is None or config.algo.loss_type == "sft_loss":
        return False
    if moe.log_routing_agreement is None:
        is_in_process = config.cluster.engine == "embedded" and not is_served(config)
        return moe.use_rollout_routing_replay or is_in_process
    return moe.use_rollout_routing_replay or moe.log_routing_agreement


def _first(hf: HF, keys: str, default: Any = None) -> Any:
    """Return the value of the first of these keys that config.json has."""
    for key in keys.split():
        value: Any = hf
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    return default


def _key(keys: str, default: Any = None, agrees: Callable[[Any, Any], bool] = operator.eq) -> Fact:
    """Return the fact of the first of these keys in config.json."""
    return Fact(keys, lambda hf: _first(hf, keys, default), agrees)


def _near(fact: Fact) -> Fact:
    """Return the fact with a tolerance for rounding."""
    return Fact(fact.keys, fact.value, lambda flag, actual: math.isclose(flag, actual, rel_tol=1e-9))


def _of_experts(key: str, default: Any) -> Fact:
    """Return the fact of a key of models with experts."""
    return Fact(f"{key} {NUM_EXPERTS[0]}", lambda hf: _first(hf, key, default) if _has_experts(hf) else None)


def _has_experts(hf: HF) -> bool:
    return any(hf.get(key) for key in NUM_EXPERTS)


def _is_latent(hf: HF) -> bool:
    return bool(hf.get("kv_lora_rank"))


def _known(hf: HF, value: Any) -> Any:
    """Return `value` for families with known layers; None for others."""
    return value if hf.get("model_type") in FAMILIES else None


def _shares_heads(hf: HF) -> bool:
    heads = hf.get("num_attention_heads")
    return not _is_latent(hf) and _first(hf, "num_key_value_heads", heads) != heads


def _head_width(hf: HF) -> Any:
    if _is_latent(hf):
        return ANYTHING  # Megatron-LM ignores it
    if hf.get("head_dim"):
        return hf["head_dim"]
    width, heads = hf.get("hidden_size"), hf.get("num_attention_heads")
    return width // heads if width and heads else None


def _normalizes_heads(hf: HF) -> Any:
    return _known(hf, hf.get("model_type") in NORMALIZED_FAMILIES or bool(hf.get("use_qk_norm")))


def _is_of(*families: str) -> Callable[[HF], Any]:
    """Return the fact that a model is of one of these families; None for unknown families."""
    return lambda hf: _known(hf, hf.get("model_type") in families)


def _dense_width(hf: HF) -> Any:
    """Return the width of dense layers; anything for models in which every layer has experts and none is named."""
    if hf.get("intermediate_size") is not None or not _has_experts(hf):
        return hf.get("intermediate_size")
    return ANYTHING


def _interleaves(hf: HF) -> Any:
    """Whether RoPE rotates neighboring channels; with latent attention Megatron-LM ignores the flag."""
    return ANYTHING if _is_latent(hf) else _known(hf, hf.get("model_type") == "glm4")


def _has_qkv_bias(hf: HF) -> Any:
    if _is_latent(hf):
        return ANYTHING  # Megatron-LM ignores it
    if hf.get("model_type") in ("mimo", "qwen2", "qwen2_moe"):
        return hf.get("qkv_bias") is not False
    return _known(hf, bool(hf.get("attention_bias", hf.get("model_type") == "gpt_oss")))


def _has_no_other_bias(hf: HF) -> Any:
    """Whether experts, feed-forward layers and the attention output have no biases."""
    family = hf.get("model_type")
    after = bool(hf.get("attention_bias")) and family not in WITH_PLAIN_OUTPUT
    return _known(hf, family != "gpt_oss" and not hf.get("mlp_bias") and not after)


def _is_swiglu(hf: HF) -> Any:
    return _known(hf, hf.get("model_type") != "gpt_oss" and hf.get("hidden_act", "silu") in ("silu", "swish"))


def _is_gpt_oss(hf: HF) -> bool:
    return hf.get("model_type") == "gpt_oss"


def _window(hf: HF) -> Any:
    """Return the sliding window including the query's own token; Megatron's scripts count with or without it."""
    return hf.get("sliding_window") if hf.get("use_sliding_window", True) else None


def _sees(window: str) -> int | None:
    """Return the first number of Megatron's `before,after`; None if the window looks ahead or is malformed.

    >>> _sees("127,0"), _sees("(128, 0)"), _sees("128,128")
    (127, 128, None)
    """
    match = re.fullmatch(r"\(?\s*(\d+)\s*,\s*0\s*\)?", window)
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


def _stretching(hf: HF) -> Any:
    """Return the type of RoPE scaling: default, linear, llama3, yarn and others."""
    return _first(hf, STRETCHING, "default")


def _factor(hf: HF) -> float:
    return float(_first(hf, FACTOR, 1.0))


def _positions(hf: HF) -> Any:
    if _first(hf, BASE) is None:
        return _known(hf, "rope")
    return "yarn" if _stretching(hf) == "yarn" and not _is_latent(hf) else "rope"


def _rotated(hf: HF) -> Any:
    if _first(hf, BASE) is None and _known(hf, True) is None:
        return None
    if hf.get("rotary_dim") and hf.get("head_dim"):
        return hf["rotary_dim"] / hf["head_dim"]
    return _first(hf, SHARE, 0.5 if hf.get("model_type") in ("glm4", "glm4_moe") else 1.0)


def _yarn_scale(name: str) -> Fact:
    keys = f"rope_parameters.{name} rope_scaling.{name}"

    def value(hf: HF) -> Any:
        return ANYTHING if _stretching(hf) != "yarn" or _factor(hf) == 1.0 else _first(hf, keys)

    return _near(Fact(keys, value))


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
    return hf.get("intermediate_size") if hf.get("model_type") in ("gpt_oss", "minimax_m2", "mixtral") else None


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
    if (kinds := hf.get("mlp_layer_types")) is not None:
        return _pattern([kind == "sparse" for kind in kinds])
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


def _same_layers(flag: str, pattern: str) -> bool:
    layers = layers_with_experts(pattern, 0) or []
    return layers_with_experts(flag, len(layers)) == layers


def _pattern(layers: list[bool]) -> str:
    """Return the shortest pattern of a list of layers.

    >>> _pattern([False, True, True])
    '[0]*1+[1]*2'
    """
    runs = re.findall(r"0+|1+", "".join(str(int(layer)) for layer in layers))
    return "+".join(f"[{run[0]}]*{len(run)}" for run in runs)


BASE = "rope_parameters.rope_theta rope_theta rope_scaling.rope_theta"
SHARE = "rope_parameters.partial_rotary_factor partial_rotary_factor"
STRETCHING = "rope_parameters.rope_type rope_parameters.type rope_scaling.rope_type rope_scaling.type"
FACTOR = "rope_parameters.factor rope_scaling.factor"
_EXPERT_KEYS = " ".join(NUM_EXPERTS)
_WITHOUT_EFFECT = (
    *("moe_token_drop_policy", "no_masked_softmax_fusion", "no_rope_fusion", "no_bias_swiglu_fusion"),
    *("no_bias_gelu_fusion", "no_bias_dropout_fusion", "attention_softmax_in_fp32"),
)

FACTS: dict[str, Fact] = {
    "num_layers": _key("num_hidden_layers"),
    "hidden_size": _key("hidden_size"),
    "ffn_hidden_size": Fact("intermediate_size", _dense_width),
    "num_attention_heads": _key("num_attention_heads"),
    "group_query_attention": Fact("num_attention_heads num_key_value_heads", _shares_heads),
    "num_query_groups": _key("num_key_value_heads num_attention_heads"),
    "kv_channels": Fact("head_dim hidden_size num_attention_heads", _head_width),
    "qk_layernorm": Fact("model_type use_qk_norm", _normalizes_heads),
    "add_qkv_bias": Fact("model_type attention_bias qkv_bias", _has_qkv_bias),
    "spec": Fact(
        "model_type",
        lambda hf: hf.get("model_type"),
        lambda flag, actual: flag[0].startswith(PLUGINS) and actual in SPECS.get(flag[0].rpartition(".")[2], ()),
    ),
    "use_gated_attention": Fact("model_type", _is_of(*GATED_FAMILIES)),
    "attention_output_gate": Fact("model_type", _is_of(*GATED_FAMILIES)),
    "apply_layernorm_1p": Fact("model_type", _is_of(*GATED_FAMILIES)),
    "post_self_attn_layernorm": Fact("model_type", _is_of("glm4")),
    "post_mlp_layernorm": Fact("model_type", _is_of("glm4")),
    "rotary_interleaved": Fact("model_type", _interleaves),
    "moe_shared_expert_gate": Fact("model_type", _is_of(*GATED_EXPERT_FAMILIES)),
    "mtp_num_layers": _key("num_nextn_predict_layers mtp_num_hidden_layers"),
    "disable_bias_linear": Fact("model_type attention_bias mlp_bias", _has_no_other_bias),
    "swiglu": Fact("model_type hidden_act", _is_swiglu),
    "quick_geglu": Fact("model_type", _is_gpt_oss),
    "glu_linear_offset": _near(Fact("model_type", lambda hf: _known(hf, GPT_OSS_OFFSET if _is_gpt_oss(hf) else 0.0))),
    "activation_func_clamp_value": _near(
        Fact(
            "model_type swiglu_limit",
            lambda hf: hf.get("swiglu_limit", GPT_OSS_CLAMP if _is_gpt_oss(hf) else None),
        )
    ),
    "softmax_type": Fact("model_type", lambda hf: _known(hf, "learnable" if _is_gpt_oss(hf) else "vanilla")),
    "window_size": Fact("sliding_window", _window, lambda flag, actual: _sees(flag) in (actual, actual - 1)),
    "window_attn_skip_freq": Fact("layer_types", _whole_layers),
    "enable_gpt_oss": Fact("model_type", _is_gpt_oss),
    "normalization": Fact("model_type rms_norm_eps layer_norm_eps layer_norm_epsilon", _normalization),
    "norm_epsilon": _near(_key("rms_norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon")),
    "attention_dropout": _near(_key("attention_dropout attn_pdrop", 0.0)),
    "hidden_dropout": _near(_key("hidden_dropout resid_pdrop", 0.0)),
    "vocab_size": _key("vocab_size"),
    "padded_vocab_size": _key("vocab_size"),
    "make_vocab_size_divisible_by": _key("vocab_size", agrees=lambda flag, actual: flag > 0 and actual % flag == 0),
    "untie_embeddings_and_output_weights": Fact("model_type tie_word_embeddings", _is_untied),
    "max_position_embeddings": _key("max_position_embeddings"),
    "position_embedding_type": Fact(
        f"{BASE} {STRETCHING} model_type",
        _positions,
        lambda flag, actual: flag == actual or (flag, actual) == ("rope", "yarn"),
    ),
    "use_rotary_position_embeddings": Fact(f"{BASE} model_type", lambda hf: _positions(hf) is not None),
    "rotary_base": _near(_key(BASE)),
    "rotary_percent": _near(Fact(f"{SHARE} rotary_dim head_dim model_type", _rotated)),
    "rotary_scaling_factor": _near(
        Fact(f"{FACTOR} kv_lora_rank", lambda hf: _factor(hf) if _is_latent(hf) or _stretching(hf) == "yarn" else None)
    ),
    "mscale": _yarn_scale("mscale"),
    "mscale_all_dim": _yarn_scale("mscale_all_dim"),
    "use_rope_scaling": Fact(f"{STRETCHING} model_type", lambda hf: _stretching(hf) == "llama3"),
    "rope_scaling_factor": _near(
        Fact(f"{STRETCHING} {FACTOR} model_type", lambda hf: _factor(hf) if _stretching(hf) == "llama3" else None)
    ),
    "multi_latent_attention": Fact("kv_lora_rank", _is_latent),
    "q_lora_rank": _key("q_lora_rank"),
    "kv_lora_rank": _key("kv_lora_rank"),
    "qk_head_dim": _key("qk_nope_head_dim"),
    "qk_pos_emb_head_dim": _key("qk_rope_head_dim"),
    "v_head_dim": _key("v_head_dim"),
    "num_experts": _key(" ".join(NUM_EXPERTS)),
    "moe_layer_freq": Fact(
        f"{_EXPERT_KEYS} num_hidden_layers first_k_dense_replace mlp_layer_types mlp_only_layers decoder_sparse_step",
        _expert_layers,
        _same_layers,
    ),
    "moe_ffn_hidden_size": Fact("moe_intermediate_size intermediate_size", _expert_width),
    "moe_shared_expert_intermediate_size": Fact(
        "shared_expert_intermediate_size n_shared_experts moe_intermediate_size", _shared_width
    ),
    "moe_router_topk": _key(" ".join(TOP_K)),
    "moe_router_score_function": Fact("model_type scoring_func", _score_function),
    "moe_router_pre_softmax": Fact("model_type norm_topk_prob", _weighs_all),
    "moe_router_topk_scaling_factor": _near(_of_experts("routed_scaling_factor", 1.0)),
    "moe_router_num_groups": _of_experts("n_group", 1),
    "moe_router_group_topk": _of_experts("topk_group", 1),
    "no_position_embedding": Fact(f"{BASE} model_type", lambda hf: _positions(hf) is not None),
} | dict.fromkeys(_WITHOUT_EFFECT, Fact("", lambda _: ANYTHING))
