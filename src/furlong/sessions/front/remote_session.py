"""Sessions as the process of the HTTP server sees them: they are in the process of the run."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from furlong.chat.messages import Message
from furlong.chat.prompt_size import num_chars
from furlong.sessions.endpoints.client_call import ClientCall
from furlong.sessions.endpoints.served_session import StreamPart
from furlong.sessions.front.channel import Channel
from furlong.sessions.front.wire import call_fields, error_from, piece_from, reply_from
from furlong.sessions.reply import Reply
from furlong.sessions.reply_stream import Broadcast, ReplyPiece


class Run:
    """The process of the run: answers questions, and starts calls. `receive` gets its messages."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._calls: dict[int, RemoteCall] = {}
        self._sessions: dict[str, RemoteSession] = {}  # by id and by key

    async def ask(self, kind: str, *values: Any) -> Any:
        """Return the answer of the run. Raises its error."""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self.channel.send(kind, number, *values)
            return await answer
        finally:
            del self._asked[number]

    async def find(self, id: str, key: str) -> RemoteSession:
        """Return the session with an id, or without one that with a key. Raises RefusedError and EndedError."""
        known = self._sessions.get(id or key)
        if known is None:
            name, context_len = await self.ask("find", id, key)
            known = self._sessions[id or key] = RemoteSession(self, name, context_len)
        return known

    def start(self, call: RemoteCall) -> int:
        """Keep a call until it is done; return its number."""
        number = next(self._numbers)
        self._calls[number] = call
        return number

    def forget(self, number: int) -> None:
        """Ignore what else comes for a call."""
        self._calls.pop(number, None)

    def receive(self, message: list[Any]) -> None:
        """Process a message of the run."""
        kind, number, *values = message
        if kind == "ended":
            for name in (number, *values):
                self._sessions.pop(name, None)
        elif (answer := self._asked.get(number)) is not None:
            if not answer.done():
                if kind == "failed":
                    answer.set_exception(error_from(*values))
                else:
                    answer.set_result(values[0])
        elif (call := self._calls.get(number)) is not None:
            if kind in ("done", "failed"):
                del self._calls[number]
            call.receive(kind, values)


@dataclass(frozen=True)
class RemoteSession:
    """A session of the run; see `ServedSession`."""

    run: Run
    id: str
    context_len: int | None

    async def check_size(self, body: Mapping[str, Any]) -> None:
        """Count the characters of a large body. Raises FullContextError if it cannot fit into the context."""
        await self.run.ask("size", self.id, await asyncio.to_thread(num_chars, body))

    def call(self, call: ClientCall, *, role: str, key: str, is_retry: bool) -> RemoteCall:
        """Start a call, or join the one with this key that a client's retry repeats."""
        return RemoteCall(self, call, role, key, is_retry=is_retry)

    async def count_tokens(self, call: ClientCall) -> int:
        """Return the number of prompt tokens that a call would have."""
        return await self.run.ask("count", self.id, call_fields(call))

    async def earlier(self, response_id: Any) -> list[Message]:
        """Return the conversation of an earlier response, without its instructions. Raises RequestError."""
        return await self.run.ask("earlier", self.id, response_id)


@dataclass
class _Head:
    response_id: str = ""
    prompt_tokens: int = 0


class RemoteCall:
    """A call of the run; see `RunningCall`."""

    def __init__(self, session: RemoteSession, call: ClientCall, role: str, key: str, *, is_retry: bool) -> None:
        self._session, self._key = session, key
        self._answer: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()
        self._new: dict[int, list[ReplyPiece]] = {}
        self.streams = [_Head() for _ in range(call.n)] if call.is_stream else []
        self._changes = Broadcast() if call.is_stream else None
        self._number = session.run.start(self)
        session.run.channel.send("call", self._number, session.id, role, key, is_retry, call_fields(call))

    def receive(self, kind: str, values: list[Any]) -> None:
        """Process a message of the run."""
        match kind:
            case "done":
                self._answer.set_result([reply_from(each) for each in values[0]])
            case "failed":
                self._answer.set_exception(error_from(*values))
                self._answer.exception()  # nobody reads it if the client is gone
            case "begun":
                self.streams = [_Head(*each) for each in values[0]]
            case _:
                self._new.setdefault(values[0], []).append(piece_from(values[1]))
        if self._changes is not None:
            self._changes.notify()

    async def replies(self) -> list[Reply]:
        """Return the replies. Raises what the session raised, and EndedError if it ended meanwhile."""
        try:
            return await self._answer
        except asyncio.CancelledError:
            self.missed()
            raise

    async def begun(self) -> None:
        """Wait for the first token. Raises the error of the call if there is one before."""
        assert self._changes is not None
        try:
            while not self._answer.done() and not self._new:
                await self._changes.next.wait()
        except asyncio.CancelledError:
            self.missed()
            raise
        if self._answer.done():
            self._answer.result()

    async def parts(self, deadline_s: float) -> AsyncGenerator[StreamPart]:
        """Yield what the answers grow by, and at the end the replies. Raises TimeoutError at the deadline."""
        assert self._changes is not None
        is_complete = False
        try:
            while True:
                change, is_done = self._changes.next, self._answer.done()
                new, self._new = self._new, {}
                for index in sorted(new):
                    yield index, reduce(ReplyPiece.joined, new[index])
                if is_done:
                    break
                async with asyncio.timeout_at(deadline_s):
                    await change.wait()
            for index, reply in enumerate(self._answer.result()):
                yield index, reply
            is_complete = True
        finally:
            if not is_complete:
                self.missed()

    def missed(self) -> None:
        """Note that the client left without its answer."""
        run = self._session.run
        run.forget(self._number)
        run.channel.send("left", self._number, self._session.id, self._key)
