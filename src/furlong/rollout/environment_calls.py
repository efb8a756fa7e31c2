"""Calls of environments and agent functions, in threads or in worker processes (`--env-workers`)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Mapping
from contextvars import copy_context
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

from furlong.config.checks.environment_specs import EnvironmentSpec, parse_env_workers
from furlong.core.event_loop import call_in_thread
from furlong.core.sample import Sample
from furlong.core.sample_changes import apply_changes
from furlong.core.user_code import is_async
from furlong.core.user_functions import load_function
from furlong.environments.protocol import Message, Observation, Step, Task
from furlong.environments.returned_values import checked_observation, checked_step
from furlong.environments.step_batches import StepBatches, StepMany, step_many_of
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
    async with _seat(num_workers, sample, args) as (process, number):
        environment = await _ProcessEnvironment.make(spec, process, number)
        try:
            yield environment
        finally:
            await environment.close()


async def call_agent_function(path: str, keywords: Mapping[str, Any], sample: Sample, args: Any) -> Any:
    """Call an agent function: on the event loop if it is async, otherwise in a thread; or in a worker process."""
    kind, num_workers = parse_env_workers(args.env_workers)
    if kind == "thread":
        function = load_function(path)
        if is_async(function):
            return await function(**keywords)
        call = functools.partial(copy_context().run, function, **keywords)  # it may call `policy()`
        return await _call_in_thread(call, num_workers, "agent function")
    async with _seat(num_workers, sample, args) as (process, number):
        call = {"path": path, "instance": number}
        await process.call("load", call, lambda: None)
        done = await process.call("agent_function", {**call, "keywords": dict(keywords)}, policy().watch.release)
    if "metadata" in done:
        sample.metadata.clear()
        sample.metadata.update(done["metadata"])
    return done["result"]


@contextlib.asynccontextmanager
async def _seat(num_workers: int, sample: Sample, args: Any) -> AsyncGenerator[tuple[EnvironmentProcess, int]]:
    """Provide a worker process for an episode. The wait for it does not count in the limits of the episode."""
    memory_gib, watch = args.agent_memory_limit, policy().watch
    workers = environment_workers(num_workers, None if memory_gib is None else int(memory_gib * 2**30))
    watch.hold()
    try:
        async with workers.seat(alone=REISSUED in sample.metadata) as seat:
            yield seat
    finally:
        watch.release()


async def _call_in_thread(function: Callable[[], Any], num_workers: int, name: str) -> Any:
    """Call a function in a thread, of which there are `num_workers`. The wait for one does not count in limits."""
    permits = _permits.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(num_workers))
    watch = policy().watch
    watch.hold()
    try:
        async with permits:
            watch.release()
            value, error = await call_in_thread(function, name=name)
    finally:
        watch.release()
    if error is not None:
        raise error
    return value


_permits: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()  # of the threads
_batches: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[type, StepBatches]] = WeakKeyDictionary()  # by class


class _ThreadEnvironment:
    """An instance in this process. Methods that are not async run in threads."""

    def __init__(self, spec: EnvironmentSpec, num_workers: int) -> None:
        self.path, self.leads, self._name = spec.path, False, spec.name
        self._instance = cast("Any", None)
        self._num_workers = num_workers

    @staticmethod
    async def make(spec: EnvironmentSpec, made: Any, num_workers: int) -> _ThreadEnvironment:
        environment = _ThreadEnvironment(spec, num_workers)
        environment._instance = await environment._in_thread(lambda: made(**spec.arguments))
        environment.leads = hasattr(environment._instance, "run")
        return environment

    async def reset(self, task: Task, seed: int) -> Observation:
        return checked_observation(await self._call("reset", task, seed), self.path)

    async def step(self, message: Message) -> Step:
        step_many, watch = step_many_of(self._instance), policy().watch
        if step_many is None:
            return checked_step(await self._call("step", message), self.path)
        watch.hold()
        try:
            return await self._batched(step_many).step(self._instance, message, watch.release)
        finally:
            watch.release()

    def _batched(self, step_many: StepMany) -> StepBatches:
        """Return the batches of the class, which all episodes of the run share."""
        by_class = _batches.setdefault(asyncio.get_running_loop(), {})
        if type(self._instance) not in by_class:
            timer, name = policy().blocking, f"environment {self._name}"

            async def call(steps: list[tuple[Any, Message]]) -> Any:
                if is_async(step_many):
                    return await timer.timed(functools.partial(step_many, steps))
                value, error = await call_in_thread(functools.partial(step_many, steps), name=name)
                if error is not None:
                    raise error
                return value

            by_class[type(self._instance)] = StepBatches(self.path, call)
        return by_class[type(self._instance)]

    async def run(self, sample: Sample) -> Any:
        return await self._call("run", policy(), sample)

    async def close(self) -> None:
        if hasattr(self._instance, "close"):
            await self._call("close")

    async def _call(self, name: str, *values: Any) -> Any:
        method = getattr(self._instance, name)
        return await method(*values) if is_async(method) else await self._in_thread(lambda: method(*values))

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        return await _call_in_thread(function, self._num_workers, f"environment {self._name}")


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
