"""The side of an environment worker: has instances of classes, calls their methods, and calls agent functions.

Methods that are not async are called one at a time in the main thread, async ones in the event loop of another thread
(`furlong.core.worker_process`). The policy that `run` gets asks the run.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from furlong.core.sample import Sample, changed_fields
from furlong.core.user_code import is_async
from furlong.core.user_functions import load_function
from furlong.core.worker_process import Message, WorkerSide
from furlong.environments.protocol import Observation, Step, Task
from furlong.environments.rubric import Episode, number_of
from furlong.environments.step_batches import (
    WINDOW_S,
    StepBatches,
    StepMany,
    checked_observation,
    checked_step,
    checked_steps,
    step_many_of,
)
from furlong.errors import RolloutError


@dataclass(frozen=True)
class _Batch:
    """Steps for one call of a `step_many` that is not async, by the number of the run's call."""

    path: str
    step_many: StepMany
    ready_at: float
    steps: dict[int, tuple[Any, Message]] = field(default_factory=dict[int, tuple[Any, Message]])


class EnvironmentWorker:
    """Answers calls of methods of instances, and of agent functions."""

    def __init__(self, side: WorkerSide) -> None:
        self._side = side
        self._instances: dict[int, tuple[str, Any]] = {}  # path and instance
        self._batches: dict[type, _Batch] = {}  # that wait
        self._batching = threading.Lock()  # for `_batches`
        self._async_batches: dict[type, StepBatches] = {}

    def begin(self, message: Message) -> None:
        """Begin a call: at once if it is async, otherwise after those before it."""
        number, method = message["id"], message["method"]
        match method:
            case "load":
                self._side.call(number, lambda: load_function(message["path"]), lambda _: None)
                return
            case "make":
                self._side.call(number, lambda: self._make(message))
                return
            case "agent_function":
                self._call_function(message)
                return
            case _:
                path, made = self._instances[message["instance"]]
        if method == "close":
            del self._instances[message["instance"]]
        if method == "step" and (step_many := step_many_of(made)) is not None:
            self._begin_step(number, path, made, message["message"], step_many)
            return
        function = cast("Any", getattr(made, method, None))
        values: list[Any] = []
        form: Callable[[Any], Any] = lambda _: None  # noqa: E731
        if method == "judge":
            rubric: Any = load_function(message["rubric"])
            function = rubric.in_environment[message["part"]]
            values = [Episode.of(Sample.from_dict(message["sample"])), made]
            form = number_of
        elif function is None:  # close is optional
            self._side.answer(number, None)
            return
        elif method == "reset":
            values = [Task(**message["task"]), message["seed"]]
            form = lambda value: json_from_observation(checked_observation(value, path))  # noqa: E731
        elif method == "step":
            values = [message["message"]]
            form = lambda value: json_from_step(checked_step(value, path))  # noqa: E731
        elif method == "run":
            sample = Sample.from_dict(message["sample"])
            before = copy.deepcopy(sample.to_dict())
            values = [WorkerPolicy(functools.partial(self._side.ask, number)), sample]
            form = lambda value: {"result": value, "changes": changed_fields(sample, before)}  # noqa: E731
        self._side.call(number, lambda: function(*values), form, is_async=is_async(function))

    def _make(self, message: Message) -> Message:
        made = load_function(message["path"])(**message["arguments"])
        self._instances[message["instance"]] = message["path"], made
        return {"has_run": hasattr(made, "run")}

    def _call_function(self, message: Message) -> None:
        function, keywords = load_function(message["path"]), message["keywords"]
        before = copy.deepcopy(keywords.get("metadata"))

        def form(value: Any) -> Message:
            is_plain = value is None or isinstance(value, Mapping | int | float | str)
            changed = {} if keywords.get("metadata") == before else {"metadata": keywords["metadata"]}
            return {"result": value if is_plain else repr(value)[:1000], **changed}

        self._side.call(message["id"], lambda: function(**keywords), form, is_async=is_async(function))

    def _begin_step(self, number: int, path: str, made: Any, message: Message, step_many: StepMany) -> None:
        """Begin a step of a class with `step_many`: it is part of the batch that waits, or begins one."""
        started = functools.partial(self._side.write, {"started": number})
        if is_async(step_many):
            batches = self._async_batches.setdefault(type(made), StepBatches(path, step_many))
            step = functools.partial(batches.step, made, message, started)
            self._side.call(number, step, json_from_step, is_async=True, reports_start=False)
            return
        with self._batching:
            batch = self._batches.get(type(made))
            if batch is None:
                batch = _Batch(path, step_many, time.monotonic() + WINDOW_S)
                self._batches[type(made)] = batch
                self._side.queue.put(functools.partial(self._step_many, batch))
            batch.steps[number] = (made, message)

    def _step_many(self, batch: _Batch) -> None:
        """Call `step_many` with the steps that have arrived until the batch is ready."""
        time.sleep(max(0.0, batch.ready_at - time.monotonic()))
        with self._batching:
            self._batches = {made: each for made, each in self._batches.items() if each is not batch}
        steps = {number: step for number, step in batch.steps.items() if not self._side.is_withdrawn(number)}
        for number in steps:
            self._side.write({"started": number})
        try:
            value = batch.step_many(list(steps.values())) if steps else []
            results = checked_steps(value, len(steps), batch.path)
        except BaseException as error:  # noqa: BLE001  the run raises it
            results = [error] * len(steps)
        for number, result in zip(steps, results, strict=True):
            if isinstance(result, BaseException):
                self._side.fail(number, result)
            else:
                self._side.answer(number, json_from_step(result))


