"""`AnsweredCall`: the replies of one call, which several requests of a client may wait for or stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from functools import reduce
from typing import Any

from furlong.sessions.endpoints.client_call import ClientCall
from furlong.sessions.endpoints.served_session import StreamPart
from furlong.sessions.reply import Reply
from furlong.sessions.reply_stream import Broadcast, ReplyPiece, ReplyStream
from furlong.sessions.session_errors import EndedError

_Answer = Callable[[Sequence[ReplyStream | None]], Coroutine[Any, Any, list[Reply]]]


class AnsweredCall:
    """A call in flight or answered. streams: one for each streamed answer.

    The engine's call belongs to the session, and continues if a client without a stream disconnects.
    """

    def __init__(self, answer: _Answer, call: ClientCall) -> None:
        self.wants_tokens = call.wants_tokens
        self._changes = Broadcast()
        self._num_readers = self._num_delivered = 0
        self.streams: list[ReplyStream] = []
        if call.is_stream:
            self.streams = [ReplyStream(self._changes.notify, wants_texts=call.wants_texts) for _ in range(call.n)]
        self.task = asyncio.create_task(answer(self.streams or [None] * call.n))
        if call.is_stream:
            self.task.add_done_callback(lambda _: self._changes.notify())

    @property
    def is_delivered(self) -> bool:
        """Whether a client got the replies."""
        return self._num_delivered > 0

    @property
    def is_over(self) -> bool:
        """Whether it has no answer that a retry may get: it failed, or its client left during the stream."""
        is_failed = self.task.done() and (self.task.cancelled() or self.task.exception() is not None)
        return is_failed or any(stream.tokens.is_stopped for stream in self.streams)

    def finished(self) -> list[Reply]:
        """Return the replies of a call that is done. Raises its error, and EndedError if its session ended."""
        if self.task.cancelled():
            raise EndedError("the session ended while the request was running")
        return self.task.result()

    def deliver(self) -> list[Reply]:
        """Return the replies to one client, as `finished`."""
        replies = self.finished()
        self._num_delivered += 1
        if self._num_delivered == 1:
            self._mark()
        return replies

    def retract(self) -> None:
        """Note that a client had left when its replies were sent. A streamed answer is not kept for retries."""
        self._num_delivered -= 1
        self.leave()

    def leave(self) -> None:
        """Note that a client has left without the replies; streams end unless another one reads or has them."""
        if self.is_delivered or self._num_readers:
            return
        for stream in self.streams:
            stream.stop()
        self.task.add_done_callback(lambda _: self._mark())

    async def replies(self) -> list[Reply]:
        """Return the replies to one client. Raises the error of the call, and EndedError if the session ended."""
        try:
            await asyncio.shield(self.task)
        except asyncio.CancelledError:
            if not self.task.cancelled():
                self.leave()
                raise
        return self.deliver()

    async def begun(self) -> None:
        """Wait for the first token. Raises the error of the call if there is one before."""
        while not self.task.done() and not any(stream.pieces for stream in self.streams):
            await self._changes.next.wait()
        if self.task.done():
            self.finished()

    async def parts(self, deadline_s: float | None) -> AsyncGenerator[StreamPart]:
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
            for index, reply in enumerate(self.finished()):
                yield index, reply
            is_complete = True
            self.deliver()
        finally:
            self._num_readers -= 1
            if not is_complete:
                self.leave()

    def missed(self) -> None:
        """Note that the client was gone when its answer was ready."""
        if self.streams:
            self.leave()
        else:
            self.retract()

    def _mark(self) -> None:
        """Note in the tree whether a client got the replies."""
        if self.task.cancelled() or self.task.exception() is not None:
            return
        for reply in self.task.result():
            if reply.node is not None:
                reply.node.is_delivered = self.is_delivered
