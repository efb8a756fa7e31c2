"""`--environment openenv:URL`: environments behind a server of OpenEnv."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from typing import Any, TypeVar, cast

from openenv.core.generic_client import GenericEnvClient  # pyright: ignore[reportMissingImports]  an extra

from furlong.environments.protocol import Step, Task
from furlong.errors import InfraError

T = TypeVar("T")


class OpenEnvClient:
    """One session of an OpenEnv server. target: its URL.

    action_key: the field of the action that the reply's text becomes; a reply that is a JSON object is the action
    itself. observation_key: the field of the observation that the policy reads; all of it as JSON without one.
    """

    def __init__(self, target: str, action_key: str = "message", observation_key: str | None = None) -> None:
        self._client: Any = GenericEnvClient(base_url=target)
        self._target, self._action_key, self._observation_key = target, action_key, observation_key

    async def reset(self, task: Task, seed: int) -> str:
        """Open a session, and return the first observation."""
        await self._infra(self._client.connect())
        result = await self._infra(self._client.reset(seed=seed, **_fields(task.metadata.get("reset"))))
        return self._text(result.observation) or task.messages[-1]["content"]

    async def step(self, message: Any) -> Step:
        """Send the action, and return the observation with its reward."""
        content = str(message.get("content") or "")
        action = _fields(_json(content)) or {self._action_key: content}
        result = await self._infra(self._client.step(action))
        reward = None if result.reward is None else float(result.reward)
        return Step(self._text(result.observation) or "(empty)", reward, done=bool(result.done))

    async def close(self) -> None:
        """Close the session."""
        await self._infra(self._client.close())

    def _text(self, observation: Any) -> str:
        value = _fields(observation).get(self._observation_key) if self._observation_key else observation
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    async def _infra(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except Exception as error:
            raise InfraError(f"the OpenEnv server {self._target} failed: {type(error).__name__}: {error}") from error


def _fields(value: Any) -> dict[str, Any]:
    return dict(cast("dict[str, Any]", value)) if isinstance(value, dict) else {}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
