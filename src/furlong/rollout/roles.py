"""Roles: several agents in one episode, each with its rewards and its baseline.

A sample's role is in its metadata (`ROLE`), from the session or set by a generate function. Rewards are normalized
within (prompt group, role), so a solver is compared with solvers of the same prompt only. Roles with a `ROLE_GROUP` are
compared within their episode, such as solvers of the problem that the proposer of the episode wrote.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from furlong.core.metric import Metrics, mean, total
from furlong.core.outcome import Outcome
from furlong.core.sample import ROLE, ROLE_GROUP, UNNAMED_ROLE, Group, Sample, Status, metadata_keys, scalar_reward
from furlong.sessions.samples import ROLES


def role_of(sample: Sample) -> str:
    """Return the role of a sample."""
    return str(sample.metadata.get(ROLE) or UNNAMED_ROLE)


def has_roles(samples: Iterable[Sample]) -> bool:
    """Return whether any sample has a role."""
    return not metadata_keys(samples).isdisjoint((ROLE, ROLE_GROUP))


def baseline_groups(samples: Sequence[Sample], group_ids: Sequence[int]) -> NDArray[np.int64]:
    """Return a number for each sample that is equal for samples whose rewards are compared, [N]."""
    if not has_roles(samples):
        return _numbered(group_ids)
    return _numbered([(group, _compared(sample)) for group, sample in zip(group_ids, samples, strict=True)])


def completions_of_roles(samples: Sequence[Sample], rollout_ids: Sequence[int]) -> NDArray[np.int64]:
    """Return a number for each sample that is equal for samples of one role in one completion, [N]."""
    if not has_roles(samples):
        return _numbered(rollout_ids)
    return _numbered([(number, role_of(sample)) for number, sample in zip(rollout_ids, samples, strict=True)])


def _numbered(keys: Sequence[Hashable]) -> NDArray[np.int64]:
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def _compared(sample: Sample) -> Hashable:
    """Return what samples of one prompt group share whose rewards are compared: the role, or episode and group."""
    group = sample.metadata.get(ROLE_GROUP)
    return role_of(sample) if group is None else (sample.index, str(group))


def by_baseline(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Return the samples of one prompt group whose rewards are compared with each other."""
    parts: dict[Hashable, list[Sample]] = defaultdict(list)
    for sample in samples:
        parts[_compared(sample)].append(sample)
    return [*parts.values()]


def by_role(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Return the samples of each role, sorted by its name."""
    parts: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        parts[role_of(sample)].append(sample)
    return dict(sorted(parts.items()))


def pick_rewards_of_roles(samples: Sequence[Sample]) -> None:
    """Replace rewards that are a dict by role with the value of the sample's role.

    A dict is one by role if a key is a role of the sample's episode; a role that it lacks fails its samples.
    """
    if not any(isinstance(sample.reward, dict) for sample in samples):
        return
    roles: dict[int | None, set[str]] = defaultdict(set)
    for sample in samples:
        if ROLE in sample.metadata:
            roles[sample.index] |= {role_of(sample), *(sample.metadata.get(ROLES) or ())}
    for sample in samples:
        reward, own = sample.reward, role_of(sample)
        if not isinstance(reward, dict) or not roles[sample.index] & reward.keys():
            continue
        sample.reward = reward.get(own)
        if sample.reward is None:
            has = ", ".join(sorted(reward))
            sample.outcome = Outcome.failed(f"the reward has no value for the role {own}, only for {has}; return one")
            sample.status = Status.FAILED


def role_metrics(groups: Sequence[Group], reward_key: str | None) -> Metrics:
    """Measure each role, if there are several: `role/NAME/{samples, reward, response_len}`; {} otherwise."""
    samples = [sample for group in groups for sample in group.samples]
    if not has_roles(samples) or len(parts := by_role(samples)) < 2:
        return {}
    metrics: Metrics = {}
    for role, own in parts.items():
        metrics[f"role/{role}/samples"] = total(len(own))
        rewards = [scalar_reward(sample, reward_key) for sample in own if sample.reward is not None]
        if rewards:
            metrics[f"role/{role}/reward"] = mean(sum(rewards) / len(rewards), len(rewards))
        lengths = [s.effective_response_length for s in own if s.status is not Status.FAILED]
        if lengths:
            metrics[f"role/{role}/response_len"] = mean(sum(lengths) / len(lengths), len(lengths))
    return metrics
