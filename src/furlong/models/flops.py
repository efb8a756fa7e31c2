"""Count forward FLOPs of a Hugging Face model from its parameters and its config.

Every matrix element costs one multiply-add per token, those of experts only for the tokens routed to them. Attention
costs the GEMMs of queries with keys and of probabilities with values.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from furlong.core.batch import FlopsModel
from furlong.core.routing import RoutingShape


def forward_flops(model: PreTrainedModel) -> FlopsModel:
    """Return the FLOPs model of an unsharded model, which may be on the meta device."""
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
    widths = _score_width(config) + _value_width(config)
    coefficient = float(config.num_attention_heads * widths)
    windows = [window for window in layer_windows(config) if window is not None]
    num_whole = config.num_hidden_layers - len(windows)
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


def _score_width(config: Any) -> int:
    """Return the width of a query or key head."""
    if getattr(config, "kv_lora_rank", None):
        return config.qk_nope_head_dim + config.qk_rope_head_dim
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _value_width(config: Any) -> int:
    """Return the width of a value head."""
    return config.v_head_dim if getattr(config, "kv_lora_rank", None) else _score_width(config)
