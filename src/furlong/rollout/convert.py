"""From scored groups to the columns that are trained on: the one place where rewards are normalized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from furlong.algo.algorithm_rules import training_rewards
from furlong.config.sections.algo import AlgoFlags
from furlong.core.batch import RolloutBatch
from furlong.core.routing import UNKNOWN_EXPERT, Routes, RoutingShape
from furlong.core.sample import Group, Sample, Status, scalar_reward
from furlong.errors import DataError, RolloutError
from furlong.rollout.sample_metrics import RETOKENISED

# Keys of slime's dict of a custom conversion that are no per-token columns; the last three follow from the others here.
CONVERTED = frozenset(
    (
        *("tokens", "response_lengths", "loss_masks", "rewards", "raw_reward", "rollout_ids", "sample_indices"),
        *("truncated", "metadata", "rollout_routed_experts", "total_lengths", "rollout_mask_sums", "round_number"),
    )
)


@dataclass(frozen=True)
class Conversion:
    """How samples become a batch.

    `settings` are the algorithm's, which say how rewards are normalized; None leaves rewards as they are.
    `max_response_len` is what the over-long penalty counts from; `mask_truncated` leaves responses that hit the length
    limit out of the loss. `routing`: the model's, where samples may come with the experts that their tokens went to;
    with `needs_routes` they must. `post_process` and `convert` are slime's hooks that replace normalization, or all of
    this.
    """

    settings: AlgoFlags | None = None
    max_response_len: int = 0
    reward_key: str | None = None
    mask_truncated: bool = False
    routing: RoutingShape | None = None
    needs_routes: bool = False
    post_process: Callable[..., Any] | None = None
    convert: Callable[..., dict[str, Any]] | None = None
    args: Any = None


def batch_from_groups(rollout_id: int, groups: Sequence[Group], how: Conversion) -> RolloutBatch:
    """Build the batch of a rollout from finished groups, in the order given.

    A FAILED sample keeps its row with a mask of zeros: it counts in the batch, gets no gradient, and its missing
    reward (nan in `raw_rewards`) takes no part in its group's statistics.
    """
    samples = [sample for group in groups for sample in group.samples]
    if how.convert is not None:
        return _batch_from_train_data(rollout_id, how.convert(how.args, samples), samples, how)
    raw = np.array([_raw_reward(s, how) for s in samples], np.float64)
    if how.post_process is not None:
        raw, rewards = _post_processed(how.post_process, samples, how)
    else:
        rewards = _normalized(raw, samples, how)
    return RolloutBatch(
        rollout_id=rollout_id,
        tokens=_flat((s.tokens for s in samples), np.int32),
        lengths=np.fromiter((len(s.tokens) for s in samples), np.int64, len(samples)),
        response_lengths=np.fromiter((s.response_length for s in samples), np.int64, len(samples)),
        loss_masks=_flat((_mask(s, how) for s in samples), np.uint8),
        rewards=rewards.astype(np.float32),
        raw_rewards=raw.astype(np.float32),
        group_ids=np.fromiter((_known(s.group_index) for s in samples), np.int64, len(samples)),
        rollout_ids=np.fromiter((_rollout_key(s) for s in samples), np.int64, len(samples)),
        sample_ids=np.fromiter((_known(s.index) for s in samples), np.int64, len(samples)),
        truncated=np.fromiter((s.status is Status.TRUNCATED for s in samples), np.uint8, len(samples)),
        columns=_columns(samples),
        metadata=[s.train_metadata for s in samples] if any(s.train_metadata for s in samples) else None,
        routed_experts=_routed_experts(samples, how),
    )


def _known(value: int | None) -> int:
    if value is None:
        raise RolloutError("a sample without index or group_index reached training; keep the ones the source gave it")
    return value


def _rollout_key(sample: Sample) -> int:
    return _known(sample.index) if sample.rollout_id is None else sample.rollout_id


def _raw_reward(sample: Sample, how: Conversion) -> float:
    is_demonstration = how.settings is None and sample.reward is None
    return float("nan") if is_demonstration or sample.status is Status.FAILED else scalar_reward(sample, how.reward_key)


def _normalized(raw: NDArray[np.float64], samples: Sequence[Sample], how: Conversion) -> NDArray[np.float32]:
    """Rewards to train on; those of failed samples, which take no part in their group's statistics, are 0."""
    scored: list[int] = np.flatnonzero(~np.isnan(raw)).tolist()
    rewards = np.zeros(len(raw), np.float32)
    if how.settings is None or not scored:
        rewards[scored] = raw[scored]
        return rewards
    rewards[scored] = training_rewards(
        how.settings,
        raw[scored],
        group_ids_N=np.array([_known(samples[i].group_index) for i in scored], np.int64),
        rollout_ids_N=np.array([_rollout_key(samples[i]) for i in scored], np.int64),
        response_lengths_N=np.array([samples[i].response_length for i in scored], np.int64),
        max_response_len=how.max_response_len,
    )
    return rewards


