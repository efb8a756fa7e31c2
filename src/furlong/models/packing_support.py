"""Whether a transformers model can run packed sequences, one sequence at a time, or cannot be trained.

Packing several sequences in one row is correct if tokens mix only in attention, the attention is furlong's, and the
model uses the caller's position ids. Otherwise some models can still run one sequence at a time.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from furlong.errors import ConfigError

if TYPE_CHECKING:  # it takes a second to import
    from transformers import PreTrainedModel

# Kinds of layers in which tokens attend to earlier tokens, or a window of them.
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
# Recurrent kinds of layers.
RECURRENT_LAYERS = frozenset({"linear_attention", "mamba", "recurrent", "conv", "hybrid", "hybrid_sliding"})
# Families with a sliding window only in their masks, which packed attention does not get.
WINDOW_IN_MASKS = frozenset({"phimoe"})
TOKENWISE_LAYERS = frozenset({"mlp", "moe"})
REMEDY = "give a decoder of attention layers, such as Qwen, Llama, Gemma or gpt-oss, as --hf-checkpoint"


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


def single_sequence_reason(model: PreTrainedModel) -> str:
    """Return why sequences of this family cannot be packed; "" if they can."""
    if kinds := recurrent_kinds(model.config):
        return f"has recurrent layers ({', '.join(kinds)}), whose state would leak from one sequence into the next"
    if not takes_positions(model):
        return "ignores position_ids and does not number positions per sequence"
    return ""


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


def _untrainable(model: PreTrainedModel) -> str:
    dispatches: Any = getattr(type(model), "_can_set_attn_implementation", None)  # not a public name
    if dispatches is not None and not dispatches():
        return "has its own attention, which cannot be replaced by packed attention"
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
