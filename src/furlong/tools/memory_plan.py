"""The memory plan of a run: what each phase needs on a GPU, and which flags would use it well.

`tools.memory_phases` has the arithmetic; here are the flags. Neither needs a GPU, or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from furlong.config.engine_groups import engine_parts, trained_model
from furlong.config.sections import Config
from furlong.config.topology import Topology
from furlong.core.catalogue import Diagnosis, diagnosis
from furlong.machine import MemoryUse
from furlong.tools.memory_model import ModelSize, TrainingSetup
from furlong.tools.memory_phases import (
    GIB,
    Phase,
    ServingSetup,
    engine_weights,
    least_fraction,
    most_tokens,
    on_host,
    resting,
    serving_phase,
    smallest_change,
    training_phases,
    usable,
)
from furlong.training.megatron.parallel_layout import Layout

STATIC_FRACTION = 0.85  # what SGLang takes of a large GPU where nobody says
# What an engine keeps of a GPU once it has released all, measured on an H200: 2 GiB before it has served; 5 to 12 GiB
# after 512 requests at once, by the width of the model; 7 GiB for a tiny one with the attention of Triton.
ASLEEP_FRAC = 0.05  # of the GPU, at least
ASLEEP_BYTES, ASLEEP_ROW_BYTES = 2 * GIB, 2048  # and for each value of an MLP's row, of each request


@dataclass(frozen=True)
class MemoryPlan:
    """Phases on one GPU of `device_bytes`. `change`: flags after which they fit, "" if they do already.

    least_fraction: of the GPU, with which the engine holds all requests at full length; most_fraction: that leaves room
    for what the trainer keeps on a GPU that they share. host: what the ranks of a machine hold in its memory, None if
    nothing worth counting. sure: for each of its parts, what the prediction was compared with.
    """

    device_bytes: int
    trainer: tuple[Phase, ...]
    engine: Phase | None
    change: str
    most_tokens: int
    least_fraction: float | None
    most_fraction: float | None = None
    host: Phase | None = None
    sure: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def limit(self) -> int:
        """Bytes that a phase may take."""
        return usable(self.device_bytes)

    @property
    def trainer_peak(self) -> Phase:
        """The largest of the trainer's phases."""
        return max(self.trainer, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        """Whether every phase does."""
        return self.trainer_peak.total <= self.limit and (self.engine is None or self.engine.total <= self.limit)

    def record(self) -> dict[str, Any]:
        """JSON-able form, in GiB."""
        phases = [*(("trainer", phase) for phase in self.trainer), *([("engine", self.engine)] if self.engine else [])]
        return {
            "fits": self.fits,
            "device_gib": self.device_bytes / GIB,
            "usable_gib": self.limit / GIB,
            "host": None if self.host is None else self.host.record(),
            "phases": [{"who": who, **phase.record()} for who, phase in phases],
            "change": self.change,
            "max_tokens_per_gpu": self.most_tokens,
            "sglang_mem_fraction_static": self.least_fraction,
            "sglang_mem_fraction_static_at_most": self.most_fraction,
            "sure": dict(self.sure),
        }


def plan_memory(config: Config, model_config: Mapping[str, Any], device_bytes: int) -> MemoryPlan:
    """Plan a run on GPUs of `device_bytes`. `model_config`: config.json of --hf-checkpoint. Raises ConfigError.

    With --colocate each phase has what the other part keeps on the GPU meanwhile: little where it is offloaded.
    """
    model, topology = ModelSize.read(model_config), Topology.of(config)
    how = training_of(config, topology, model.layers)
    engine = serving_of(config, topology)
    limit = usable(device_bytes)
    serving = None if engine is None else serving_phase(model, engine, device_bytes)
    beside = _beside(config, model, engine, device_bytes) if topology.is_colocated else {}
    room = limit - sum(beside.values())
    phases = [replace(phase, parts={**phase.parts, **beside}) for phase in training_phases(model, how, room)]
    most: float | None = None
    longest = -(-longest_sample(config) // config.train.context_parallel_size)
    change = _as_flags(smallest_change(model, how, room, longest=longest), config)
    if topology.is_colocated:
        there = {"buckets": 2 * config.sync.update_weight_buffer_size, **beside}
        if config.cluster.offload_rollout:
            there["engine's weights"] = engine_weights(model, 1 if engine is None else engine.tp_size)
        phases.append(Phase("publish weights", resting(model, how) | there))
    if serving is not None and topology.is_colocated:
        kept = {} if config.cluster.offload_train else {"trainer": sum(resting(model, how).values())}
        most = max((100 * (limit - sum(kept.values())) // device_bytes) / 100, 0.0)
        serving = replace(serving, parts={**serving.parts, **kept})
        if serving.total > limit and (not change or change.startswith("--")):  # else no flags help
            change = " ".join(filter(None, (change, f"--sglang-mem-fraction-static {most:g}" if most else "--offload")))
    return MemoryPlan(
        device_bytes=device_bytes,
        trainer=tuple(phases),
        engine=serving,
        change=change,
        most_tokens=most_tokens(model, how, room),
        least_fraction=None if engine is None else least_fraction(model, engine, device_bytes),
        most_fraction=most,
        host=_on_host(config, topology, model, how),
        sure=_how_sure(model, how, has_engine=engine is not None, has_sleeper="sleeping engine" in beside),
    )


def _how_sure(model: ModelSize, how: TrainingSetup, *, has_engine: bool, has_sleeper: bool) -> dict[str, str]:
    """What was measured of each part of a prediction (docs/scale-out/memory.md has the figures)."""
    layout = how.layout
    unseen = {
        "experts": model.experts > 0,
        "pipeline stages": layout is not None and layout.pipeline > 1,
        "shared sequences": layout is not None and layout.context > 1,
    }
    never = " and ".join(name for name, is_there in unseen.items() if is_there)
    found = {"trainer": "within 10 % of what one or two H200s measured"}
    if never:
        found["trainer"] = f"computed; {never} were never compared with a GPU"
    if has_engine:
        found["engine"] = "within 5 % of SGLang 0.5.16 on an H200"
    if has_sleeper:
        found["sleeping engine"] = "the most that was measured, up to 5 GiB less where few requests run at once"
    return found


def _on_host(config: Config, topology: Topology, model: ModelSize, how: TrainingSetup) -> Phase | None:
    """What all ranks of a machine hold in its memory."""
    sleeps = topology.is_colocated and bool(config.cluster.offload_train)
    of_each = -(-model.parameters // max(topology.num_ranks, 1))
    copied = checkpoint_bytes_per_parameter(config) * of_each if config.checkpoint.async_save else 0
    ranks = min(topology.gpus_per_node, topology.num_ranks)
    parts = {name: ranks * size for name, size in on_host(model, how, sleeps=sleeps, copied=copied).items()}
    return Phase("beside training", parts, f"of {ranks} ranks" if ranks > 1 else "") if parts else None


def checkpoint_bytes_per_parameter(config: Config) -> int:
    """What a checkpoint has of each parameter: its float32 value, and the optimizer's moments."""
    return 4 * (1 + (0 if config.checkpoint.no_save_optim else _num_moments(config)))


def _num_moments(config: Config) -> int:
    return 2 if config.optim.optimizer == "adam" else 1


def _as_flags(change: str, config: Config) -> str:
    """A change of flags as the flags of this run allow it: tokens of a micro-batch are limited where they count."""
    if config.train.use_dynamic_batch_size or "--max-tokens-per-gpu" not in change:
        return change
    dropped = "" if config.train.micro_batch_size == 1 else ", without --micro-batch-size"
    return f"--use-dynamic-batch-size {change}{dropped}"


def _beside(config: Config, model: ModelSize, engine: ServingSetup | None, device_bytes: int) -> dict[str, int]:
    """What an engine has of a GPU that it shares while the trainer works."""
    if engine is None:
        return {}
    if config.cluster.offload_rollout:
        return {"sleeping engine": max(int(ASLEEP_FRAC * device_bytes), asleep_bytes(model, engine))}
    return {"engine": serving_phase(model, engine, device_bytes).total}


def asleep_bytes(model: ModelSize, engine: ServingSetup) -> int:
    """What an engine that has served its requests keeps of a GPU once it has released all."""
    return ASLEEP_BYTES + ASLEEP_ROW_BYTES * engine.requests * model.mlp_width // engine.tp_size


def training_of(
    config: Config, topology: Topology, num_layers: int | None = None, *, on_cpu: bool = False
) -> TrainingSetup:
    """What decides the trainer's memory, from the flags. `num_layers`: of the model, where it is cut by layers."""
    train, algo = config.train, config.algo
    is_cut = train.train_backend == "megatron"
    longest = -(-longest_sample(config) // train.context_parallel_size)
    tokens = train.max_tokens_per_gpu if train.use_dynamic_batch_size and train.max_tokens_per_gpu else 0
    if not train.use_dynamic_batch_size:
        tokens = train.micro_batch_size * longest
    most = config.data.rollout_batch_size * config.data.n_samples_per_prompt * longest  # of a whole rollout
    return TrainingSetup(
        tokens=max(min(tokens, most), longest),
        shards=max(topology.num_ranks // (1 if is_cut else train.dp_replicate_size), 1),
        frozen_models=int(algo.use_kl_loss or bool(algo.kl_coef)) + int(algo.keep_old_actor),
        whole_layers=train.recompute_activations,
        is_offloaded=config.optim.offload_optimizer_states or config.optim.optimizer_cpu_offload,
        masters_too=config.optim.optimizer_cpu_offload,
        is_half=train.bf16 or not (train.fp32 or on_cpu),
        num_moments=_num_moments(config),
        on_cpu=on_cpu,
        layout=Layout.of(train, config.megatron, num_layers) if is_cut else None,
    )


def serving_of(config: Config, topology: Topology) -> ServingSetup | None:
    """What decides the memory of an SGLang engine, from the flags; None where furlong starts none on a GPU."""
    if config.cluster.engine != "sglang" or not topology.num_engines:
        return None
    data = config.data
    parts = engine_parts(trained_model(config).groups)
    part = min(parts, key=lambda part: part.num_gpus)  # has the most of the model on a GPU
    options = {**config.engines.sglang_options, **part.group.options}
    samples = data.rollout_batch_size * data.n_samples_per_prompt
    per_engine = -(-samples // len(parts))
    return ServingSetup(
        fraction=float(options.get("mem_fraction_static") or STATIC_FRACTION),
        tp_size=max(part.num_gpus // int(options.get("pp_size") or 1), 1),
        requests=min(per_engine, config.cluster.sglang_server_concurrency),
        request_tokens=longest_sample(config),
    )


def longest_sample(config: Config) -> int:
    """Tokens of the longest sample that the flags allow; 1 where they name no limit."""
    rollout = config.rollout
    if rollout.rollout_max_context_len is not None:
        return rollout.rollout_max_context_len
    return (rollout.rollout_max_prompt_len or 0) + (rollout.rollout_max_response_len or 0) or 1


def findings(plan: MemoryPlan, device: str) -> list[Diagnosis]:
    """MEM01, if a phase of the trainer or of the engine does not fit."""
    if plan.fits:
        return []
    who, peak = "training", plan.trainer_peak
    if peak.total <= plan.limit and plan.engine is not None:
        who, peak = "generation", plan.engine
    largest = max(peak.parts, key=lambda name: peak.parts[name])
    return [
        diagnosis(
            "MEM01",
            f"{who} needs {peak.total / GIB:.1f} GiB in `{peak.name}` on a GPU that has {plan.limit / GIB:.1f} GiB "
            f"to give ({device}); the largest part is {largest}, {peak.parts[largest] / GIB:.1f} GiB",
            remedy=plan.change,
            evidence=plan.record(),
        )
    ]


def host_findings(plan: MemoryPlan, config: Config, host_bytes: int) -> list[Diagnosis]:
    """MEM01, if what the ranks of a machine hold in its memory is more than it has."""
    if plan.host is None or plan.host.total <= host_bytes:
        return []
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in plan.host.parts.items())
    ways = [
        "leave --async-save out" if config.checkpoint.async_save else "",
        "--no-offload-train, if trainer and engine fit on the GPU together" if "asleep" in plan.host.parts else "",
        "fewer ranks on a machine, or one with more memory",
    ]
    return [
        diagnosis(
            "MEM01",
            f"the ranks of a machine hold {size_text(plan.host.total)} in its memory, which has "
            f"{size_text(host_bytes)}: {parts}",
            remedy="; ".join(filter(None, ways)),
            evidence={"needed": plan.host.total, "has": host_bytes, "parts": dict(plan.host.parts)},
        )
    ]


def cpu_findings(config: Config, model_config: Mapping[str, Any], machine: MemoryUse) -> list[Diagnosis]:
    """MEM01 as a warning, if one process that trains on this machine's CPU needs more memory than there is.

    Predictions for CPUs are within a third of what was measured.
    """
    model, topology = ModelSize.read(model_config), Topology.of(config)
    if topology.num_ranks != 1:
        return []
    how = training_of(config, topology, model.layers, on_cpu=True)
    room = machine.limit - machine.used
    peak = max(training_phases(model, how, room), key=lambda phase: phase.total)
    needed = peak.total + 4 * model.parameters  # an engine's own copy
    if needed <= room:
        return []
    longest = longest_sample(config)
    return [
        diagnosis(
            "MEM01",
            f"training needs about {size_text(needed)} in `{peak.name}`, engine included; of the "
            f"{size_text(machine.limit)} of {machine.whose} {size_text(room)} are free",
            remedy=_as_flags(smallest_change(model, how, room - 4 * model.parameters, longest=longest), config)
            or "fewer other programs",
            severity="warning",
            evidence={"needed": needed, "free": room, "parts": dict(peak.parts)},
        )
    ]


def change_after(
    config: Config,
    model_config: Mapping[str, Any],
    room: int,
    *,
    longest: int | None,
    tokens: int | None = None,
    on_cpu: bool = False,
) -> tuple[str, str]:
    """What was predicted of a run that ran out of memory, and flags after which it fits into `room` bytes.

    `longest` is the longest sample that it had at hand, `tokens` are those of the micro-batch. Where the prediction
    says that it fits already, the tokens of a micro-batch are halved: something else has memory, or it is fragmented.
    """
    model, topology = ModelSize.read(model_config), Topology.of(config)
    how = training_of(config, topology, model.layers, on_cpu=on_cpu)
    how = replace(how, tokens=tokens or how.tokens)
    if topology.is_colocated and not on_cpu:
        room -= sum(_beside(config, model, serving_of(config, topology), room).values())
    change = _as_flags(smallest_change(model, how, room, longest=longest or longest_sample(config)), config)
    peak = max(training_phases(model, how, room), key=lambda phase: phase.total)
    predicted = f"predicted {size_text(peak.total)} in `{peak.name}`, where {size_text(room)} can be had"
    if change:
        return predicted, change
    half = f"--max-tokens-per-gpu {max(how.tokens // 2, longest or 1)}"
    return f"{predicted}, so memory is held elsewhere or fragmented", _as_flags(half, config)


def size_text(num_bytes: int) -> str:
    """A number of bytes for people."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1024:.0f} KiB"
