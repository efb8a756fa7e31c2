"""Predicts the memory of each phase of a run on one GPU, from the sizes of the model and how it is trained and served.

Weights in bfloat16 have float32 master weights, gradients and two moments: 2 + 4 + 4 + 8 bytes per parameter. FSDP
ranks shard the master weights and gather bfloat16 layers from them: 16 bytes per parameter, divided by the ranks.
Compiled layers keep the results of GEMMs and attention for the backward pass (`models.compiled_layers`), others about
twice that. MLPs are recomputed in as many layers as necessary. Megatron-core shards differently (`PipelineStage`) and
keeps its gradient buffers between steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from furlong.errors import ConfigError
from furlong.models.model_facts import BACKWARD_ROWS, COMPILED_FROM, HEADROOM_FRAC, logits_bytes
from furlong.training.megatron.parallel_layout import Layout

GIB = 2**30
CONTEXT_BYTES = 1 * GIB  # CUDA context, cuBLAS and NCCL buffers, outside of PyTorch's allocator
BACKWARD_ROWS_CPU = 3  # measured, like the copies of a chunk's logits: CPUs have no fused output layer
LOGITS_COPIES, LOGITS_COPIES_CPU = 2, 4
EAGER_FACTOR = 2.0  # what an uncompiled layer keeps relative to a compiled one: float32 norms, activations
# The same of a layer with experts, measured with 8 layers of Qwen3-30B-A3B on two and four H200s. Megatron-core also
# keeps tokens in the order in which ranks exchange them.
EXPERTS_FACTOR, EXPERTS_FACTOR_MEGATRON = 1.3, 1.65
TOKEN_STEP = 256  # proposals are multiples of this
MOST_TOKENS = 1 << 22  # upper limit of proposals


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
    has_head: bool = True  # not a value model, whose head is negligible

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
        return self.layers * self.layer + self.embedding * (1 if self.is_tied or not self.has_head else 2)

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
class TeacherSetup:
    """A teacher in the trainer. rollout_tokens: most response tokens of a rollout on a rank.

    Of each, --opd-loss full (`is_full`) keeps the hidden state until it is trained on, and topk `top_k` log-probs.
    """

    model: ModelSize
    rollout_tokens: int
    is_full: bool = False
    top_k: int = 0


@dataclass(frozen=True)
class TrainingSetup:
    """Settings that determine the trainer's memory on one rank.

    tokens: per micro-batch on this rank (--max-tokens-per-gpu, or a longer sample). shards: ranks that share a copy of
    the model; with a Megatron `layout`, all training ranks. frozen_models: reference and old actor. critic: the value
    model that is trained, too. shares_device: models take turns on the device, and the others are in host memory.
    whole_layers: --recompute-activations. is_offloaded: moments are in host memory except during
    the optimizer step, and with `offloads_masters` so are float32 master weights. on_cpu: train on the CPU, where
    layers are not compiled and recomputed only on request. grad_bytes: of an element of Megatron's gradient buffers.
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
    grad_bytes: int = 4
    teacher: TeacherSetup | None = None
    critic: ModelSize | None = None
    shares_device: bool = False

    @property
    def width(self) -> int:
        """Bytes of a weight or activation."""
        return 2 if self.is_half else 4

    @property
    def on_device(self) -> TrainingSetup:
        """The same without offloading, as during an optimizer step."""
        return replace(self, is_offloaded=False, offloads_masters=False)

    def kept_factor(self, model: ModelSize) -> float:
        """Return what a layer keeps for the backward pass relative to `kept_per_token`."""
        if model.experts and not self.on_cpu:
            return EXPERTS_FACTOR if self.layout is None else EXPERTS_FACTOR_MEGATRON
        return 1.0 if self.compiles(model) else EAGER_FACTOR

    def compiles(self, model: ModelSize) -> bool:
        """Whether dense layers are compiled."""
        return self.is_half and not self.on_cpu and model.parameters >= COMPILED_FROM and not model.experts

    @property
    def of_critic(self) -> TrainingSetup:
        """That of the critic alone."""
        return replace(self, frozen_models=0, teacher=None, critic=None, shares_device=False)

    @property
    def hidden_per_token(self) -> int:
        """Bytes of the teacher's hidden state of a token; 0 if none is kept."""
        return self.width * self.teacher.model.hidden if self.teacher is not None and self.teacher.is_full else 0

    @property
    def likeliest_tokens(self) -> int:
        """Number of the likeliest tokens of a rollout, over all positions."""
        return 0 if self.teacher is None else self.teacher.top_k * self.teacher.rollout_tokens

    @property
    def kept_of_teacher(self) -> int:
        """Bytes on the host of what a rollout keeps of its teacher: hidden states, or ids and log-probs."""
        hidden = 0 if self.teacher is None else self.hidden_per_token * self.teacher.rollout_tokens
        return hidden + 8 * self.likeliest_tokens


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
        has_head = self.is_last and model.has_head and not (model.is_tied and self.layout.pipeline == 1)
        embedded = int(self.number == 0) + int(has_head)
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
        """Bytes between two steps, without `gradients`, which stay unless the trainer is offloaded."""
        setup = self.setup
        frozen = setup.frozen_models + (setup.teacher is not None)  # which has the policy's architecture
        parts = {
            "weights": setup.width * self.parameters,
            "master_weights": 4 * self.stepped if setup.is_half and not setup.offloads_masters else 0,
            "moments": 0 if setup.is_offloaded else 4 * setup.num_moments * self.stepped,
            "frozen models": 0 if setup.shares_device else setup.width * frozen * self.parameters,
        }
        if setup.critic is not None and not setup.shares_device:
            critic = PipelineStage(setup.critic, setup.of_critic, self.number)
            parts["critic"] = sum((critic.resting() | critic.gradients).values())
        return {name: size for name, size in parts.items() if size}

    @property
    def gradients(self) -> dict[str, int]:
        """Bytes of the gradient buffers, in which replicas do not share."""
        return {"gradients": self.setup.grad_bytes * self.parameters}

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


