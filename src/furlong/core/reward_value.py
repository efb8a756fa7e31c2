"""What a reward function may return, and what becomes of everything else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from furlong.core.outcome import Outcome

_SHOWN = 80


def outcome_from_value(value: Any) -> Outcome:
    """Turn what a reward function returned into an outcome.

    A number, a bool, a numpy or torch scalar is a reward, a dict stays a dict. None, nan, inf, text and everything else
    is a failed outcome that names the type and the value.
    """
    value = _plain(value)
    if isinstance(value, dict):
        return _from_dict(value)
    if isinstance(value, bool | int | float):
        return _from_number(value)
    if value is None:
        return Outcome.failed("the reward function returned None: not scored")
    return Outcome.failed(f"the reward is {_shown(value)}; return a finite number or a dict of them")


def outcomes_from_list(values: Any, num_samples: int) -> list[Outcome]:
    """Turn what a batch reward function returned into one outcome per sample.

    Anything but a sequence of exactly `num_samples` fails every sample and names both counts: there is no telling which
    reward belongs to which sample.
    """
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, str) or not isinstance(values, Sequence):
        reason = f"a batch reward function must return a list of {num_samples} rewards, not {_shown(values)}"
        return [Outcome.failed(reason)] * num_samples
    if len(values) != num_samples:
        reason = f"the batch reward function returned {len(values)} rewards for {num_samples} samples"
        return [Outcome.failed(reason)] * num_samples
    return [outcome_from_value(value) for value in values]


def _plain(value: Any) -> Any:
    """Unwrap numpy and torch scalars, without importing either."""
    if isinstance(value, bool | int | float | str | dict | list | tuple) or value is None:
        return value
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        return value.item()
    return value


def _from_number(value: float) -> Outcome:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        return Outcome.failed(f"the reward is {_shown(value)}; return a finite number or a dict of them")
    return Outcome.scored(number)


def _from_dict(value: dict[Any, Any]) -> Outcome:
    if not value:
        return Outcome.failed("the reward is an empty dict")
    reward = {str(key): _plain(part) for key, part in value.items()}
    for key, part in reward.items():
        if not _is_finite(part):
            return Outcome.failed(f"the reward is a dict whose {key!r} is {_shown(part)}; its numbers must be finite")
    return Outcome.scored(reward)


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(_is_finite(part) for part in value.values())
    return not isinstance(value, list | tuple) or all(_is_finite(part) for part in value)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= _SHOWN else text[:_SHOWN] + '...'}"
