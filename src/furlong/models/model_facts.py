"""Facts about a transformers model that need no torch: whether it can run packed sequences, its FLOPs, its memory.

Packing several sequences in one row is correct if tokens mix only in attention and gated delta nets, the attention is
furlong's, and the model uses the caller's position ids. Otherwise some models can still run one sequence at a time.

Every matrix element costs one multiply-add per token, those of experts only for the tokens routed to them. Attention
costs the GEMMs of queries with keys and of probabilities with values.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

from furlong.core.routing import RoutingShape
from furlong.errors import ConfigError

if TYPE_CHECKING:  # they take seconds to import
    from transformers import PreTrainedModel

    from furlong.core.batch import FlopsModel

logger = logging.getLogger(__name__)

# Kinds of layers in which tokens attend to earlier tokens, or a window of them.
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
# Recurrent kinds of layers.
RECURRENT_LAYERS = frozenset({"linear_attention", "mamba", "recurrent", "conv", "hybrid", "hybrid_sliding"})
DELTA_PARTS = (  # of the gated delta nets of Qwen3-Next; Qwen3.5; OLMo Hybrid, beside their convolution
    {"in_proj_qkvz", "in_proj_ba", "norm", "out_proj"},
    {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "norm", "out_proj"},
    {"q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj", "o_norm", "o_proj"},
)
DELTA_LAYERS = "linear_attention"  # the kind of gated delta nets, and of other layers
# Families with a sliding window only in their masks, which packed attention does not get.
WINDOW_IN_MASKS = frozenset({"phimoe"})
TOKENWISE_LAYERS = frozenset({"mlp", "moe"})
OWN_ATTENTION = "has its own attention, which cannot be replaced by packed attention"
REMEDY = "give a decoder of attention layers, such as Qwen, Llama, Gemma or gpt-oss, as --hf-checkpoint"

GPU_KV_FRAC = 0.4  # of the free memory of a GPU, for the KV cache of an embedded engine
# Memory of training steps.
HEADROOM_FRAC = 0.04  # fraction of the device left free for fragmentation and estimation errors
BACKWARD_ROWS = 6  # rows of the MLP's intermediate width per token that exist at once in a layer's backward pass
COMPILED_FROM = 250_000_000  # parameters; above this, compiling the decoder layers on a GPU (about a minute) pays off


def layer_kinds(config: Any) -> set[str]:
    """Return the kinds of a model's layers; empty for a family that has only one and does not name it."""
    return set(getattr(config.get_text_config(), "layer_types", None) or ())


def recurrent_kinds(config: Any) -> list[str]:
    """Return the kinds of recurrent layers, whose state would leak between packed sequences."""
    return sorted(layer_kinds(config) & RECURRENT_LAYERS)


def check_family(model: PreTrainedModel) -> None:
    """Raise ConfigError for a family that packed attention or the chunked output layer would compute incorrectly."""
    if reason := _untrainable(model):
        raise ConfigError(
            f"{type(model).__name__} ({model.config.model_type}) {reason}; this model family cannot be trained: "
            f"{REMEDY}"
        )


def check_attention(model: PreTrainedModel) -> None:
    """Raise ConfigError for a family with its own attention, where packed attention would silently not be used."""
    if _has_own_attention(model):
        raise ConfigError(f"{type(model).__name__} ({model.config.model_type}) {OWN_ATTENTION}: {REMEDY}")


def single_sequence_reason(model: PreTrainedModel) -> str:
    """Return why sequences of this family cannot be packed; "" if they can."""
    kinds = recurrent_kinds(model.config)
    if kinds and not has_only_delta_nets(model):
        return f"has recurrent layers ({', '.join(kinds)}), whose state would leak from one sequence into the next"
    if not takes_positions(model):
        return "ignores position_ids and does not number positions per sequence"
    return ""


def delta_nets(model: Any) -> list[Any]:
    """Return a model's gated delta nets, which `packed_model` runs on packed sequences."""
    return [module for module in model.modules() if _is_delta_net(module)]


def _is_delta_net(module: Any) -> bool:
    if not type(module).__name__.endswith("GatedDeltaNet"):
        return False
    parts = {name for name, part in module.named_children() if next(part.parameters(), None) is not None} - {"conv1d"}
    has_bias = getattr(getattr(module, "conv1d", None), "bias", None) is not None
    return parts in DELTA_PARTS and module.activation in ("silu", "swish") and not has_bias


