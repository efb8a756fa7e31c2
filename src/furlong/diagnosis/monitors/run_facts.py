"""The configuration of a run as its monitors read it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from furlong.config.checks.value_checks import BOXED
from furlong.config.command_line import config_from_values
from furlong.config.flag_spec import flag_specs
from furlong.config.sections import Config, by_field
from furlong.core.algorithms import ALGORITHMS
from furlong.core.transports import transport_spec


@dataclass(frozen=True)
class RunFacts:
    """A run's configuration, what follows from it, and whether its model folder has a chat template."""

    config: Config = dataclasses.field(default_factory=Config)
    has_chat_template: bool = False

    @staticmethod
    def of(config: Config) -> RunFacts:
        """Look up the chat template of `config`'s model."""
        return RunFacts(config, _has_chat_template(Path(str(config.rollout.hf_checkpoint or ""))))

    @staticmethod
    def from_recorded(sections: Mapping[str, Mapping[str, Any]]) -> RunFacts:
        """Read the flags of a `config.json`, as section -> field -> value.

        Flags that the file lacks have their defaults, and flags that this version lacks are ignored: another version
        may have written it.
        """
        specs = flag_specs(Config)
        values = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in by_field(sections).items()
            if name in specs
        }
        return RunFacts.of(config_from_values(values))

    @property
    def model(self) -> str:
        """Path of the policy's model folder."""
        return str(self.config.rollout.hf_checkpoint or "")

    @property
    def reference(self) -> str:
        """Path of the reference model's folder."""
        return str(self.config.checkpoint.ref_load or self.model)

    @property
    def is_own_reference(self) -> bool:
        """Whether training starts from the reference's weights, so that their first KL is 0."""
        return self.reference == self.model

    @property
    def first_step(self) -> int:
        """The step of the first batch, unless the run resumes."""
        start = 0 if self.config.checkpoint.load is not None else self.config.data.start_rollout_id or 0
        return start + 1

    @property
    def num_samples(self) -> int:
        """Samples per rollout."""
        return self.config.data.rollout_batch_size * self.config.data.n_samples_per_prompt

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps per rollout."""
        return self.config.train.num_steps_per_rollout or 1

    @property
    def max_staleness(self) -> float:
        """The most rollouts that a policy can lag behind; infinite without training or with recorded rollouts."""
        if self.config.debug.debug_rollout_only or self.config.debug.load_debug_rollout_data:
            return math.inf
        return (self.config.rollout.async_buffer_size or 0) + self.config.sync.update_weights_interval - 1

    @property
    def has_old_policy(self) -> bool:
        """Whether the loss compares with log-probs of other weights than those of the first optimizer step."""
        return self.config.algo.use_rollout_logprobs or self.config.algo.keep_old_actor

    @property
    def has_custom_generation(self) -> bool:
        """Whether a user's function generates samples."""
        rollout = self.config.rollout
        return bool(rollout.custom_generate_function_path or rollout.rollout_function_path)

    @property
    def has_reward_server(self) -> bool:
        """Whether rewards come from --rm-url."""
        reward = self.config.reward
        return reward.custom_rm_path is None and (reward.rm_type or "").removeprefix(BOXED) == "remote_rm"

    @property
    def can_run_ahead(self) -> bool:
        """Whether --async-buffer-size could let rollouts run ahead of training, and does not yet."""
        config = self.config
        return not (config.rollout.async_buffer_size or config.cluster.colocate or config.debug.debug_rollout_only)

    @property
    def compares_in_groups(self) -> bool:
        """Whether a reward's baseline is its prompt group. Assumed of algorithms that this process does not know."""
        row = ALGORITHMS.get(self.config.algo.advantage_estimator)
        return self.config.algo.rewards_normalization and (row is None or row.baseline != "none")

    @property
    def normalizes_spread(self) -> bool:
        """Whether advantages are divided by a standard deviation."""
        return self.config.algo.grpo_std_normalization or self.config.algo.normalize_advantages

    @property
    def transport(self) -> str:
        """The transport of weight updates, as `core.transports` names it."""
        sync = self.config.sync
        return transport_spec(sync.update_weight_transport, mode=sync.update_weight_mode).name


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").exists():
        return True
    path = folder / "tokenizer_config.json"
    return path.exists() and bool(json.loads(path.read_text()).get("chat_template"))
