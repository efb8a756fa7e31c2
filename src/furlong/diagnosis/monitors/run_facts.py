"""What monitors know of a run's configuration: the values on which it depends whether something is wrong."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from furlong.config.sections import Config, by_field
from furlong.config.verifiers import BOXED
from furlong.core.algorithms import ALGORITHMS


@dataclass(frozen=True)
class Setting:
    """Facts of one run, from its configuration or from the `config.json` that it left.

    `first_step` is the step of the first batch of a run from the beginning; `max_staleness` bounds the age of a policy,
    in rollouts; `may_run_ahead`: no rollout runs ahead of training, and the flags could change that;
    `is_own_reference`: the reference is the model that training starts from; `compares_in_groups`: an advantage is a
    reward against those of the same prompt; `transport`: how weights go, in `diagnosis.transport_signs`.
    """

    model: str = ""
    reference: str = ""
    loss_type: str = "policy_loss"
    first_step: int = 1
    num_samples: int = 1
    n_samples_per_prompt: int = 1
    steps_per_rollout: int = 1
    temperature: float = 1.0
    max_response_len: int | None = None
    max_context_len: int | None = None
    max_staleness: float = 0
    rollouts_ahead: int = 0
    publishes_every: int = 1
    may_use_tis: bool = False
    is_partial: bool = False
    over_sampling: int | None = None
    has_old_policy: bool = False
    has_custom_generation: bool = False
    has_chat_template: bool = False
    applies_chat_template: bool = False
    label_key: str | None = None
    has_custom_reward: bool = False
    asks_reward_server: bool = False
    num_reward_workers: int = 1
    reward_timeout: float = 60.0
    may_run_ahead: bool = False
    compares_in_groups: bool = True
    num_data_workers: int = 0
    frozen_parameters: tuple[str, ...] = ()
    trained_parameters: tuple[str, ...] = ()
    restarts_engines: bool = False
    replays_routing: bool = False
    backend: str = "fsdp"
    is_float32: bool = False
    transport: str = "memory"
    may_publish_less: bool = True
    normalizes_spread: bool = True
    serves_with_sglang: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()

    @property
    def is_own_reference(self) -> bool:
        """Whether KL to the reference has to be 0 before the first optimizer step."""
        return self.reference == self.model

    @staticmethod
    def of(config: Config) -> Setting:
        """The facts of a configuration."""
        return Setting.of_values(dataclasses.asdict(config))

    @staticmethod
    def of_values(values: Mapping[str, Mapping[str, Any]]) -> Setting:
        """The facts of a configuration given as section -> field -> value, as in `config.json`.

        A field that is not there, because another version wrote the file, has its default.
        """
        flat = by_field(dataclasses.asdict(Config())) | by_field(values)
        model = str(flat["hf_checkpoint"] or "")
        start = 0 if flat["load"] is not None else flat["start_rollout_id"] or 0
        return Setting(
            model=model,
            reference=str(flat["ref_load"] or model),
            loss_type=flat["loss_type"],
            first_step=start + 1,
            num_samples=flat["rollout_batch_size"] * flat["n_samples_per_prompt"],
            n_samples_per_prompt=flat["n_samples_per_prompt"],
            steps_per_rollout=flat["num_steps_per_rollout"] or 1,
            temperature=flat["rollout_temperature"],
            max_response_len=flat["rollout_max_response_len"],
            max_context_len=flat["rollout_max_context_len"],
            max_staleness=_max_staleness(flat),
            rollouts_ahead=flat["async_buffer_size"] or 0,
            publishes_every=flat["update_weights_interval"],
            may_use_tis=not (flat["use_tis"] or flat["use_rollout_logprobs"]),
            is_partial=flat["partial_rollout"],
            over_sampling=flat["over_sampling_batch_size"],
            has_old_policy=flat["use_rollout_logprobs"] or flat["keep_old_actor"],
            has_custom_generation=bool(flat["custom_generate_function_path"] or flat["rollout_function_path"]),
            has_chat_template=_has_chat_template(Path(model)),
            applies_chat_template=flat["apply_chat_template"],
            label_key=flat["label_key"],
            has_custom_reward=flat["custom_rm_path"] is not None,
            asks_reward_server=flat["custom_rm_path"] is None
            and (flat["rm_type"] or "").removeprefix(BOXED) == "remote_rm",
            num_reward_workers=flat["num_reward_workers"],
            reward_timeout=flat["reward_timeout"],
            may_run_ahead=not (flat["async_buffer_size"] or flat["colocate"] or flat["debug_rollout_only"]),
            compares_in_groups=_compares_in_groups(flat),
            num_data_workers=flat["num_data_workers"],
            frozen_parameters=tuple(flat["freeze_params_name_list"] or ()),
            trained_parameters=tuple(flat["only_train_params_name_list"] or ()),
            restarts_engines=bool(flat.get("use_fault_tolerance")),
            replays_routing=flat["use_rollout_routing_replay"],
            backend=flat["train_backend"],
            is_float32=flat["fp32"],
            transport="disk delta"
            if flat["update_weight_mode"] == "delta"
            else flat["update_weight_transport"] or "memory",
            may_publish_less=not flat["offload_rollout"],
            normalizes_spread=flat["grpo_std_normalization"] or flat["normalize_advantages"],
            serves_with_sglang=flat["engine"] == "sglang",
            stop_token_ids=tuple(flat["rollout_stop_token_ids"] or ()),
            stop_texts=tuple(flat["rollout_stop"] or ()),
        )


def _max_staleness(flat: Mapping[str, Any]) -> float:
    """The bound that the flags promise; none where nothing is trained, or only what another run has generated."""
    if flat["debug_rollout_only"] or flat["load_debug_rollout_data"]:
        return math.inf
    return (flat["async_buffer_size"] or 0) + flat["update_weights_interval"] - 1


def _compares_in_groups(flat: Mapping[str, Any]) -> bool:
    """Whether rewards have a baseline of their group; an algorithm that this process does not know may have one."""
    row = ALGORITHMS.get(flat["advantage_estimator"])
    return flat["rewards_normalization"] and (row is None or row.baseline != "none")


def _has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer of a model folder has one: what an instruct model is known by."""
    if (folder / "chat_template.jinja").exists():
        return True
    path = folder / "tokenizer_config.json"
    return path.exists() and bool(json.loads(path.read_text()).get("chat_template"))
