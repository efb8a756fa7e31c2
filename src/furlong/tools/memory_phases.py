"""How much memory each phase of a run needs on one GPU, computed from the model's config and the flags.

Weights in bfloat16 have float32 masters, gradients and two moments: 2 + 4 + 4 + 8 bytes a parameter. Ranks that share a
model hold a slice of the masters each and gather bfloat16 layers from them: 16 bytes a parameter, over the ranks.
Compiled layers keep the results of matrix products and attention for the backward pass (`models.compiled_layers`);
others about twice that. MLPs are recomputed in as many layers as the memory asks for. Megatron's ranks cut the model in
other ways (`tools.memory_model`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from furlong.models.working_memory import BACKWARD_ROWS, COMPILED_FROM, HEADROOM_FRAC, logits_bytes
from furlong.tools.memory_model import (
    ModelSize,
    PipelineStage,
    TrainingSetup,
    larger_layouts,
    layout_flags,
    stages,
)

GIB = 2**30
CONTEXT_BYTES = 1 * GIB  # CUDA context, cuBLAS and NCCL buffers, which PyTorch does not count
BACKWARD_ROWS_CPU = 3  # measured, as are the copies of a chunk's logits: the output layer is not fused there
LOGITS_COPIES, LOGITS_COPIES_CPU = 2, 4
EAGER_FACTOR = 2.0  # what a layer that is not compiled keeps, relative to one that is: norms in float32, activations
TOKEN_STEP = 256  # proposals are multiples of this
MOST_TOKENS = 1 << 22  # of a proposal


@dataclass(frozen=True)
class Phase:
    """One phase's peak: named parts in bytes. `note` says what was chosen to make it fit."""

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
    """Bytes of a device that a run can fill."""
    return int(device_bytes * (1 - HEADROOM_FRAC)) - CONTEXT_BYTES


def resting(model: ModelSize, how: TrainingSetup) -> dict[str, int]:
    """What the trainer holds between two steps, on the fullest rank."""
    if how.layout is not None:
        return max((stage.resting() for stage in stages(model, how)), key=lambda parts: sum(parts.values()))
    share = math.ceil(model.parameters / how.shards)
    is_copied = how.is_half and how.shards == 1  # float32 masters beside the weights; ranks gather weights from them
    parts = {
        "weights": (2 if is_copied else 4) * share,
        "masters": 4 * share if is_copied and not how.masters_too else 0,
        "moments": 0 if how.is_offloaded else 4 * how.num_moments * share,
        "frozen models": (2 if how.is_half else 4) * how.frozen_models * share,
    }
    return {name: size for name, size in parts.items() if size}


