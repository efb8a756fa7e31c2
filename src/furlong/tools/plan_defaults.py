"""Defaults of `furlong plan` for missing flags: a run of usual sizes, colocated with its engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from furlong.config.command_line import examine
from furlong.config.flag_spec import flag_specs
from furlong.config.flag_values import words_from_value
from furlong.config.sections import Config
from furlong.errors import ConfigError
from furlong.models.hf_folder import read_json
from furlong.tools.memory_model import ModelSize

PROMPTS, EACH = 32, 8  # per rollout, and samples per prompt
SAMPLE_TOKENS, PROMPT_TOKENS = 8192, 1024
NODE = 8  # GPUs per machine
WEIGHTS_FRAC = 0.4  # of a GPU, for an engine's weights; larger models are sharded
ENGINES = ("engine", "colocate", "rollout_num_gpus", "rollout_num_gpus_per_engine")
UNSEEN: Mapping[str, Any] = {
    "num_rollout": 1,
    "data_source_path": "any.data",
    "rm_type": "random",
}  # no effect on memory


def assumptions(words: Sequence[str], *, gpus: int | None, device_bytes: int) -> dict[str, Any]:
    """Return values by field for flags missing from `words`; {} if the command is complete.

    gpus: for trainer and engines together, in whole machines if more than one; 1 if None. Raises ConfigError if the
    folder is not a model.
    """
    resolved, problems = examine(words)
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
    words = [words_from_value(specs[name], value) for name, value in assumed.items() if name not in UNSEEN]
    return " ".join(word.replace("=", " ", 1) for flag_words in words for word in flag_words)


def _sizes(explicit: set[str], config: Config, model_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return prompts, samples, and tokens per micro-batch: one of the longest sample, unless set by a flag."""
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
    if not {"micro_batch_size", "use_dynamic_batch_size", "max_tokens_per_gpu"} & explicit:
        longest = rollout.rollout_max_context_len or prompt + response
        tokens = -(-longest // config.train.context_parallel_size)
        assumed |= {"use_dynamic_batch_size": True, "max_tokens_per_gpu": tokens}
    elif "max_tokens_per_gpu" in explicit:
        assumed["use_dynamic_batch_size"] = True
    return assumed


def _gpus(explicit: set[str], gpus: int | None, model_config: Mapping[str, Any], device_bytes: int) -> dict[str, Any]:
    """Return the GPUs of trainer and engines, which are colocated unless a flag configures engines."""
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
