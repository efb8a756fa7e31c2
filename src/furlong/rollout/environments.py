"""Environments of `--environment`: one instance plays one episode with the policy, in threads or worker processes.

`generate` is the custom generate function of such runs. Prompts, turns, masks, budgets and the parsing of replies are
those of `policy().chat`; the environment gets messages and returns messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import struct
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakKeyDictionary

import xxhash

from furlong.config.environment_specs import EnvironmentSpec, parse_env_workers, parse_environments
from furlong.core.event_loop import call_in_thread
from furlong.core.sample import STEP_REWARDS, Sample, apply_changes
from furlong.core.user_code import describe_exception, is_async, is_raised_by_user
from furlong.core.user_functions import load_function
from furlong.core.worker_process import Worker, WorkerEndedError
from furlong.environments.protocol import ENVIRONMENT, INFO, Message, Observation, Step, Task
from furlong.environments.rubric import Episode, Rubric, number_of
from furlong.environments.step_batches import (
    StepBatches,
    StepMany,
    checked_observation,
    checked_step,
    step_many_of,
)
from furlong.environments.worker_process import WorkerReply
from furlong.errors import InfraError, RolloutError
from furlong.rollout.agent import policy
from furlong.rollout.episodes import LIMIT, REISSUED, EpisodeWatch
from furlong.rollout.policy import Policy

_WORKER = "furlong.environments.worker_process:EnvironmentWorker"
RESULT = "agent_result"  # sample metadata: what an agent returned
IDLE_S = 5.0  # for a method that runs in a thread when its episode ends, before the rubric and `close` are called


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:  # noqa: ARG001  slime's signature
    """Play one episode of the sample's environment. Raises RolloutError for what the environment did wrong."""
    spec = spec_of(parse_environments(args.environment), sample)
    made: Any = load_function(spec.path)
    sample.metadata[ENVIRONMENT] = spec.name
    rubric = getattr(made, "rubric", None)
    rubric_path = spec.rubric_path + (".of_group" if getattr(rubric, "has_group_parts", False) else "")
    is_scored = has_reward_function(args, sample)
    if rubric is not None and not is_scored:
        is_scored = True
        sample.custom_rm_path = rubric_path
    environment = await _open(spec, made, sample, args)
    if sample.custom_rm_path == rubric_path and (names := list(getattr(rubric, "in_environment", ()))):
        policy().judge = functools.partial(_judge, environment, spec.rubric_path, names, args.reward_timeout)
    if environment.leads:
        record_result(sample, await environment.run(sample))
    else:
        await _play(environment, sample, seed_of_task(args.rollout_seed, sample.group_index), is_scored=is_scored)
    return sample


def spec_of(specs: Sequence[EnvironmentSpec], sample: Sample) -> EnvironmentSpec:
    """Return the environment of a sample, which its metadata name in a mixture. Raises RolloutError."""
    name = sample.metadata.get(ENVIRONMENT)
    if len(specs) == 1:
        return specs[0]
    for spec in specs:
        if spec.name == name:
            return spec
    raise RolloutError(
        f"sample {sample.index} has metadata.environment {name!r}, which is none of "
        f"{', '.join(spec.name for spec in specs)}; give an evaluation set the name of its environment, or set it in "
        "the metadata of its rows"
    )


def seed_of_task(rollout_seed: int, group_index: int | None) -> int:
    """Return the seed of an episode: equal for the samples of a group, also when it is issued again."""
    return xxhash.xxh64_intdigest(struct.pack("<qq", rollout_seed, group_index or 0)) & 0x7FFFFFFF


async def _play(environment: PlayedEnvironment, sample: Sample, seed: int, *, is_scored: bool) -> None:
    prompt = sample.prompt
    task = Task(prompt if isinstance(prompt, str) else list(prompt), sample.label, sample.metadata, sample.tools)
    observation = await environment.reset(task, seed)
    messages = list(observation.messages)
    rewards: list[float] = []
    info: dict[str, Any] = {}
    try:
        while True:
            reply = await policy().chat(messages, tools=observation.tools)
            if not reply.tokens:  # a limit has ended the episode
                break
            step = await environment.step(reply.message)
            info.update(step.info)
            if step.reward is not None:
                rewards += [0.0] * (len(policy().answered) - 1 - len(rewards)) + [float(step.reward)]
            if step.truncated:
                sample.metadata[LIMIT] = "environment"
            if step.done or step.truncated or reply.finish_reason == "abort":
                break
            added = [{"role": "user", "content": step.messages}] if isinstance(step.messages, str) else step.messages
            messages += [reply.message, *added]
    finally:
        sample.metadata[STEP_REWARDS], sample.metadata[INFO] = rewards, info
        if not is_scored:
            sample.reward = sum(rewards)
    if not (is_scored or rewards or policy().watch.reached):
        raise RolloutError(
            f"--environment {environment.path}: no step returned a reward, and the class has no rubric; return "
            "Step(reward=...), set rubric = Rubric(...), or give --custom-rm-path or --rm-type"
        )


