"""Derived values: the one place that computes the defaults of flags which depend on other flags."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from furlong.config.critic import FLAG as ROLES_FLAG
from furlong.config.critic import role_overrides
from furlong.config.engine_groups import is_split, models_in_file
from furlong.config.environment_specs import parse_environments
from furlong.config.facts import SERVERS
from furlong.config.sections import AlgoFlags, Config, OpdFlags
from furlong.core.algorithms import find_algorithm
from furlong.core.process_environment import API_KEY_VARIABLE
from furlong.core.transports import default_transport
from furlong.errors import ConfigError

AGENT_PATH = "furlong.rollout.agents:generate"  # runs the agents of --agent-function-path, --agent-command
ONLINE_PATH = "furlong.rollout.agents:generate_online"
ENVIRONMENT_PATH = "furlong.rollout.environments:generate"
DEFAULT_MAX_TOKENS = 4096  # per micro-batch, if no flag sets the packing

Derived = dict[str, tuple[Any, str]]
Put = Callable[[str, Any, str], None]

_EVAL_FROM_TRAINING = {
    "eval_temperature": "rollout_temperature",
    "eval_top_p": "rollout_top_p",
    "eval_top_k": "rollout_top_k",
    "eval_min_new_tokens": "rollout_min_new_tokens",
    "eval_max_response_len": "rollout_max_response_len",
    "eval_max_prompt_len": "rollout_max_prompt_len",
    "eval_max_context_len": "rollout_max_context_len",
    "eval_function_path": "rollout_function_path",
    "eval_input_key": "input_key",
    "eval_label_key": "label_key",
    "eval_tool_key": "tool_key",
    "eval_reward_key": "reward_key",
}

# Fields that default to another field: a wrong value there is reported once, for the other field.
COPIES = _EVAL_FROM_TRAINING | {
    "eps_clip_high": "eps_clip",
    "over_sampling_batch_size": "rollout_batch_size",
    "rollout_max_context_len": "seq_length",
}


def derive(config: Config, explicit: frozenset[str]) -> Derived:
    """Return field -> (value, reason) for unset fields whose default depends on other fields.

    `explicit` names the fields set by a flag or a file; they are never changed. Contradictions are left for `validate`.
    """
    derived: Derived = {}

    def put(name: str, value: Any, why: str) -> None:
        if name not in explicit and name not in derived and value is not None:
            derived[name] = (value, why)

    _run(config, put)
    _threads(config, put)
    n_samples = _samples_per_prompt(config, put, explicit)
    _steps(config, put, explicit, n_samples)
    _rollout(config, put)
    _engine(config, put, explicit)
    _algorithm(config, put, n_samples)
    if config.session.agent_function_path or config.session.agent_command:
        put("custom_generate_function_path", AGENT_PATH, "--agent-function-path or --agent-command")
    if config.session.online_sessions:
        put("custom_generate_function_path", ONLINE_PATH, "--online-sessions")
    if config.session.environment:
        put("custom_generate_function_path", ENVIRONMENT_PATH, "--environment")
        with contextlib.suppress(ConfigError):  # which `validate` reports
            files = [spec.prompt_data for spec in parse_environments(config.session.environment)]
            put("prompt_data", next((file for file in files if file is not None), None), "--environment")
    context_len = derived.get("rollout_max_context_len")
    for name, origin in _EVAL_FROM_TRAINING.items():
        value = next(getattr(s, origin) for s in vars(config).values() if hasattr(s, origin))
        if origin == "rollout_max_context_len" and context_len is not None:
            value = context_len[0]
        put(name, value, f"--{origin.replace('_', '-')}")
    return derived


def _run(config: Config, put: Put) -> None:
    track, debug = config.track, config.debug
    if track.run_name is not None:
        name = track.run_name
    elif track.output_dir:
        name = Path(track.output_dir).name
        put("run_name", name, "--output-dir")
    else:
        model = Path(config.rollout.hf_checkpoint or "model").name
        algorithm = "sft" if config.algo.loss_type == "sft_loss" else config.algo.advantage_estimator
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{algorithm}-{model}").lower()
        put("run_name", name, "algorithm and model")
    put("output_dir", f"outputs/{name}", "--run-name")
    if track.use_wandb:
        put("wandb_group", name, "--run-name")
    if debug.dump_details is not None:
        put(
            "save_debug_rollout_data", f"{debug.dump_details}/rollout_data/{{rollout_id}}.safetensors", "--dump-details"
        )
        put(
            "save_debug_train_data",
            f"{debug.dump_details}/train_data/{{rollout_id}}_{{rank}}.safetensors",
            "--dump-details",
        )
    if debug.load_debug_rollout_data is not None:
        put("debug_train_only", True, "--load-debug-rollout-data")


def _threads(config: Config, put: Put) -> None:
    if config.train.deterministic_mode and config.cluster.num_threads is None:
        put("num_threads", 1, "--deterministic-mode; the automatic choice may differ from run to run")


def _steps(config: Config, put: Put, explicit: frozenset[str], n_samples: int) -> None:
    train, data = config.train, config.data
    samples = max(0, data.rollout_batch_size * n_samples)
    steps = train.num_steps_per_rollout
    if train.global_batch_size is not None:
        if samples and train.global_batch_size > 0 and samples % train.global_batch_size == 0:
            steps = samples // train.global_batch_size
            put("num_steps_per_rollout", steps, "samples of a rollout / --global-batch-size")
    elif samples:
        if steps is None:
            steps = 1
            put("num_steps_per_rollout", 1, "one optimizer step per rollout")
        if steps > 0 and samples % steps == 0:
            put("global_batch_size", samples // steps, "samples of a rollout / --num-steps-per-rollout")
    if data.num_rollout and steps is not None:
        put("lr_decay_iters", data.num_rollout * steps, "--num-rollout x --num-steps-per-rollout")
    if data.num_rollout and (config.checkpoint.save or "{rollout_id}" in (config.checkpoint.save_hf or "")):
        put("save_interval", data.num_rollout, "without --save-interval, the run saves at the end")
    if config.checkpoint.load and config.optim.use_stateless_adam:
        put("no_load_optim", True, "--use-stateless-adam keeps no moments")
    if not {"micro_batch_size", "use_dynamic_batch_size", "max_tokens_per_gpu"} & explicit:
        put("use_dynamic_batch_size", True, "--micro-batch-size is not given")
        put("max_tokens_per_gpu", DEFAULT_MAX_TOKENS, "fits small models; on GPUs the memory plan chooses")
    if train.balance_by_flops:
        put("balance_data", True, "--balance-by-flops")


def _samples_per_prompt(config: Config, put: Put, explicit: frozenset[str]) -> int:
    """Return the number of responses per prompt, and set it to 1 if no flag does and nothing compares them."""
    name = "--loss-type sft_loss" if config.algo.loss_type == "sft_loss" else config.algo.advantage_estimator
    compares = config.algo.loss_type != "sft_loss" and find_algorithm(name).baseline != "none"
    if compares or "n_samples_per_prompt" in explicit:
        return config.data.n_samples_per_prompt
    put("n_samples_per_prompt", 1, f"{name} does not compare the responses of a prompt")
    return 1


def _rollout(config: Config, put: Put) -> None:
    put("async_buffer_size", 0, "synchronous")
    if config.data.rollout_batch_size:
        put("over_sampling_batch_size", config.data.rollout_batch_size, "--rollout-batch-size")
    put("rollout_max_context_len", config.train.seq_length, "--seq-length")


def _engine(config: Config, put: Put, explicit: frozenset[str]) -> None:
    cluster = config.cluster
    engine = cluster.engine
    if engine == "auto":
        is_external = bool(cluster.rollout_external_engine_addrs or cluster.sglang_router_ip)
        engine = "external" if is_external else "embedded"
        put("engine", engine, "addresses are given" if is_external else "no addresses are given")
    trainer_gpus = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    path = config.engines.sglang_config
    shares_only_gpu = "colocate" not in explicit and _shares_only_gpu(config, engine)
    if shares_only_gpu:
        put("colocate", True, "--engine sglang with one training GPU and no others for engines")
    colocate = cluster.colocate or shares_only_gpu
    if colocate and engine != "external":
        put("rollout_num_gpus", trainer_gpus, "--colocate: the training GPUs")
    if path is not None:
        with contextlib.suppress(ConfigError):  # validate reports the problems of the file
            models = models_in_file(path, config.engines.rollout_num_gpus_per_engine, config.rollout.hf_checkpoint)
            groups = [group for model in models for group in model.groups]
            put("rollout_num_gpus", sum(group.num_gpus for group in groups), "--sglang-config")
            if len(models) > 1:
                put("sglang_router_strategy", "cache_aware", "--sglang-config has several models")
            elif is_split(groups):
                put("sglang_router_strategy", "cache_aware", "--sglang-config splits prefill and decode")
    if config.engines.prefill_num_servers is not None:
        put("sglang_router_strategy", "cache_aware", "--prefill-num-servers")
    if config.engines.router_options:
        put("sglang_router_strategy", "cache_aware", "options of the router are given")
    is_placed = config.engines.rollout_num_gpus is not None or colocate or path is not None
    if is_placed or trainer_gpus > 1:
        put("ray_address", os.environ.get("RAY_ADDRESS"), "RAY_ADDRESS")
    is_served = engine in SERVERS or is_placed
    if is_served or (config.opd.use_opd and config.opd.opd_teacher_load is None):
        put("sglang_api_key", os.environ.get(API_KEY_VARIABLE), API_KEY_VARIABLE)
    transport = default_transport(colocate=colocate, has_servers=is_served)
    put("update_weight_transport", transport, "--colocate" if colocate else "--engine")
    is_shared = colocate and not config.debug.debug_rollout_only
    if config.algo.uses_critic and not config.debug.debug_rollout_only:
        put("offload_train", True, "policy and critic share the training GPUs")
    for name in ("offload_train", "offload_rollout"):
        put(name, cluster.offload or is_shared, "--offload" if cluster.offload else "--colocate")


def _shares_only_gpu(config: Config, engine: str) -> bool:
    """Whether SGLang gets the trainer's one GPU because no flag gives it another, and neither waits for the other."""
    cluster, debug = config.cluster, config.debug
    is_one = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node == 1
    is_placed = config.engines.rollout_num_gpus is not None or config.engines.sglang_config is not None
    is_placed |= bool(cluster.rollout_external_engine_addrs or cluster.sglang_router_ip)
    has_both = not (debug.debug_rollout_only or debug.debug_train_only) and config.algo.loss_type != "sft_loss"
    return engine == "sglang" and is_one and not is_placed and has_both and not config.rollout.async_buffer_size


