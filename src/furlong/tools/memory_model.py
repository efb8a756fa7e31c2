"""What memory depends on: the size of a model, how it is trained, and how Megatron-core shards it."""

from __future__ import annotations

import math
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
class TrainingSetup:
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
    def on_device(self) -> TrainingSetup:
        """The same with nothing offloaded: what it is during an optimizer step."""
        return replace(self, is_offloaded=False, masters_too=False)


NODE = 8  # GPUs that are connected so well that a layer can be shared among them


class PipelineStage:
    """What one rank of a pipeline stage holds, in parameters and in bytes of one token.

    how.layout has to be given; `how.shards` counts all training ranks that hold one or more copies of the model.
    """

    def __init__(self, model: ModelSize, how: TrainingSetup, number: int) -> None:
        layout = how.layout
        assert layout is not None
        self.model, self.how, self.layout, self.number = model, how, layout, number
        self.layers = _layers_of(model.layers, layout, number)

    @property
    def is_last(self) -> bool:
        """Whether it has the output layer."""
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
        """All of its parameters."""
        return self.shared + self.of_experts

    @property
    def stepped(self) -> int:
        """Parameters whose masters and moments this rank has: those of equal ranks are shared out."""
        layout, ranks = self.layout, self.how.shards
        alike = max(ranks // (layout.tensor * layout.pipeline), 1)
        alike_experts = max(ranks // (layout.expert_tensor * layout.expert * layout.pipeline), 1)
        return math.ceil(self.shared / alike) + math.ceil(self.of_experts / alike_experts)

    @property
    def in_flight(self) -> float:
        """Micro-batches whose activations it keeps at once, in units of all of its layers."""
        return self.layout.passes_in_flight(self.number) / self.layout.virtual

    def resting(self) -> dict[str, int]:
        """What it holds between two steps; buffers of gradients stay unless the trainer leaves the device."""
        how = self.how
        parts = {
            "weights": (2 if how.is_half else 4) * self.parameters,
            "masters": 4 * self.stepped if how.is_half and not how.masters_too else 0,
            "moments": 0 if how.is_offloaded else 4 * how.num_moments * self.stepped,
            "frozen models": (2 if how.is_half else 4) * how.frozen_models * self.parameters,
        }
        return {name: size for name, size in parts.items() if size}

    @property
    def kept_per_token(self) -> int:
        """What one compiled layer keeps of one token: heads and MLP rows are cut, the residual only with its tokens.

        Ranks that share a layer keep, besides, what they gathered before attention and before the MLP.
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
        """Bytes of its layers' inputs, which are kept where whole layers are made again."""
        hidden = 2 * self.model.hidden * tokens
        return self.layers * hidden // (self.layout.tensor if self.layout.sequence_parallel else 1)


def stages(model: ModelSize, how: TrainingSetup) -> list[PipelineStage]:
    """The pipeline stages that can be the fullest: the first, the second, and the last."""
    assert how.layout is not None
    last = how.layout.pipeline - 1
    return [PipelineStage(model, how, number) for number in sorted({0, min(1, last), last})]


def larger_layouts(model: ModelSize, layout: Layout) -> list[Layout]:
    """Layouts that cut the model further, from the cheapest on: tensors within a machine, then layers, then both."""
    found: list[Layout] = []
    for ranks in (2, 4, 8, 16, 32, 64):
        for tensor in (1, 2, 4, NODE):
            pipeline = ranks // tensor
            if tensor * pipeline != ranks or model.kv_heads % tensor or model.layers % pipeline:
                continue
            if tensor < layout.tensor or pipeline < layout.pipeline:
                continue
            found.append(
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
    return [each for each in found if (each.tensor, each.pipeline) != (layout.tensor, layout.pipeline)]


def layout_flags(layout: Layout, ranks: int) -> str:
    """The flags of a layout on this many ranks."""
    words = [f"--actor-num-gpus-per-node {min(ranks, NODE)}"]
    if ranks > NODE:
        words.insert(0, f"--actor-num-nodes {ranks // NODE}")
    if layout.tensor > 1:
        words.append(f"--tensor-model-parallel-size {layout.tensor} --sequence-parallel")
    if layout.pipeline > 1:
        words.append(f"--pipeline-model-parallel-size {layout.pipeline}")
    return " ".join(words)


def _layers_of(layers: int, layout: Layout, number: int) -> int:
    given = {0: layout.first_layers, layout.pipeline - 1: layout.last_layers}
    if (own := given.get(number)) is not None:
        return own
    ends = {stage: count for stage, count in given.items() if count is not None}
    return math.ceil((layers - sum(ends.values())) / max(layout.pipeline - len(ends), 1))