def json_from_observation(value: Observation) -> Message:
    """Return the fields of an observation."""
    return {"messages": list(value.messages), "tools": value.tools}


def json_from_step(value: Step) -> Message:
    """Return the fields of a step."""
    messages = value.messages if isinstance(value.messages, str) else list(value.messages)
    flags = {"done": bool(value.done), "truncated": bool(value.truncated)}
    return {"messages": messages, "reward": value.reward, "info": dict(value.info), **flags}


@dataclass(frozen=True)
class WorkerReply:
    """An answer of the policy, with the fields of `policy().chat`."""

    message: Mapping[str, Any]
    tokens: list[int]
    log_probs: list[float]
    versions: list[int]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    id: str

    @property
    def content(self) -> str:
        """The text without reasoning and tool calls."""
        return self.message["content"] or ""

    @property
    def reasoning(self) -> str | None:
        """The reasoning, if the reply has any."""
        return self.message.get("reasoning_content")

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls in OpenAI's form."""
        return self.message.get("tool_calls", [])


class WorkerPolicy:
    """The methods of the policy that work across processes: chat, role, generate, open_session, encode and decode."""

    def __init__(self, ask: Callable[[str, Mapping[str, Any]], Future[Any]]) -> None:
        self._ask = ask

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> WorkerReply:
        """Answer chat messages, as `policy().chat`."""
        return WorkerReply(**await asyncio.wrap_future(self._ask("chat", {"messages": list(messages), **options})))

    def role(self, name: str, *, trainable: bool = True, group: str | None = None) -> WorkerRole:
        """Return the policy as one of several agents of the episode."""
        self._ask("role", {"name": name, "trainable": trainable, "group": group}).result()
        return WorkerRole(self, name)

    async def generate(self, prompt: str | Sequence[int], **sampling_params: Any) -> SimpleNamespace:
        """Complete text or token ids, as `policy().generate`."""
        values = {"prompt": prompt if isinstance(prompt, str) else list(prompt), **sampling_params}
        return SimpleNamespace(**await asyncio.wrap_future(self._ask("generate", values)))

    def open_session(self) -> SimpleNamespace:
        """Return the session of this sample on the session server."""
        return SimpleNamespace(**self._ask("open_session", {}).result())

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without adding special tokens."""
        return self._ask("encode", {"text": text}).result()

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""
        return self._ask("decode", {"tokens": list(tokens)}).result()

    def __getattr__(self, name: str) -> Any:
        raise RolloutError(
            f"policy.{name} does not work in a process of --env-workers process; use chat, role, generate, "
            "open_session, encode or decode, or run this environment with --env-workers thread"
        )


@dataclass(frozen=True)
class WorkerRole:
    """The policy as the agent of one role."""

    policy: WorkerPolicy
    name: str

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> WorkerReply:
        """Answer chat messages."""
        return await self.policy.chat(messages, role=self.name, **options)
