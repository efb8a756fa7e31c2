"""Worker process of environments: has instances of their classes, and calls their methods, and agent functions.

Messages are lines of JSON on stdin and stdout, which user code does not see. The run sends calls, withdraws them, and
answers what `run` asks of its policy; the worker sends when a call begins, its result, and those questions. Methods
that are not async are called one at a time in the main thread, async ones in the event loop of another thread. The
process ends with its supervisor (`furlong.sandboxes.process_supervisor`), which ends with the run.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from furlong import errors
from furlong.core.process_tree import close_in_forked_children
from furlong.core.sample import Sample, changed_fields
from furlong.core.user_code import describe_exception, is_async, message_of
from furlong.core.user_functions import load_function
from furlong.environments.json_lines import decode_line, encode_line
from furlong.environments.protocol import Task
from furlong.environments.returned_values import (
    checked_observation,
    checked_step,
    json_from_observation,
    json_from_step,
)
from furlong.environments.step_batches import WINDOW_S, StepBatches, StepMany, checked_steps, step_many_of
from furlong.environments.worker_policy import WorkerPolicy

Message = dict[str, Any]
_FORMS: dict[str, Callable[[Any, str], Any]] = {
    "reset": lambda value, path: json_from_observation(checked_observation(value, path)),
    "step": lambda value, path: json_from_step(checked_step(value, path)),
    "close": lambda value, path: None,  # noqa: ARG005  of the table
}


def main() -> None:
    """Answer calls until the end of stdin."""
    source, sink = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]  a TextIOWrapper here
    close_in_forked_children(source, sink)
    EnvironmentWorker(os.fdopen(source, "rb", closefd=False), sink).serve()


def remote_error(name: str, text: str) -> Exception:
    """Return an exception of another process: one of furlong or a TimeoutError as itself, others by their name."""
    if name == "TimeoutError":
        return TimeoutError(text)
    known = getattr(errors, name, None)
    if isinstance(known, type) and issubclass(known, errors.FurlongError):
        return known(text)
    return type(name, (errors.RolloutError,), {})(text)


def error_fields(error: BaseException) -> dict[str, str]:
    """Return the arguments of `remote_error`: the text has the place of an exception of user code."""
    name = type(error).__name__
    is_known = isinstance(error, errors.FurlongError)
    return {"name": name, "text": message_of(error) if is_known else describe_exception(error)[len(name) + 2 :]}


@dataclass(frozen=True)
class _Instance:
    path: str
    made: Any


@dataclass(frozen=True)
class _Call:
    """A call of a method. reports_start: when it is called; otherwise `function` reports it."""

    id: int
    function: Callable[[], Any]
    form: Callable[[Any], Any]
    reports_start: bool = True


@dataclass(frozen=True)
class _Batch:
    """Steps for one call of a `step_many` that is not async, by the number of the run's call."""

    path: str
    step_many: StepMany
    ready_at: float
    steps: dict[int, tuple[Any, Message]] = field(default_factory=dict[int, tuple[Any, Message]])