def _layers_of(layers: int, layout: Layout, number: int) -> int:
    explicit = {0: layout.first_layers, layout.pipeline - 1: layout.last_layers}
    if (count := explicit.get(number)) is not None:
        return count
    ends = {stage: count for stage, count in explicit.items() if count is not None}
    return math.ceil((layers - sum(ends.values())) / max(layout.pipeline - len(ends), 1))


@dataclass(frozen=True)
class Phase:
    """One phase's peak: named parts in bytes. `note`: what was recomputed to make it fit."""

    name: str
    parts: Mapping[str, int]
    note: str = ""

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.parts.values())

    def record(self) -> dict[str, Any]:
        """JSON-able form, in GiB."""
        parts = {name: size / GIB for name, size in self.parts.items()}
        return {"phase": self.name, "gib": self.total / GIB, "parts": parts, "note": self.note}


def usable(device_bytes: int) -> int:
    """Return the bytes of a device that a run can use."""
    return int(device_bytes * (1 - HEADROOM_FRAC)) - CONTEXT_BYTES


def resting(model: ModelSize, setup: TrainingSetup) -> dict[str, int]:
    """Return the trainer's bytes between two steps, on the rank with the most."""
    if setup.layout is not None:
        return max((stage.resting() for stage in stages(model, setup)), key=lambda parts: sum(parts.values()))
    share = math.ceil(model.parameters / setup.shards)
    is_copied = setup.is_half and setup.shards == 1  # sharded ranks gather bfloat16 weights from the master weights
    parts = {
        "weights": (2 if is_copied else 4) * share,
        "master_weights": 4 * share if is_copied and not setup.offloads_masters else 0,
        "moments": 0 if setup.is_offloaded else 4 * setup.num_moments * share,
        "frozen models": 0 if setup.shares_device else sum(_frozen(model, setup)),
    }
    if setup.critic is not None and not setup.shares_device:
        parts["critic"] = sum(resting(setup.critic, setup.of_critic).values())
    return {name: size for name, size in parts.items() if size}


def between_steps(model: ModelSize, setup: TrainingSetup) -> dict[str, int]:
    """Return what is on the device between two steps, on the rank with the most: `resting`, and gradient buffers."""
    if setup.layout is None:
        return resting(model, setup)
    parts = (stage.resting() | stage.gradients for stage in stages(model, setup))
    return max(parts, key=lambda sizes: sum(sizes.values()))


def _frozen(model: ModelSize, setup: TrainingSetup) -> list[int]:
    models = [model] * setup.frozen_models + ([setup.teacher.model] if setup.teacher is not None else [])
    return [setup.width * math.ceil(each.parameters / setup.shards) for each in models]


