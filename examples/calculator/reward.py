"""The reward of the calculator agents: the share of right digits of the answer, less the cost of calls."""

from __future__ import annotations

from typing import Any

CALL_COST = 0.1


def shaped(args: Any, sample: Any) -> float:  # noqa: ARG001  slime's signature
    """Return the share of right digits of the last answer, less CALL_COST for each turn before it."""
    answers = [message["content"] for message in sample.metadata["messages"] if message["role"] == "assistant"]
    right = sum(a == b for a, b in zip(answers[-1], sample.label, strict=False))
    return right / max(len(answers[-1]), len(sample.label)) - CALL_COST * (len(answers) - 1)


def shaped_and_right(args: Any, sample: Any) -> dict[str, float]:
    """Return the shaped reward, and whether the last answer is right: `--reward-key`, `--eval-reward-key`."""
    answers = [message["content"] for message in sample.metadata["messages"] if message["role"] == "assistant"]
    return {"shaped": shaped(args, sample), "right": float(answers[-1] == sample.label)}