class EnvironmentWorker:
    """Calls methods of instances. source: of messages of the run. sink: descriptor of the pipe for answers."""

    def __init__(self, source: BinaryIO, sink: int) -> None:
        self._source, self._sink = source, sink
        self._writing = threading.Lock()
        self._instances: dict[int, _Instance] = {}
        self._waiting: queue.SimpleQueue[_Call | _Batch] = queue.SimpleQueue()
        self._batches: dict[type, _Batch] = {}  # that wait
        self._batching = threading.Lock()  # for `_batches`
        self._async_batches: dict[type, StepBatches] = {}
        self._withdrawn: set[int] = set()
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._asked: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()

    def serve(self) -> None:
        """Call methods that are not async, in this thread."""
        for target in (self._run_loop, self._listen):
            threading.Thread(target=target, daemon=True).start()
        while True:
            call = self._waiting.get()
            if isinstance(call, _Batch):
                self._step_many(call)
                continue
            if self._is_withdrawn(call.id):
                continue
            self._write({"started": call.id})
            try:
                answer = {"value": call.form(call.function())}
            except BaseException as error:  # noqa: BLE001  the run raises it
                answer = {"error": error_fields(error)}
            self._withdrawn.discard(call.id)
            self._answer(call.id, answer)

    def _is_withdrawn(self, number: int) -> bool:
        """Answer a call that the run has withdrawn before it began."""
        if number not in self._withdrawn:
            return False
        self._withdrawn.remove(number)
        self._write({"id": number, "error": {"name": "RolloutError", "text": "the call was withdrawn"}})
        return True

    def _step_many(self, batch: _Batch) -> None:
        """Call `step_many` with the steps that have arrived until the batch is ready."""
        time.sleep(max(0.0, batch.ready_at - time.monotonic()))
        with self._batching:
            self._batches = {made: each for made, each in self._batches.items() if each is not batch}
        steps = {number: step for number, step in batch.steps.items() if not self._is_withdrawn(number)}
        for number in steps:
            self._write({"started": number})
        try:
            value = batch.step_many(list(steps.values())) if steps else []
            results = checked_steps(value, len(steps), batch.path)
        except BaseException as error:  # noqa: BLE001  the run raises it
            results = [error] * len(steps)
        for number, result in zip(steps, results, strict=True):
            self._withdrawn.discard(number)
            is_error = isinstance(result, BaseException)
            self._answer(number, {"error": error_fields(result)} if is_error else {"value": json_from_step(result)})

    def _run_loop(self) -> None:
        self._loop.run_forever()
        os._exit(1)  # a task of user code has ended the loop

    def _listen(self) -> None:
        """Read messages until the run ends."""
        try:
            for line in self._source:
                message = decode_line(line)
                if "reply" in message:
                    self._settle(message)
                elif "cancel" in message:
                    self._loop.call_soon_threadsafe(self._cancel, message["cancel"])
                else:
                    self._receive(message)
        except BaseException:  # noqa: BLE001  nothing would be answered any more
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def _receive(self, message: Message) -> None:
        """Begin a call: at once if it is async, otherwise after those before it."""
        number, method, instance = message["id"], message["method"], self._instances.get(message["instance"])
        if method in ("load", "make"):
            function = self._maker(message) if method == "make" else lambda: load_function(message["path"])
            self._waiting.put(_Call(number, function, lambda value: value if method == "make" else None))
            return
        if method == "agent_function":
            self._call_function(message)
            return
        assert instance is not None, f"instance {message['instance']} is unknown"
        if method == "close":
            del self._instances[message["instance"]]
        if method == "step" and (step_many := step_many_of(instance.made)) is not None:
            begin = self._begin_step if is_async(step_many) else self._add_step
            begin(number, instance, message["message"], step_many)
            return
        if (function := getattr(instance.made, method, None)) is None:  # close is optional
            self._answer(number, {"value": None})
            return
        values, form = self._arguments(message), self._form(message, instance.path)
        if is_async(function):
            self._loop.call_soon_threadsafe(self._begin, _Call(number, lambda: function(*values), form))
        else:
            self._waiting.put(_Call(number, lambda: function(*values), form))

    def _call_function(self, message: Message) -> None:
        """Begin the call of an agent function: at once if it is async, otherwise after the calls before it."""
        function, keywords = load_function(message["path"]), message["keywords"]
        before = copy.deepcopy(keywords.get("metadata"))

        def form(value: Any) -> Message:
            is_plain = value is None or isinstance(value, Mapping | int | float | str)
            changed = {} if keywords.get("metadata") == before else {"metadata": keywords["metadata"]}
            return {"result": value if is_plain else repr(value)[:1000], **changed}

        call = _Call(message["id"], lambda: function(**keywords), form)
        if is_async(function):
            self._loop.call_soon_threadsafe(self._begin, call)
        else:
            self._waiting.put(call)

    def _add_step(self, number: int, instance: _Instance, message: Message, step_many: StepMany) -> None:
        """Add a step to the batch of its class that waits, or begin one."""
        with self._batching:
            batch = self._batches.get(type(instance.made))
            if batch is None:
                batch = _Batch(instance.path, step_many, time.monotonic() + WINDOW_S)
                self._batches[type(instance.made)] = batch
                self._waiting.put(batch)
            batch.steps[number] = (instance.made, message)

    def _begin_step(self, number: int, instance: _Instance, message: Message, step_many: StepMany) -> None:
        """Begin a step of a class whose `step_many` is async."""
        batches = self._async_batches.setdefault(type(instance.made), StepBatches(instance.path, step_many))
        started = functools.partial(self._write, {"started": number})
        step = functools.partial(batches.step, instance.made, message, started)
        call = _Call(number, step, json_from_step, reports_start=False)
        self._loop.call_soon_threadsafe(self._begin, call)

    def _maker(self, message: Message) -> Callable[[], Message]:
        def make() -> Message:
            made = load_function(message["path"])(**message["arguments"])
            self._instances[message["instance"]] = _Instance(message["path"], made)
            return {"has_run": hasattr(made, "run")}

        return make

    def _arguments(self, message: Message) -> list[Any]:
        match message["method"]:
            case "reset":
                return [Task(**message["task"]), message["seed"]]
            case "step":
                return [message["message"]]
            case "run":
                message["copy"] = Sample.from_dict(message["sample"])
                message["before"] = copy.deepcopy(message["copy"].to_dict())
                return [WorkerPolicy(lambda name, values: self._ask(message["id"], name, values)), message["copy"]]
            case _:
                return []

    def _form(self, message: Message, path: str) -> Callable[[Any], Any]:
        if message["method"] == "run":
            return lambda value: {"result": value, "changes": changed_fields(message["copy"], message["before"])}
        form = _FORMS[message["method"]]
        return lambda value: form(value, path)

    def _begin(self, call: _Call) -> None:
        self._tasks[call.id] = self._loop.create_task(self._run(call))

    async def _run(self, call: _Call) -> None:
        if call.reports_start:
            self._write({"started": call.id})
        try:
            answer = {"value": call.form(await call.function())}
        except BaseException as error:  # noqa: BLE001  the run raises it
            answer = {"error": error_fields(error)}
        del self._tasks[call.id]
        self._answer(call.id, answer)

    def _cancel(self, number: int) -> None:
        """Withdraw a call: an async one is cancelled, one that waits is not made, and one that runs is left alone."""
        if (task := self._tasks.get(number)) is not None:
            task.cancel()
        else:
            self._withdrawn.add(number)

    def _ask(self, call: int, name: str, values: Mapping[str, Any]) -> Future[Any]:
        """Ask the run for a call of the policy."""
        number, answer = next(self._numbers), Future[Any]()
        self._asked[number] = answer
        try:
            self._write({"ask": number, "id": call, "name": name, "values": values})
        except TypeError as error:
            del self._asked[number]
            raise errors.RolloutError(f"policy.{name}: {error}; pass plain numbers, text, lists and dicts") from None
        return answer

    def _settle(self, message: Message) -> None:
        answer = self._asked.pop(message["reply"])
        if answer.cancelled():
            return
        if "error" in message:
            answer.set_exception(remote_error(**message["error"]))
        else:
            answer.set_result(message["value"])

    def _answer(self, number: int, answer: Message) -> None:
        try:
            self._write({"id": number, **answer})
        except (TypeError, ValueError) as error:
            text = f"an environment returned a value that cannot leave its process: {error}; return JSON values"
            self._write({"id": number, "error": {"name": "RolloutError", "text": text}})

    def _write(self, message: Message) -> None:
        view = memoryview(encode_line(message))
        with self._writing:
            while view:
                view = view[os.write(self._sink, view) :]
