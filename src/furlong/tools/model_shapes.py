"""Shapes of the tensors that a model needs, from its config.json, for families with known dense layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from furlong.tools.model_folder import StoredModel

Shape = tuple[int | None, ...]  # None: a size that config.json leaves to the default of its family
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DENSE = ("llama", "mistral", "qwen2", "qwen3")
NORMALIZED = ("qwen3",)  # with norms of queries and keys, and a head_dim that does not follow from hidden_size
WITH_HIDDEN_HEADS = ("llama", "qwen2")  # head_dim defaults to hidden_size / num_attention_heads


def embedding_shapes(config: Mapping[str, Any]) -> Mapping[str, Shape]:
    """Return the shapes of the embedding and, unless it is tied, the output layer; {} if config.json has no sizes."""
    vocab, width = _size(config, "vocab_size"), _size(config, "hidden_size")
    if vocab is None or width is None:
        return {}
    return {EMBEDDING: (vocab, width)} | ({} if config.get("tie_word_embeddings") else {HEAD: (vocab, width)})


def needed_shapes(config: Mapping[str, Any]) -> Mapping[str, Shape]:
    """Return the shape of each tensor that a model needs. {} for families other than `DENSE`, or without sizes."""
    family, layers = config.get("model_type"), _size(config, "num_hidden_layers")
    shapes = embedding_shapes(config)
    if family not in DENSE or layers is None or not shapes or _size(config, "num_attention_heads") is None:
        return {}
    layer = _layer_shapes(config, str(family))
    numbered = {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()}
    return {**shapes, **numbered, "model.norm.weight": (config["hidden_size"],)}


def _layer_shapes(config: Mapping[str, Any], family: str) -> dict[str, Shape]:
    """Return the shapes of one layer."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    wide = _size(config, "intermediate_size")
    kv_heads = _size(config, "num_key_value_heads") or (heads if family == "llama" else None)
    head = _size(config, "head_dim") or (width // heads if family in WITH_HIDDEN_HEADS else None)
    queries = None if head is None else heads * head
    keys = None if head is None or kv_heads is None else kv_heads * head
    shapes: dict[str, Shape] = {
        "self_attn.q_proj.weight": (queries, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (width, queries),
        "mlp.gate_proj.weight": (wide, width),
        "mlp.up_proj.weight": (wide, width),
        "mlp.down_proj.weight": (width, wide),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    if family in NORMALIZED:
        shapes |= {f"self_attn.{name}_norm.weight": (head,) for name in ("q", "k")}
    if family == "qwen2" or config.get("attention_bias"):
        sizes = {"q": queries, "k": keys, "v": keys}
        shapes |= {f"self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    return shapes


def misfits(model: StoredModel) -> tuple[list[str], list[str]]:
    """Return the tensors that config.json needs and no shard contains, and those of another shape, described.

    Names may lack the prefix `model.`, as in folders of a base model without output layer.
    """
    config, stored = model.text_config, model.tensors
    needed = needed_shapes(config)
    missing: list[str] = []
    other: list[str] = []
    for name, shape in (needed or embedding_shapes(config)).items():
        tensor = stored.get(name) or stored.get(name.removeprefix("model."))
        if tensor is None:
            missing += [name] if needed else []
        elif len(tensor.shape) != len(shape) or any(
            size is not None and size != actual for size, actual in zip(shape, tensor.shape, strict=True)
        ):
            expected = ", ".join("?" if size is None else str(size) for size in shape)
            other.append(f"{name} is {list(tensor.shape)}, expected [{expected}]")
    return missing, other


def _size(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and value > 0 else None
