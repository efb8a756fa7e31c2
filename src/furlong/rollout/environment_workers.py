"""Worker processes of environments: `--env-workers process N`.

An instance stays in one process, which has other instances beside it if more than N episodes run. If a process ends,
its episodes raise InfraError, so they are issued again, each in its own process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from furlong.environments.json_lines import decode_line, encode_line
from furlong.environments.worker_policy import WorkerReply
from furlong.environments.worker_process import error_fields, remote_error
from furlong.errors import InfraError, RolloutError
from furlong.sandboxes.supervised_process import ProcessLimits, Supervisor

GRACE_S = 1.0  # for a call that was cancelled; a method that is not async can only be ended with its process
_REPORT_S = 1.0
_MAX_LINE = 1 << 30
_BOOT = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from furlong.environments.worker_process import main; main()"  # noqa: E501

logger = logging.getLogger(__name__)


class ProcessEndedError(InfraError):
    """The process of an environment has ended."""


@dataclass
class _Pending:
    """A call without an answer. started: is called when the method begins. policy: answers what `run` asks."""

    answer: asyncio.Future[Any]
    name: str
    started: Callable[[], object]
    policy: Any = None
    has_started: bool = False
    asked: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])


class EnvironmentProcess:
    """A worker process, with the calls that wait for it."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._pending: dict[int, _Pending] = {}
        self._numbers = itertools.count()
        self._endings: set[asyncio.Task[None]] = set()
        self._reader = asyncio.create_task(self._read())
        self.ending = ""  # how it ended, "" while it runs

    @staticmethod
    async def start(memory_bytes: int | None) -> EnvironmentProcess:
        """Start a process. Raises InfraError."""
        supervisor = await Supervisor.start(
            [sys.executable, "-c", _BOOT, json.dumps(sys.path)],
            directory=os.getcwd(),
            environment=os.environ,
            limits=ProcessLimits(memory_bytes=memory_bytes),
            pipes_stderr=False,
            max_line_bytes=_MAX_LINE,
        )
        return EnvironmentProcess(supervisor)

    async def call(
        self, name: str, fields: Mapping[str, Any], started: Callable[[], object], policy: Any = None
    ) -> Any:
        """Call a method; returns its value. Raises what it raises, and InfraError if the process ends first."""
        number = next(self._numbers)
        try:
            line = encode_line({"id": number, "method": name, **fields})
        except (TypeError, ValueError) as error:
            raise RolloutError(
                f"--env-workers process cannot send the sample to {name}: {error}; put plain numbers, text, lists and "
                "dicts into metadata and label"
            ) from None
        if self.ending:
            raise ProcessEndedError(f"the process of the environment ended before {name} ({self.ending})")
        pending = _Pending(asyncio.get_running_loop().create_future(), name, started, policy)
        self._pending[number] = pending
        try:
            await self._send(line)
            return await pending.answer
        except asyncio.CancelledError:
            await self._withdraw(number, pending)
            raise
        finally:
            for task in pending.asked:
                task.cancel()

    async def end(self) -> None:
        """Kill the process, and all that it started."""
        await self._supervisor.end()
        await asyncio.wait({self._reader})

    async def _withdraw(self, number: int, pending: _Pending) -> None:
        """Cancel a call. Its process is killed, in the background, if the call does not end within GRACE_S."""
        if number not in self._pending:
            return
        pending.answer = asyncio.get_running_loop().create_future()
        ending = asyncio.create_task(self._end_if_stuck(number, pending))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
        await asyncio.sleep(0)

    async def _end_if_stuck(self, number: int, pending: _Pending) -> None:
        await self._send(encode_line({"cancel": number}))
        while not pending.answer.done():
            had_started = pending.has_started
            await asyncio.wait({pending.answer}, timeout=GRACE_S)
            if not pending.answer.done() and had_started:
                logger.warning("a call of %s does not end: its process is killed", pending.name)
                await self._supervisor.end()
        pending.answer.exception()

    async def _send(self, line: bytes) -> None:
        assert self._supervisor.process.stdin is not None
        with contextlib.suppress(ConnectionError):  # its end is noticed where its answers are read
            self._supervisor.process.stdin.write(line)
            await self._supervisor.process.stdin.drain()

    async def _read(self) -> None:
        """Settle calls until the process ends, and fail those that are left."""
        assert self._supervisor.process.stdout is not None
        try:
            while line := await self._supervisor.process.stdout.readline():
                self._receive(decode_line(line))
        except ValueError as error:
            logger.warning("a process of environments is killed: it sent no message (%s)", error)
        try:
            with contextlib.suppress(TimeoutError):  # its supervisor reports why, unless only the pipe has ended
                async with asyncio.timeout(_REPORT_S):
                    await self._supervisor.process.wait()
            await self._supervisor.end()
            _, end = self._supervisor.take_report()
            self.ending = _ending(end)
        except InfraError as error:
            self.ending = str(error)
        finally:
            self._supervisor.close()
            self.ending = self.ending or "unknown"
            for pending in self._pending.values():
                where = f"in {pending.name}" if pending.has_started else f"before {pending.name}"
                if not pending.answer.done():
                    pending.answer.set_exception(
                        ProcessEndedError(f"the process of the environment ended {where} ({self.ending})")
                    )
            self._pending.clear()

    def _receive(self, message: dict[str, Any]) -> None:
        if "started" in message:
            pending = self._pending[message["started"]]
            pending.has_started = True
            pending.started()
        elif "ask" in message:
            pending = self._pending[message["id"]]
            task = asyncio.create_task(self._answer(pending.policy, message))
            pending.asked.add(task)
            task.add_done_callback(pending.asked.discard)
        else:
            pending = self._pending.pop(message["id"])
            if pending.answer.done():
                return
            if "error" in message:
                pending.answer.set_exception(remote_error(**message["error"]))
            else:
                pending.answer.set_result(message["value"])

    async def _answer(self, policy: Any, message: Mapping[str, Any]) -> None:
        """Answer what `run` asks of its policy."""
        try:
            reply = {"value": await _asked(policy, message["name"], message["values"])}
        except Exception as error:  # noqa: BLE001  raised in the process that asked
            reply = {"error": error_fields(error)}
        await self._send(encode_line({"reply": message["ask"], **reply}))