def on_host(model: ModelSize, setup: TrainingSetup, *, sleeps: bool, copied: int = 0) -> dict[str, int]:
    """Return the peak host memory of one rank's process.

    sleeps: the trainer is offloaded during generation, with all that it has between steps except bfloat16 weights,
    which are rounded from the master weights again. copied: bytes of a checkpoint that is written in the background.
    """
    policy = resting(model, replace(setup.on_device, shares_device=False, critic=None))
    critic = {} if setup.critic is None else resting(setup.critic, setup.of_critic.on_device)
    frozen = _frozen(model, setup) if setup.layout is None else [policy.get("frozen models", 0)]
    kept = [sum(parts.values()) - (parts["weights"] if "master_weights" in parts else 0) for parts in (policy, critic)]
    if sleeps:
        parts = {"asleep": sum(kept)}
    elif setup.shares_device:  # all but the smallest, while that is on the device
        in_use = [kept[0] - sum(frozen), kept[1], *filter(None, frozen)]
        parts = {"models in turn": sum(kept) - min(in_use)}
    else:
        parts = {"offloaded": sum(resting(model, setup.on_device).values()) - sum(resting(model, setup).values())}
    parts |= {"checkpoint": copied, "teacher's outputs": 0 if setup.on_cpu else setup.kept_of_teacher}
    return {name: size for name, size in parts.items() if size}


def training_phases(model: ModelSize, setup: TrainingSetup, limit: int) -> list[Phase]:
    """Predict the trainer's phases on a rank with `limit` bytes, with as little recomputation as possible."""
    if setup.layout is not None:
        by_stage = [_phases_of_stage(stage, limit) for stage in stages(model, setup)]
        return [max(phases, key=lambda phase: phase.total) for phases in zip(*by_stage, strict=True)]
    still = resting(model, setup)
    share = math.ceil(model.parameters / setup.shards)
    tokens = setup.tokens
    width = setup.width
    gathered = _gathered(model, setup)
    working = (BACKWARD_ROWS_CPU if setup.on_cpu else BACKWARD_ROWS) * model.mlp_width * width * tokens
    head = (LOGITS_COPIES_CPU if setup.on_cpu else LOGITS_COPIES) * _logits(model, setup) + 6 * model.embedding
    distilled = setup.hidden_per_token * tokens
    if setup.hidden_per_token and (setup.shards > 1 or setup.shares_device):  # a copy of the teacher's head
        distilled += setup.hidden_per_token * model.vocab
    fixed = {
        **still,
        "gradients": 4 * share,
        **({"teacher's outputs": distilled} if distilled else {}),
        **({"gathered layers": 3 * gathered} if gathered else {}),  # weights, and gradients in float32
    }
    room = limit - sum(fixed.values()) - max(working, head)
    activations, note = _activations(model, setup, tokens, room)
    # after the backward pass of a layer, gradients in bfloat16 replace its activations
    last = max(activations, width * share if setup.is_half and setup.shards == 1 else 0)
    backward = Phase("train", fixed | {"activations": last, "head and working rows": max(working, head)}, note)
    passes = [_pass("log-probs", model, setup, still, likeliest=8)]
    if setup.teacher is not None:
        alone = {"frozen models": _frozen(model, setup)[-1]} if setup.shares_device else still
        passes.append(_pass("teacher's log-probs", setup.teacher.model, setup, alone, likeliest=4))
    step = resting(model, setup.on_device) | _critic(still) | {"gradients": 4 * share}
    phases = [*passes, backward, Phase("optimizer step", step)]
    if setup.critic is not None and setup.critic.parameters > model.parameters:
        beside = {} if setup.shares_device else {"other models": sum(still.values()) - still["critic"]}
        for phase in training_phases(setup.critic, setup.of_critic, limit - sum(beside.values())):
            phases.append(replace(phase, name=f"critic: {phase.name}", parts={**phase.parts, **beside}))
    return phases


def _critic(still: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in still.items() if name == "critic"}  # it stays offloaded in the policy's step


def _gathered(model: ModelSize, setup: TrainingSetup) -> int:
    return 0 if setup.shards == 1 else setup.width * (2 * model.layer + model.embedding)