def _post_processed(
    function: Callable[..., Any], samples: Sequence[Sample], how: Conversion
) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """What the hook makes of the samples that have a reward; of those that failed the same as without it.

    Raises DataError for an answer that is not two numbers for each, or has one to train on that is not finite.
    """
    scored = [i for i, sample in enumerate(samples) if sample.status is not Status.FAILED]
    answer = function(how.args, [samples[i] for i in scored])
    what = type(answer).__name__
    if isinstance(answer, tuple | list) and len(answer) == 2:
        raw, rewards = np.full(len(samples), np.nan), np.zeros(len(samples), np.float32)
        shown, processed = (np.asarray(part, np.float64) for part in answer)
        if shown.shape == processed.shape == (len(scored),):
            if (bad := np.flatnonzero(~np.isfinite(processed))).size:
                raise DataError(
                    f"--custom-reward-post-process-path made {processed[bad[0]]} of the reward of sample "
                    f"{samples[scored[bad[0]]].index} ({bad.size} of {len(scored)} are not finite); return finite "
                    "numbers to train on"
                )
            raw[scored], rewards[scored] = shown, processed
            return raw, rewards
        what = f"numbers of shapes {shown.shape} and {processed.shape} for {len(scored)} samples"
    raise DataError(
        f"--custom-reward-post-process-path returned {what}; it must return (raw rewards, rewards to train on), each "
        "with one number for each sample that it was given: those that failed are not among them"
    )


def _mask(sample: Sample, how: Conversion) -> NDArray[np.uint8]:
    unwanted = sample.remove_sample or sample.status is Status.FAILED
    if unwanted or (how.mask_truncated and sample.status is Status.TRUNCATED):
        return np.zeros(sample.response_length, np.uint8)
    if sample.loss_mask is None:
        return np.ones(sample.response_length, np.uint8)
    return _zeros_and_ones(sample.loss_mask, sample.response_length, f"the loss_mask of sample {sample.index}")


def _zeros_and_ones(mask: Any, num_tokens: int, what: str) -> NDArray[np.uint8]:
    """A loss mask as it is kept. Raises DataError for anything but 0 and 1, one for each token of the response."""
    values = np.asarray(mask)
    if values.shape != (num_tokens,):
        raise DataError(
            f"{what} has the shape {values.shape} and its response {num_tokens} tokens; give one number per token "
            "(Sample.append_response_tokens keeps them in step)"
        )
    if len(other := values[(values != 0) & (values != 1)]):
        raise DataError(
            f"{what} has {other[0]} in it: a token is trained on, which is 1, or not, which is 0; to weigh tokens, "
            "write advantages with --custom-advantage-function-path"
        )
    return values.astype(np.uint8)


def _columns(samples: Sequence[Sample]) -> dict[str, NDArray[Any]]:
    """Per-token columns, each there for all samples or for none; FAILED samples, which are masked, are filled with 0.

    Raises RolloutError naming a sample that lacks a column which others have.
    """
    found: dict[str, NDArray[Any]] = {}
    for name, dtype in (
        ("rollout_log_probs", np.float32),
        ("teacher_log_probs", np.float32),
        ("token_versions", np.int32),
    ):
        if not any(getattr(s, name) for s in samples):
            continue
        parts: list[Any] = []
        for s in samples:
            column = getattr(s, name) or []
            if len(column) != s.response_length:
                if s.status is not Status.FAILED:
                    raise RolloutError(
                        f"sample {s.index} has {len(column)} {name} for {s.response_length} response tokens while "
                        "others have them; a custom generate function must set them for every sample or for none"
                    )
                column = [0] * s.response_length
            parts.append(column)
        found[name] = _flat(parts, dtype)
    if any(RETOKENISED in s.metadata for s in samples):
        found["retokenised"] = _flat((_retokenised(s) for s in samples), np.uint8)
    return found


def _routed_experts(samples: Sequence[Sample], how: Conversion) -> Routes | None:
    """Where every token went, -1 where nothing was recorded: for the last token, and what came after the last answer.

    Raises RolloutError if the token before a trained one has no record, or one of another model.
    """
    if how.routing is None or not (how.needs_routes or any(s.rollout_routed_experts is not None for s in samples)):
        return None
    parts: list[Routes] = []
    for sample in samples:
        mask = np.flatnonzero(_mask(sample, how))
        wanted = sample.prompt_length + int(mask[-1]) if len(mask) else 0  # rows that the last trained token rests on
        found = sample.rollout_routed_experts
        num_known = 0 if found is None else len(found)
        if how.needs_routes and num_known < wanted:
            raise RolloutError(
                f"sample {sample.index} has the routed experts of {num_known} tokens, but those of {wanted} are needed "
                "for the tokens that are trained on; a custom function that asks the engine by itself must set "
                "Sample.rollout_routed_experts, or pass routed_experts to append_response_tokens"
            )
        num_tokens = len(sample.tokens)
        routes = np.full((num_tokens, how.routing.num_layers, how.routing.top_k), UNKNOWN_EXPERT, np.int16)
        if found is not None and num_tokens > 1:
            known = how.routing.checked(found, f"sample {sample.index}")[: num_tokens - 1]
            routes[: len(known)] = known
        parts.append(routes)
    return np.concatenate(parts) if parts else None


