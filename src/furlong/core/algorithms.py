"""The algorithms, one row each, as plain data: flags are checked and completed from it before torch is imported.

`--advantage-estimator` selects a row; no code branches on its name. A new algorithm is one row of `ALGORITHMS`, plus a
function in `algo/advantage.py` or `algo/policy_loss.py` if none of those there fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from furlong.errors import ConfigError

Baseline = Literal["group_mean_std", "group_mean", "leave_one_out", "none"]
Aggregation = Literal["rollout", "token", "constant"]
Role = Literal["actor", "critic", "ref", "old_actor", "teacher"]
Read = Literal["old_log_probs", "ref_log_probs", "entropy", "routes", "old_actor", "top_ids", "teacher"]


@dataclass(frozen=True)
class Pass:
    """A forward pass without gradient over a whole rollout, before its first optimizer step.

    role: the model that runs; for the actor, the one that generated the rollout, if it is kept.
    column: the per-token column that is filled. phase: name in `perf/<phase>_time`.
    reads: the pass runs if the run reads one of these; always, if empty.
    """

    role: Role
    column: str
    phase: str
    reads: tuple[Read, ...] = ()


LOG_PROB_PASSES = (
    Pass("ref", "ref_log_probs", "ref_log_probs", ("ref_log_probs",)),
    Pass("actor", "old_log_probs", "log_probs", ("old_log_probs", "entropy", "routes", "old_actor", "top_ids")),
    Pass("teacher", "teacher_log_probs", "teacher", ("teacher",)),  # after the policy's, which may select its tokens
)


@dataclass(frozen=True)
class Algorithm:
    """The choices that define an algorithm.

    source: the paper.
    baseline: subtracted from the rewards of a group.
    advantages: token advantages from rewards, a key of `algo.advantage.ADVANTAGES`.
    policy: the loss per token, a key of `algo.policy_loss.POLICY_LOSSES`.
    sequence_level: the ratio is computed per sequence (GSPO).
    aggregation: how token losses are averaged; None follows the flags.
    eps_clip_high: the default upper clip bound; None means eps_clip.
    clips: whether the loss uses the clip bounds.
    kl_in_reward, discounted: whether `kl_coef` and `gamma` apply.
    whitened: whether --normalize-advantages is required.
    defaults: values of other flags, unless they are given.
    trains: the models that a round trains, in order.
    passes: the forward passes of a round, in order.
    """

    source: str
    baseline: Baseline = "group_mean_std"
    advantages: str = "constant"
    policy: str = "clipped_ratio"
    sequence_level: bool = False
    aggregation: Aggregation | None = None
    eps_clip_high: float | None = None
    clips: bool = True
    kl_in_reward: bool = False
    discounted: bool = False
    whitened: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    trains: tuple[Role, ...] = ("actor",)
    passes: tuple[Pass, ...] = LOG_PROB_PASSES

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained."""
        return "critic" in self.trains

    def upper_clip(self, eps_clip: float) -> float:
        """Return the upper clip bound of a run without --eps-clip-high."""
        return eps_clip if self.eps_clip_high is None else self.eps_clip_high


_GRPO = Algorithm("arXiv:2402.03300")
_PPO = Algorithm(
    "arXiv:1707.06347",
    baseline="none",
    advantages="gae",
    kl_in_reward=True,
    discounted=True,
    trains=("critic", "actor"),
    passes=(*LOG_PROB_PASSES, Pass("critic", "values", "values")),
)

ALGORITHMS: dict[str, Algorithm] = {
    "grpo": _GRPO,
    "gspo": replace(_GRPO, source="arXiv:2507.18071", sequence_level=True),
    "cispo": replace(_GRPO, source="arXiv:2506.13585", policy="clipped_weight"),
    "reinforce_plus_plus": Algorithm(
        "arXiv:2501.03262", baseline="none", advantages="return", kl_in_reward=True, discounted=True, whitened=True
    ),
    "reinforce_plus_plus_baseline": Algorithm(
        "arXiv:2501.03262", baseline="group_mean", advantages="penalized", kl_in_reward=True, whitened=True
    ),
    "ppo": _PPO,
    "vapo": replace(
        _PPO,
        source="arXiv:2504.05118",
        aggregation="token",
        eps_clip_high=0.28,
        defaults={"critic_lambd": 1.0, "lambd_length_alpha": 0.05, "positive_nll_coef": 0.1},
    ),
    "sao": replace(
        _PPO,
        source="arXiv:2607.07508",
        policy="masked_weight",
        eps_clip_high=3.0,
        defaults={
            "eps_clip": 0.8,
            "use_rollout_logprobs": True,
            "critic_lambd": 1.0,
            "lambd_length_alpha": 0.05,
            "critic_steps_per_rollout": 2,
            "critic_freeze_params_name_list": (r"\.self_attn\.",),
        },
    ),
    "rloo": Algorithm("arXiv:2402.14740", baseline="leave_one_out"),
    "dr_grpo": replace(_GRPO, source="arXiv:2503.20783", baseline="group_mean", aggregation="constant"),
    "dapo": replace(_GRPO, source="arXiv:2503.14476", aggregation="token", eps_clip_high=0.28),
}

BUILTIN_ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(dict(ALGORITHMS))  # without rows that user code adds


def find_algorithm(name: str) -> Algorithm:
    """Return the row of `--advantage-estimator`. Raises ConfigError for an unknown name."""
    try:
        return ALGORITHMS[name]
    except KeyError:
        raise ConfigError(f"--advantage-estimator {name} is unknown; choose from {sorted(ALGORITHMS)}") from None