def _ending(end: Mapping[str, Any]) -> str:
    if end["code"] is None:
        return str(end["reason"])
    return f"exit code {end['code']}" if end["code"] >= 0 else f"killed by signal {-end['code']}"


async def _asked(policy: Any, name: str, values: Mapping[str, Any]) -> Any:
    """Call a method of the policy for `furlong.environments.worker_policy`."""
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

    process: EnvironmentProcess | None = None
    num_episodes: int = 0
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)


class EnvironmentWorkers:
    """The processes of the environments of one event loop: at most `num`, and as many for episodes that run alone."""

    def __init__(self, num: int, memory_bytes: int | None = None) -> None:
        self._memory_bytes = memory_bytes
        self._slots = [_Slot() for _ in range(num)]
        self._alone = asyncio.Semaphore(num)
        self._numbers = itertools.count()
        self._extra: set[EnvironmentProcess] = set()

    @contextlib.asynccontextmanager
    async def seat(self, *, alone: bool = False) -> AsyncGenerator[tuple[EnvironmentProcess, int]]:
        """Provide (process, number of the instance): the process with the fewest episodes, or one of its own."""
        number = next(self._numbers)
        if not alone:
            slot = min(self._slots, key=lambda each: (each.num_episodes, each.process is None))
            slot.num_episodes += 1
            try:
                async with slot.starting:
                    if slot.process is None or slot.process.ending:
                        slot.process = await EnvironmentProcess.start(self._memory_bytes)
                yield slot.process, number
            finally:
                slot.num_episodes -= 1
            return
        async with self._alone:
            process = await EnvironmentProcess.start(self._memory_bytes)
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


def environment_workers(num: int, memory_bytes: int | None) -> EnvironmentWorkers:
    """Return the processes of this event loop."""
    return _workers.setdefault(asyncio.get_running_loop(), EnvironmentWorkers(num, memory_bytes))


async def close_environment_workers() -> None:
    """Kill the processes of this event loop."""
    if (workers := _workers.pop(asyncio.get_running_loop(), None)) is not None:
        await workers.close()