def _algorithm(config: Config, put: Put, n_samples: int) -> None:
    algo, name = config.algo, config.algo.advantage_estimator
    row = find_algorithm(name)
    for field, value in row.defaults.items():
        put(field, value, f"{name} ({row.source})")
    is_own_bound = row.eps_clip_high is not None
    put("eps_clip_high", row.upper_clip(algo.eps_clip), f"{name} ({row.source})" if is_own_bound else "--eps-clip")
    if row.aggregation == "token":
        put("calculate_per_token_loss", True, f"{name} averages over tokens ({row.source})")
    if row.baseline == "group_mean":
        put("grpo_std_normalization", False, f"{name} only centers rewards ({row.source})")
    if row.aggregation == "constant":
        why = f"{name} divides by a constant, --rollout-max-response-len"
        put("loss_constant_len", config.rollout.rollout_max_response_len, why)
    if n_samples == 1:
        put("grpo_std_normalization", False, "one sample per prompt has no standard deviation")
    if algo.use_tis and algo.tis_clip_low:
        put("tis_mode", "clip", "--tis-clip-low sets a lower bound")
    _slime_bounds(algo, put)
    with contextlib.suppress(ConfigError):  # validate reports the problems of the file
        for field, value in role_overrides(config, "actor").items():
            put(field, value, ROLES_FLAG)
    _distillation(config.opd, put)
    if algo.uses_reference:
        put("ref_load", config.rollout.hf_checkpoint, "--hf-checkpoint")


def _distillation(opd: OpdFlags, put: Put) -> None:
    if not opd.use_opd:
        return
    has_folder = opd.opd_teacher_load is not None
    put("opd_type", "trainer" if has_folder else "sglang", f"--opd-teacher-load is {'' if has_folder else 'not '}given")
    if opd.opd_log_prob_top_k:
        put("opd_loss", "topk", "--opd-log-prob-top-k")
    elif opd.opd_loss == "topk":
        put("opd_log_prob_top_k", 32, "--opd-loss topk")


def _slime_bounds(algo: AlgoFlags, put: Put) -> None:
    """Set the bounds of importance weights that slime's mis.yaml gives under its own names."""
    upper, lower = algo.tis_upper_bound, algo.tis_lower_bound
    put("tis_clip", upper, "--tis-upper-bound")
    if algo.tis_mode != "truncate":
        if lower is None and upper:
            put("tis_clip_low", 1 / upper, "the reciprocal of --tis-upper-bound, as in slime")
        put("tis_clip_low", lower, "--tis-lower-bound")
    if algo.use_rs:
        put("tis_veto", algo.rs_veto_threshold, "--rs-veto-threshold")
