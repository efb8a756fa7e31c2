"""Checks of what the methods of environments return, and its form as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from furlong.environments.protocol import Message, Observation, Step
from furlong.errors import RolloutError


def checked_observation(value: Any, path: str) -> Observation:
    """Return what `reset` of the class at `path` returned as an observation. Raises RolloutError."""
    if isinstance(value, Observation):
        return value
    if isinstance(value, str):
        return Observation([{"role": "user", "content": value}])
    if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in cast("list[Any]", value)):
        return Observation(cast("list[Message]", value))
    raise RolloutError(
        f"--environment {path}: reset returned {value!r:.200}; return an Observation, a list of messages, or text"
    )


def checked_step(value: Any, path: str) -> Step:
    """Return what `step` of the class at `path` returned. Raises RolloutError."""
    where = f"--environment {path}: step returned"
    if not isinstance(value, Step):
        raise RolloutError(f"{where} {value!r:.200}; return a furlong.environments.Step")
    if not (value.done or value.truncated or value.messages):
        raise RolloutError(f"{where} no messages, and done is False; return messages, or done=True")
    reward: Any = value.reward
    if reward is not None and (not isinstance(reward, int | float) or not abs(reward) < float("inf")):
        raise RolloutError(f"{where} the reward {reward!r:.80}; return a finite number, or None")
    return value


def json_from_observation(value: Observation) -> dict[str, Any]:
    """Return the fields of an observation."""
    return {"messages": list(value.messages), "tools": value.tools}


def json_from_step(value: Step) -> dict[str, Any]:
    """Return the fields of a step."""
    messages = value.messages if isinstance(value.messages, str) else list(value.messages)
    flags = {"done": bool(value.done), "truncated": bool(value.truncated)}
    return {"messages": messages, "reward": value.reward, "info": dict(value.info), **flags}
