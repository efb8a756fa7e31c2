"""`AnsweredCall`: the replies of one call, which several requests of a client may wait for or stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from functools import reduce
from typing import Any

from furlong.sessions.endpoints.client_call import ClientCall
from furlong.sessions.reply_stream import Broadcast, ReplyPiece, ReplyStream
from furlong.sessions.session import EndedError, Reply

StreamPart = tuple[int, ReplyPiece | Reply]
"""The number of an answer, and what it grew by, or at last the whole reply."""

_Answer = Callable[[Sequence[ReplyStream | None]], Coroutine[Any, Any, list[Reply]]]


class AnsweredCall:
    """A call in flight or answered. is_delivered: a client got the replies. streams: one for each streamed answer."""

    def __init__(self, answer: _Answer, call: ClientCall) -> None:
        self.is_delivered = False
        self._changes = Broadcast()
        self._num_readers = 0
        self.streams = [ReplyStream(self._changes.notify) for _ in range(call.n)] if call.is_stream else []
        self.task = asyncio.create_task(answer(self.streams or [None] * call.n))
        self.task.add_done_callback(lambda _: self._changes.notify())

    @property
    def is_over(self) -> bool:
        """Whether it has no answer that a retry may get: it failed, or its client left during the stream."""
        is_failed = self.task.done() and (self.task.cancelled() or self.task.exception() is not None)
        return is_failed or any(stream.tokens.is_stopped for stream in self.streams)

    async def replies(self, is_disconnected: Callable[[], Awaitable[bool]]) -> list[Reply]:
        """Return the replies. Raises EndedError if the session ended meanwhile."""
        try:
            replies = await asyncio.shield(self.task)
        except asyncio.CancelledError:
            if self.task.cancelled():
                raise EndedError("the session ended while the request was running") from None
            self.task.add_done_callback(lambda _: self._mark(is_delivered=False))
            raise
        self.is_delivered = not await is_disconnected()
        self._mark(is_delivered=self.is_delivered)
        return replies

    async def begun(self) -> None:
        """Wait for the first token. Raises the error of the call if there is one before."""
        while not self.task.done() and not any(stream.pieces for stream in self.streams):
            await self._changes.next.wait()
        if self.task.done():
            self._finished()

    async def parts(self, deadline_s: float) -> AsyncGenerator[StreamPart]:
        """Yield what the answers grow by, and at the end the replies. Raises TimeoutError at the deadline.

        If the last reader leaves early, the engine's requests are aborted, and the answers end there.
        """
        self._num_readers += 1
        seen = [0] * len(self.streams)
        is_complete = False
        try:
            while True:
                change, is_done = self._changes.next, self.task.done()
                for index, stream in enumerate(self.streams):
                    if new := stream.pieces[seen[index] :]:
                        seen[index] += len(new)
                        yield index, reduce(ReplyPiece.joined, new)
                if is_done:
                    break
                async with asyncio.timeout_at(deadline_s):
                    await change.wait()
            for index, reply in enumerate(self._finished()):
                yield index, reply
            is_complete = self.is_delivered = True
            self._mark(is_delivered=True)
        finally:
            self._num_readers -= 1
            if not is_complete:
                self.leave()

    def leave(self) -> None:
        """End the answers unless another client reads or has them."""
        if not self.is_delivered and not self._num_readers:
            for stream in self.streams:
                stream.stop()
            self.task.add_done_callback(lambda _: self._mark(is_delivered=self.is_delivered))

    def _finished(self) -> list[Reply]:
        if self.task.cancelled():
            raise EndedError("the session ended while the request was running")
        return self.task.result()

    def _mark(self, *, is_delivered: bool) -> None:
        """Note in the tree whether a client got the replies."""
        if self.task.cancelled() or self.task.exception() is not None:
            return
        for reply in self.task.result():
            if reply.node is not None:
                reply.node.is_delivered = is_delivered