def _pass(name: str, model: ModelSize, setup: TrainingSetup, still: Mapping[str, int], *, likeliest: int) -> Phase:
    """Predict a forward pass without gradient.

    likeliest: bytes of one of the likeliest tokens, an id or a log-prob, which go to the host after the whole rollout.
    """
    rows = BACKWARD_ROWS_CPU if setup.on_cpu else BACKWARD_ROWS
    working = rows * model.mlp_width * setup.width * setup.tokens // 2
    parts = {**still, "working rows": max(working, _logits(model, setup))}
    if gathered := _gathered(model, setup):
        parts["gathered layers"] = gathered
    if setup.likeliest_tokens:
        parts["likeliest tokens"] = likeliest * setup.likeliest_tokens
    return Phase(name, parts)


def _phases_of_stage(stage: PipelineStage, limit: int) -> list[Phase]:
    """Predict the phases of a Megatron rank. Gradient buffers exist in all of them."""
    model, setup, layout = stage.model, stage.setup, stage.layout
    still = stage.resting() | stage.gradients
    working = BACKWARD_ROWS * model.mlp_width * 2 * setup.tokens // layout.tensor
    head = LOGITS_COPIES * _logits(model, setup) + 6 * model.embedding // layout.tensor if stage.is_last else 0
    distilled = setup.hidden_per_token * setup.tokens if stage.is_last else 0
    if distilled and setup.shares_device:  # a copy of the teacher's head
        distilled += setup.hidden_per_token * model.vocab // layout.tensor
    outputs = {"teacher's outputs": distilled} if distilled else {}
    room = limit - sum(still.values()) - distilled - max(working, head)
    one = int(stage.kept_per_token * setup.kept_factor(model)) * setup.tokens
    kept, note = int(stage.in_flight * stage.layers * one), "nothing recomputed"
    saved = int(stage.in_flight * (4 if setup.compiles(model) else 8) * model.mlp_width * setup.tokens / layout.tensor)
    if setup.whole_layers:
        kept, note = int(stage.in_flight * stage.inputs_kept(setup.tokens)) + one, "whole layers recomputed"
    elif kept > room and not model.experts:
        count = min(stage.layers, math.ceil((kept - room) / saved))
        kept, note = kept - count * saved, f"MLP recomputed in {count} of {stage.layers} layers"
    if layout.pipeline > 1:
        note = f"stage {stage.number + 1} of {layout.pipeline}; {note}"
    no_grad = still | {"working rows": max(working // 2, _logits(model, setup) if stage.is_last else 0)}
    if setup.likeliest_tokens:
        no_grad["likeliest tokens"] = 8 * setup.likeliest_tokens
    step = still | PipelineStage(model, setup.on_device, stage.number).resting() | _critic(still)
    return [
        Phase("log-probs", no_grad),
        Phase("train", still | outputs | {"activations": kept, "head and working rows": max(working, head)}, note),
        Phase("optimizer step", step),
    ]


def _logits(model: ModelSize, setup: TrainingSetup) -> int:
    return min(logits_bytes(on_cpu=setup.on_cpu), 4 * model.vocab * setup.tokens)


def _activations(model: ModelSize, setup: TrainingSetup, tokens: int, room: int) -> tuple[int, str]:
    """Return the bytes that layers keep, and a note on how many MLPs are recomputed to fit into `room`."""
    wide = 1 if setup.is_half else 2  # float32 instead of bfloat16
    if setup.whole_layers:
        one = setup.kept_factor(model) * model.kept_per_token
        return int(wide * (model.layers * 2 * model.hidden + one)) * tokens, "whole layers recomputed"
    kept = int(wide * model.kept_per_token * setup.kept_factor(model)) * tokens * model.layers
    bytes_saved = 4 if setup.compiles(model) else 8  # gate and up; their product if not compiled
    saved = wide * bytes_saved * model.mlp_width * tokens
    excess = kept - room
    if excess <= 0 or model.experts or setup.on_cpu:
        return kept, "nothing recomputed"
    count = min(model.layers, math.ceil(excess / saved))
    return kept - count * saved, f"MLP recomputed in {count} of {model.layers} layers"


def most_tokens(model: ModelSize, setup: TrainingSetup, limit: int) -> int:
    """Return the largest micro-batch that fits, in tokens; 0 if not even `TOKEN_STEP` does."""

    def fits(tokens: int) -> bool:
        phases = training_phases(model, replace(setup, tokens=tokens), limit)
        return max(phase.total for phase in phases) <= limit

    low, high = 0, 1
    while high * TOKEN_STEP < MOST_TOKENS and fits(high * TOKEN_STEP):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * TOKEN_STEP) else (low, middle)
    return low * TOKEN_STEP


def smallest_change(model: ModelSize, setup: TrainingSetup, limit: int, *, longest: int, update_bytes: int = 0) -> str:
    """Return the cheapest change of flags with which training should fit; "" if it already does.

    longest: tokens of the longest sample, which gets its own micro-batch if it exceeds --max-tokens-per-gpu.
    update_bytes: what a weight update needs beside the trainer, on the same GPU.
    """
    sequence = max(longest, TOKEN_STEP)

    def most(changed: TrainingSetup) -> int:
        is_updated = sum(between_steps(model, changed).values()) + update_bytes <= limit
        return most_tokens(model, changed, limit) if is_updated else 0

    for whole, offloaded in ((False, False), (True, False), (False, True), (True, True)):
        if offloaded and setup.on_cpu:  # where moments are on the host anyway
            break
        changed = replace(setup, whole_layers=whole or setup.whole_layers, is_offloaded=offloaded or setup.is_offloaded)
        tokens = most(changed)
        if tokens >= sequence:
            flags = [
                f"--max-tokens-per-gpu {tokens}" if tokens < setup.tokens else "",
                "--recompute-activations" if whole else "",
                "--offload-optimizer-states" if offloaded else "",
            ]
            return " ".join(filter(None, flags))
    if setup.on_cpu:
        return "use a smaller model, shorter samples, or more memory: no micro-batch size fits"
    if setup.layout is not None:
        return (
            "use more ranks with a larger --tensor-model-parallel-size or --pipeline-model-parallel-size, a smaller "
            "model, or shorter samples"
        )
    for ranks in (2, 4, 8, 16, 32, 64, 128):
        changed = replace(setup, shards=ranks * setup.shards, whole_layers=True)
        tokens = most(changed)
        for context in (1, ranks):
            if tokens >= math.ceil(sequence / context):
                more = f"--actor-num-gpus-per-node {changed.shards}"
                split = f" --context-parallel-size {context}" if context > 1 else ""
                fewer = f" --max-tokens-per-gpu {tokens}" if tokens < setup.tokens else ""
                return f"{more}{split} --recompute-activations{fewer}"
    return "use a smaller model, or shorter samples: no setting of up to 128 times the GPUs fits"


@dataclass(frozen=True)
class ServingSetup:
    """Settings that determine the engine's memory on one GPU.

    fraction: of the device, for weights and KV cache (SGLang's --mem-fraction-static). requests, request_tokens: number
    and length of concurrent requests.
    """

    fraction: float
    tp_size: int = 1
    requests: int = 1
    request_tokens: int = 0


def serving_phase(model: ModelSize, setup: ServingSetup, device_bytes: int) -> Phase:
    """Predict the engine during generation. The KV cache gets what `fraction` leaves after the weights."""
    weights = engine_weights(model, setup.tp_size)
    kv = int(device_bytes * setup.fraction) - weights
    capacity = max(kv, 0) // _kv_per_token(model, setup)
    needed = setup.requests * setup.request_tokens
    note = f"KV cache of {capacity:,} tokens"
    if needed:
        note += f", {capacity / needed:.1f} times what {setup.requests} requests need at full length"
    return Phase("generate", {"weights": weights, "KV cache": max(kv, 0)}, note)


def least_fraction(model: ModelSize, setup: ServingSetup, device_bytes: int) -> float:
    """Return the smallest --mem-fraction-static, in hundredths, that fits all requests at full length."""
    needed = engine_weights(model, setup.tp_size) + setup.requests * setup.request_tokens * _kv_per_token(model, setup)
    return math.ceil(100 * needed / device_bytes) / 100


def engine_weights(model: ModelSize, tp_size: int) -> int:
    """Return the bytes of bfloat16 weights on each GPU of a tensor-parallel engine."""
    return 2 * model.parameters // tp_size


def _kv_per_token(model: ModelSize, setup: ServingSetup) -> int:
    """Return the KV cache bytes per token on one GPU; with more GPUs than heads, heads are replicated."""
    return max(model.kv_per_token // min(setup.tp_size, model.kv_heads), 1)