async def _judge(
    environment: PlayedEnvironment, rubric: str, names: Sequence[str], timeout_s: float, samples: Sequence[Sample]
) -> None:
    """Call the functions of a rubric that use the environment, one after the other, and record their values.

    After one that does not return, which may have its process killed, the others are not called. Raises InfraError,
    unless a limit has ended the episode.
    """
    for sample in samples:
        row: dict[str, float | str] = {}
        for name in names:
            limit = asyncio.timeout(timeout_s)
            try:
                async with limit:
                    row[name] = await environment.judge(rubric, name, sample)
            except BaseException as error:
                is_lost = isinstance(error, InfraError) and environment.watch.reached is None
                if is_lost or not is_raised_by_user(error):
                    raise
                row[name] = f"raised {describe_exception(error)}"
                if limit.expired():
                    row |= dict.fromkeys(
                        names[len(row) - 1 :], f"did not return within {timeout_s:g} s (--reward-timeout)"
                    )
                    break
        Rubric.record(sample, row)


def has_reward_function(args: Any, sample: Sample) -> bool:
    """Return whether a reward function or verifier scores the sample."""
    return bool(args.custom_rm_path or args.rm_type or sample.custom_rm_path or sample.metadata.get("rm_type"))


def record_result(sample: Sample, result: Any) -> None:
    """Store what an agent returned: a number is the reward, an object is metadata and may have a `reward`."""
    if result is None:
        return
    if isinstance(result, Mapping):
        values = dict(cast("Mapping[str, Any]", result))
        reward = values.pop("reward", None)
        sample.metadata.update(values)
        if reward is not None:
            sample.reward = reward
    elif isinstance(result, int | float):
        sample.reward = float(result)
    else:
        sample.metadata[RESULT] = result if isinstance(result, str) else repr(result)[:1000]


async def _open(spec: EnvironmentSpec, made: Any, sample: Sample, args: Any) -> PlayedEnvironment:
    kind, num_workers = parse_env_workers(args.env_workers)
    closing = policy().closing
    if kind == "thread":
        environment = _ThreadEnvironment(spec, policy(), num_workers)
        closing.push_async_callback(environment.close)
        await environment.make(made)
        return environment
    process, number = await closing.enter_async_context(_seat(num_workers, sample, args))
    environment = _ProcessEnvironment(spec, policy(), process, number)
    closing.push_async_callback(environment.close)
    await environment.make()
    return environment


async def call_agent_function(path: str, keywords: Mapping[str, Any], sample: Sample, args: Any) -> Any:
    """Call an agent function: on the event loop if it is async, otherwise in a thread; or in a worker process."""
    kind, num_workers = parse_env_workers(args.env_workers)
    if kind == "thread":
        function = load_function(path)
        if is_async(function):
            return await function(**keywords)
        call = functools.partial(copy_context().run, function, **keywords)  # it may call `policy()`
        return await _call_in_thread(call, num_workers, "agent function", policy().watch)
    async with _seat(num_workers, sample, args) as (process, number):
        call = {"path": path, "instance": number}
        await _call_worker(process, policy(), "load", call)
        done = await _call_worker(
            process, policy(), "agent_function", {**call, "keywords": dict(keywords)}, policy().watch.release
        )
    if "metadata" in done:
        sample.metadata.clear()
        sample.metadata.update(done["metadata"])
    return done["result"]


class ProcessEndedError(InfraError):
    """The process of an environment has ended."""


async def _call_worker(
    worker: Worker, asked: Policy, name: str, fields: Mapping[str, Any], started: Callable[[], object] = lambda: None
) -> Any:
    try:
        return await worker.call(name, fields, started=started, asked=functools.partial(_asked, asked))
    except WorkerEndedError as error:
        where = f"in {name}" if error.has_started else f"before {name}"
        raise ProcessEndedError(f"the process of the environment ended {where} ({error})") from None
    except TypeError as error:
        raise RolloutError(
            f"--env-workers process cannot send the sample to {name}: {error}; put plain numbers, text, lists and "
            "dicts into metadata and label"
        ) from None


