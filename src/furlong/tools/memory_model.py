"""Inputs of memory predictions: the size of a model, how it is trained, and how Megatron-core shards it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from furlong.errors import ConfigError
from furlong.training.megatron.parallel_layout import Layout


@dataclass(frozen=True)
class ModelSize:
    """Dimensions of a decoder. `intermediate` is the width of dense MLPs, `moe_intermediate` of one expert."""

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
        """Read a model's config.json. Raises ConfigError if a dimension is missing."""
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
                f"config.json of a {config.get('model_type', 'nameless')} model has no {error}, which is needed to "
                "predict its memory"
            ) from error

    @property
    def embedding(self) -> int:
        """Parameters of the embedding; an untied output layer has as many."""
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
        """All parameters except norms and biases, which are negligible."""
        return self.layers * self.layer + self.embedding * (1 if self.is_tied else 2)

    @property
    def mlp_width(self) -> int:
        """MLP activations per token in a layer."""
        return self.experts_per_token * self.moe_intermediate if self.experts else self.intermediate

    @property
    def kept_per_token(self) -> int:
        """Bytes per token that one compiled layer keeps for the backward pass."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        rows = 2 * queries + 2 * keys + 2 * self.hidden + 2 * self.mlp_width
        if self.experts:  # tokens sorted by expert, and the experts' outputs before their sum
            rows += 2 * self.experts_per_token * self.hidden
        return 2 * rows + 4 * self.heads

    @property
    def kv_per_token(self) -> int:
        """Bytes of keys and values per token in all layers, in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class TrainingSetup:
    """Settings that determine the trainer's memory on one rank.

    tokens: per micro-batch on this rank (--max-tokens-per-gpu, or a longer sample). shards: ranks that share a copy of
    the model; with a Megatron `layout`, all training ranks. frozen_models: reference, teacher, old actor. whole_layers:
    --recompute-activations. is_offloaded: moments are in host memory except during the optimizer step, and with
    `offloads_masters` so are float32 master weights. on_cpu: train on the CPU, where layers are not compiled and
    recomputed only on request.
    """

    tokens: int
    shards: int = 1
    frozen_models: int = 0
    whole_layers: bool = False
    is_offloaded: bool = False
    offloads_masters: bool = False
    is_half: bool = True
    num_moments: int = 2
    on_cpu: bool = False
    layout: Layout | None = None

    @property
    def on_device(self) -> TrainingSetup:
        """The same without offloading, as during an optimizer step."""
        return replace(self, is_offloaded=False, offloads_masters=False)


NODE = 8  # GPUs per machine, within which tensor parallelism is fast


