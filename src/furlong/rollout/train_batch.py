"""Conversion of scored groups into a training batch. Rewards are normalized here and nowhere else."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from furlong.algo.advantage import training_rewards
from furlong.config.hooks import Hooks
from furlong.config.sections import AlgoFlags, MoeFlags, RewardFlags, RolloutFlags
from furlong.core.batch import RolloutBatch
from furlong.core.routing import UNKNOWN_EXPERT, Routes, RoutingShape
from furlong.core.sample import (
    ROLE,
    ROLE_GROUP,
    STEP_REWARDS,
    TURN_ENDS,
    UNNAMED_ROLE,
    Group,
    Sample,
    Status,
    metadata_keys,
    scalar_reward,
)
from furlong.core.text import abbreviate, shortened
from furlong.errors import DataError, RolloutError
from furlong.sessions.samples import LEAF

MAX_ID = (1 << 31) - 1  # tokens are int32
CONVERSION = "--custom-convert-samples-to-train-data-path"
# Keys of slime's custom conversion that are not per-token columns; the last three are derived here.
CONVERTED = frozenset(
    (
        *("tokens", "response_lengths", "loss_masks", "rewards", "raw_reward", "rollout_ids", "sample_indices"),
        *("truncated", "metadata", "rollout_routed_experts", "total_lengths", "rollout_mask_sums", "round_number"),
    )
)

TEACHERS = ("teacher_log_probs", "teacher_top_log_probs")
POSITIVE = 1e-3  # a log-prob above it is no rounding error
_COLUMNS = {  # of the batch, by field of a sample
    **dict.fromkeys(("rollout_log_probs", *TEACHERS), np.float32),
    **dict.fromkeys(("token_versions", "teacher_top_ids"), np.int32),
    "teacher_mask": np.uint8,
}


@dataclass(frozen=True)
class Conversion:
    """Settings for converting samples to a batch.

    algo: reward normalization and --mask-truncated; None keeps rewards unchanged (demonstrations). hooks:
    `custom_reward_post_process` replaces normalization, `custom_convert_samples_to_train_data` the whole conversion.
    routing: shape of the routed experts, if samples may have them; with --use-rollout-routing-replay they must.
    """

    algo: AlgoFlags | None = None
    rollout: RolloutFlags = field(default_factory=RolloutFlags)
    reward: RewardFlags = field(default_factory=RewardFlags)
    moe: MoeFlags = field(default_factory=MoeFlags)
    hooks: Hooks = field(default_factory=Hooks)
    routing: RoutingShape | None = None
    args: Any = None


def batch_from_groups(rollout_id: int, groups: Sequence[Group], conversion: Conversion) -> RolloutBatch:
    """Build the batch of a rollout from finished groups, in the order given.

    A FAILED sample keeps its row with a mask of zeros: it counts in the batch, gets no gradient, and its missing reward
    (nan in `raw_rewards`) is excluded from its group's statistics. What functions of the user made of samples is
    checked here, once. Raises RolloutError and DataError that name the sample.
    """
    for group in groups:
        for sample in group.samples:
            if sample.group_index != group.index:
                raise RolloutError(
                    f"a function changed group_index of sample {sample.index} from {group.index} to "
                    f"{sample.group_index}; keep it: rewards are normalized within the group of a prompt"
                )
            if not 0 <= sample.response_length < len(sample.tokens):
                raise RolloutError(
                    f"sample {sample.index} has {len(sample.tokens)} tokens and response_length "
                    f"{sample.response_length}; `tokens` must be prompt + response: fix the function that changed it "
                    "(generate function, hook or reward function)"
                )
    samples = [sample for group in groups for sample in group.samples]
    convert, post_process = (
        conversion.hooks.custom_convert_samples_to_train_data,
        conversion.hooks.custom_reward_post_process,
    )
    if convert is not None:
        for sample in samples:  # slime's samples have a mask
            sample.loss_mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
        return _batch_from_train_data(rollout_id, convert(conversion.args, samples), samples, conversion)
    if post_process is not None:
        raw, rewards = _post_processed(post_process, samples, conversion.args)
        for sample, number in zip(samples, raw.tolist(), strict=True):
            if isinstance(sample.reward, dict) and conversion.reward.reward_key is None:
                sample.reward = number  # only the hook can tell which number of its reward counts
    else:
        raw = np.array([_raw_reward(s, conversion) for s in samples], np.float64)
        rewards = _normalized(raw, samples, conversion)
    mask_truncated = conversion.algo is not None and conversion.algo.mask_truncated
    masks = [_mask(s, mask_truncated=mask_truncated) for s in samples]
    columns = _columns(samples)
    if conversion.algo is not None and conversion.algo.return_level == "turn":
        columns["turn_rewards"] = _flat(map(_turn_rewards, samples, masks), np.float32)
    return RolloutBatch(
        rollout_id=rollout_id,
        tokens=_flat((s.tokens for s in samples), np.int32),
        lengths=np.fromiter((len(s.tokens) for s in samples), np.int64, len(samples)),
        response_lengths=np.fromiter((s.response_length for s in samples), np.int64, len(samples)),
        loss_masks=_flat(masks, np.uint8),
        rewards=rewards.astype(np.float32),
        raw_rewards=raw.astype(np.float32),
        group_ids=np.fromiter((_required_id(s.group_index) for s in samples), np.int64, len(samples)),
        rollout_ids=np.fromiter((_rollout_key(s) for s in samples), np.int64, len(samples)),
        sample_ids=np.fromiter((_required_id(s.index) for s in samples), np.int64, len(samples)),
        truncated=np.fromiter((s.status is Status.TRUNCATED for s in samples), np.uint8, len(samples)),
        columns=columns,
        metadata=[s.train_metadata for s in samples] if any(s.train_metadata for s in samples) else None,
        routed_experts=_routed_experts(samples, masks, conversion),
    )


def _required_id(value: int | None) -> int:
    if value is None:
        raise RolloutError("a sample has no index or group_index; keep those set by the data source")
    return value


def _rollout_key(sample: Sample) -> int:
    return _required_id(sample.index) if sample.rollout_id is None else sample.rollout_id


def _raw_reward(sample: Sample, conversion: Conversion) -> float:
    is_demonstration = conversion.algo is None and sample.reward is None
    if is_demonstration or sample.status is Status.FAILED:
        return float("nan")
    return scalar_reward(sample, conversion.reward.reward_key)


def _normalized(raw: NDArray[np.float64], samples: Sequence[Sample], conversion: Conversion) -> NDArray[np.float32]:
    """Return the rewards to train on, compared within (group, role); failed samples are left out and get 0."""
    scored: list[int] = np.flatnonzero(~np.isnan(raw)).tolist()
    rewards = np.zeros(len(raw), np.float32)
    if conversion.algo is None or not scored:
        rewards[scored] = raw[scored]
        return rewards
    kept = [samples[i] for i in scored]
    roles = has_roles(kept)
    rewards[scored] = training_rewards(
        conversion.algo,
        raw[scored],
        group_ids_N=_numbered([(_required_id(s.group_index), roles and _compared(s)) for s in kept]),
        rollout_ids_N=_numbered([(_rollout_key(s), roles and role_of(s)) for s in kept]),
        response_lengths_N=np.array([s.response_length for s in kept], np.int64),
        max_response_len=conversion.rollout.rollout_max_response_len or 0,
    )
    return rewards


# Roles: several agents in one episode. A sample's role is in its metadata (`ROLE`), from the session or a generate
# function. Rewards are normalized within (prompt group, role), so a solver is compared with solvers of the same prompt
# only. Roles with a `ROLE_GROUP` are compared within their episode, such as solvers of the problem that the proposer of
# the episode wrote.


def role_of(sample: Sample) -> str:
    """Return the role of a sample."""
    return str(sample.metadata.get(ROLE) or UNNAMED_ROLE)


def has_roles(samples: Iterable[Sample]) -> bool:
    """Return whether any sample has a role."""
    return not metadata_keys(samples).isdisjoint((ROLE, ROLE_GROUP))


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


def _post_processed(
    function: Callable[..., Any], samples: Sequence[Sample], args: Any
) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """Run the hook on the samples that have not failed; returns raw rewards and rewards to train on.

    Raises DataError if the hook does not return two numbers for each, or a non-finite number to train on.
    """
    scored = [i for i, sample in enumerate(samples) if sample.status is not Status.FAILED]
    result = function(args, [samples[i] for i in scored])
    for sample in (samples[i] for i in scored):
        reply: Any = sample.reward if LEAF in sample.metadata else None
        if isinstance(reply, dict) and "meta_info" in reply and sample.teacher_log_probs is not None:
            raise RolloutError(
                f"--custom-reward-post-process-path set teacher_log_probs of sample {sample.index}, whose reward is "
                "the reply to the last leaf of its episode: use --opd-teacher-urls, which scores each leaf"
            )
    what = type(result).__name__
    if isinstance(result, tuple | list) and len(result) == 2:
        raw, rewards = np.full(len(samples), np.nan), np.zeros(len(samples), np.float32)
        shown, processed = (
            _numbers(part, None, f"--custom-reward-post-process-path: item {i} of what it returned")
            for i, part in enumerate(result)
        )
        if shown.shape == processed.shape == (len(scored),):
            if (bad := np.flatnonzero(~np.isfinite(processed))).size:
                raise DataError(
                    f"--custom-reward-post-process-path returned {processed[bad[0]]} for sample "
                    f"{samples[scored[bad[0]]].index} ({bad.size} of {len(scored)} are not finite); return finite "
                    "rewards to train on"
                )
            raw[scored], rewards[scored] = shown, processed
            return raw, rewards
        what = f"numbers of shapes {shown.shape} and {processed.shape} for {len(scored)} samples"
    raise DataError(
        f"--custom-reward-post-process-path returned {what}; it must return (raw rewards, rewards to train on), each "
        "with one number for each sample it received (failed samples are not passed to it)"
    )


def _mask(sample: Sample, *, mask_truncated: bool) -> NDArray[np.uint8]:
    is_removed = sample.remove_sample or sample.status is Status.FAILED
    if is_removed or (mask_truncated and sample.status is Status.TRUNCATED):
        return np.zeros(sample.response_length, np.uint8)
    if sample.loss_mask is None:
        return np.ones(sample.response_length, np.uint8)
    return _zeros_and_ones(sample.loss_mask, sample.response_length, f"the loss_mask of sample {sample.index}")


def _zeros_and_ones(mask: Any, num_tokens: int, what: str) -> NDArray[np.uint8]:
    try:
        values = np.asarray(mask)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what} is {shortened(mask)}; give one number per token ({str(error)[:200]})") from error
    if values.shape != (num_tokens,):
        raise DataError(
            f"{what} has shape {values.shape}, but the response has {num_tokens} tokens; give one number per token "
            "(Sample.append_response_tokens keeps them consistent)"
        )
    if len(other := values[(values != 0) & (values != 1)]):
        raise DataError(
            f"{what} contains {other[0]}; it must be 1 for trained tokens and 0 for others. To weight tokens, set "
            "advantages with --custom-advantage-function-path"
        )
    return values.astype(np.uint8)


def _columns(samples: Sequence[Sample]) -> dict[str, NDArray[Any]]:
    """Return the per-token columns, each present for all samples or for none; FAILED samples get zeros.

    Raises RolloutError for a sample that lacks a column of others, and for log-probs that are not finite or above 0.
    """
    columns: dict[str, NDArray[Any]] = {}
    for name, dtype in _COLUMNS.items():
        given = [getattr(s, name) for s in samples]
        if all(value is None or not len(value) for value in given):
            continue
        values = [np.asarray([] if value is None else value, dtype) for value in given]
        width = next(value.shape[1:] for value in values if len(value))
        for i, s in enumerate(samples):
            if len(values[i]) != s.response_length:
                if s.status is not Status.FAILED and (name != "teacher_mask" or len(values[i])):
                    raise RolloutError(
                        f"sample {s.index} has {len(values[i])} {name} for {s.response_length} response tokens; a "
                        "function that sets or changes tokens must keep one for each, for all samples or for none "
                        "(Sample.append_response_tokens keeps them consistent)"
                    )
                values[i] = (np.zeros if s.status is Status.FAILED else np.ones)((s.response_length, *width), dtype)
        columns[name] = np.concatenate(values)
        if not np.isfinite(columns[name]).all():
            index = next(s.index for s, value in zip(samples, values, strict=True) if not np.isfinite(value).all())
            raise RolloutError(
                f"sample {index} has {name} that are not finite numbers; set them to None if they are unknown, "
                "and to 0.0 for tokens that the policy did not generate"
            )
        if name in TEACHERS and (highest := float(columns[name].max(initial=0.0))) > POSITIVE:
            raise RolloutError(f"{name} of up to {highest:g} are no log-probs, which are at most 0; check their sign")
    return columns


def _turn_rewards(sample: Sample, mask: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the sample's `step_rewards` at the last token of their turn, and minus them at the last trained one.

    There the reward is paid, which contains them. What was earned before the first trained turn is not paid at all, and
    what a turn earned that is not trained belongs to the one before. Raises DataError for more rewards than turns.
    """
    moved, what = np.zeros(len(mask)), f"{STEP_REWARDS} of sample {sample.index}"
    if not mask.any():
        return moved
    rewards = _numbers(sample.metadata.get(STEP_REWARDS) or [], None, what)
    if not np.isfinite(rewards).all():
        raise DataError(f"{what} are {shortened(rewards.tolist())}; give finite numbers, 0 for a turn without a reward")
    ends: list[int] = np.flatnonzero((mask > 0) & (np.append(mask[1:], 0) == 0)).tolist()
    turns: Any = sample.metadata.get(TURN_ENDS)
    if turns is None and len(rewards) > len(ends):
        raise DataError(
            f"{what} are {len(rewards)} numbers, but it has {len(ends)} turns, which are runs of tokens with loss mask "
            "1; give one number per turn"
        )
    turns = list(enumerate(ends)) if turns is None else [(n, at) for n, at in turns if at < len(mask) and mask[at]]
    for number, reward in enumerate(rewards.tolist() if turns else []):
        moved[turns[-1][1]] -= reward
        if earned := bisect_right(turns, number, key=lambda turn: turn[0]):
            moved[turns[earned - 1][1]] += reward
    return moved