async def _asked(policy: Any, name: str, values: Mapping[str, Any]) -> Any:
    """Call a method of the policy for `furlong.environments.worker_process`."""
    match name:
        case "chat":
            reply = await policy.chat(**values)
            return {each.name: getattr(reply, each.name) for each in dataclasses.fields(WorkerReply)}
        case "generate":
            done = await policy.generate(**values)
            names = ("tokens", "log_probs", "versions", "finish_reason", "text")
            return {each: getattr(done, each) for each in names}
        case "open_session":
            opened = policy.open_session()
            return {"url": opened.url, "key": opened.key, "id": opened.id}
        case "role":
            policy.role(**values)
            return None
        case "encode" | "decode":
            return getattr(policy, name)(**values)
        case _:
            raise RolloutError(f"a process of environments asks for policy.{name}")


@dataclass
class _Slot:
    """One of the N processes, which is started when it is needed, and started again if it ends."""

    process: Worker | None = None
    num_episodes: int = 0
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)


class EnvironmentWorkers:
    """The processes of the environments of one event loop: at most `num`, and as many for episodes that run alone."""

    def __init__(self, num: int, memory_bytes: int | None = None) -> None:
        self._memory_bytes = memory_bytes
        self._slots = [_Slot() for _ in range(num)]
        self._alone = asyncio.Semaphore(num)
        self._numbers = itertools.count()
        self._extra: set[Worker] = set()

    @contextlib.asynccontextmanager
    async def seat(self, *, alone: bool = False) -> AsyncGenerator[tuple[Worker, int]]:
        """Provide (process, number of the instance): the process with the fewest episodes, or a new one."""
        number = next(self._numbers)
        if not alone:
            slot = min(self._slots, key=lambda each: (each.num_episodes, each.process is None))
            slot.num_episodes += 1
            try:
                async with slot.starting:
                    if slot.process is None or slot.process.ending:
                        slot.process = await Worker.start(_WORKER, memory_bytes=self._memory_bytes)
                yield slot.process, number
            finally:
                slot.num_episodes -= 1
            return
        async with self._alone:
            process = await Worker.start(_WORKER, memory_bytes=self._memory_bytes)
            self._extra.add(process)
            try:
                yield process, number
            finally:
                self._extra.discard(process)
                await process.end()

    async def close(self) -> None:
        """Kill all processes."""
        processes = [*self._extra, *(slot.process for slot in self._slots if slot.process is not None)]
        await asyncio.gather(*(process.end() for process in processes))
        self._slots = [_Slot() for _ in self._slots]


_workers: WeakKeyDictionary[asyncio.AbstractEventLoop, EnvironmentWorkers] = WeakKeyDictionary()


async def close_environment_workers() -> None:
    """Kill the processes of this event loop."""
    if (workers := _workers.pop(asyncio.get_running_loop(), None)) is not None:
        await workers.close()


@contextlib.asynccontextmanager
async def _seat(num_workers: int, sample: Sample, args: Any) -> AsyncGenerator[tuple[Worker, int]]:
    """Provide a worker process for an episode. The wait for it does not count in the limits of the episode."""
    memory_gib = args.agent_memory_limit
    memory_bytes = None if memory_gib is None else int(memory_gib * 2**30)
    workers = _workers.setdefault(asyncio.get_running_loop(), EnvironmentWorkers(num_workers, memory_bytes))
    with policy().watch.held():
        async with workers.seat(alone=REISSUED in sample.metadata) as seat:
            yield seat


async def _call_in_thread(
    function: Callable[[], Any], num_workers: int, name: str, watch: EpisodeWatch, running: set[Any] | None = None
) -> Any:
    """Call a function in a thread, of which there are `num_workers`. The wait for one does not count in limits.

    running: contains the call until it ends, which a cancelled one does later.
    """
    permits = _permits.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(num_workers))
    with watch.held() as release:
        async with permits:
            release()
            call = call_in_thread(function, name=name)
            if running is not None:
                running.add(call)
                call.add_done_callback(running.discard)
            await asyncio.wait({call})
    value, error = call.result()
    if error is not None:
        raise error
    return value


_permits: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()  # of the threads
_batches: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[type, StepBatches]] = WeakKeyDictionary()  # by class


