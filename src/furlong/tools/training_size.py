"""What memory depends on: the dimensions of a model, and how it is trained (`tools.memory_phases` counts the bytes)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from furlong.errors import ConfigError
from furlong.training.megatron.parallel_layout import Layout


@dataclass(frozen=True)
class ModelSize:
    """Dimensions of a decoder. `intermediate` is that of dense MLPs, `moe_intermediate` of one expert."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate: int = 0

    @staticmethod
    def read(config: Mapping[str, Any]) -> ModelSize:
        """Read a model folder's config.json. Raises ConfigError for a model whose dimensions are not there."""
        config = config.get("text_config") or config
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            intermediate = int(config.get("intermediate_size") or config["moe_intermediate_size"])
            experts = (
                config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0
            )
            return ModelSize(
                layers=int(config["num_hidden_layers"]),
                hidden=hidden,
                intermediate=intermediate,
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                vocab=int(config["vocab_size"]),
                is_tied=bool(config.get("tie_word_embeddings", True)),
                experts=int(experts),
                experts_per_token=int(config.get("num_experts_per_tok") or 0),
                moe_intermediate=int(config.get("moe_intermediate_size") or intermediate) if experts else 0,
            )
        except KeyError as error:
            raise ConfigError(
                f"config.json of a {config.get('model_type', 'nameless')} model has no {error}; its memory cannot be "
                "predicted"
            ) from error

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and as many of the head."""
        return self.vocab * self.hidden

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        if not self.experts:
            return attention + 3 * self.hidden * self.intermediate
        return attention + self.hidden * self.experts + self.experts * 3 * self.hidden * self.moe_intermediate

    @property
    def parameters(self) -> int:
        """All parameters but norms and biases, which are too few to count."""
        return self.layers * self.layer + self.embedding * (1 if self.is_tied else 2)

    @property
    def mlp_width(self) -> int:
        """Width of the MLP rows that one token has in a layer."""
        return self.experts_per_token * self.moe_intermediate if self.experts else self.intermediate

    @property
    def kept_per_token(self) -> int:
        """What one compiled layer keeps of one token for the backward pass."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        rows = 2 * queries + 2 * keys + 2 * self.hidden + 2 * self.mlp_width
        if self.experts:  # tokens are sorted by expert, and the experts' outputs are kept before they are added up
            rows += 2 * self.experts_per_token * self.hidden
        return 2 * rows + 4 * self.heads

    @property
    def kv_per_token(self) -> int:
        """Keys and values of one token in all layers, in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Training:
    """What decides the trainer's memory on one rank.

    tokens: of a micro-batch on this rank (--max-tokens-per-gpu, or those of a longer sample). shards: ranks that share
    one copy of the model; with a `layout`, which is Megatron's, all training ranks. frozen_models: reference, teacher,
    old actor. whole_layers: --recompute-activations. is_offloaded: moments are in the host's memory but for the
    optimizer step, and with `masters_too` so are float32 masters that are no parameters themselves. on_cpu: the device
    is the machine itself, where nothing is compiled or recomputed unless it is asked for.
    """

    tokens: int
    shards: int = 1
    frozen_models: int = 0
    whole_layers: bool = False
    is_offloaded: bool = False
    masters_too: bool = False
    is_half: bool = True
    num_moments: int = 2
    on_cpu: bool = False
    layout: Layout | None = None

    @property
    def on_device(self) -> Training:
        """The same with nothing offloaded: what it is during an optimizer step."""
        return replace(self, is_offloaded=False, masters_too=False)