def _routed_experts(
    samples: Sequence[Sample], masks: Sequence[NDArray[np.uint8]], conversion: Conversion
) -> Routes | None:
    """Return the experts of every token, -1 if unknown: for the last token, and for tokens after the last completion.

    Raises RolloutError if the token before a trained one has no experts, or those of another model.
    """
    shape = conversion.routing
    is_required = conversion.moe.use_rollout_routing_replay
    if shape is None or not (is_required or any(s.rollout_routed_experts is not None for s in samples)):
        return None
    parts: list[Routes] = []
    for sample, mask in zip(samples, masks, strict=True):
        trained = np.flatnonzero(mask)
        num_needed = sample.prompt_length + int(trained[-1]) if len(trained) else 0  # up to the last trained token
        recorded = sample.rollout_routed_experts
        num_known = 0 if recorded is None else len(recorded)
        if is_required and num_known < num_needed:
            raise RolloutError(
                f"sample {sample.index} has routed experts for {num_known} tokens, but training needs them for "
                f"{num_needed}; a custom function that calls the engine directly must set "
                "Sample.rollout_routed_experts, or pass routed_experts to append_response_tokens"
            )
        num_tokens = len(sample.tokens)
        routes = np.full((num_tokens, shape.num_layers, shape.top_k), UNKNOWN_EXPERT, np.int16)
        if recorded is not None and num_tokens > 1:
            known = shape.checked(recorded, f"sample {sample.index}")[: num_tokens - 1]
            routes[: len(known)] = known
        parts.append(routes)
    return np.concatenate(parts) if parts else None


