"""Which of many requests for one server is sent next.

Few are being sent at a time, so that the first ones reach the server while the last ones are still to be made. And of
each prompt one goes before the others: SGLang (0.5.16, first come first served) prefills what is at the front of its
queue together, where a prefix that several have in common is computed for each of them. It is taken from the cache only
by requests of a later prefill. So requests are taken in blocks whose prompts, counted once, fill a prefill: the first
request of each prompt of a block goes, then the others of the block before. Blocks keep the order in which requests
came, or groups would all end late.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

AT_A_TIME = 32  # requests that are being sent
BLOCK_TOKENS = 16_384  # of prompts, each counted once: SGLang's --max-prefill-tokens


@dataclass(eq=False)
class _Waiting:
    new_tokens: int  # of its prompt; 0 if another request with this prompt was there before
    called: asyncio.Future[None]


class Turns:
    """Gives turns to requests that wait to be sent to one server."""

    def __init__(self) -> None:
        self._num_free = AT_A_TIME
        self._waiting: deque[_Waiting] = deque()
        self._block: deque[_Waiting] = deque()
        self._later: list[_Waiting] = []  # others of the block's prompts, which go after the first of the next block
        self._prompts: Counter[int] = Counter()  # of requests that wait, or are with the server

    @contextlib.asynccontextmanager
    async def turn(self, prompt: int, num_tokens: int) -> AsyncGenerator[Callable[[], None]]:
        """Wait for the turn of a request, and keep its prompt in mind until the block is left.

        `prompt` says which prompts are the same. What is given is called when the request is on its way: it is the next
        one's turn then.
        """
        new_tokens = 0 if prompt in self._prompts else num_tokens
        self._prompts[prompt] += 1
        with contextlib.ExitStack() as held:
            try:
                await self._wait(new_tokens)
                held.callback(self._give)
                yield held.close
            finally:
                self._prompts[prompt] -= 1
                if not self._prompts[prompt]:
                    del self._prompts[prompt]

    async def _wait(self, new_tokens: int) -> None:
        loop = asyncio.get_running_loop()
        waiting = _Waiting(new_tokens, loop.create_future())
        self._waiting.append(waiting)
        if self._num_free:  # after those that come in this turn of the loop, too
            loop.call_soon(self._call)
        try:
            await waiting.called
        except asyncio.CancelledError:
            if waiting.called.done() and not waiting.called.cancelled():  # it was called, and does not come
                self._give()
            raise

    def _give(self) -> None:
        self._num_free += 1
        self._call()

    def _call(self) -> None:
        while self._num_free and (waiting := self._next()) is not None:
            if not waiting.called.done():  # else it was cancelled
                self._num_free -= 1
                waiting.called.set_result(None)

    def _next(self) -> _Waiting | None:
        if not self._block:
            taken, later = 0, list[_Waiting]()
            while self._waiting and taken < BLOCK_TOKENS:
                waiting = self._waiting.popleft()
                taken += waiting.new_tokens
                (self._block if waiting.new_tokens else later).append(waiting)
            if not self._block and not self._later:
                self._later, later = later, []
            self._block += self._later
            self._later = later
        return self._block.popleft() if self._block else None