class _ThreadEnvironment:
    """An instance in this process. Methods that are not async run in threads."""

    def __init__(self, spec: EnvironmentSpec, policy: Policy, num_workers: int) -> None:
        self.path, self.leads, self.watch = spec.path, False, policy.watch
        self._spec, self._policy, self._num_workers = spec, policy, num_workers
        self._instance = cast("Any", None)
        self._running: set[Any] = set()  # calls in threads

    async def make(self, made: Any) -> None:
        def call() -> None:
            self._instance = made(**self._spec.arguments)

        await self._in_thread(call)
        self.leads = hasattr(self._instance, "run")

    async def reset(self, task: Task, seed: int) -> Observation:
        return checked_observation(await self._call("reset", task, seed), self.path)

    async def step(self, message: Message) -> Step:
        if (step_many := step_many_of(self._instance)) is None:
            return checked_step(await self._call("step", message), self.path)
        with self.watch.held() as release:
            return await self._batched(step_many).step(self._instance, message, release)

    def _batched(self, step_many: StepMany) -> StepBatches:
        by_class = _batches.setdefault(asyncio.get_running_loop(), {})
        if type(self._instance) not in by_class:
            load, name = self._policy.load, f"environment {self._spec.name}"

            async def call(steps: list[tuple[Any, Message]]) -> Any:
                if is_async(step_many):
                    return await load.timed(functools.partial(step_many, steps))
                value, error = await call_in_thread(functools.partial(step_many, steps), name=name)
                if error is not None:
                    raise error
                return value

            by_class[type(self._instance)] = StepBatches(self.path, call)
        return by_class[type(self._instance)]

    async def run(self, sample: Sample) -> Any:
        return await self._call("run", self._policy, sample)

    async def judge(self, rubric: str, name: str, sample: Sample) -> float | str:
        await self._idle()
        loaded: Any = load_function(rubric)
        return number_of(await self._await(loaded.in_environment[name], Episode.of(sample), self._instance))

    async def close(self) -> None:
        await self._idle()
        if hasattr(self._instance, "close"):
            await self._call("close")

    async def _idle(self) -> None:
        """Wait for a call whose episode has ended meanwhile: a thread cannot be stopped."""
        if self._running:
            await asyncio.wait(set(self._running), timeout=IDLE_S)

    async def _call(self, name: str, *values: Any) -> Any:
        return await self._await(getattr(self._instance, name), *values)

    async def _await(self, function: Callable[..., Any], *values: Any) -> Any:
        return await function(*values) if is_async(function) else await self._in_thread(lambda: function(*values))

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        name = f"environment {self._spec.name}"
        return await _call_in_thread(function, self._num_workers, name, self.watch, self._running)


class _ProcessEnvironment:
    """An instance in a worker process. Time in which other episodes occupy the process does not count."""

    def __init__(self, spec: EnvironmentSpec, policy: Policy, process: Worker, number: int) -> None:
        self.path, self.leads, self.watch = spec.path, False, policy.watch
        self._spec, self._policy, self._process, self._number = spec, policy, process, number

    async def make(self) -> None:
        path = self._spec.path
        await _call_worker(self._process, self._policy, "load", {"path": path, "instance": self._number})
        made = await self._call("make", path=path, arguments=dict(self._spec.arguments))
        self.leads = made["has_run"]

    async def reset(self, task: Task, seed: int) -> Observation:
        fields = {"prompt": task.prompt, "label": task.label, "metadata": task.metadata, "tools": task.tools}
        return Observation(**await self._call("reset", task=fields, seed=seed))

    async def step(self, message: Message) -> Step:
        return Step(**await self._call("step", message=message))

    async def run(self, sample: Sample) -> Any:
        done = await self._call("run", sample=sample.to_dict())
        apply_changes(sample, done["changes"])
        return done["result"]

    async def judge(self, rubric: str, name: str, sample: Sample) -> float | str:
        return await self._call("judge", rubric=rubric, part=name, sample=sample.to_dict())

    async def close(self) -> None:
        with contextlib.suppress(ProcessEndedError):  # the episode has ended, or has failed for this reason
            await self._call("close")

    async def _call(self, name: str, **fields: Any) -> Any:
        fields["instance"] = self._number
        with self.watch.held() as release:
            return await _call_worker(self._process, self._policy, name, fields, release)


PlayedEnvironment = _ThreadEnvironment | _ProcessEnvironment
