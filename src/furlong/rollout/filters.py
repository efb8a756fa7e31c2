"""Filters over whole groups. Names and the result type are slime's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from furlong.core.sample import Sample, Status, scalar_reward
from furlong.errors import RolloutError
from furlong.rollout.metrics import reward_label
from furlong.rollout.train_batch import by_baseline


@dataclass
class DynamicFilterOutput:
    """Decision whether to train on a group; `reason` becomes the metric `rollout/dynamic_filter/drop_<reason>`.

    With `keep_when_insufficient` a dropped group is used if the other groups in flight cannot fill the batch: no
    further prompts are issued in its place.
    """

    keep: bool
    reason: str = ""
    keep_when_insufficient: bool = False


def filter_output(result: Any) -> DynamicFilterOutput:
    """Convert what a filter returns: a bool, also of numpy or torch, or an object with slime's fields.

    Lone surrogates in a reason are escaped, because no file of the run can store them. Raises RolloutError for any
    other result.
    """
    if hasattr(result, "keep"):
        keep, reason = _as_bool(result.keep), str(getattr(result, "reason", None) or "")
        reason = reason.encode(errors="backslashreplace").decode()
        return DynamicFilterOutput(keep, reason, bool(getattr(result, "keep_when_insufficient", False)))
    keep = _as_bool(result)
    return DynamicFilterOutput(keep, "" if keep else "filter")


def _as_bool(value: Any) -> bool:
    plain = value.item() if getattr(value, "shape", None) == () else value  # a scalar of numpy or torch
    if not isinstance(plain, bool):
        raise RolloutError(
            f"--dynamic-sampling-filter-path: the filter returned {value!r}; return True or False, or a "
            "DynamicFilterOutput"
        )
    return plain


def check_reward_nonzero_std(args: Any, samples: Sequence[Sample], **_: Any) -> DynamicFilterOutput:
    """Keep a group only if its rewards differ (DAPO, arXiv:2503.14476 sec. 3.2): equal rewards give no gradient.

    With several roles, the rewards of one of them must differ.
    """
    parts = by_baseline(s for s in samples if s.status not in (Status.FAILED, Status.ABORTED))
    key = getattr(args, "reward_key", None)
    compared = [[scalar_reward(s, key) for s in part] for part in parts]
    if all(len(rewards) < 2 for rewards in compared):
        return DynamicFilterOutput(False, "too_few_scored")
    if any(float(np.std(rewards)) > 1e-6 for rewards in compared):
        return DynamicFilterOutput(True)
    rewards = max(compared, key=len)
    return DynamicFilterOutput(False, f"zero_std_{reward_label(rewards[0])}")


def check_no_aborted(args: Any, samples: Sequence[Sample], **_: Any) -> DynamicFilterOutput:  # noqa: ARG001
    """Keep a group only if none of its samples was aborted. A filter of Miles."""
    is_aborted = any(sample.status is Status.ABORTED for sample in samples)
    return DynamicFilterOutput(not is_aborted, "group_has_aborted" if is_aborted else "")


def check_reward_nonzero_std_with_fallback(args: Any, samples: Sequence[Sample], **extra: Any) -> DynamicFilterOutput:
    """Prefer groups whose rewards differ, but use the others instead of generating more prompts for the batch."""
    decision = check_reward_nonzero_std(args, samples, **extra)
    has_scores = decision.reason != "too_few_scored"
    return dataclasses.replace(decision, keep_when_insufficient=not decision.keep and has_scores)
