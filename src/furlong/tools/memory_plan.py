"""The memory plan of a run: what each phase needs on a GPU, and flags with which it fits.

`tools.memory_formulas` has the formulas, this module the flags, `tools.chosen_sizes` sizes that no flag gives. None
needs a GPU or torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from furlong.catalogue import Diagnosis, diagnosis
from furlong.config.command_line import examine
from furlong.config.critic import critic_settings
from furlong.config.engine_groups import ServedModel, engine_parts, served_models, trained_model
from furlong.config.flag_spec import flag_specs
from furlong.config.flag_values import words_from_value
from furlong.config.resolve import DEFAULT_MAX_TOKENS
from furlong.config.sections import Config
from furlong.config.teachers import teacher_specs
from furlong.config.topology import Topology
from furlong.core.model_config import read_json
from furlong.errors import ConfigError
from furlong.machine import MemoryUse
from furlong.tools.memory_formulas import (
    GIB,
    NODE,
    ModelSize,
    Phase,
    ServingSetup,
    TeacherSetup,
    TrainingSetup,
    between_steps,
    engine_weights,
    least_fraction,
    most_tokens,
    on_host,
    serving_phase,
    smallest_change,
    training_phases,
    usable,
)
from furlong.training.megatron.parallel_layout import Layout

STATIC_FRACTION = 0.85  # SGLang's default on a large GPU
# What an engine retains after releasing its memory, measured on an H200: 2 GiB before it served requests; 5 to 12 GiB
# after 512 concurrent requests, depending on the model's width; 7 GiB for a tiny model with Triton attention.
ASLEEP_FRAC = 0.05  # of the GPU, at least
ASLEEP_BYTES, ASLEEP_ROW_BYTES = 2 * GIB, 2048  # plus this for each MLP activation of each request
TOKENS = (32768, 24576, 16384, 12288, 8192)  # of a micro-batch, if no flag gives them; larger ones are not faster
EVAL_REQUESTS = 256  # of an evaluation, whose rows are not counted here
# Assumptions of `furlong plan`.
PROMPTS, EACH = 32, 8  # per rollout, and samples per prompt
SAMPLE_TOKENS, PROMPT_TOKENS = 8192, 1024
WEIGHTS_FRAC = 0.4  # of a GPU, for an engine's weights; larger models are sharded
ENGINES = ("engine", "colocate", "rollout_num_gpus", "rollout_num_gpus_per_engine")
UNSEEN: Mapping[str, Any] = {
    "num_rollout": 1,
    "data_source_path": "any.data",
    "rm_type": "random",
}  # no effect on memory


@dataclass(frozen=True)
class MemoryPlan:
    """Phases on one GPU of `device_bytes`. `change`: flags with which they fit, "" if they already do.

    frozen: the engines of other models of --sglang-config, on GPUs of their own.
    least_fraction: --mem-fraction-static with which the engine fits all requests at full length. most_fraction: the
    largest that leaves room for a colocated trainer. host: host memory of a machine's ranks, None if negligible.
    """

    device_bytes: int
    trainer: tuple[Phase, ...]
    engine: Phase | None
    change: str
    most_tokens: int
    least_fraction: float | None
    most_fraction: float | None = None
    host: Phase | None = None
    frozen: tuple[Phase, ...] = ()

    @property
    def limit(self) -> int:
        """Bytes that a phase can use."""
        return usable(self.device_bytes)

    @property
    def trainer_peak(self) -> Phase:
        """The largest of the trainer's phases."""
        return max(self.trainer, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        """Whether every phase fits."""
        engines = [*self.frozen, *([self.engine] if self.engine else [])]
        return all(phase.total <= self.limit for phase in (self.trainer_peak, *engines))

    @property
    def phases(self) -> list[tuple[str, Phase]]:
        """All phases on GPUs, with the part of the run."""
        engines = [*([self.engine] if self.engine else []), *self.frozen]
        return [*(("trainer", phase) for phase in self.trainer), *(("engine", phase) for phase in engines)]

    def record(self) -> dict[str, Any]:
        """JSON-able form, in GiB."""
        return {
            "fits": self.fits,
            "device_gib": self.device_bytes / GIB,
            "usable_gib": self.limit / GIB,
            "host": None if self.host is None else self.host.record(),
            "phases": [{"who": who, **phase.record()} for who, phase in self.phases],
            "change": self.change,
            "max_tokens_per_gpu": self.most_tokens,
            "sglang_mem_fraction_static": self.least_fraction,
            "sglang_mem_fraction_static_at_most": self.most_fraction,
        }


def plan_memory(config: Config, model_config: Mapping[str, Any], device_bytes: int) -> MemoryPlan:
    """Plan a run on GPUs of `device_bytes`. `model_config`: config.json of --hf-checkpoint. Raises ConfigError.

    With --colocate, each phase includes what the other part keeps on the GPU: little if it is offloaded.
    """
    model, topology = ModelSize.read(model_config), Topology.of(config)
    setup = training_of(config, topology, model)
    engine = serving_of(config, topology)
    limit = usable(device_bytes)
    serving = None if engine is None else serving_phase(model, engine, device_bytes)
    other = colocated_engine(config, model, engine, device_bytes) if topology.is_colocated else {}
    if teachers := teachers_here(config, model, width=setup.width):
        other = other | {"teachers in this process": teachers}
    room = limit - sum(other.values())
    phases = [replace(phase, parts={**phase.parts, **other}) for phase in training_phases(model, setup, room)]
    most: float | None = None
    longest = -(-longest_sample(config) // config.train.context_parallel_size)
    updating: dict[str, int] = {}
    if topology.is_colocated:
        updating["buckets"] = 2 * config.sync.update_weight_buffer_size
        if config.cluster.offload_rollout:
            updating["engine's weights"] = engine_weights(model, 1 if engine is None else engine.tp_size)
        phases.append(Phase("update weights", between_steps(model, setup) | updating | other))
    change = smallest_change(model, setup, room, longest=longest, update_bytes=sum(updating.values()))
    change = _as_flags(change, config)
    if serving is not None and topology.is_colocated:
        kept = {} if config.cluster.offload_train else {"trainer": sum(between_steps(model, setup).values())}
        most = max((100 * (limit - sum(kept.values())) // device_bytes) / 100, 0.0)
        serving = replace(serving, parts={**serving.parts, **kept})
        if serving.total > limit and (not change or change.startswith("--")):  # else flags do not help
            change = " ".join(filter(None, (change, f"--sglang-mem-fraction-static {most:g}" if most else "--offload")))
    frozen = tuple(_frozen_engines(config, topology, model, device_bytes))
    if large := [phase.name.removeprefix("serve ") for phase in frozen if phase.total > limit]:
        more = f"more GPUs per engine of {', '.join(large)} in --sglang-config (num_gpus_per_engine)"
        change = f"{change}, and {more}" if change else f"use {more}"
    return MemoryPlan(
        device_bytes=device_bytes,
        trainer=tuple(phases),
        engine=serving,
        change=change,
        most_tokens=most_tokens(model, setup, room),
        least_fraction=None if engine is None else least_fraction(model, engine, device_bytes),
        most_fraction=most,
        host=_on_host(config, topology, model, setup),
        frozen=frozen,
    )


def _size_of(folder: str | None, default: ModelSize) -> ModelSize:
    """Return the size of a model; `default`, the policy's, for a checkpoint of it or unknown dimensions."""
    try:
        return ModelSize.read(read_json(Path(str(folder)) / "config.json"))
    except ConfigError:
        return default


def _critic_of(config: Config, model: ModelSize) -> ModelSize:
    try:
        load = critic_settings(config).load
    except ConfigError:
        load = None
    return replace(model if load is None else _size_of(load, model), has_head=False)


def _teacher_of(config: Config, topology: Topology, model: ModelSize) -> TeacherSetup | None:
    """Return the teacher in the trainer, with the response tokens that a data-parallel rank has at most."""
    opd, rollout, train = config.opd, config.rollout, config.train
    if not opd.has_teacher_model:
        return None
    is_bounded = rollout.rollout_max_response_len and not rollout.custom_generate_function_path
    each = rollout.rollout_max_response_len if is_bounded else longest_sample(config)
    samples = config.data.rollout_batch_size * config.data.n_samples_per_prompt
    together = train.context_parallel_size  # ranks with the same samples
    if train.train_backend == "megatron":
        together *= train.tensor_model_parallel_size * train.pipeline_model_parallel_size
    tokens = -(-samples // max(topology.num_ranks // together, 1)) * int(each or 0)
    return TeacherSetup(
        _size_of(opd.opd_teacher_load, model),
        tokens,
        is_full=opd.opd_loss == "full",
        top_k=opd.opd_log_prob_top_k if opd.opd_loss == "topk" else 0,
    )


def teachers_here(config: Config, model: ModelSize, *, width: int) -> int:
    """Return the bytes of the teachers in this process, `width` for each parameter."""
    folders = [spec.folder for spec in teacher_specs(config) if spec.folder is not None]
    return sum(width * _size_of(folder, model).parameters for folder in folders)


def _frozen_engines(config: Config, topology: Topology, model: ModelSize, device_bytes: int) -> Iterator[Phase]:
    if config.cluster.engine != "sglang" or not topology.num_engines:
        return
    for served in served_models(config):
        if not served.is_trained and served.num_engines:
            setup = _serving(config, served)
            yield replace(serving_phase(_size_of(served.path, model), setup, device_bytes), name=f"serve {served.name}")


def _on_host(config: Config, topology: Topology, model: ModelSize, setup: TrainingSetup) -> Phase | None:
    sleeps = topology.is_colocated and bool(config.cluster.offload_train)
    per_rank = -(-model.parameters // max(topology.num_ranks, 1))
    copied = checkpoint_bytes_per_parameter(config) * per_rank if config.checkpoint.async_save else 0
    ranks = min(topology.gpus_per_node, topology.num_ranks)
    host = on_host(model, setup, sleeps=sleeps, copied=copied)
    parts = {name: ranks * size for name, size in host.items()}
    return Phase("during training", parts, f"of {ranks} ranks" if ranks > 1 else "") if parts else None


def checkpoint_bytes_per_parameter(config: Config) -> int:
    """Return the checkpoint bytes per parameter: its float32 value and the optimizer's moments."""
    return 4 * (1 + (0 if config.checkpoint.no_save_optim else _num_moments(config)))


def _num_moments(config: Config) -> int:
    return 2 if config.optim.optimizer == "adam" else 1


def _as_flags(change: str, config: Config) -> str:
    train = config.train
    is_given = train.max_tokens_per_gpu not in (DEFAULT_MAX_TOKENS, *TOKENS)  # else nothing was given, and is lost now
    if "--max-tokens-per-gpu" not in change or (train.use_dynamic_batch_size and is_given):
        return change
    dropped = "" if train.use_dynamic_batch_size or train.micro_batch_size == 1 else ", without --micro-batch-size"
    return f"--use-dynamic-batch-size {change}{dropped}"


def colocated_engine(
    config: Config, model: ModelSize, engine: ServingSetup | None, device_bytes: int
) -> dict[str, int]:
    """Return the bytes of an engine, by part, while the trainer runs on its GPU of `device_bytes`."""
    if engine is None:
        return {}
    if config.cluster.offload_rollout:
        return {"sleeping engine": max(int(ASLEEP_FRAC * device_bytes), asleep_bytes(model, engine))}
    return {"engine": serving_phase(model, engine, device_bytes).total}


def asleep_bytes(model: ModelSize, engine: ServingSetup) -> int:
    """Return the memory that an engine retains on a GPU after serving requests and releasing its memory."""
    return ASLEEP_BYTES + ASLEEP_ROW_BYTES * engine.requests * model.mlp_width // engine.tp_size


def training_of(config: Config, topology: Topology, model: ModelSize, *, on_cpu: bool = False) -> TrainingSetup:
    """Derive the trainer's setup from the flags."""
    train, algo = config.train, config.algo
    is_megatron = train.train_backend == "megatron"
    longest = -(-longest_sample(config) // train.context_parallel_size)
    tokens = train.max_tokens_per_gpu if train.use_dynamic_batch_size and train.max_tokens_per_gpu else 0
    if not train.use_dynamic_batch_size:
        tokens = train.micro_batch_size * longest
    most = config.data.rollout_batch_size * config.data.n_samples_per_prompt * longest  # of a whole rollout
    return TrainingSetup(
        tokens=max(min(tokens, most), longest),
        shards=max(topology.num_ranks // (1 if is_megatron else train.dp_replicate_size), 1),
        frozen_models=int(algo.uses_reference) + int(algo.keep_old_actor),
        whole_layers=train.recompute_activations,
        is_offloaded=config.optim.offload_optimizer_states or config.optim.optimizer_cpu_offload,
        offloads_masters=config.optim.optimizer_cpu_offload,
        is_half=train.bf16 or not (train.fp32 or on_cpu),
        num_moments=_num_moments(config),
        on_cpu=on_cpu,
        layout=Layout.of(train, config.megatron, model.layers) if is_megatron else None,
        grad_bytes=2 if config.megatron.grad_reduce_in_bf16 else 4,
        teacher=_teacher_of(config, topology, model),
        critic=_critic_of(config, model) if algo.uses_critic else None,
        shares_device=algo.uses_critic and bool(config.cluster.offload_train) and not on_cpu,
    )


def serving_of(config: Config, topology: Topology) -> ServingSetup | None:
    """Derive the setup of an SGLang engine from the flags; None if furlong starts none on a GPU."""
    if config.cluster.engine != "sglang" or not topology.num_engines:
        return None
    trained = trained_model(config)
    decoding = sum(part.group.role != "prefill" for part in engine_parts(trained.groups))
    requests = {"requests": requests_at_once(config, decoding), "request_tokens": longest_sample(config)}
    return replace(_serving(config, trained), **requests)


def _serving(config: Config, model: ServedModel) -> ServingSetup:
    part = min(engine_parts(model.groups), key=lambda part: part.num_gpus)  # has the most weights per GPU
    options = {**config.engines.sglang_options, **part.group.options}
    return ServingSetup(
        fraction=float(options.get("mem_fraction_static") or STATIC_FRACTION),
        tp_size=max(part.num_gpus // int(options.get("pp_size") or 1), 1),
    )


def requests_at_once(config: Config, num_engines: int) -> int:
    """Return the requests that one of `num_engines` engines, or the engine in this process (0), has at a time."""
    rollout, data = config.rollout, config.data
    prompts = max(rollout.over_sampling_batch_size or 0, data.rollout_batch_size)
    requests = -(-prompts * max(rollout.async_buffer_size or 0, 1) // (num_engines or 1)) * data.n_samples_per_prompt
    if config.eval.is_used:
        requests = max(requests, EVAL_REQUESTS)
    if rollout.max_concurrent_episodes is not None:
        requests = min(requests, -(-rollout.max_concurrent_episodes // (num_engines or 1)))
    return min(requests, config.cluster.sglang_server_concurrency) if num_engines else requests


def longest_sample(config: Config) -> int:
    """Return the tokens of the longest sample that the flags allow; 1 without a limit."""
    rollout = config.rollout
    if rollout.rollout_max_context_len is not None:
        return rollout.rollout_max_context_len
    return (rollout.rollout_max_prompt_len or 0) + (rollout.rollout_max_response_len or 0) or 1


def findings(plan: MemoryPlan, device: str) -> list[Diagnosis]:
    """MEM01: a phase of the trainer or engine does not fit."""
    if plan.fits:
        return []
    who, peak = "training", plan.trainer_peak
    if peak.total <= plan.limit:
        who, peak = "generation", max((phase for _, phase in plan.phases), key=lambda phase: phase.total)
    largest = max(peak.parts, key=lambda name: peak.parts[name])
    return [
        diagnosis(
            "MEM01",
            f"{who} needs {peak.total / GIB:.1f} GiB in `{peak.name}` on a GPU with {plan.limit / GIB:.1f} GiB "
            f"usable ({device}); the largest part is {largest}, {peak.parts[largest] / GIB:.1f} GiB",
            remedy=remedy_of(plan.change),
            evidence=plan.record(),
        )
    ]


def host_findings(plan: MemoryPlan, config: Config, host_bytes: int) -> list[Diagnosis]:
    """MEM01: the ranks of a machine need more host memory than it has."""
    if plan.host is None or plan.host.total <= host_bytes:
        return []
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in plan.host.parts.items())
    remedies = [
        "remove --async-save" if config.checkpoint.async_save else "",
        "use --no-offload-train if trainer and engine fit on the GPU together" if "asleep" in plan.host.parts else "",
        "use fewer ranks per machine, or machines with more memory",
    ]
    return [
        diagnosis(
            "MEM01",
            f"the ranks of a machine need {size_text(plan.host.total)} of host memory, but it has "
            f"{size_text(host_bytes)}: {parts}",
            remedy="; ".join(filter(None, remedies)),
            evidence={"needed": plan.host.total, "has": host_bytes, "parts": dict(plan.host.parts)},
        )
    ]


def cpu_findings(config: Config, model_config: Mapping[str, Any], machine: MemoryUse) -> list[Diagnosis]:
    """MEM01 as a warning: training in one process on this machine's CPU needs more memory than is free.

    Predictions for CPUs are within a third of measurements.
    """
    model, topology = ModelSize.read(model_config), Topology.of(config)
    if topology.num_ranks != 1:
        return []
    setup = training_of(config, topology, model, on_cpu=True)
    room = machine.limit - machine.used
    peak = max(training_phases(model, setup, room), key=lambda phase: phase.total)
    beside = 4 * model.parameters + teachers_here(config, model, width=4) + setup.kept_of_teacher  # engines' weights
    needed = peak.total + beside
    if needed <= room:
        return []
    change = smallest_change(model, setup, room - beside, longest=longest_sample(config))
    return [
        diagnosis(
            "MEM01",
            f"training and engine need about {size_text(needed)} in `{peak.name}`, but {machine.whose} has "
            f"{size_text(room)} free of {size_text(machine.limit)}",
            remedy=remedy_of(_as_flags(change, config)) or "end other programs",
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
    """Return the prediction for a run that ran out of memory, and flags with which it fits into `room` bytes.

    `longest` is the longest sample so far, `tokens` the size of the micro-batch. If the run should already fit, the
    micro-batch is halved: memory is used elsewhere, or fragmented.
    """
    model, topology = ModelSize.read(model_config), Topology.of(config)
    setup = training_of(config, topology, model, on_cpu=on_cpu)
    setup = replace(setup, tokens=tokens or setup.tokens)
    room -= teachers_here(config, model, width=setup.width)
    if topology.is_colocated and not on_cpu:
        room -= sum(colocated_engine(config, model, serving_of(config, topology), room).values())
    change = _as_flags(smallest_change(model, setup, room, longest=longest or longest_sample(config)), config)
    peak = max(training_phases(model, setup, room), key=lambda phase: phase.total)
    predicted = f"predicted {size_text(peak.total)} in `{peak.name}` with {size_text(room)} available"
    if change:
        return predicted, change
    half = f"--max-tokens-per-gpu {max(setup.tokens // 2, longest or 1)}"
    return f"{predicted}, so memory is used elsewhere or fragmented", _as_flags(half, config)


def remedy_of(change: str) -> str:
    """Make a sentence of flags, or of the advice where no flags help."""
    return f"use {change}" if change.startswith("--") else change


def size_text(num_bytes: int) -> str:
    """Format a number of bytes."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1024:.0f} KiB"


def assumptions(words: Sequence[str], *, gpus: int | None, device_bytes: int) -> dict[str, Any]:
    """Return values by field for flags missing from `words`; {} if the command is complete.

    gpus: for trainer and engines together, in whole machines if more than one; 1 if None. Raises ConfigError if the
    folder is not a model.
    """
    resolved, problems = examine(words, weights=False)
    if not problems:
        return {}
    explicit = {name for name, source in resolved.sources.items() if source == "flag" or source.startswith("file")}
    config = resolved.config
    if model_problems := [problem for problem in problems if problem.startswith("--hf-checkpoint")]:
        raise ConfigError(*model_problems)
    if not (Path(str(config.rollout.hf_checkpoint)) / "config.json").is_file():
        raise ConfigError(f"--hf-checkpoint {config.rollout.hf_checkpoint}: no config.json in that folder")
    model_config = read_json(Path(str(config.rollout.hf_checkpoint)) / "config.json")
    assumed = dict(UNSEEN) | _sizes(explicit, config, model_config) | _gpus(explicit, gpus, model_config, device_bytes)
    is_sft = config.algo.loss_type == "sft_loss"  # nothing is generated or scored
    excluded = {
        "num_rollout": "num_epoch" in explicit,
        "data_source_path": bool({"prompt_data", "rollout_global_dataset", "load_debug_rollout_data"} & explicit),
        "rm_type": "custom_rm_path" in explicit or is_sft,
        "n_samples_per_prompt": is_sft,
        **dict.fromkeys(ENGINES, is_sft),
    }
    return {n: value for n, value in assumed.items() if not excluded.get(n) and n not in explicit}


def shown(assumed: Mapping[str, Any]) -> str:
    """Format the assumptions that matter as flags."""
    specs = flag_specs(Config)
    words = [
        words_from_value(specs[name], value) or [f"{specs[name].flag}={value}"]  # what is a default, too
        for name, value in assumed.items()
        if name not in UNSEEN
    ]
    return " ".join(word.replace("=", " ", 1) for flag_words in words for word in flag_words)


def _sizes(explicit: set[str], config: Config, model_config: Mapping[str, Any]) -> dict[str, Any]:
    positions = (model_config.get("text_config") or model_config).get("max_position_embeddings")
    most = min(SAMPLE_TOKENS, int(positions or SAMPLE_TOKENS))
    rollout = config.rollout
    prompt = rollout.rollout_max_prompt_len or min(PROMPT_TOKENS, most // 2)
    response = rollout.rollout_max_response_len or max(most - prompt, 1)
    samples = (config.train.global_batch_size or 0) * (config.train.num_steps_per_rollout or 1) or PROMPTS * EACH
    n = config.data.n_samples_per_prompt if "n_samples_per_prompt" in explicit else EACH if samples % EACH == 0 else 1
    prompts = config.data.rollout_batch_size or max(samples // n, 1)
    assumed: dict[str, Any] = {"rollout_batch_size": prompts, "n_samples_per_prompt": n}
    if "rollout_max_context_len" not in explicit:
        assumed |= {"rollout_max_prompt_len": prompt, "rollout_max_response_len": response}
    if "max_tokens_per_gpu" in explicit:
        assumed["use_dynamic_batch_size"] = True
    return assumed


def _gpus(explicit: set[str], gpus: int | None, model_config: Mapping[str, Any], device_bytes: int) -> dict[str, Any]:
    count = gpus or 1
    assumed: dict[str, Any] = {}
    if gpus is not None:
        assumed |= {"actor_num_nodes": max(count // NODE, 1), "actor_num_gpus_per_node": min(count, NODE)}
    if {*ENGINES, "rollout_external_engine_addrs", "sglang_config"} & explicit:
        return assumed
    weights, each = 2 * ModelSize.read(model_config).parameters, 1
    while each < min(count, NODE) and weights / each > WEIGHTS_FRAC * device_bytes:
        each *= 2
    assumed |= {"engine": "sglang", "colocate": True, "rollout_num_gpus": count}
    return assumed | ({"rollout_num_gpus_per_engine": each} if each > 1 else {})
