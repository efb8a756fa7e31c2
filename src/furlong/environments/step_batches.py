"""What the methods of environments return, checked, and batched steps: `step_many` gets those of several episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any, cast

from furlong.core.user_code import is_raised_by_user
from furlong.environments.protocol import Message, Observation, Step
from furlong.errors import RolloutError

WINDOW_S = 0.005  # after the first step of a batch; later ones belong to the next batch

StepMany = Callable[[list[tuple[Any, Message]]], Any]


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


def step_many_of(instance: Any) -> StepMany | None:
    """Return the `step_many` of an instance's class, None without one."""
    return getattr(type(instance), "step_many", None)


def checked_steps(value: Any, num_steps: int, path: str) -> list[Step | BaseException]:
    """Return what `step_many` returned for each environment: its step, or the exception that its episode raises.

    Raises RolloutError for anything else than one value for each environment.
    """
    values: Sequence[Any] = cast("Sequence[Any]", value) if isinstance(value, list | tuple) else ()
    if len(values) != num_steps:
        shown = f"{len(values)} values" if isinstance(value, list | tuple) else f"{value!r:.200}"
        raise RolloutError(
            f"--environment {path}: step_many returned {shown} for {num_steps} steps; return a list with one Step, or "
            "one exception, for each (environment, message), in their order"
        )
    steps: list[Step | BaseException] = []
    for each in values:
        try:
            steps.append(each if isinstance(each, BaseException) else checked_step(each, path))
        except RolloutError as error:
            steps.append(error)
    return steps


@dataclass(eq=False)
class _Waiting:
    """A step without an answer. started: is called when `step_many` is called with it."""

    instance: Any
    message: Message
    started: Callable[[], object]
    answer: asyncio.Future[Step]


class StepBatches:
    """Calls `step_many` of one class on an event loop. Calls do not overlap, unless nobody waits for the earlier one.

    path: of the class. call: runs `step_many` with its argument, for example in a thread.
    """

    def __init__(
        self,
        path: str,
        call: Callable[[list[tuple[Any, Message]]], Awaitable[Any]],
    ) -> None:
        self._path, self._call = path, call
        self._waiting: list[_Waiting] = []
        self._collecting: asyncio.Task[None] | None = None

    async def step(self, instance: Any, message: Message, started: Callable[[], object]) -> Step:
        """Return the step of one environment. Raises what `step_many` raised or returned for it."""
        waiting = _Waiting(instance, message, started, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._collecting is None:  # in its own context: a batch is not part of one episode
            self._collecting = asyncio.get_running_loop().create_task(self._collect(), context=Context())
        return await waiting.answer

    async def _collect(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(WINDOW_S)
                batch, self._waiting = self._waiting, []
                running = asyncio.create_task(self._run(batch))
                await asyncio.wait({each.answer for each in batch})
                if running.done():
                    await running  # raises what ends the process
                else:
                    running.cancel()
        finally:
            self._collecting = None

    async def _run(self, batch: list[_Waiting]) -> None:
        """Answer the steps of a batch, without those that were given up before it begins."""
        batch = [each for each in batch if not each.answer.done()]
        for each in batch:
            each.started()
        try:
            value = await self._call([(each.instance, each.message) for each in batch]) if batch else []
            steps = checked_steps(value, len(batch), self._path)
        except BaseException as error:
            if not is_raised_by_user(error):
                raise
            steps = [error] * len(batch)
        for each, step in zip(batch, steps, strict=True):
            if each.answer.done():
                continue
            if isinstance(step, BaseException):
                each.answer.set_exception(step)
            else:
                each.answer.set_result(step)
