"""Calls of the methods of an environment, in threads or in worker processes (`--env-workers`)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

from furlong.config.checks.environment_specs import EnvironmentSpec, parse_env_workers
from furlong.core.daemon_calls import call_in_thread
from furlong.core.sample import Sample
from furlong.core.sample_changes import apply_changes
from furlong.core.user_code import is_async
from furlong.environments.protocol import Message, Observation, Step, Task
from furlong.environments.returned_values import checked_observation, checked_step
from furlong.rollout.agent import policy
from furlong.rollout.environment_workers import EnvironmentProcess, ProcessEndedError, environment_workers
from furlong.rollout.episode_limits import REISSUED


class PlayedEnvironment(Protocol):
    """The environment of one episode. leads: whether its `run` replaces `reset` and `step`."""

    path: str
    leads: bool

    async def reset(self, task: Task, seed: int) -> Observation:
        """Call `reset`. Raises RolloutError for what it must not return."""
        ...

    async def step(self, message: Message) -> Step:
        """Call `step`. Raises RolloutError for what it must not return."""
        ...

    async def run(self, sample: Sample) -> Any:
        """Call `run`."""
        ...


@contextlib.asynccontextmanager
async def opened_environment(
    spec: EnvironmentSpec, made: Any, sample: Sample, args: Any
) -> AsyncGenerator[PlayedEnvironment]:
    """Make an instance of the class `made` for the episode of `sample`, and close it afterwards."""
    kind, num_workers = parse_env_workers(args.env_workers)
    if kind == "thread":
        environment = await _ThreadEnvironment.make(spec, made, num_workers)
        try:
            yield environment
        finally:
            await environment.close()
        return
    memory_gib = args.agent_memory_limit
    workers = environment_workers(num_workers, None if memory_gib is None else int(memory_gib * 2**30))
    policy().watch.hold()
    try:
        async with workers.seat(alone=REISSUED in sample.metadata) as (process, number):
            environment = await _ProcessEnvironment.make(spec, process, number)
            try:
                yield environment
            finally:
                await environment.close()
    finally:
        policy().watch.release()


_permits: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()  # of the threads


class _ThreadEnvironment:
    """An instance in this process. Methods that are not async run in threads."""

    def __init__(self, spec: EnvironmentSpec, num_workers: int) -> None:
        self.path, self.leads, self._name = spec.path, False, spec.name
        self._instance = cast("Any", None)
        self._permits = _permits.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(num_workers))

    @staticmethod
    async def make(spec: EnvironmentSpec, made: Any, num_workers: int) -> _ThreadEnvironment:
        environment = _ThreadEnvironment(spec, num_workers)
        environment._instance = await environment._in_thread(lambda: made(**spec.arguments))
        environment.leads = hasattr(environment._instance, "run")
        return environment

    async def reset(self, task: Task, seed: int) -> Observation:
        return checked_observation(await self._call("reset", task, seed), self.path)

    async def step(self, message: Message) -> Step:
        return checked_step(await self._call("step", message), self.path)

    async def run(self, sample: Sample) -> Any:
        return await self._call("run", policy(), sample)

    async def close(self) -> None:
        if hasattr(self._instance, "close"):
            await self._call("close")

    async def _call(self, name: str, *values: Any) -> Any:
        method = getattr(self._instance, name)
        return await method(*values) if is_async(method) else await self._in_thread(lambda: method(*values))

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        watch = policy().watch
        watch.hold()
        try:
            async with self._permits:
                watch.release()
                value, error = await call_in_thread(function, name=f"environment {self._name}")
        finally:
            watch.release()
        if error is not None:
            raise error
        return value


class _ProcessEnvironment:
    """An instance in a worker process. Time in which other episodes occupy the process does not count."""

    def __init__(self, spec: EnvironmentSpec, process: EnvironmentProcess, number: int) -> None:
        self.path, self.leads = spec.path, False
        self._process, self._number = process, number

    @staticmethod
    async def make(spec: EnvironmentSpec, process: EnvironmentProcess, number: int) -> _ProcessEnvironment:
        environment = _ProcessEnvironment(spec, process, number)
        await process.call("load", {"path": spec.path, "instance": number}, lambda: None)
        made = await environment._call("make", path=spec.path, arguments=dict(spec.arguments))
        environment.leads = made["has_run"]
        return environment

    async def reset(self, task: Task, seed: int) -> Observation:
        fields = {"prompt": task.prompt, "label": task.label, "metadata": task.metadata, "tools": task.tools}
        return Observation(**await self._call("reset", task=fields, seed=seed))

    async def step(self, message: Message) -> Step:
        return Step(**await self._call("step", message=message))

    async def run(self, sample: Sample) -> Any:
        done = await self._call("run", sample=sample.to_dict())
        apply_changes(sample, done["changes"])
        return done["result"]

    async def close(self) -> None:
        with contextlib.suppress(ProcessEndedError):  # the episode has ended, or has failed for this reason
            await self._call("close")

    async def _call(self, name: str, **fields: Any) -> Any:
        watch = policy().watch
        watch.hold()
        try:
            values = {**fields, "instance": self._number}
            return await self._process.call(name, values, watch.release, policy() if name == "run" else None)
        finally:
            watch.release()
