"""What follows from a configuration: which engines a run has, what they return, and which groups rollouts share."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from furlong.config.critic import critic_settings
from furlong.config.engine_groups import is_split, served_models
from furlong.config.sections import Config
from furlong.core.algorithms import Role
from furlong.core.model_config import read_json
from furlong.core.routing import RoutingShape
from furlong.errors import ConfigError

LABELLED = ("math", "dapo", "deepscaler", "f1")  # verifiers that score nothing without a label
SERVERS = ("external", "sglang")  # never in this process; embedded engines are servers if they have their own GPUs


def is_started(config: Config) -> bool:
    """Whether furlong starts engine servers."""
    return config.cluster.engine in ("sglang", "embedded") and config.engines.rollout_num_gpus is not None


def gets_random_key(config: Config) -> bool:
    """Whether the engines that furlong starts get a random API key.

    Functions written for slime send no key to routers. A router adds that of the engines, but not for prefill and
    decode engines (sglang-router 0.3.2). Functions reach those of the trained model through the endpoint of the run.
    """
    is_keyless = is_started(config) and not config.cluster.sglang_api_key
    return is_keyless and not any(is_split(model.groups) for model in served_models(config) if not model.is_trained)


def is_served(config: Config) -> bool:
    """Whether engines are servers, started by furlong or not."""
    return config.cluster.engine == "external" or is_started(config)


def without_engines(config: Config) -> str:
    """Return the flag that makes engines unnecessary; "" if the run generates."""
    if config.debug.debug_train_only:
        return "--debug-train-only"
    return "--loss-type sft_loss" if config.algo.loss_type == "sft_loss" and not config.eval.is_used else ""


def model_folder(config: Config, run_folder: Path) -> Path | None:
    """Return the folder that gets the trained model at the end of the run; None for none.

    By default it is in the run folder, but not if training spans machines, which may not share that folder.
    """
    flags = config.checkpoint
    if config.data.num_rollout == 0 or config.debug.debug_rollout_only or "{rollout_id}" in (flags.save_hf or ""):
        return None
    if flags.save_hf is not None:
        return Path(flags.save_hf)
    return run_folder / "model" if flags.save_model and config.cluster.actor_num_nodes == 1 else None


@dataclass(frozen=True)
class FrozenModel:
    """A model other than the policy, by the flag with its folder; `step` selects a checkpoint there."""

    role: Role
    flag: str
    load: str
    step_flag: str
    step: int | None


def frozen_models(config: Config) -> list[FrozenModel]:
    """Return the frozen models whose folders are given: the reference (or initial weights, as in slime), a teacher."""
    flags, opd, models = config.checkpoint, config.opd, list[FrozenModel]()
    if flags.ref_load is not None:
        models.append(FrozenModel("ref", "--ref-load", flags.ref_load, "--ref-ckpt-step", flags.ref_ckpt_step))
    if opd.has_teacher_model and opd.opd_teacher_load is not None:
        step = ("--opd-teacher-ckpt-step", opd.opd_teacher_ckpt_step)
        models.append(FrozenModel("teacher", "--opd-teacher-load", opd.opd_teacher_load, *step))
    return models


def further_models(config: Config) -> list[FrozenModel]:
    """Return the frozen models, and the critic if it has a folder of its own, where it starts as the latest."""
    models = frozen_models(config)
    if config.algo.uses_critic:
        with contextlib.suppress(ConfigError):  # of --megatron-config-path, which is reported elsewhere
            if (load := critic_settings(config).load) is not None:
                models.append(FrozenModel("critic", "--critic-load", load, "--critic-load", None))
    return models


def read_model_config(config: Config) -> dict[str, Any]:
    """Return config.json of the model; {} if it does not exist. Raises ConfigError."""
    return read_json(Path(str(config.rollout.hf_checkpoint)) / "config.json")


def routing_of(config: Config) -> RoutingShape | None:
    """Return the routing shape from config.json; None for a dense model or without the file."""
    return RoutingShape.of(read_model_config(config))


def is_unscored(config: Config) -> bool:
    """Whether samples without a reward get 0, as the policy learns from a teacher.

    There is no verifier, or one without labels, which a generate function or a data source may set.
    """
    reward, data = config.reward, config.data
    sets_labels = (data.label_key, data.data_source_path, config.rollout.custom_generate_function_path)
    is_blind = (reward.rm_type or "").removeprefix("boxed_") in LABELLED and not any(sets_labels)
    return config.opd.use_opd and reward.custom_rm_path is None and (reward.rm_type is None or is_blind)


def returns_routes(config: Config) -> bool:
    """Whether the engine returns its expert choices; never for a dense model."""
    moe = config.moe
    if routing_of(config) is None or config.algo.loss_type == "sft_loss":
        return False
    if moe.log_routing_agreement is None:
        is_in_process = config.cluster.engine == "embedded" and not is_served(config)
        return moe.use_rollout_routing_replay or is_in_process
    return moe.use_rollout_routing_replay or moe.log_routing_agreement


def shares_groups(config: Config) -> bool:
    """Return whether rollouts share the groups in flight, and consist of the first complete ones.

    Asynchronous runs do if permits or a larger bound give them a choice, and for custom generate functions and agents,
    whose episodes may be long. Over-sampling and partial rollouts end each rollout by aborting the rest, so those have
    their own groups.
    """
    rollout = config.rollout
    over = rollout.over_sampling_batch_size
    aborts = rollout.partial_rollout or over not in (None, config.data.rollout_batch_size)
    if not rollout.async_buffer_size or aborts or rollout.rollout_function_path is not None:
        return False
    return (
        rollout.max_concurrent_episodes is not None
        or max_staleness(config) > default_staleness(config)
        or rollout.stale_tokens != "pace"
        or rollout.custom_generate_function_path is not None
        or config.session.agent_function_path is not None
        or config.session.agent_command is not None
    )


def default_staleness(config: Config) -> int:
    """Return the age that tokens can reach if rollouts are trained on in order."""
    return (config.rollout.async_buffer_size or 0) + config.sync.update_weights_interval - 1


def max_staleness(config: Config) -> int:
    """Return the bound of the age of trained tokens, in rollouts."""
    bound = config.rollout.max_token_staleness
    return default_staleness(config) if bound is None else bound