def has_only_delta_nets(model: Any) -> bool:
    """Whether all recurrent layers of a model are gated delta nets."""
    layers: list[str] = list(getattr(model.config.get_text_config(), "layer_types", None) or ())
    recurrent = [kind for kind in layers if kind in RECURRENT_LAYERS]
    return recurrent == [DELTA_LAYERS] * len(delta_nets(model))


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether the model below the head accepts `position_ids`; a wrapper passes its arguments to its decoder."""
    part: Any = model.base_model
    parameters = inspect.signature(part.forward).parameters
    if any(each.kind is each.VAR_POSITIONAL for each in parameters.values()):
        parameters = inspect.signature(getattr(part, "decoder", part).forward).parameters
    return "position_ids" in parameters


def hidden_window(config: Any) -> str:
    """Return why a sliding window of this config would be ignored; "" if there is none or attention receives it."""
    window = getattr(config, "sliding_window", None)
    if config.model_type not in WINDOW_IN_MASKS or window is None or window >= config.max_position_embeddings:
        return ""
    return f"has a sliding window of {window} tokens only in its masks"


def length_limit(config: Any) -> int | None:
    """Return the length up to which rotary embeddings do not depend on the longest sequence; None without a limit.

    With "longrope" and "dynamic", one longer sequence changes the frequencies of all positions.
    """
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    limits = [
        rope.get("original_max_position_embeddings") or text.max_position_embeddings
        for rope in (parameters, *parameters.values())  # of the model, or per kind of layer
        if isinstance(rope, dict) and rope.get("rope_type") in ("longrope", "dynamic")
    ]
    return min(limits, default=None)


def _has_own_attention(model: PreTrainedModel) -> bool:
    dispatches: Any = getattr(type(model), "_can_set_attn_implementation", None)  # not a public name
    return dispatches is not None and not dispatches()


def _untrainable(model: PreTrainedModel) -> str:
    if _has_own_attention(model):
        return OWN_ATTENTION
    if not hasattr(model.config, "num_attention_heads"):
        return "is not a text decoder with attention (its config.json has no num_attention_heads)"
    if kinds := sorted(layer_kinds(model.config) - ATTENTION_LAYERS - RECURRENT_LAYERS - TOKENWISE_LAYERS):
        return f"has {', '.join(kinds)} layers, which choose the tokens to attend to themselves"
    if reason := hidden_window(model.config):
        return reason
    parts: tuple[Any, ...] = (model.base_model, model.get_output_embeddings())
    known = {id(parameter) for part in parts for parameter in part.parameters()}
    if others := [name for name, parameter in model.named_parameters() if id(parameter) not in known]:
        return (
            f"has parameters between its last layer and its head ({', '.join(others[:3])}), which would not be applied"
        )
    return ""


def forward_flops(model: PreTrainedModel) -> FlopsModel:
    """Return the FLOPs model of an unsharded model, which may be on the meta device."""
    from furlong.core.batch import FlopsModel

    config: Any = model.config.get_text_config()
    routing = RoutingShape.of(config.to_dict())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    matrices: Any = 0 if head is None else head.weight.numel()
    for name, parameter in model.named_parameters():
        is_counted = any(parameter is module.weight for module in (embedding, head) if module is not None)
        if parameter.ndim < 2 or is_counted or name.endswith("bias"):
            continue
        size = parameter.numel()
        matrices += size * routing.top_k / routing.num_experts if routing and ".experts." in name else size
    widths = 2 * head_width(config)
    if getattr(config, "kv_lora_rank", None):
        widths = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    coefficient = float(config.num_attention_heads * widths)
    windows = [window for window in layer_windows(config) if window is not None]
    num_recurrent = sum(kind in RECURRENT_LAYERS for kind in getattr(config, "layer_types", None) or ())
    num_whole = config.num_hidden_layers - len(windows) - num_recurrent
    sizes = sorted(set(windows))
    return FlopsModel(
        per_token=2.0 * matrices,
        per_pair=num_whole * coefficient,
        windows=tuple((size, windows.count(size) * coefficient) for size in sizes),
    )


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """Return the attention window of each layer in tokens, including the query itself; None is unlimited."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def head_width(config: Any) -> int:
    """Return the width of a head, which queries, keys and values share except with latent attention (MLA)."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def logits_bytes(*, on_cpu: bool) -> int:
    """Return the bytes of float32 logits that exist at a time if --log-probs-chunk-size is not set."""
    return 2**27 if on_cpu else 2**30


def chunk_rows(chosen: int, vocab_size: int, *, on_cpu: bool) -> int:
    """Return the response tokens whose logits exist at a time: `chosen` if positive, otherwise by memory.

    >>> chunk_rows(-1, 151_936, on_cpu=False), chunk_rows(-1, 151_936, on_cpu=True), chunk_rows(64, 8, on_cpu=True)
    (1766, 220, 64)
    """
    return chosen if chosen > 0 else max(logits_bytes(on_cpu=on_cpu) // (4 * vocab_size), 1)


def is_worth_compiling(num_parameters: int, device: Any, dtype: Any) -> bool:
    """Whether compiling the decoder layers in the first micro-batches, which takes about a minute, pays off."""
    is_worth_it = device.type == "cuda" and str(dtype) == "torch.bfloat16" and num_parameters >= COMPILED_FROM
    if is_worth_it:
        billions = num_parameters / 1e9
        logger.info("decoder layers are compiled during the first micro-batches: %.1f B parameters on a GPU", billions)
    return is_worth_it