def _retokenised(sample: Sample) -> NDArray[np.uint8]:
    """1 from the first trained token on that the engine did not sample as it is."""
    start = sample.metadata.get(RETOKENISED, sample.response_length)
    return (np.arange(sample.response_length) >= start).astype(np.uint8)


def _flat(parts: Any, dtype: Any) -> NDArray[Any]:
    arrays = [np.asarray(part, dtype) for part in parts]
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def _batch_from_train_data(
    rollout_id: int, data: dict[str, Any], samples: Sequence[Sample], how: Conversion
) -> RolloutBatch:
    """Read the dict of lists that slime's custom conversion returns; only tokens, lengths and rewards are required.

    A key that slime does not have is a column of its own, one number per response token.
    """
    missing = [key for key in ("tokens", "response_lengths", "rewards") if key not in data]
    if missing:
        raise DataError(f"--custom-convert-samples-to-train-data-path returned no {missing}; it has {sorted(data)}")
    n = len(data["tokens"])
    if n != len(samples):
        raise DataError(f"--custom-convert-samples-to-train-data-path returned {n} rows for {len(samples)} samples")
    lengths = np.array([len(t) for t in data["tokens"]], np.int64)
    response_lengths = np.asarray(data["response_lengths"], np.int64)
    given = data.get("loss_masks") or [[1] * int(r) for r in response_lengths]
    masks = [
        _zeros_and_ones(mask, size, f"--custom-convert-samples-to-train-data-path: row {i} of loss_masks")
        for i, (mask, size) in enumerate(zip(given, response_lengths.tolist(), strict=True))
    ]
    columns = {name: _own_column(name, data[name], response_lengths) for name in sorted(set(data) - CONVERTED)}
    return RolloutBatch(
        rollout_id=rollout_id,
        tokens=_flat(data["tokens"], np.int32),
        lengths=lengths,
        response_lengths=response_lengths,
        loss_masks=_flat(masks, np.uint8),
        rewards=np.asarray(data["rewards"], np.float32),
        raw_rewards=np.asarray(data.get("raw_reward", data["rewards"]), np.float32),
        group_ids=np.array([_known(s.group_index) for s in samples], np.int64),
        rollout_ids=np.asarray(data.get("rollout_ids", [_rollout_key(s) for s in samples]), np.int64),
        sample_ids=np.asarray(data.get("sample_indices", [_known(s.index) for s in samples]), np.int64),
        truncated=np.asarray(data.get("truncated", [s.status is Status.TRUNCATED for s in samples]), np.uint8),
        columns=columns,
        metadata=data.get("metadata"),
        routed_experts=_routes_of_data(data, lengths, how.routing),
    )


def _own_column(name: str, rows: Any, response_lengths: NDArray[np.int64]) -> NDArray[np.float32]:
    """Per-token values of a custom conversion. Raises DataError for anything else, which nothing would read."""
    lengths = [len(row) if hasattr(row, "__len__") else -1 for row in rows] if isinstance(rows, list | tuple) else []
    if lengths != response_lengths.tolist():
        raise DataError(
            f"--custom-convert-samples-to-train-data-path returned {name!r}, which is not one number per response "
            f"token; known are {sorted(CONVERTED)}; put other things into `metadata`, one object a sample"
        )
    return _flat(rows, np.float32)


def _routes_of_data(data: dict[str, Any], lengths: NDArray[np.int64], shape: RoutingShape | None) -> Routes | None:
    """The rows of a custom conversion, [tokens - 1, layers, experts a token] of each sample."""
    given = data.get("rollout_routed_experts")
    if shape is None or given is None:
        return None
    parts: list[Routes] = []
    for number, (routes, length) in enumerate(zip(given, lengths.tolist(), strict=True)):
        known = shape.checked(routes, f"row {number} of the custom conversion")
        if len(known) != length - 1:
            raise DataError(
                f"row {number} of the custom conversion has {length} tokens and routed experts of {len(known)}; all "
                "but the last have some"
            )
        parts.append(np.concatenate([known, np.full((1, *known.shape[1:]), UNKNOWN_EXPERT, np.int16)]))
    return np.concatenate(parts)
