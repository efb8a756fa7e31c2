"""What `furlong plan` takes for the flags that nobody gave: a run of usual sizes on GPUs that engines share."""

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

PROMPTS, EACH = 32, 8  # of a rollout, and samples of each
SAMPLE_TOKENS, PROMPT_TOKENS = 8192, 1024
NODE = 8  # GPUs of a machine
WEIGHTS_FRAC = 0.4  # of a GPU that an engine's weights may take; beyond that it is cut
ENGINES = ("engine", "colocate", "rollout_num_gpus", "rollout_num_gpus_per_engine")
UNSEEN: Mapping[str, Any] = {
    "num_rollout": 1,
    "data_source_path": "any.data",
    "rm_type": "random",
}  # of no weight in memory


def assumptions(words: Sequence[str], *, gpus: int | None, device_bytes: int) -> dict[str, Any]:
    """Values by field for flags that `words` leave out; none for a command that is complete.

    gpus: how many there are for trainer and engines together, whole machines beyond one; 1 if nobody says. Raises
    ConfigError for a folder that is no model.
    """
    resolved, problems = examine(words)
    if not problems:
        return {}
    given = {name for name, source in resolved.sources.items() if source == "flag" or source.startswith("file")}
    config = resolved.config
    if of_model := [problem for problem in problems if problem.startswith("--hf-checkpoint")]:
        raise ConfigError(*of_model)
    if not (Path(str(config.rollout.hf_checkpoint)) / "config.json").is_file():
        raise ConfigError(f"--hf-checkpoint {config.rollout.hf_checkpoint}: no config.json in that folder")
    model_config = read_json(Path(str(config.rollout.hf_checkpoint)) / "config.json")
    found = dict(UNSEEN) | _sizes(given, config, model_config) | _gpus(given, gpus, model_config, device_bytes)
    is_taught = config.algo.loss_type == "sft_loss"  # from demonstrations: nothing is generated or scored
    excluded = {
        "num_rollout": "num_epoch" in given,
        "data_source_path": bool({"prompt_data", "rollout_global_dataset", "load_debug_rollout_data"} & given),
        "rm_type": "custom_rm_path" in given or is_taught,
        "n_samples_per_prompt": is_taught,
        **dict.fromkeys(ENGINES, is_taught),
    }
    found = {name: value for name, value in found.items() if not excluded.get(name)}
    return {name: value for name, value in found.items() if name not in given}


def shown(assumed: Mapping[str, Any]) -> str:
    """The assumptions that matter, as flags."""
    specs = flag_specs(Config)
    words = [words_from_value(specs[name], value) for name, value in assumed.items() if name not in UNSEEN]
    return " ".join(word.replace("=", " ", 1) for of_flag in words for word in of_flag)


def _sizes(given: set[str], config: Config, model_config: Mapping[str, Any]) -> dict[str, Any]:
    """Prompts, samples, and tokens of a micro-batch: one of the longest samples, unless a flag says otherwise."""
    positions = (model_config.get("text_config") or model_config).get("max_position_embeddings")
    most = min(SAMPLE_TOKENS, int(positions or SAMPLE_TOKENS))
    rollout = config.rollout
    prompt = rollout.rollout_max_prompt_len or min(PROMPT_TOKENS, most // 2)
    response = rollout.rollout_max_response_len or max(most - prompt, 1)
    samples = (config.train.global_batch_size or 0) * (config.train.num_steps_per_rollout or 1) or PROMPTS * EACH
    n = config.data.n_samples_per_prompt if "n_samples_per_prompt" in given else EACH if samples % EACH == 0 else 1
    prompts = config.data.rollout_batch_size or max(samples // n, 1)
    found: dict[str, Any] = {"rollout_batch_size": prompts, "n_samples_per_prompt": n}
    if "rollout_max_context_len" not in given:
        found |= {"rollout_max_prompt_len": prompt, "rollout_max_response_len": response}
    if not {"micro_batch_size", "use_dynamic_batch_size", "max_tokens_per_gpu"} & given:
        longest = rollout.rollout_max_context_len or prompt + response
        tokens = -(-longest // config.train.context_parallel_size)
        found |= {"use_dynamic_batch_size": True, "max_tokens_per_gpu": tokens}
    elif "max_tokens_per_gpu" in given:
        found["use_dynamic_batch_size"] = True
    return found


def _gpus(given: set[str], gpus: int | None, model_config: Mapping[str, Any], device_bytes: int) -> dict[str, Any]:
    """GPUs of trainer and engines, which take turns on them unless a flag speaks of engines."""
    count = gpus or 1
    found: dict[str, Any] = {}
    if gpus is not None:
        found |= {"actor_num_nodes": max(count // NODE, 1), "actor_num_gpus_per_node": min(count, NODE)}
    if {*ENGINES, "rollout_external_engine_addrs", "sglang_config"} & given:
        return found
    weights, each = 2 * ModelSize.read(model_config).parameters, 1
    while each < min(count, NODE) and weights / each > WEIGHTS_FRAC * device_bytes:
        each *= 2
    found |= {"engine": "sglang", "colocate": True, "rollout_num_gpus": count}
    return found | ({"rollout_num_gpus_per_engine": each} if each > 1 else {})
