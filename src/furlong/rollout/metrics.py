"""Metrics of the samples of a rollout or an evaluation, under slime's metric names.

Pure functions over groups; a few hundred milliseconds at 65,536 samples. Unmeasured values are absent: a rollout
without a scored sample has no `raw_reward`, and a failed reward call is counted, never averaged.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from furlong.config.hooks import Hooks
from furlong.config.sections import TrackFlags
from furlong.core.metric import Metrics, maximum, mean, minimum, total, values
from furlong.core.sample import (
    OTHER_CONTEXT,
    ROLE,
    UNKNOWN_VERSION,
    UNSAMPLED,
    Group,
    Sample,
    Status,
    metadata_keys,
    scalar_reward,
)
from furlong.environments.protocol import AGENT_ERROR, ENVIRONMENT, FAILED_PARTS, INFO, PARTS
from furlong.errors import DataError
from furlong.rollout.episodes import LIMIT, PROCESS_ENDED, REISSUED, SILENT
from furlong.rollout.train_batch import has_roles, role_of
from furlong.sessions.samples import EPISODE, LEAF

SPECIAL = re.compile(r"<\|[^<>|]*\|>|</?s>|<eos>|<end_of_turn>")  # tokens that end or frame an answer
REPETITION_TAIL = 10_000  # characters; slime calls a response repetitive if its last 10,000 compress more than 10 times
REPETITION_RATIO = 10.0
REPETITION_SAMPLES = 1_024  # compressing 10 kB takes 0.2 ms, so large rollouts are sampled evenly

DEFAULT_TRACK = TrackFlags()

Floats = NDArray[np.float64]


def rollout_metrics(
    groups: Sequence[Group], track: TrackFlags = DEFAULT_TRACK, *, reward_key: str | None = None
) -> Metrics:
    """Measure the samples of one training rollout.

    Always: `rollout/response_len/*`, `rollout/truncated_ratio`, `rollout/repetition_frac`, `rollout/raw_reward`,
    `rollout/zero_std/count_{reward}`, `rollout/zero_std_frac`, `rollout/same_response_frac` (groups whose responses are
    all the same tokens), `rollout/reward_range` (largest reward less smallest), and `rollout/reward_failed`,
    `rollout/reward_timed_out` once rewards were called.
    With sessions of agents `session/*` and `rollout/episode_versions`, with environments `env/NAME/*`, `reward/NAME`,
    with roles `role/NAME/*`.
    If there are any: `rollout/env_tokens_in_loss`, samples that train on tokens no engine sampled,
    `rollout/other_context`, samples that failed because they would train other tokens or contexts than the engine's,
    and `perf/non_generation_time/*`, the seconds that generate functions wrote into samples.
    --log-reward-category gives `rollout/error_cat/{value}`, --log-passrate `passrate/pass@k`, --log-multi-turn
    `multi_turn/*`, and --log-correct-samples `rollout/correct_response_len/*` of those with reward 1.
    Raises DataError for dict rewards without `reward_key`.
    """
    samples = [sample for group in groups for sample in group.samples]
    metrics = _under("rollout", _shape(samples))
    rewards = [_rewards(group, reward_key) for group in groups]
    shown = np.array([_shown_reward(s, reward_key) for s in samples if s.reward is not None])
    if shown.size:
        metrics["rollout/raw_reward"] = mean(float(shown.mean()), shown.size)
        metrics |= _under("rollout", _zero_std(_by_baseline(groups, reward_key) if has_roles(samples) else rewards))
        alike = [all(s.tokens == g.samples[0].tokens for s in g.samples) for g in groups if len(g.samples) > 1]
        if alike:
            metrics["rollout/same_response_frac"] = mean(sum(alike) / len(alike), len(alike))
        metrics["rollout/reward_range"] = maximum(float(np.ptp(np.concatenate(rewards))))
        metrics |= _under("rollout", _suspicious(samples, reward_key))
    metrics |= _under("rollout", outcome_metrics(samples)) | _episode_ends(samples)
    if count := sum(map(_trains_on_unsampled, samples)):
        metrics["rollout/env_tokens_in_loss"] = total(count)
    if count := sum(OTHER_CONTEXT in s.metadata for s in samples):
        metrics["rollout/other_context"] = total(count)
    metrics |= _episodes(samples) | environment_metrics(samples, reward_key) | role_metrics(groups, reward_key)
    if track.log_reward_category is not None:
        metrics |= _under("rollout/error_cat", _categories(samples, track.log_reward_category))
    if track.log_passrate:
        metrics |= _under("passrate", pass_at_k(_attempts(groups, reward_key)))
    if track.log_correct_samples:
        correct = [s for s in samples if s.reward is not None and scalar_reward(s, reward_key) == 1]
        metrics |= _under("rollout/correct_response_len", _lengths(correct))
    if any(s.non_generation_time for s in samples):
        seconds = statistics(s.non_generation_time for s in samples)
        metrics |= _under("perf/non_generation_time", seconds)
    if track.log_multi_turn:
        turns = _under("raw_response_length", statistics(s.response_length for s in samples))
        turns |= _under("wo_obs_response_length", _lengths(samples))
        numbers = [s.metadata.get("round_number") for s in samples]  # which an agent may have set
        rounds = statistics(float(each) for each in numbers if isinstance(each, int | float))
        turns |= {f"multi_turn_metric/round_number_{key}": v for key, v in rounds.items() if key != "median"}
        metrics |= _under("multi_turn", turns)
    return metrics


def _episodes(samples: Sequence[Sample]) -> Metrics:
    episodes: list[dict[str, Any]] = [s.metadata[EPISODE] for s in samples if EPISODE in s.metadata]
    if not episodes:
        return {}
    count = len(episodes)
    metrics = {
        f"session/{name}": mean(sum(episode[name] for episode in episodes) / count, count)
        for name in ("leaves", "turns", "prefix_kept_frac")
    }
    if continued := sum(episode["continued"] for episode in episodes):
        edited = sum(episode["branches"].get("edited", 0) for episode in episodes)
        metrics["session/forked_frac"] = mean(edited / continued, continued)
    metrics["rollout/episode_versions"] = mean(sum(episode["versions"] for episode in episodes) / count, count)
    for name, key in (("branches", "session/branch_reason"), ("counts", "session")):
        totals: Counter[str] = Counter()
        for episode in episodes:
            totals.update(episode[name])
        metrics |= {f"{key}/{each}": total(number) for each, number in totals.items()}
    return metrics


def eval_metrics(
    name: str, groups: Sequence[Group], *, reward_key: str | None = None, pass_k: bool | Sequence[int] = True
) -> Metrics:
    """Measure one evaluation set: `eval/{name}` is the mean reward.

    Also `eval/{name}-truncated_ratio`, `eval/{name}/response_len/*`, `eval/{name}/repetition_frac`,
    `eval/{name}-pass@k` (of groups with more than one sample; `pass_k` False leaves it out, a sequence gives the k),
    and the counts of reward calls that failed or timed out.
    """
    samples = [sample for group in groups for sample in group.samples]
    metrics = eval_shape(name, samples)
    shown = np.array([_shown_reward(s, reward_key) for s in samples if s.reward is not None])
    if shown.size:
        metrics[f"eval/{name}"] = mean(float(shown.mean()), shown.size)
    if pass_k is not False and any(len(group) > 1 for group in groups):
        ks = None if pass_k is True else pass_k
        metrics |= {f"eval/{name}-{k}": v for k, v in pass_at_k(_attempts(groups, reward_key), ks).items()}
    metrics |= _under(
        f"eval/{name}", outcome_metrics(samples) | part_metrics(samples) | role_metrics(groups, reward_key)
    )
    if pass_k is not False and any(ROLE in sample.metadata for sample in samples):
        ks = None if pass_k is True else pass_k
        for role in by_role(samples):
            own = [Group(g.index, [s for s in g.samples if role_of(s) == role], g.epoch, g.row) for g in groups]
            metrics |= _under(f"eval/{name}/role/{role}", pass_at_k(_attempts(own, reward_key), ks))
    return metrics


def eval_shape(name: str, samples: Sequence[Sample]) -> Metrics:
    """Measure what was generated for one evaluation set, without rewards: lengths, truncation and repetition."""
    metrics: Metrics = {}
    for key, value in _shape(samples).items():
        metrics[f"eval/{name}-{key}" if key == "truncated_ratio" else f"eval/{name}/{key}"] = value
    return metrics


def statistics(numbers: Iterable[float]) -> Metrics:
    """Return `mean`, `median`, `max` and `min`; {} for no numbers."""
    array = np.fromiter(numbers, np.float64)
    if not array.size:
        return {}
    return {
        "mean": mean(float(array.mean()), array.size),
        "median": mean(float(np.median(array)), array.size),
        "max": maximum(float(array.max())),
        "min": minimum(float(array.min())),
    }


def pass_at_k(attempts: Sequence[Floats], ks: Sequence[int] | None = None) -> Metrics:
    """Estimate `pass@k` without bias (arXiv:2107.03374 eq. 1): 1 - C(n - c, k) / C(n, k), averaged over prompts.

    `attempts` has the rewards of each prompt; a reward of 1 is a pass. By default k runs over the powers of two up to
    the largest group. A group with fewer than k rewards is left out, and so is a k that no group reaches.
    """
    n = np.array([len(rewards) for rewards in attempts], np.int64)
    c = np.array([int((rewards == 1).sum()) for rewards in attempts], np.int64)
    if not n.size or n.max() == 0:
        return {}
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n.max() + 1)))])
    metrics: Metrics = {}
    for k in [2**i for i in range(int(math.log2(n.max())) + 1)] if ks is None else ks:
        rows = n >= k
        if k < 1 or not rows.any():
            continue
        size, wrong = n[rows], (n - c)[rows]
        rest = np.maximum(wrong - k, 0)
        log_all_wrong = (log_factorial[wrong] - log_factorial[rest]) - (log_factorial[size] - log_factorial[size - k])
        metrics[f"pass@{k}"] = mean(float(np.where(wrong < k, 1.0, 0.0 - np.expm1(log_all_wrong)).mean()), size.size)
    return metrics


def _suspicious(samples: Sequence[Sample], reward_key: str | None) -> Metrics:
    """Count samples that are empty, or that end their process, and those of them with the highest reward."""
    scored = [(s, scalar_reward(s, reward_key)) for s in samples if s.reward is not None and s.label != ""]
    rewards = [reward for _, reward in scored]
    if not rewards or max(rewards) == min(rewards):
        return {}
    counts: Counter[str] = Counter()
    for sample, reward in scored:
        kind = "exit" if "os._exit(" in sample.response else "" if SPECIAL.sub("", sample.response).strip() else "empty"
        if kind:
            counts[f"suspicious/{kind}"] += 1
            counts[f"suspicious/{kind}_best"] += reward == max(rewards)
    return {name: total(n) for name, n in counts.items()}


def is_repetitive(text: str) -> bool:
    """Return whether the end of a long text repeats itself: its last 10,000 characters compress to under 10 %."""
    if len(text) <= REPETITION_TAIL:
        return False
    raw = text[-REPETITION_TAIL:].encode("utf-8", "surrogatepass")
    return len(raw) / len(zlib.compress(raw, 6)) > REPETITION_RATIO


def _under(prefix: str, metrics: Metrics) -> Metrics:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def _shape(samples: Sequence[Sample]) -> Metrics:
    seen = [s for s in samples if s.status not in (Status.ABORTED, Status.FAILED) or s.response_length]
    if not seen:
        return {}
    metrics = _under("response_len", _lengths(seen))
    metrics["truncated_ratio"] = mean(sum(s.status is Status.TRUNCATED for s in seen) / len(seen), len(seen))
    judged = seen[:: math.ceil(len(seen) / REPETITION_SAMPLES)]
    metrics["repetition_frac"] = mean(sum(is_repetitive(s.response) for s in judged) / len(judged), len(judged))
    return metrics


def _trains_on_unsampled(sample: Sample) -> bool:
    """Return whether a token that no engine sampled is in the loss, judged by weight versions and counts."""
    if sample.remove_sample or sample.status is Status.FAILED:
        return False
    if sample.metadata.get(UNSAMPLED):
        return True
    versions, mask = sample.token_versions, sample.loss_mask
    if mask is None or UNKNOWN_VERSION not in versions or max(versions) == UNKNOWN_VERSION:
        return False
    return any(kept and version == UNKNOWN_VERSION for kept, version in zip(mask, versions, strict=False))


def _lengths(samples: Sequence[Sample]) -> Metrics:
    return statistics(s.effective_response_length for s in samples)


def _rewards(group: Group, reward_key: str | None) -> Floats:
    return np.array([scalar_reward(s, reward_key) for s in group.samples if s.reward is not None], np.float64)


def _by_baseline(groups: Sequence[Group], reward_key: str | None) -> list[Floats]:
    parts = [part for group in groups for part in by_role(group.samples).values()]
    return [np.array([scalar_reward(s, reward_key) for s in part if s.reward is not None]) for part in parts]


def _attempts(groups: Sequence[Group], reward_key: str | None) -> list[Floats]:
    """Return the rewards of each prompt, one per completion: fanned-out samples count once, with the last reward."""
    attempts: list[Floats] = []
    for group in groups:
        by_completion: dict[object, float] = {}
        for i, s in enumerate(group.samples):
            if s.reward is not None:
                by_completion[(i,) if s.rollout_id is None else s.rollout_id] = scalar_reward(s, reward_key)
        attempts.append(np.array(list(by_completion.values()), np.float64))
    return attempts


def _shown_reward(sample: Sample, reward_key: str | None) -> float:
    """Return the reward to report: `metadata["raw_reward"]` if a hook has stored the reward before shaping."""
    raw = sample.metadata.get("raw_reward")
    return scalar_reward(sample, reward_key) if raw is None else float(raw)


def reward_label(reward: float) -> str:
    """Return a reward rounded to one decimal, for names of metrics: "1", "0.5", "-1"."""
    return f"{round(reward, 1) + 0.0:g}"  # + 0.0: not "-0"


def _zero_std(rewards: Sequence[Floats]) -> Metrics:
    """Count groups with equal rewards, which give no gradient, by that reward (`reward_label`)."""
    several = [r for r in rewards if r.size > 1]
    if not several:
        return {}
    counts = Counter(reward_label(float(r[0])) for r in several if (r == r[0]).all())
    metrics: Metrics = {f"zero_std/count_{reward}": total(n) for reward, n in sorted(counts.items())}
    metrics["zero_std_frac"] = mean(counts.total() / len(several), len(several))
    return metrics


def outcome_metrics(samples: Sequence[Sample]) -> Metrics:
    """Count failed and timed-out calls by stage; once rewards were called, their counts are reported even if 0."""
    seen = [s.outcome for s in samples if s.outcome is not None and s.status is not Status.ABORTED]
    if not seen:
        return {}
    counts = Counter(f"{outcome.stage}_{outcome.kind}" for outcome in seen)
    shown = {"reward_failed", "reward_timed_out"} | (counts.keys() - {"reward_scored"})
    uncompared = sum(outcome.kind == "scored" and outcome.reason != "" for outcome in seen)
    return {name: total(counts[name]) for name in sorted(shown)} | (
        {"verifier_errors": total(uncompared)} if uncompared else {}
    )


def _episode_ends(samples: Sequence[Sample]) -> Metrics:
    """Count episodes by what ended them, other than the agent itself: each kind that occurred."""
    counts: Counter[str] = Counter()
    if metadata_keys(samples).isdisjoint((LIMIT, AGENT_ERROR, SILENT, REISSUED, EPISODE)):
        samples = [s for s in samples if s.outcome is not None and s.outcome.stage == "generate"]
    for s in samples:
        if LEAF in s.metadata:  # of the same episode as the last leaf
            continue
        limit, outcome = s.metadata.get(LIMIT), s.outcome
        if limit is not None:
            counts[f"rollout/episodes/limit/{limit}"] += 1
            counts["rollout/episodes/agent_error" if limit == "tool_time" else "rollout/episodes/policy_limit"] += 1
        elif AGENT_ERROR in s.metadata:
            counts["rollout/episodes/agent_error"] += 1
        elif outcome is not None and outcome.stage == "generate" and outcome.kind != "scored":
            counts["rollout/episodes/infra" if outcome.kind == "infra" else "rollout/episodes/agent_error"] += 1
        elif s.status is Status.TRUNCATED and EPISODE in s.metadata:  # the last answer was cut, or had no room
            counts["rollout/episodes/policy_limit"] += 1
        counts["rollout/episodes/silent"] += SILENT in s.metadata
        if REISSUED in s.metadata:
            counts["rollout/episodes/reissued"] += 1
            counts["rollout/episodes/process_ended"] += str(s.metadata[REISSUED]).startswith(PROCESS_ENDED)
    return {name: total(n) for name, n in sorted(counts.items()) if n}


def _categories(samples: Sequence[Sample], key: str) -> Metrics:
    scored = [s for s in samples if s.reward is not None]
    for s in scored:
        if not isinstance(s.reward, dict) or key not in s.reward:
            has = sorted(s.reward) if isinstance(s.reward, dict) else type(s.reward).__name__
            raise DataError(
                f"--log-reward-category {key}: the reward of sample {s.index} has no such key, it has {has}; "
                "return a dict with that key from the reward function or leave the flag out"
            )
    counts = Counter(str(s.reward[key]) for s in scored if isinstance(s.reward, dict))
    return {category: mean(n / len(scored), len(scored)) for category, n in sorted(counts.items())}


def environment_metrics(samples: Sequence[Sample], reward_key: str | None = None) -> Metrics:
    """Measure episodes by environment: {} without any.

    `env/NAME/episodes`, `env/NAME/failed`, and means over the others: `env/NAME/reward`, `env/NAME/turns`,
    `env/NAME/truncated_ratio`, the parts of the reward as `env/NAME/reward/PART`, and the numbers that its steps
    recorded as `env/NAME/info/KEY`. Parts are also reported over all environments, as `reward/PART`.
    """
    if metadata_keys(samples).isdisjoint((ENVIRONMENT, PARTS, FAILED_PARTS)):
        return {}
    episodes = [sample for sample in samples if LEAF not in sample.metadata]
    by_name: dict[str, list[Sample]] = defaultdict(list)
    for sample in episodes:
        if (name := sample.metadata.get(ENVIRONMENT)) is not None:
            by_name[str(name)].append(sample)
    metrics = part_metrics(episodes)
    for name, group in sorted(by_name.items()):
        metrics |= {f"env/{name}/{key}": value for key, value in _of_environment(group, reward_key).items()}
    return metrics


def _of_environment(samples: Sequence[Sample], reward_key: str | None) -> Metrics:
    ended = [sample for sample in samples if sample.status is not Status.FAILED]
    metrics: Metrics = {"episodes": total(len(samples)), "failed": total(len(samples) - len(ended))}
    if ended:
        count = len(ended)
        metrics["truncated_ratio"] = mean(sum(s.status is Status.TRUNCATED for s in ended) / count, count)
    metrics |= _means({"reward": scalar_reward(s, reward_key)} for s in ended if s.reward is not None)
    metrics |= _means({"turns": s.metadata[EPISODE]["turns"]} for s in ended if EPISODE in s.metadata)
    metrics |= part_metrics(samples)
    return metrics | _means(
        {f"info/{key}": value for key, value in (s.metadata.get(INFO) or {}).items()} for s in ended
    )


def by_role(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Return the samples of each role, sorted by its name."""
    parts: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        parts[role_of(sample)].append(sample)
    return dict(sorted(parts.items()))


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


