"""`--environment gym:ID`: environments of gymnasium whose observations and actions are text or one number."""

from __future__ import annotations

import re
from typing import Any

import gymnasium  # pyright: ignore[reportMissingImports]  an extra
from gymnasium import spaces  # pyright: ignore[reportMissingImports]  an extra

from furlong.environments.protocol import Step, Task
from furlong.errors import ConfigError

_NUMBER = re.compile(r"-?\d+")


class GymnasiumText:
    """One gymnasium environment. target: its id, `module:ID` for one that a module registers; options go to `make`.

    The reply is the action: its text, or the last whole number in it if actions are numbered. A reply without an action
    is answered with the possible ones, and the environment does not move.
    """

    def __init__(self, target: str, **options: Any) -> None:
        where = f"--environment gym:{target}"
        try:
            self._inner: Any = gymnasium.make(target, **options)
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ConfigError(f"{where}: {type(error).__name__}: {error}; check the id and its options") from error
        space: Any = self._inner.action_space
        if not isinstance(space, spaces.Text | spaces.Discrete):
            raise ConfigError(
                f"{where} has actions of type {type(space).__name__}; a policy can give Text or "
                "Discrete ones: wrap the environment"
            )

    @classmethod
    def check_arguments(cls, target: str, **options: Any) -> None:
        """Make the environment once. Raises ConfigError."""
        cls(target, **options).close()

    def reset(self, task: Task, seed: int) -> str:
        """Return the first observation; the episode's number in the data is part of its seed."""
        del task
        observation, _ = self._inner.reset(seed=seed)
        return _text(observation)

    def step(self, message: Any) -> Step:
        """Act, and return the observation with its reward."""
        action, space = self._action(str(message.get("content") or "")), self._inner.action_space
        if action is None:
            first = int(space.start)
            return Step(f"answer with one number from {first} to {first + int(space.n) - 1}", info={"no_action": 1})
        observation, reward, terminated, truncated, info = self._inner.step(action)
        numbers = {key: value for key, value in info.items() if isinstance(value, bool | int | float | str)}
        done = bool(terminated)
        return Step(_text(observation), float(reward), done=done, truncated=bool(truncated) and not done, info=numbers)

    def close(self) -> None:
        """Close the environment."""
        self._inner.close()

    def _action(self, content: str) -> Any:
        space = self._inner.action_space
        if isinstance(space, spaces.Text):
            return content
        numbers = [int(number) for number in _NUMBER.findall(content)]
        return numbers[-1] if numbers and space.contains(numbers[-1]) else None


def _text(observation: Any) -> str:
    return observation if isinstance(observation, str) and observation else str(observation) or " "