class PipelineStage:
    """One rank of a pipeline stage: its parameters, and bytes per token.

    `setup.layout` must be set; `setup.shards` counts all training ranks, over all copies of the model.
    """

    def __init__(self, model: ModelSize, setup: TrainingSetup, number: int) -> None:
        layout = setup.layout
        assert layout is not None
        self.model, self.setup, self.layout, self.number = model, setup, layout, number
        self.layers = _layers_of(model.layers, layout, number)

    @property
    def is_last(self) -> bool:
        """Whether it contains the output layer."""
        return self.number == self.layout.pipeline - 1

    @property
    def shared(self) -> int:
        """Parameters of attention, dense MLPs, routers and embeddings."""
        model, tensor = self.model, self.layout.tensor
        attention = model.hidden * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
        mlp = 0 if model.experts else 3 * model.hidden * model.intermediate
        router = model.hidden * model.experts
        embedded = int(self.number == 0) + int(self.is_last and not (model.is_tied and self.layout.pipeline == 1))
        return self.layers * ((attention + mlp) // tensor + router) + embedded * model.embedding // tensor

    @property
    def of_experts(self) -> int:
        """Parameters of its experts."""
        model, layout = self.model, self.layout
        each = 3 * model.hidden * model.moe_intermediate // layout.expert_tensor
        return self.layers * (model.experts // layout.expert) * each

    @property
    def parameters(self) -> int:
        """All parameters of the rank."""
        return self.shared + self.of_experts

    @property
    def stepped(self) -> int:
        """Parameters whose master weights and moments this rank has; replicas split them."""
        layout, ranks = self.layout, self.setup.shards
        alike = max(ranks // (layout.tensor * layout.pipeline), 1)
        alike_experts = max(ranks // (layout.expert_tensor * layout.expert * layout.pipeline), 1)
        return math.ceil(self.shared / alike) + math.ceil(self.of_experts / alike_experts)

    @property
    def in_flight(self) -> float:
        """Micro-batches whose activations it keeps at once, relative to all of its layers."""
        return self.layout.passes_in_flight(self.number) / self.layout.virtual

    def resting(self) -> dict[str, int]:
        """Bytes between two steps, without gradient buffers, which stay unless the trainer is offloaded."""
        setup = self.setup
        parts = {
            "weights": (2 if setup.is_half else 4) * self.parameters,
            "master_weights": 4 * self.stepped if setup.is_half and not setup.offloads_masters else 0,
            "moments": 0 if setup.is_offloaded else 4 * setup.num_moments * self.stepped,
            "frozen models": (2 if setup.is_half else 4) * setup.frozen_models * self.parameters,
        }
        return {name: size for name, size in parts.items() if size}

    @property
    def kept_per_token(self) -> int:
        """Bytes per token that one compiled layer keeps: heads and MLP are sharded, the residual only by sequence.

        Tensor-parallel ranks also keep what they gather before attention and MLP.
        """
        model, layout = self.model, self.layout
        queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
        cut = 2 * queries + 2 * keys
        wide = layout.expert_tensor if model.experts else layout.tensor
        whole = 2 * model.hidden // (layout.tensor if layout.sequence_parallel else 1)
        gathered = 0 if layout.tensor == 1 else model.hidden if model.experts else 2 * model.hidden
        rows = cut // layout.tensor + 2 * model.mlp_width // wide + whole + gathered
        if model.experts:
            rows += 2 * model.experts_per_token * model.hidden // (layout.tensor if layout.sequence_parallel else 1)
        return 2 * rows + 4 * model.heads // layout.tensor

    def inputs_kept(self, tokens: int) -> int:
        """Bytes of its layers' inputs, which are kept if whole layers are recomputed."""
        hidden = 2 * self.model.hidden * tokens
        return self.layers * hidden // (self.layout.tensor if self.layout.sequence_parallel else 1)


def stages(model: ModelSize, setup: TrainingSetup) -> list[PipelineStage]:
    """Return the stages that can need the most memory: the first, the second, and the last."""
    assert setup.layout is not None
    last = setup.layout.pipeline - 1
    return [PipelineStage(model, setup, number) for number in sorted({0, min(1, last), last})]


def larger_layouts(model: ModelSize, layout: Layout) -> list[Layout]:
    """List layouts that shard the model further, cheapest first: by TP within a machine, then PP, then both."""
    layouts: list[Layout] = []
    for ranks in (2, 4, 8, 16, 32, 64):
        for tensor in (1, 2, 4, NODE):
            pipeline = ranks // tensor
            if tensor * pipeline != ranks or model.kv_heads % tensor or model.layers % pipeline:
                continue
            if tensor < layout.tensor or pipeline < layout.pipeline:
                continue
            layouts.append(
                replace(
                    layout,
                    tensor=tensor,
                    pipeline=pipeline,
                    sequence_parallel=tensor > 1,
                    expert_tensor=1 if layout.expert > 1 else tensor,
                    virtual=1,
                    first_layers=None,
                    last_layers=None,
                )
            )
    return [each for each in layouts if (each.tensor, each.pipeline) != (layout.tensor, layout.pipeline)]


def layout_flags(layout: Layout, ranks: int) -> str:
    """Return the flags of a layout on this many ranks."""
    words = [f"--actor-num-gpus-per-node {min(ranks, NODE)}"]
    if ranks > NODE:
        words.insert(0, f"--actor-num-nodes {ranks // NODE}")
    if layout.tensor > 1:
        words.append(f"--tensor-model-parallel-size {layout.tensor} --sequence-parallel")
    if layout.pipeline > 1:
        words.append(f"--pipeline-model-parallel-size {layout.pipeline}")
    return " ".join(words)


def _layers_of(layers: int, layout: Layout, number: int) -> int:
    explicit = {0: layout.first_layers, layout.pipeline - 1: layout.last_layers}
    if (count := explicit.get(number)) is not None:
        return count
    ends = {stage: count for stage, count in explicit.items() if count is not None}
    return math.ceil((layers - sum(ends.values())) / max(layout.pipeline - len(ends), 1))
