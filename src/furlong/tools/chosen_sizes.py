"""Sizes that a run chooses where no flag gives them, from the memory of a GPU; and which engine is faster there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any, cast

from furlong.config.engine_groups import served_models, trained_model
from furlong.config.evaluation import used_eval_specs
from furlong.config.facts import without_engines
from furlong.config.resolve import DEFAULT_MAX_TOKENS
from furlong.config.sections import Config
from furlong.config.topology import Topology
from furlong.models.model_facts import GPU_KV_FRAC
from furlong.tools.memory_formulas import (
    CONTEXT_BYTES,
    GIB,
    ModelSize,
    ServingSetup,
    TrainingSetup,
    between_steps,
    engine_weights,
    least_fraction,
    resting,
    training_phases,
    usable,
)
from furlong.tools.memory_plan import (
    ASLEEP_FRAC,
    PROMPT_TOKENS,
    STATIC_FRACTION,
    TOKENS,
    asleep_bytes,
    colocated_engine,
    longest_sample,
    requests_at_once,
    serving_of,
    size_text,
    teachers_here,
    training_of,
)

PLAN_FRAC = 0.9  # predictions are within 10 %
RECOMPUTED_TOKENS = 8192
FILLED = 4  # micro-batches of a step for each pipeline stage: with fewer, stages wait for each other
SLOTS = (1024, 768, 512, 384, 256, 192)  # of the embedded engine
LEAST_REQUESTS, MOST_REQUESTS = 64, 1024  # that SGLang gets CUDA graphs for
GRAPH_BYTES = 2 * 2**20  # of CUDA graphs for each request, as SGLang assumes
KV_SLACK = 1.25  # for pages and prefixes, over all requests at full length
USUAL_PROMPT = 256  # tokens, without a limit of the prompt
# Of an engine that stays on the GPU with the trainer: its least fraction, since SGLang counts more than weights and
# cache in it, and SGLang's options with which `_sizes_together` does not know its memory.
LEAST_STATIC = 0.1
UNPLANNED = {"mem_fraction_static", "max_total_tokens", "chunked_prefill_size", "dp_size", "dtype", "enable_lora"}
MANY_WAVES, LONG_RESPONSE = 3, 1024  # from which SGLang is expected to be faster than the embedded engine

Sizes = dict[str, tuple[Any, str]]  # value and reason by field


def chosen_sizes(
    config: Config, model_config: Mapping[str, Any], device_bytes: int, *, given: Collection[str] = ()
) -> Sizes:
    """Return sizes for GPUs of `device_bytes`, on every layout; none where the usual default is the best that fits.

    These are the tokens of micro-batches, the slots of embedded engines or options of SGLang engines that the run
    starts, and with --colocate whether trainer and engines stay on the GPUs together. `given`: fields that flags set,
    whose values are kept, like options in the configuration. Raises ConfigError for a model of unknown dimensions.
    """
    model = ModelSize.read(model_config)
    sizes = _sizes_in_turn(config, model, device_bytes)
    sizes = {name: size for name, size in sizes.items() if name not in given or isinstance(size[0], dict)}
    takes_turns = {"offload", "offload_train", "offload_rollout"} & set(given)
    return sizes if takes_turns else sizes | _sizes_together(config, sizes, model, device_bytes)


def _sizes_in_turn(config: Config, model: ModelSize, device_bytes: int) -> Sizes:
    topology = Topology.of(config)
    setup, sizes, beside = training_of(config, topology, model), Sizes(), 0
    teachers = teachers_here(config, model, width=setup.width)
    device = f"{device_bytes / GIB:.0f} GiB of GPU memory"
    if config.cluster.engine == "embedded" and not without_engines(config):
        slots, why, beside = _embedded_size(config, model, setup, device_bytes)
        if slots > config.cluster.embedded_num_slots:
            sizes["embedded_num_slots"] = slots, f"{device}, {why}"
    elif (engine := serving_of(config, topology)) is not None and not without_engines(config):
        if options := _sglang_sizes(config, model, setup, engine, device_bytes):
            options |= config.engines.sglang_options
            why = f"{device}, {engine.requests} requests at a time on each engine"
            sizes["sglang_options"] = options, why
            config = replace(config, engines=replace(config.engines, sglang_options=options))
        if topology.is_colocated:
            beside = sum(colocated_engine(config, model, serving_of(config, topology), device_bytes).values())
    if config.train.max_tokens_per_gpu != DEFAULT_MAX_TOKENS or not topology.num_ranks:
        return sizes
    room, fitting = int(PLAN_FRAC * usable(device_bytes)) - beside - teachers, dict[int, bool]()
    for tokens in TOKENS:
        phases = training_phases(model, replace(setup, tokens=tokens), room)
        if max(phase.total for phase in phases) <= room and _fills_pipeline(config, setup, tokens):
            fitting[tokens] = not any("recomputed in" in phase.note for phase in phases)
    if whole := [tokens for tokens, is_whole in fitting.items() if is_whole]:
        stages = " and fills the pipeline" if setup.layout is not None and setup.layout.pipeline > 1 else ""
        why = f"{device}: the largest that fits without recomputation{stages}"
        sizes["max_tokens_per_gpu"] = whole[0], why
    elif RECOMPUTED_TOKENS in fitting:
        sizes["max_tokens_per_gpu"] = RECOMPUTED_TOKENS, f"{device}: fits with MLPs recomputed"
    return sizes


def with_chosen_sizes(
    config: Config, sources: Mapping[str, str], model_config: Mapping[str, Any], device_bytes: int
) -> tuple[Config, dict[str, str], list[str]]:
    """Return the configuration with `chosen_sizes`, its sources, and each size as flags with its reason.

    Flags take precedence: only values whose source is a default, or derived, are replaced.
    """
    sources, words = dict(sources), dict[str, list[str]]()
    given = {name for name, source in sources.items() if not source.startswith(("default", "derived"))}
    for name, (value, reason) in chosen_sizes(config, model_config, device_bytes, given=given).items():
        section = next(each.name for each in fields(config) if hasattr(getattr(config, each.name), name))
        before = getattr(getattr(config, section), name)
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
        prefix, new = "", {name: value}
        if isinstance(value, dict):  # options of SGLang, of which some may be given
            options = cast("dict[str, Any]", value)
            prefix, new = "sglang-", {option: each for option, each in options.items() if option not in before}
        derived = f"{sources[name]}; derived {', '.join(new)}" if name in given else "derived"
        sources[name] = f"{derived}: {reason}"
        for flag, each in new.items():
            dashed = flag.replace("_", "-")
            head, tail = ("no-", "") if each is False else (prefix, f" {each}")
            words.setdefault(reason, []).append(f"--{head}{dashed}{tail}")
    return config, sources, [f"{' '.join(of_reason)}: {reason}" for reason, of_reason in words.items()]


def _full_length(config: Config, unlimited_prompt: int = USUAL_PROMPT) -> int:
    rollout = config.rollout
    is_limited = rollout.rollout_max_prompt_len or rollout.rollout_max_context_len
    return longest_sample(config) + (0 if is_limited else unlimited_prompt)


def _fills_pipeline(config: Config, setup: TrainingSetup, tokens: int) -> bool:
    layout = setup.layout
    if layout is None or layout.pipeline == 1:
        return True
    of_sample = layout.tensor * layout.pipeline * layout.context  # ranks that train on the same samples
    samples = config.train.global_batch_size or config.data.rollout_batch_size * config.data.n_samples_per_prompt
    step = samples * _full_length(config) // (max(setup.shards // of_sample, 1) * layout.context)
    return tokens * FILLED * layout.pipeline <= step


def _embedded_size(config: Config, model: ModelSize, setup: TrainingSetup, device_bytes: int) -> tuple[int, str, int]:
    """Return slots of an embedded engine, why, and its memory while the trainer runs on the same GPU.

    All requests get slots if their keys and values fit at full length into its part of the memory, which it takes
    before the first step allocates the moments.
    """
    topology, cluster = Topology.of(config), config.cluster
    is_half = not config.train.fp32 and cluster.embedded_dtype != "float32"
    weights = (2 if is_half else 4) * model.parameters
    in_process = not topology.num_engines
    shares = in_process or (topology.is_colocated and not cluster.offload_train)
    trainer = 0
    if shares:
        trainer = sum(resting(model, replace(setup, is_offloaded=True)).values())
        trainer += teachers_here(config, model, width=setup.width)
    cache = int(GPU_KV_FRAC * max(usable(device_bytes) - weights - trainer, 0))
    requests = requests_at_once(config, topology.num_engines)
    fitting = cache // (model.kv_per_token * (1 if is_half else 2) * _full_length(config))
    slots = next((n for n in reversed(SLOTS) if n >= requests), SLOTS[0])
    if slots > fitting:
        slots = next((n for n in SLOTS if n <= fitting), 0)
    beside = weights + cache if in_process or topology.is_colocated else 0
    if topology.is_colocated and cluster.offload_rollout:
        beside = int(ASLEEP_FRAC * device_bytes)
    return slots, f"{requests} requests at a time", beside


def _sglang_sizes(
    config: Config, model: ModelSize, setup: TrainingSetup, engine: ServingSetup, device_bytes: int
) -> dict[str, Any]:
    """Return options of SGLang that are not given: CUDA graphs for all requests of an engine, and its memory.

    Decoding without graphs is several times slower, so more requests than there are graphs for wait. SGLang's own
    share of the memory suits an engine that is alone on its GPU, or that takes turns with the trainer.
    """
    given, cluster, topology = config.engines.sglang_options, config.cluster, Topology.of(config)
    models = served_models(config)
    if given.get("device") == "cpu" or len(models) > 1:
        return {}
    options: dict[str, Any] = {}
    requests = min(max(-(-engine.requests // 8) * 8, LEAST_REQUESTS), MOST_REQUESTS)
    requests = min(requests, int(given.get("max_running_requests") or requests))
    has_graphs = any("cuda_graph" in name and "prefill" not in name and "piecewise" not in name for name in given)
    fits = usable(device_bytes) >= int(engine.fraction * device_bytes) + requests * GRAPH_BYTES
    if fits and not has_graphs and not given.get("speculative_algorithm"):
        workers = int(given.get("dp_size") or 1)  # of attention, which share the requests
        options = {"cuda_graph_max_bs": -(-requests // workers), "max_running_requests": requests}
    if not topology.is_colocated or "mem_fraction_static" in given:
        return options
    static = int(STATIC_FRACTION * device_bytes)
    if not cluster.offload_train:
        phases = training_phases(model, replace(setup, tokens=RECOMPUTED_TOKENS), usable(device_bytes))
        trainer = max(phase.total for phase in phases)
        if cluster.offload_rollout:
            trainer = sum(between_steps(model, setup).values())
        static = min(static, int(PLAN_FRAC * usable(device_bytes)) - trainer - (device_bytes - static))
    if context_len := config.rollout.rollout_max_context_len:  # else lengths are not bounded
        at_full_length = replace(engine, requests=requests, request_tokens=context_len)
        static = min(static, int(KV_SLACK * least_fraction(model, at_full_length, device_bytes) * device_bytes))
    if engine_weights(model, engine.tp_size) < static < int(STATIC_FRACTION * device_bytes):
        options["mem_fraction_static"] = round(static / device_bytes, 2)
    return options


def _sizes_together(config: Config, sizes: Sizes, model: ModelSize, device_bytes: int) -> Sizes:
    """Return that trainer and engines stay on their GPUs, and the engines' memory; {} if they should take turns.

    They stay if both fit into `PLAN_FRAC` of the usable memory with the other `sizes`, nothing recomputed, and KV cache
    for all requests of an engine at full length. SGLang takes its fraction of what is free when it starts: the whole
    GPU, or what the trainer leaves. The cache must suffice in the latter case, and fit in the former.
    """
    cluster, topology, given = config.cluster, Topology.of(config), config.engines.sglang_options
    engine, train = serving_of(config, topology), config.train
    options, why = sizes.get("sglang_options", ({}, ""))
    in_turn = topology.is_colocated and cluster.offload_train and cluster.offload_rollout
    is_sized = "cuda_graph_max_bs" in options.keys() - given.keys() and not UNPLANNED & given.keys()
    if not in_turn or not is_sized or engine is None or config.algo.uses_critic:
        return {}
    groups, length = trained_model(config).groups, _longest_request(config)
    if length is None or len(groups) != 1 or groups[0].options:  # not bounded, or engines that differ
        return {}
    longest = -(-length // train.context_parallel_size)
    tokens, _ = sizes.get("max_tokens_per_gpu", (train.max_tokens_per_gpu or 0, ""))
    if not train.use_dynamic_batch_size:
        tokens = train.micro_batch_size * longest
    setup = replace(training_of(config, topology, model), tokens=max(tokens, longest))
    phases = training_phases(model, setup, usable(device_bytes))
    updating = sum(between_steps(model, setup).values()) + 2 * config.sync.update_weight_buffer_size
    trainer = max(updating, *(phase.total for phase in phases)) + teachers_here(config, model, width=setup.width)
    left = device_bytes - CONTEXT_BYTES - trainer
    if left <= 0 or any("recomputed in" in phase.note for phase in phases):
        return {}
    engine = replace(engine, requests=min(engine.requests, options["max_running_requests"]), request_tokens=length)
    fraction = max(round(KV_SLACK * least_fraction(model, engine, left), 2), LEAST_STATIC)
    working = max(device_bytes - int(STATIC_FRACTION * device_bytes), asleep_bytes(model, engine))
    served = int(fraction * device_bytes) + working + options["cuda_graph_max_bs"] * GRAPH_BYTES
    if trainer + served > PLAN_FRAC * usable(device_bytes):
        return {}
    both = f"trainer ({size_text(trainer)}) and engine ({size_text(served)}) fit together"
    stay = f"{device_bytes / GIB:.0f} GiB of GPU memory: {both}"
    return {
        "sglang_options": (options | {"mem_fraction_static": fraction}, why),
        "offload_train": (False, stay),
        "offload_rollout": (False, stay),
    }


def _longest_request(config: Config) -> int | None:
    """Return the tokens of the longest request to an engine, evaluations included; None if it is not bounded."""
    if config.rollout.rollout_max_context_len:  # SGLang's limit for all
        return config.rollout.rollout_max_context_len
    each = [config, *(spec.config for spec in used_eval_specs(config))]
    for rollout in (one.rollout for one in each):
        if rollout.custom_generate_function_path or rollout.rollout_function_path:  # may have more than one turn
            return None
        if not rollout.rollout_max_response_len:
            return None
    return max(_full_length(one, PROMPT_TOKENS) for one in each)


def engine_advice(config: Config) -> str:
    """Return which engine is expected to be faster on a GPU of this process, and why."""
    samples, slots = requests_at_once(config, 0), config.cluster.embedded_num_slots
    waves = -(-samples // slots)
    if waves >= MANY_WAVES and (config.rollout.rollout_max_response_len or 0) >= LONG_RESPONSE:
        return (
            f"engine: SGLang (--engine sglang) is expected to be faster: {samples} samples need {waves} waves of "
            f"{slots} slots, and its cache in pages has room for more sequences"
        )
    return (
        f"engine: the embedded engine is expected to be faster than SGLang: {samples} samples are decoded in {waves} "
        f"wave{'s' * (waves > 1)} of {slots} slots, and trainer and engine do not hand over memory"
    )
