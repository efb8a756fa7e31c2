"""A custom reward: partial credit for each correct digit, and an error category."""

from __future__ import annotations

from typing import Any

from furlong import Sample


def reward(args: Any, sample: Sample, **kwargs: Any) -> dict[str, Any]:  # noqa: ARG001  slime's signature
    """Return `score` for training (--reward-key), `exact` for evaluation (--eval-reward-key), and `kind`.

    With --log-reward-category kind, metrics.jsonl reports the fraction of each kind as `rollout/error_cat/<kind>`.
    """
    answer, right = sample.response.removesuffix("<|im_end|>"), str(sample.label)
    exact = float(answer == right)
    width = max(len(answer), len(right))
    digits = sum(a == b for a, b in zip(answer.rjust(width), right.rjust(width), strict=True)) / width
    return {"score": 0.5 * exact + 0.5 * digits, "exact": exact, "kind": kind_of(sample, answer, exact)}


def kind_of(sample: Sample, answer: str, exact: float) -> str:
    """Classify an answer as correct or as one kind of mistake."""
    a, b = (int(number) for number in str(sample.prompt).rstrip("=").split("+"))
    if exact:
        return "right"
    if answer == str((a // 10 + b // 10) % 10 * 10 + (a + b) % 10):
        return "forgot_carry"
    return "other" if answer.isdigit() else "no_number"
