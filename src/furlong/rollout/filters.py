"""Filters over whole groups. Names and the result type are slime's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from furlong.core.sample import Sample, Status
from furlong.errors import RolloutError


@dataclass(frozen=True)
class DynamicFilterOutput:
    """Whether to train on a group; `reason` becomes the metric `rollout/dynamic_filter/drop_<reason>`.

    With `keep_when_insufficient` a dropped group is used after all if too few survive when the data ends.
    """

    keep: bool
    reason: str = ""
    keep_when_insufficient: bool = False


def verdict(result: Any) -> DynamicFilterOutput:
    """Accept a plain bool from a filter function too. Raises RolloutError for anything else that is no verdict."""
    if isinstance(result, DynamicFilterOutput):
        return result
    keep, reason = getattr(result, "keep", None), getattr(result, "reason", "")
    if keep is not None:
        return DynamicFilterOutput(bool(keep), str(reason), bool(getattr(result, "keep_when_insufficient", False)))
    if not isinstance(result, bool | np.bool_):
        raise RolloutError(
            f"--dynamic-sampling-filter-path: the filter returned {result!r}; return True or False, or a "
            "DynamicFilterOutput"
        )
    return DynamicFilterOutput(bool(result), "" if result else "filter")


def check_reward_nonzero_std(args: Any, samples: Sequence[Sample], **_: Any) -> DynamicFilterOutput:
    """Keep a group only if its rewards differ (DAPO, arXiv:2503.14476 sec. 3.2): equal rewards give no gradient."""
    rewards = [s.get_reward_value(args) for s in samples if s.status not in (Status.FAILED, Status.ABORTED)]
    if len(rewards) < 2:
        return DynamicFilterOutput(False, "too_few_scored")
    if float(np.std(rewards)) > 1e-6:
        return DynamicFilterOutput(True)
    return DynamicFilterOutput(False, f"zero_std_{rewards[0]:.1f}")
