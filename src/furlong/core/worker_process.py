"""Worker processes of reward functions, environments and agent functions: both sides of their protocol.

A frame is a length in four bytes (big-endian) followed by that many bytes of JSON. The run sends calls, before them the
objects of `furlong.train` that they use (`user_objects`), withdraws them, asks where a call hangs, and answers
questions of a call; the worker reports when a call begins, its result, and those questions. Functions that are not
async are called one at a time in the main thread, async ones in the event loop of another thread. A worker runs under
`process_supervisor`, which kills everything that it started at its end, and ends with the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import queue
import struct
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import PurePath
from typing import Any, NoReturn, cast

import orjson

from furlong import errors
from furlong.core.supervised_process import ProcessLimits, Supervisor, ending_of
from furlong.core.user_code import describe_exception, frame_place, is_user_file, message_of
from furlong.core.user_objects import USER_OBJECTS, object_name, packed

Message = dict[str, Any]
Asked = Callable[[str, Mapping[str, Any]], Awaitable[Any]]  # answers a question of a call: its name and values

_HEADER = struct.Struct(">I")
_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from furlong.core.worker_process import boot; "
    "boot(sys.argv[2])"
)
_GRACE_S = 1.0  # for a call that was withdrawn; a function that is not async can only be ended with its process
_READ_GRACE_S = 0.05  # the answer may be in the pipe already when a busy run reaches the deadline
_HANG_REPORT_S = 0.25  # for a worker to report the line of a call that is overdue
_REPORT_S = 1.0  # for the supervisor to report the end of a worker whose pipe has ended

logger = logging.getLogger(__name__)


def encode_json(message: Any) -> bytes:
    """Encode a message; arrays become lists, sets sorted lists, paths text. Raises TypeError with the wrong type."""
    try:
        return orjson.dumps(message, default=_json_value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    except TypeError:  # lone surrogates and long integers, too
        return json.dumps(message, default=_json_value).encode()


def decode_json(data: bytes) -> Any:
    """Decode what `encode_json` made. Raises ValueError."""
    try:
        return orjson.loads(data)
    except ValueError:
        return json.loads(data)


def _frame(message: Any) -> bytes:
    body = encode_json(message)
    return _HEADER.pack(len(body)) + body


def _json_value(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(cast("set[Any]", value))
    if isinstance(value, Mapping):
        return dict(cast("Mapping[Any, Any]", value))
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")


class WorkerEndedError(Exception):
    """A worker ended before it answered a call.

    has_started: whether the call had begun. is_cause: whether it ended the worker; None if that is unknown.
    overdue_at: the line of user code, "" if unknown, of a call that exceeded its time, if the worker was killed for it.
    """

    def __init__(
        self, reason: str, *, has_started: bool = False, is_cause: bool | None = False, overdue_at: str | None = None
    ) -> None:
        super().__init__(reason)
        self.has_started, self.is_cause, self.overdue_at = has_started, is_cause, overdue_at


# The side of the run


@dataclass
class _Pending:
    answer: asyncio.Future[Any]
    name: str
    started: Callable[[], object]
    asked: Asked | None
    has_started: bool = False
    questions: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])


class Worker:
    """A worker process, with the calls that wait for it. `ending` describes its end, "" while it runs."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.ending = ""
        self._supervisor = supervisor
        self._pending: dict[int, _Pending] = {}
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._objects: set[str] = set()  # that the process has
        self._hung: tuple[int, str] | None = None  # the call that did not return in time, and where it was
        self._is_overdue = False
        self._reader = asyncio.create_task(self._read())

    @staticmethod
    async def start(target: str, *, memory_bytes: int | None = None) -> Worker:
        """Start a process; `target` is the class that `boot` loads. Raises InfraError."""
        supervisor = await Supervisor.start(
            [sys.executable, "-c", _BOOT, json.dumps(sys.path), target],
            directory=os.getcwd(),
            environment=os.environ,
            limits=ProcessLimits(memory_bytes=memory_bytes),
            pipes_stderr=False,
        )
        return Worker(supervisor)

    async def call(
        self,
        method: str,
        fields: Mapping[str, Any],
        *,
        started: Callable[[], object] = lambda: None,
        asked: Asked | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Make a call and return its value; `started` is called when it begins. Raises what the call raises.

        The process gets the object that `path` in the fields names, if it is one of `furlong.train`. A worker that does
        not answer within `timeout_s` is killed. Raises WorkerEndedError if the worker ends first, and TypeError for
        fields without a JSON form.
        """
        number, name = next(self._numbers), object_name(fields.get("path"))
        frame = _frame({"id": number, "method": method, **fields})
        if name is not None and name not in self._objects:
            self._objects.add(name)
            frame = _frame({"object": name, "packed": packed(name)}) + frame
        if self.ending:
            raise WorkerEndedError(self.ending)
        pending = _Pending(asyncio.get_running_loop().create_future(), method, started, asked)
        self._pending[number] = pending
        try:
            await self._send(frame)
            await asyncio.wait({pending.answer}, timeout=timeout_s)
            if not pending.answer.done():
                await asyncio.wait({pending.answer}, timeout=_READ_GRACE_S)
            if not pending.answer.done():
                self._is_overdue = True
                await self._send(_frame({"locate": number}))
                await asyncio.wait({pending.answer}, timeout=_HANG_REPORT_S)
                await self._supervisor.end()
            return await pending.answer
        except asyncio.CancelledError:
            if number in self._pending and not self.ending:
                ending = asyncio.create_task(self._withdraw(number, pending))
                self._tasks.add(ending)
                ending.add_done_callback(self._tasks.discard)
                await asyncio.sleep(0)
            raise
        finally:
            for task in pending.questions:
                task.cancel()

    async def end(self) -> None:
        """Kill the process, and all that it started."""
        await self._supervisor.end()
        await asyncio.wait({self._reader})

    async def _withdraw(self, number: int, pending: _Pending) -> None:
        """Cancel a call. Its process is killed if the call has begun and does not end within _GRACE_S."""
        pending.answer = asyncio.get_running_loop().create_future()
        await self._send(_frame({"cancel": number}))
        while not pending.answer.done():
            had_started = pending.has_started
            await asyncio.wait({pending.answer}, timeout=_GRACE_S)
            if not pending.answer.done() and had_started:
                logger.warning("a call of %s does not end: its process is killed", pending.name)
                await self._supervisor.end()
        pending.answer.exception()

    async def _send(self, frame: bytes) -> None:
        assert self._supervisor.process.stdin is not None
        with contextlib.suppress(ConnectionError):  # its end is noticed where its answers are read
            self._supervisor.process.stdin.write(frame)
            await self._supervisor.process.stdin.drain()

    async def _read(self) -> None:
        source = self._supervisor.process.stdout
        assert source is not None
        try:
            while True:
                (size,) = _HEADER.unpack(await source.readexactly(_HEADER.size))
                self._receive(decode_json(await source.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except (ValueError, KeyError) as error:
            logger.warning("a worker process is killed: it sent no message (%s)", error)
        try:
            with contextlib.suppress(TimeoutError):  # its supervisor reports why, unless only the pipe has ended
                async with asyncio.timeout(_REPORT_S):
                    await self._supervisor.process.wait()
            await self._supervisor.end()
            end = self._supervisor.take_report()
            self.ending = ending_of(end["code"], str(end["reason"]))
        except errors.InfraError as error:
            self.ending = str(error)
        finally:
            self._supervisor.close()
            self.ending = self.ending or "unknown"
            self._fail_pending()

    def _fail_pending(self) -> None:
        waiting = {number: each for number, each in self._pending.items() if not each.answer.done()}
        self._pending.clear()
        started = [number for number, each in waiting.items() if each.has_started]
        for number, each in waiting.items():
            if self._hung is not None:
                is_cause = self._hung[0] == number
            else:
                is_cause = True if len(waiting) == 1 or started == [number] else None if each.has_started else False
            overdue_at = (self._hung or (0, ""))[1] if self._is_overdue else None
            each.answer.set_exception(
                WorkerEndedError(self.ending, has_started=each.has_started, is_cause=is_cause, overdue_at=overdue_at)
            )

    def _receive(self, message: Message) -> None:
        if "started" in message:
            pending = self._pending[message["started"]]
            pending.has_started = True
            pending.started()
        elif "ask" in message:
            pending = self._pending[message["id"]]
            task = asyncio.create_task(self._reply(pending, message))
            pending.questions.add(task)
            task.add_done_callback(pending.questions.discard)
        elif "hung" in message:
            self._hung = message["hung"], message["where"]
        else:
            pending = self._pending.pop(message["id"])
            if pending.answer.done():
                return
            if "error" in message:
                pending.answer.set_exception(_remote_error(**message["error"]))
            else:
                pending.answer.set_result(message["value"])

    async def _reply(self, pending: _Pending, message: Message) -> None:
        try:
            assert pending.asked is not None
            reply = {"value": await pending.asked(message["name"], message["values"])}
        except Exception as error:  # noqa: BLE001  raised in the process that asked
            reply = {"error": error_fields(error)}
        await self._send(_frame({"reply": message["ask"], **reply}))


def _remote_error(name: str, text: str) -> Exception:
    """Return an exception of another process: one of furlong or a TimeoutError as itself, others by their name."""
    if name == "TimeoutError":
        return TimeoutError(text)
    known = getattr(errors, name, None)
    if isinstance(known, type) and issubclass(known, errors.FurlongError):
        return known(text)
    return type(name, (errors.RolloutError,), {})(text)


def error_fields(error: BaseException) -> dict[str, str]:
    """Return name and text of an exception for another process; the text has the place if user code raised it."""
    name = type(error).__name__
    is_known = isinstance(error, errors.FurlongError)
    return {"name": name, "text": message_of(error) if is_known else describe_exception(error)[len(name) + 2 :]}


# The side of the worker


def boot(target: str) -> NoReturn:
    """Serve the run with the class `module:Class` until the end of stdin.

    It is made with the `WorkerSide`; its method `begin(message)` begins a call. User code does not see the pipes: its
    stdout is stderr, its stdin is empty.
    """
    source, sink = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]  a TextIOWrapper here
    module, _, name = target.partition(":")
    side = WorkerSide(source, sink)
    side.serve(getattr(import_module(module), name)(side).begin)


class WorkerSide:
    """Runs calls in the worker, and answers them."""

    def __init__(self, source: int, sink: int) -> None:
        self._source, self._sink = source, sink
        self._writing = threading.Lock()
        self.queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()  # of the main thread
        self._current: int | None = None  # the call in the main thread
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._run_loop, daemon=True)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._withdrawn: set[int] = set()
        self._questions: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()

    def serve(self, begin: Callable[[Message], object]) -> NoReturn:
        """Run what is queued in this thread."""
        self._loop_thread.start()
        threading.Thread(target=self._listen, args=(begin,), daemon=True).start()
        while True:
            self.queue.get()()

    def call(
        self,
        number: int,
        function: Callable[[], Any],
        form: Callable[[Any], Any] = lambda value: value,
        *,
        is_async: bool = False,
        reports_start: bool = True,
    ) -> None:
        """Begin a call: at once if it is async, otherwise after those before it. `form` makes JSON of its value."""
        if is_async:
            self._loop.call_soon_threadsafe(self._begin_task, number, function, form, reports_start)
        else:
            self.queue.put(lambda: self._call(number, function, form))

    def answer(self, number: int, value: Any) -> None:
        """Send the value of a call, or that it cannot be sent."""
        try:
            self.write({"id": number, "value": value})
        except (TypeError, ValueError) as error:
            text = f"a value cannot leave its process: {error}; return JSON values"
            self.write({"id": number, "error": {"name": "RolloutError", "text": text}})

    def fail(self, number: int, error: BaseException) -> None:
        """Send the exception of a call."""
        self.write({"id": number, "error": error_fields(error)})

    def is_withdrawn(self, number: int) -> bool:
        """Answer a call that the run has withdrawn before it began; return whether it was."""
        if number not in self._withdrawn:
            return False
        self._withdrawn.remove(number)
        self.write({"id": number, "error": {"name": "RolloutError", "text": "the call was withdrawn"}})
        return True

    def ask(self, call: int, name: str, values: Mapping[str, Any]) -> Future[Any]:
        """Ask the run a question for a call. Raises TypeError for values without a JSON form."""
        number, answer = next(self._numbers), Future[Any]()
        self._questions[number] = answer
        try:
            self.write({"ask": number, "id": call, "name": name, "values": values})
        except TypeError:
            del self._questions[number]
            raise
        return answer

    def write(self, message: Message) -> None:
        """Send a message."""
        view = memoryview(_frame(message))
        with self._writing:
            while view:
                view = view[os.write(self._sink, view) :]

    def _call(self, number: int, function: Callable[[], Any], form: Callable[[Any], Any]) -> None:
        if self.is_withdrawn(number):
            return
        self._current = number
        self.write({"started": number})
        try:
            value = form(function())
        except BaseException as error:  # noqa: BLE001  the run raises it
            self._current = None
            self.fail(number, error)
        else:
            self._current = None
            self.answer(number, value)
        self._withdrawn.discard(number)

    def _begin_task(
        self, number: int, function: Callable[[], Any], form: Callable[[Any], Any], reports_start: bool
    ) -> None:
        async def run() -> None:
            if reports_start:
                self.write({"started": number})
            try:
                value = form(await function())
            except BaseException as error:  # noqa: BLE001  the run raises it
                self.fail(number, error)
            else:
                self.answer(number, value)
            del self._tasks[number]

        self._tasks[number] = self._loop.create_task(run(), name=str(number))

    def _run_loop(self) -> None:
        self._loop.run_forever()
        os._exit(1)  # a task of user code has ended the loop

    def _listen(self, begin: Callable[[Message], object]) -> None:
        try:
            with os.fdopen(self._source, "rb", closefd=False) as source:
                while head := source.read(_HEADER.size):
                    message = decode_json(source.read(_HEADER.unpack(head)[0]))
                    if "reply" in message:
                        answer = self._questions.pop(message["reply"])
                        if answer.cancelled():
                            continue
                        if "error" in message:
                            answer.set_exception(_remote_error(**message["error"]))
                        else:
                            answer.set_result(message["value"])
                    elif "object" in message:
                        USER_OBJECTS.packed[message["object"]] = message["packed"]
                    elif "cancel" in message:
                        self._loop.call_soon_threadsafe(self._cancel, message["cancel"])
                    elif "locate" in message:
                        self._locate()
                    else:
                        begin(message)
        except BaseException:  # noqa: BLE001  nothing would be answered any more
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def _cancel(self, number: int) -> None:
        """Withdraw a call: an async one is cancelled, one that waits is not made, and one that runs is left alone."""
        if (task := self._tasks.get(number)) is not None:
            task.cancel()
        else:
            self._withdrawn.add(number)

    def _locate(self) -> None:
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]  documented, for debuggers
        number, thread = self._current, threading.main_thread()
        if number is None:
            task, thread = asyncio.current_task(self._loop), self._loop_thread
            number = next((each for each, running in self._tasks.items() if running is task), None)
        if number is not None:
            frame = frames.get(thread.ident or 0)
            while frame is not None and not is_user_file(frame.f_code.co_filename):
                frame = frame.f_back
            self.write({"hung": number, "where": "" if frame is None else frame_place(frame)})