def on_host(model: ModelSize, how: TrainingSetup, *, sleeps: bool, copied: int = 0) -> dict[str, int]:
    """What the process of one rank holds in the host's memory at its fullest.

    sleeps: the trainer leaves the device while engines generate, with all that it holds between steps but weights that
    are rounded masters, which are rounded again. copied: bytes for a checkpoint that is written while training goes on.
    """
    whole = resting(model, how.on_device)
    if sleeps:
        parts = {"asleep": sum(whole.values()) - whole.get("masters", 0) // 2}
    else:
        parts = {"offloaded": sum(whole.values()) - sum(resting(model, how).values())}
    parts["checkpoint"] = copied
    return {name: size for name, size in parts.items() if size}


def training_phases(model: ModelSize, how: TrainingSetup, limit: int) -> list[Phase]:
    """The trainer's phases on a rank with `limit` bytes, with as little recomputation as fits."""
    if how.layout is not None:
        of_stages = [_phases_of_stage(stage, limit) for stage in stages(model, how)]
        return [max(phases, key=lambda phase: phase.total) for phases in zip(*of_stages, strict=True)]
    still = resting(model, how)
    share = math.ceil(model.parameters / how.shards)
    tokens = how.tokens
    width = 2 if how.is_half else 4
    gathered = 0 if how.shards == 1 else width * (2 * model.layer + model.embedding)  # two layers, embedding or head
    working = (BACKWARD_ROWS_CPU if how.on_cpu else BACKWARD_ROWS) * model.mlp_width * width * tokens
    head = (LOGITS_COPIES_CPU if how.on_cpu else LOGITS_COPIES) * _logits(model, how) + 6 * model.embedding
    fixed = {
        **still,
        "gradients": 4 * share,
        **({"gathered layers": 3 * gathered} if gathered else {}),  # weights, and gradients in float32
    }
    room = limit - sum(fixed.values()) - max(working, head)
    activations, note = _activations(model, how, tokens, room)
    # where layers have been through the backward pass, gradients in bfloat16 take the place of their activations
    last = max(activations, width * share if how.is_half and how.shards == 1 else 0)
    backward = Phase("train", fixed | {"activations": last, "head and working rows": max(working, head)}, note)
    no_grad = (
        still
        | {"working rows": max(working // 2, _logits(model, how))}
        | ({"gathered layers": gathered} if gathered else {})
    )
    step = resting(model, how.on_device) | {"gradients": 4 * share}
    return [Phase("log-probs", no_grad), backward, Phase("optimizer step", step)]


def _phases_of_stage(stage: PipelineStage, limit: int) -> list[Phase]:
    """The phases of a rank of Megatron's. Buffers of gradients are there in each of them."""
    model, how, layout = stage.model, stage.how, stage.layout
    still = stage.resting() | {"gradients": 4 * stage.parameters}
    working = BACKWARD_ROWS * model.mlp_width * 2 * how.tokens // layout.tensor
    head = LOGITS_COPIES * _logits(model, how) + 6 * model.embedding // layout.tensor if stage.is_last else 0
    room = limit - sum(still.values()) - max(working, head)
    is_compiled = how.is_half and model.parameters >= COMPILED_FROM and not model.experts
    one = int(stage.kept_per_token * (1.0 if is_compiled else EAGER_FACTOR)) * how.tokens
    kept, note = int(stage.in_flight * stage.layers * one), "nothing recomputed"
    saved = int(stage.in_flight * (4 if is_compiled else 8) * model.mlp_width * how.tokens / layout.tensor)
    if how.whole_layers:
        kept, note = int(stage.in_flight * stage.inputs_kept(how.tokens)) + one, "whole layers recomputed"
    elif kept > room and not model.experts:
        count = min(stage.layers, math.ceil((kept - room) / saved))
        kept, note = kept - count * saved, f"MLP recomputed in {count} of {stage.layers} layers"
    if layout.pipeline > 1:
        note = f"stage {stage.number + 1} of {layout.pipeline}; {note}"
    no_grad = still | {"working rows": max(working // 2, _logits(model, how) if stage.is_last else 0)}
    step = still | PipelineStage(model, how.on_device, stage.number).resting()
    return [
        Phase("log-probs", no_grad),
        Phase("train", still | {"activations": kept, "head and working rows": max(working, head)}, note),
        Phase("optimizer step", step),
    ]


def _logits(model: ModelSize, how: TrainingSetup) -> int:
    """Float32 logits that exist at a time."""
    return min(logits_bytes(on_cpu=how.on_cpu), 4 * model.vocab * how.tokens)


def _activations(model: ModelSize, how: TrainingSetup, tokens: int, room: int) -> tuple[int, str]:
    """What the layers keep, and how many of their MLPs are recomputed so that it fits into `room`."""
    is_compiled = how.is_half and not how.on_cpu and model.parameters >= COMPILED_FROM and not model.experts
    wide = 1 if how.is_half else 2  # values of four bytes in place of two
    if how.whole_layers:
        one = (EAGER_FACTOR if how.on_cpu else 1.0) * model.kept_per_token
        return int(wide * (model.layers * 2 * model.hidden + one)) * tokens, "whole layers recomputed"
    kept = int(wide * model.kept_per_token * (1.0 if is_compiled else EAGER_FACTOR)) * tokens * model.layers
    saved = wide * (4 if is_compiled else 8) * model.mlp_width * tokens  # gate and up; the product, where not compiled
    excess = kept - room
    if excess <= 0 or model.experts or how.on_cpu:
        return kept, "nothing recomputed"
    count = min(model.layers, math.ceil(excess / saved))
    return kept - count * saved, f"MLP recomputed in {count} of {model.layers} layers"


def most_tokens(model: ModelSize, how: TrainingSetup, limit: int) -> int:
    """The largest micro-batch that fits, in tokens; 0 if not even `TOKEN_STEP` do."""

    def fits(tokens: int) -> bool:
        phases = training_phases(model, replace(how, tokens=tokens), limit)
        return max(phase.total for phase in phases) <= limit

    low, high = 0, 1
    while high * TOKEN_STEP < MOST_TOKENS and fits(high * TOKEN_STEP):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * TOKEN_STEP) else (low, middle)
    return low * TOKEN_STEP


def smallest_change(model: ModelSize, how: TrainingSetup, limit: int, *, longest: int) -> str:
    """The first change of flags, from the cheapest on, after which training fits, as computed; "" if it does already.

    longest: tokens of the longest sample, which is alone in its micro-batch if --max-tokens-per-gpu is less.
    """
    sequence = max(longest, TOKEN_STEP)
    tried: list[tuple[str, TrainingSetup]] = [
        ("", how),
        ("--recompute-activations", replace(how, whole_layers=True)),
    ]
    if not how.on_cpu:  # moments are on the host there already
        tried += [
            ("--offload-optimizer-states", replace(how, is_offloaded=True)),
            ("--recompute-activations --offload-optimizer-states", replace(how, whole_layers=True, is_offloaded=True)),
        ]
    for flags, changed in tried:
        tokens = most_tokens(model, changed, limit)
        if tokens >= sequence:
            fewer = f"--max-tokens-per-gpu {tokens}" if tokens < how.tokens else ""
            return " ".join(filter(None, (fewer, flags)))
    if how.on_cpu:
        return "a smaller model, shorter samples, or more memory: no setting of micro-batches fits"
    if how.layout is not None:
        return _larger_layout(model, how, limit, sequence)
    for ranks in (2, 4, 8, 16, 32, 64, 128):
        changed = replace(how, shards=ranks * how.shards, whole_layers=True)
        tokens = most_tokens(model, changed, limit)
        for context in (1, ranks):
            if tokens >= math.ceil(sequence / context):
                more = f"--actor-num-gpus-per-node {changed.shards}"
                split = f" --context-parallel-size {context}" if context > 1 else ""
                fewer = f" --max-tokens-per-gpu {tokens}" if tokens < how.tokens else ""
                return f"{more}{split} --recompute-activations{fewer}"
    return "a smaller model, or shorter samples: no setting of up to 128 times the GPUs fits"


def _larger_layout(model: ModelSize, how: TrainingSetup, limit: int, sequence: int) -> str:
    assert how.layout is not None
    for layout in larger_layouts(model, how.layout):
        ranks = max(how.shards, layout.tensor * layout.pipeline * layout.context)
        for whole in (False, True):
            changed = replace(how, layout=layout, shards=ranks, whole_layers=whole)
            tokens = most_tokens(model, changed, limit)
            if tokens >= sequence:
                fewer = f" --max-tokens-per-gpu {tokens}" if tokens < how.tokens else ""
                return layout_flags(layout, ranks) + (" --recompute-activations" if whole else "") + fewer
    return "more ranks, a smaller model, or shorter samples: no layout of up to 64 GPUs fits"


@dataclass(frozen=True)
class ServingSetup:
    """What decides the engine's memory on one GPU.

    fraction: of the device, for weights and KV cache (SGLang's --mem-fraction-static). requests, request_tokens: those
    that should run at once, and their length.
    """

    fraction: float
    tp_size: int = 1
    requests: int = 1
    request_tokens: int = 0


def serving_phase(model: ModelSize, how: ServingSetup, device_bytes: int) -> Phase:
    """The engine while it generates. The KV cache fills what `fraction` leaves beside the weights."""
    weights = engine_weights(model, how.tp_size)
    kv = int(device_bytes * how.fraction) - weights
    held = max(kv, 0) // _kv_per_token(model, how)
    wanted = how.requests * how.request_tokens
    note = f"KV cache of {held:,} tokens"
    if wanted:
        note += f", {held / wanted:.1f} times those of {how.requests} requests at full length"
    return Phase("generate", {"weights": weights, "KV cache": max(kv, 0)}, note)


def least_fraction(model: ModelSize, how: ServingSetup, device_bytes: int) -> float:
    """The smallest --mem-fraction-static, in hundredths, whose KV cache holds all requests at full length."""
    wanted = engine_weights(model, how.tp_size) + how.requests * how.request_tokens * _kv_per_token(model, how)
    return math.ceil(100 * wanted / device_bytes) / 100


def engine_weights(model: ModelSize, tp_size: int) -> int:
    """Bytes of the weights, in bfloat16, on each of the `tp_size` GPUs that share an engine's layers."""
    return 2 * model.parameters // tp_size


def _kv_per_token(model: ModelSize, how: ServingSetup) -> int:
    """Bytes of a token in the KV cache of one GPU; where there are more GPUs than heads, some hold the same ones."""
    return max(model.kv_per_token // min(how.tp_size, model.kv_heads), 1)