def part_metrics(samples: Sequence[Sample]) -> Metrics:
    """Return the mean of each part of the rewards as `reward/NAME`, and failures as `reward/NAME_failed`."""
    metrics = _means(
        {f"reward/{name}": value for name, value in (s.metadata.get(PARTS) or {}).items()} for s in samples
    )
    failed = Counter(name for s in samples for name in s.metadata.get(FAILED_PARTS) or ())
    return metrics | {f"reward/{name}_failed": total(count) for name, count in sorted(failed.items())}


def _means(rows: Iterable[dict[str, Any]]) -> Metrics:
    columns: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for key, value in row.items():
            if isinstance(value, bool | int | float):
                columns[key].append(float(value))
    return {key: mean(sum(column) / len(column), len(column)) for key, column in columns.items()}


@dataclass(frozen=True)
class SampleReport:
    """Metrics of samples, with slime's logging hooks. If a hook returns True, the standard metrics are left out.

    `custom_rollout_log_function(rollout_id, args, samples, extra_metrics, rollout_time)` and
    `custom_eval_rollout_log_function(rollout_id, args, data, extra_metrics)`; `data` maps the name of each set to its
    `rewards`, `truncated` and `samples`, lists with one entry per sample.
    """

    track: TrackFlags = DEFAULT_TRACK
    hooks: Hooks = field(default_factory=Hooks)
    reward_key: str | None = None
    args: Any = None

    def of_rollout(self, rollout_id: int, groups: Sequence[Group], extra: Metrics, seconds: float) -> Metrics:
        """Return the metrics of a training rollout with `extra`, which overrides measured ones.

        They are those of before the hook, whatever it does to the samples.
        """
        metrics = rollout_metrics(groups, self.track, reward_key=self.reward_key) | extra
        if (log := self.hooks.custom_rollout_log_function) is not None:
            samples = [sample for group in groups for sample in group.samples]
            if log(rollout_id, self.args, samples, values(extra), seconds):
                return extra
        return metrics

    def of_evaluation(
        self, rollout_id: int, data: dict[str, dict[str, Any]], measured: Metrics, extra: Metrics
    ) -> Metrics:
        """Return the metrics of an evaluation: `extra`, and `measured` unless the hook has logged."""
        log = self.hooks.custom_eval_rollout_log_function
        if log is not None and log(rollout_id, self.args, data, values(extra)):
            return extra
        return measured | extra


def evaluation_data(samples: Sequence[Sample], reward_key: str | None) -> dict[str, Any]:
    """Return the samples of one set in the form of evaluation hooks. A missing reward is None."""
    return {
        "rewards": [None if s.reward is None else scalar_reward(s, reward_key) for s in samples],
        "truncated": [s.status is Status.TRUNCATED for s in samples],
        "samples": list(samples),
    }
