"""Sizes that depend on the GPU: tokens of micro-batches, and slots of the embedded engine, unless flags give them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from furlong.config.command_line import Resolved
from furlong.config.resolve import DEFAULT_MAX_TOKENS
from furlong.config.sections import Config
from furlong.config.topology import Topology, uses_ray
from furlong.core.model_config import read_json
from furlong.errors import FurlongError
from furlong.inference.embedded.model_loading import GPU_KV_FRAC
from furlong.tools.memory_formulas import ModelSize, Phase, resting, training_phases, usable
from furlong.tools.memory_plan import longest_sample, training_of

GIB = 2**30
TOKENS = (32768, 24576, 16384, 12288, 8192)  # larger micro-batches are not faster
RECOMPUTED_TOKENS = 8192
SLOTS = (1024, 768, 512, 384, 256, 192)
MANY_WAVES, LONG_RESPONSE = 3, 1024  # from which SGLang is expected to be faster
PLAN_FRAC = 0.9  # predictions are within 10 %
PROMPT_TOKENS = 256  # assumed without a limit of the prompt

Sizes = dict[str, tuple[int, str]]


def sized_for_device(resolved: Resolved) -> Resolved:
    """Return a copy with the sizes for the GPU of this process; `resolved` itself with other layouts or without a GPU.

    The log gets a line for each.
    """
    config = resolved.config
    if uses_ray(config) or config.cluster.engine != "embedded" or not torch.cuda.is_available():
        return resolved
    model_config = read_json(Path(str(config.rollout.hf_checkpoint)) / "config.json")
    free = {
        name
        for name, source in resolved.sources.items()
        if name in ("max_tokens_per_gpu", "embedded_num_slots") and source.startswith(("default", "derived"))
    }
    _, total = torch.cuda.mem_get_info()
    try:
        sizes = device_sizes(config, model_config, total)
    except FurlongError as error:  # the memory plan does not know the sizes of this model
        line = f"slots and micro-batches are not adapted to the GPU's memory: {error}"
        return replace(resolved, lines=(*resolved.lines, line))
    sized = _replaced(resolved, {name: size for name, size in sizes.items() if name in free})
    return replace(sized, lines=(*sized.lines, engine_advice(sized.config)))


def device_sizes(config: Config, model_config: Mapping[str, Any], device_bytes: int) -> Sizes:
    """Return values and reasons for a GPU of `device_bytes`; nothing where the usual default is the best that fits.

    Micro-batches are as large as fits without recomputation, at most `TOKENS[0]`; if none does, `RECOMPUTED_TOKENS`.
    The engine has slots for all samples of a rollout, if their keys and values fit into its part of the memory at full
    length.
    """
    model, topology = ModelSize.read(model_config), Topology.of(config)
    device = f"{device_bytes / GIB:.0f} GiB of GPU memory"
    limit = usable(device_bytes)
    setup = training_of(config, topology, model.layers)
    is_half = not config.train.fp32 and config.cluster.embedded_dtype != "float32"
    engine_weights = (2 if is_half else 4) * model.parameters
    loaded = engine_weights + sum(size for name, size in resting(model, setup).items() if name != "moments")
    cache = int(GPU_KV_FRAC * max(limit - loaded, 0))  # chosen before the first step allocates the moments
    room = int(PLAN_FRAC * limit) - cache - engine_weights
    sizes = Sizes()
    if config.train.max_tokens_per_gpu == DEFAULT_MAX_TOKENS:
        setup = training_of(config, topology, model.layers)
        fitting = {
            n: phases for n in TOKENS if _fits(phases := training_phases(model, replace(setup, tokens=n), room), room)
        }
        whole = [n for n, phases in fitting.items() if not any("recomputed in" in phase.note for phase in phases)]
        if whole:
            sizes["max_tokens_per_gpu"] = (whole[0], f"{device}: the largest that fits without recomputation")
        elif RECOMPUTED_TOKENS in fitting:
            sizes["max_tokens_per_gpu"] = (RECOMPUTED_TOKENS, f"{device}: fits with MLPs recomputed")
    samples = samples_of(config)
    length = longest_sample(config) + (0 if config.rollout.rollout_max_prompt_len else PROMPT_TOKENS)
    per_token = kv_values(model_config) * (2 if is_half else 4)
    fitting_slots = cache // (per_token * length) if per_token else SLOTS[0]
    slots = next((n for n in reversed(SLOTS) if n >= samples), SLOTS[0])
    if slots > fitting_slots:
        slots = next((n for n in SLOTS if n <= fitting_slots), 0)
    if slots > config.cluster.embedded_num_slots:
        sizes["embedded_num_slots"] = (slots, f"{device}, {samples} samples in a rollout")
    return sizes


def _fits(phases: Sequence[Phase], room: int) -> bool:
    return max(phase.total for phase in phases) <= room


def engine_advice(config: Config) -> str:
    """Return which engine is expected to be faster on this GPU, and why."""
    rollout, slots = config.rollout, config.cluster.embedded_num_slots
    samples = samples_of(config)
    waves = -(-samples // slots)
    if waves >= MANY_WAVES and (rollout.rollout_max_response_len or 0) >= LONG_RESPONSE:
        return (
            f"engine: SGLang (--engine sglang) is expected to be faster: {samples} samples need {waves} waves of "
            f"{slots} slots, and its cache in pages has room for more sequences"
        )
    return (
        f"engine: the embedded engine is expected to be faster than SGLang: {samples} samples are decoded in {waves} "
        f"wave{'s' * (waves > 1)} of {slots} slots, and trainer and engine do not hand over memory"
    )


def samples_of(config: Config) -> int:
    """Return the samples of a rollout, with those of --over-sampling-batch-size."""
    prompts = max(config.rollout.over_sampling_batch_size or 0, config.data.rollout_batch_size)
    return prompts * config.data.n_samples_per_prompt


def kv_values(model_config: Mapping[str, Any]) -> int:
    """Return how many numbers the keys and values of a token are; 0 if config.json does not have the sizes."""
    text: Mapping[str, Any] = model_config.get("text_config") or model_config
    heads, width, layers = (text.get(n) for n in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    if not heads or not width or not layers:
        return 0
    return 2 * int(layers) * int(text.get("num_key_value_heads") or heads) * int(text.get("head_dim") or width // heads)


def _replaced(resolved: Resolved, sizes: Sizes) -> Resolved:
    if not sizes:
        return resolved
    config = resolved.config
    sections: dict[str, Any] = {}
    for name, (value, _) in sizes.items():
        section = next(each.name for each in dataclasses.fields(config) if hasattr(getattr(config, each.name), name))
        sections[section] = replace(sections.get(section) or getattr(config, section), **{name: value})
    sources = {**resolved.sources, **{name: f"derived: {why}" for name, (_, why) in sizes.items()}}
    lines = tuple(f"--{name.replace('_', '-')} {value}: {why}" for name, (value, why) in sizes.items())
    return replace(resolved, config=replace(config, **sections), sources=sources, lines=(*resolved.lines, *lines))