def _flat(parts: Any, dtype: Any) -> NDArray[Any]:
    arrays = [np.asarray(part, dtype) for part in parts]
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def _batch_from_train_data(
    rollout_id: int, data: Any, samples: Sequence[Sample], conversion: Conversion
) -> RolloutBatch:
    """Read the dict of lists returned by slime's custom conversion; only tokens, lengths and rewards are required.

    Unknown keys become columns with one number per response token. Raises DataError for any other value.
    """
    if not isinstance(data, dict):
        raise DataError(f"{CONVERSION} returned {shortened(data)}; it must return a dict of lists by name")
    data, n = cast("dict[str, Any]", data), len(samples)
    if missing := [key for key in ("tokens", "response_lengths", "rewards") if key not in data]:
        raise DataError(f"{CONVERSION} returned no {missing}; it has {abbreviate(sorted(map(str, data)))}")

    def column(name: str, default: Any, least: int = -(1 << 53)) -> NDArray[np.int64]:
        return _numbers(data.get(name, default), n, f"{CONVERSION}: {name}", least).astype(np.int64)

    def rows(name: str) -> list[Any]:
        value = data[name]
        if not hasattr(value, "__len__") or isinstance(value, str | bytes | dict) or len(value) != n:
            what = f"{CONVERSION}: {name} is {shortened(value)}"
            raise DataError(f"{what}; expected a list with one entry for each of {n} samples")
        return list(value)

    tokens = [
        _numbers(row, None, f"{CONVERSION}: row {i} of tokens", 0, MAX_ID) for i, row in enumerate(rows("tokens"))
    ]
    lengths = np.array([len(row) for row in tokens], np.int64)
    response_lengths = column("response_lengths", None, 0)
    if (wrong := np.flatnonzero(response_lengths > lengths)).size:
        i = wrong[0]
        raise DataError(f"{CONVERSION}: row {i} has {lengths[i]} tokens and a response of {response_lengths[i]}")
    sizes: list[int] = response_lengths.tolist()
    given = data.get("loss_masks")
    is_whole = given is None or (isinstance(given, list) and not given)
    masks = [
        _zeros_and_ones(mask, size, f"{CONVERSION}: row {i} of loss_masks")
        for i, (mask, size) in enumerate(
            zip([[1] * size for size in sizes] if is_whole else rows("loss_masks"), sizes, strict=True)
        )
    ]
    rewards = _numbers(data["rewards"], n, f"{CONVERSION}: rewards")
    if (wrong := np.flatnonzero(~np.isfinite(rewards))).size:
        raise DataError(f"{CONVERSION}: reward {wrong[0]} is {rewards[wrong[0]]}; return finite rewards to train on")
    columns: dict[str, NDArray[Any]] = {}
    for name in sorted(set(data) - CONVERTED):
        try:
            parts = [
                _numbers(row, size, f"row {i}") for i, (row, size) in enumerate(zip(rows(name), sizes, strict=True))
            ]
        except DataError as error:
            raise DataError(
                f"{CONVERSION} returned {name!r}, which is not one number per response token: {error}; known keys are "
                f"{sorted(CONVERTED)}; put other data into `metadata`, one object per sample"
            ) from error
        columns[name] = _flat(parts, np.float32)
    routes: list[Routes] = []
    if (shape := conversion.routing) is not None and data.get("rollout_routed_experts") is not None:
        for i, (row, length) in enumerate(zip(rows("rollout_routed_experts"), lengths.tolist(), strict=True)):
            if len(known := shape.checked(row, f"row {i} of the custom conversion")) != length - 1:
                raise DataError(
                    f"row {i} of the custom conversion has {length} tokens and routed experts for {len(known)}; give "
                    "experts for all tokens but the last"
                )
            routes.append(np.concatenate([known, np.full((1, *known.shape[1:]), UNKNOWN_EXPERT, np.int16)]))
    return RolloutBatch(
        rollout_id=rollout_id,
        tokens=_flat(tokens, np.int32),
        lengths=lengths,
        response_lengths=response_lengths,
        loss_masks=_flat(masks, np.uint8),
        rewards=rewards.astype(np.float32),
        raw_rewards=_numbers(data.get("raw_reward", rewards), n, f"{CONVERSION}: raw_reward").astype(np.float32),
        group_ids=np.array([_required_id(s.group_index) for s in samples], np.int64),
        rollout_ids=column("rollout_ids", [_rollout_key(s) for s in samples]),
        sample_ids=column("sample_indices", [_required_id(s.index) for s in samples]),
        truncated=column("truncated", [int(s.status is Status.TRUNCATED) for s in samples]).astype(np.uint8),
        columns=columns,
        metadata=data.get("metadata"),
        routed_experts=np.concatenate(routes) if routes else None,
    )


def _numbers(
    value: Any, count: int | None, what: str, least: int | None = None, most: int = 1 << 53
) -> NDArray[np.float64]:
    try:
        array = np.asarray(value)
        array = np.asarray(value, np.float64) if array.dtype.kind == "O" else array  # None, or 10**400
        is_valid = array.ndim == 1 and (array.dtype.kind in "biuf" or not array.size)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        array, is_valid = np.zeros(0), False
    if not is_valid or count not in (None, len(array)):
        expected = "numbers" if count is None else f"{count} numbers"
        raise DataError(f"{what} is {shortened(value)}; expected {expected}")
    if least is not None:
        wrong = array[~((array >= least) & (array <= most) & (array == np.floor(array)))]
        if wrong.size:
            raise DataError(f"{what} contains {wrong[0]:g}; expected integers from {least} to {most}")
    return array.astype(np.float64)
