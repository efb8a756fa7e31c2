"""The outcome of a reward call, or of the generation before it, and its construction from a returned value.

A failed call is an outcome with a reason, never an absence and never a reward of 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

OutcomeKind = Literal["scored", "failed", "timed_out", "infra"]
OutcomeStage = Literal["generate", "reward"]
_MAX_REPR = 80


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of scoring one sample.

    reward: a float, or a dict from which `--reward-key` selects; None unless `kind` is "scored".
    reason: the exception or the limit; of a scored one that of a verifier, which gives 0 to what it cannot compare.
    kind: "infra" if what failed is not the user's function but a sandbox or server that it uses (`InfraError`).
    stage: what failed, the user's generate function or the reward.
    """

    kind: OutcomeKind
    reward: float | dict[str, Any] | None = None
    reason: str = ""
    stage: OutcomeStage = "reward"

    @staticmethod
    def scored(reward: float | dict[str, Any]) -> Outcome:
        """The call returned a valid reward."""
        return Outcome("scored", reward)

    @staticmethod
    def failed(reason: str, *, stage: OutcomeStage = "reward") -> Outcome:
        """The call raised, or returned an invalid reward."""
        return Outcome("failed", None, reason, stage)

    @staticmethod
    def timed_out(seconds: float, *, stage: OutcomeStage = "reward", details: str = "") -> Outcome:
        """The call did not return within `seconds`."""
        return Outcome("timed_out", None, f"no answer within {seconds:g} s{'; ' if details else ''}{details}", stage)


def outcome_from_value(value: Any) -> Outcome:
    """Convert the return value of a reward function to an outcome.

    A finite number, a bool, and a numpy or torch scalar are rewards; so is a dict of them. Anything else, including
    None, nan, inf and text, is a failed outcome whose reason has the type and the value. An Outcome stays unchanged.
    """
    if isinstance(value, Outcome):
        return value
    value = _plain(value)
    if isinstance(value, dict):
        return _from_dict(value)
    if isinstance(value, bool | int | float):
        return _from_number(value)
    if value is None:
        return Outcome.failed("the reward function returned None: not scored")
    return Outcome.failed(f"the reward is {_shown(value)}; return a finite number or a dict of them")


def outcomes_from_list(values: Any, num_samples: int) -> list[Outcome]:
    """Convert the return value of a batch reward function to one outcome per sample.

    If it is not a sequence of `num_samples` values, every sample fails: rewards cannot be assigned to samples.
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
    return f"{type(value).__name__} {text if len(text) <= _MAX_REPR else text[:_MAX_REPR] + '...'}"
