"""What of a transformers model family decides how its sequences can be run.

Several sequences in one row are right if tokens meet in attention only, if that attention is ours, and if positions are
those that the caller gives. Where only the row is wrong a model can run one sequence at a time.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from furlong.errors import ConfigError

if TYPE_CHECKING:  # it takes a second to import
    from transformers import PreTrainedModel

# Kinds of layers in which a token sees those before it, or a window of them.
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
# Kinds of layers that carry a state from token to token.
STATE_LAYERS = frozenset({"linear_attention", "mamba", "recurrent", "conv", "hybrid", "hybrid_sliding"})
# Families that have a sliding window in their masks only, which attention of ours never sees.
WINDOW_IN_MASKS = frozenset({"phimoe"})
TOKENWISE_LAYERS = frozenset({"mlp", "moe"})
WAY_OUT = "give a decoder of attention layers, such as Qwen, Llama, Gemma or gpt-oss, as --hf-checkpoint"


def layer_kinds(config: Any) -> set[str]:
    """The kinds of a model's layers; empty for a family that has one kind only and does not name it."""
    return set(getattr(config.get_text_config(), "layer_types", None) or ())


def state_kinds(config: Any) -> list[str]:
    """The kinds of layers that carry a state from token to token, of which there should be none in a packed row."""
    return sorted(layer_kinds(config) & STATE_LAYERS)


def check_family(model: PreTrainedModel) -> None:
    """Raise ConfigError for a family that packed attention or the chunked output layer would compute wrongly."""
    if reason := _untrainable(model):
        raise ConfigError(
            f"{type(model).__name__} ({model.config.model_type}) {reason}; this model family cannot be trained: "
            f"{WAY_OUT}"
        )


def single_sequence_reason(model: PreTrainedModel) -> str:
    """Why sequences of this family must not share a row; empty if they may."""
    if kinds := state_kinds(model.config):
        return f"has layers of kind {', '.join(kinds)}, which carry a state from one sequence into the next"
    if not takes_positions(model):
        return "numbers positions itself and not by sequence"
    return ""


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether the part below the head takes `position_ids`: all arguments of a wrapper go to the decoder in it."""
    part: Any = model.base_model
    parameters = inspect.signature(part.forward).parameters
    if any(each.kind is each.VAR_POSITIONAL for each in parameters.values()):
        parameters = inspect.signature(getattr(part, "decoder", part).forward).parameters
    return "position_ids" in parameters


def hidden_window(config: Any) -> str:
    """Why a sliding window of this config would be left out; empty if there is none, or attention is told of it."""
    window = getattr(config, "sliding_window", None)
    if config.model_type not in WINDOW_IN_MASKS or window is None or window >= config.max_position_embeddings:
        return ""
    return f"has a sliding window of {window} tokens of which only its masks know"


def length_limit(config: Any) -> int | None:
    """Tokens up to which what a token's position does is independent of the longest sequence; None: of any length.

    Rotary frequencies of the kinds "longrope" and "dynamic" are others for all positions where one lies beyond it.
    """
    text = config.get_text_config()
    given = getattr(text, "rope_parameters", None) or {}
    limits = [
        rope.get("original_max_position_embeddings") or text.max_position_embeddings
        for rope in (given, *given.values())  # of the model, or of each kind of layer
        if isinstance(rope, dict) and rope.get("rope_type") in ("longrope", "dynamic")
    ]
    return min(limits, default=None)


def _untrainable(model: PreTrainedModel) -> str:
    dispatches: Any = getattr(type(model), "_can_set_attn_implementation", None)  # no public name says it
    if dispatches is not None and not dispatches():
        return "has attention of its own that cannot be replaced by packed attention"
    if not hasattr(model.config, "num_attention_heads"):
        return "is no decoder of text with attention (its config.json has no num_attention_heads)"
    if kinds := sorted(layer_kinds(model.config) - ATTENTION_LAYERS - STATE_LAYERS - TOKENWISE_LAYERS):
        return f"has layers of kind {', '.join(kinds)}, which choose the tokens that they see themselves"
    if reason := hidden_window(model.config):
        return reason
    parts: tuple[Any, ...] = (model.base_model, model.get_output_embeddings())
    known = {id(parameter) for part in parts for parameter in part.parameters()}
    if others := [name for name, parameter in model.named_parameters() if id(parameter) not in known]:
        return (
            f"has parameters between its last layer and its head ({', '.join(others[:3])}), and only a head is applied"
        )
    return ""
