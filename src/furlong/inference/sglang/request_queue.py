"""Which of many requests for one server is sent next.

Few are being sent at a time, so that the first ones reach the server while the last ones are still to be made. And of
each prompt one goes before the others: SGLang (0.5.16, first come first served) prefills what is at the front of its
queue together, where a prefix that several have in common is computed for each of them. It is taken from the cache only
by requests of a later prefill. So requests are taken in blocks whose prompts, counted once, fill a prefill: the first
request of each prompt of a block goes, then the others of the block before. Blocks keep the order in which requests
came, or groups would all end late.

A block that is not full has nothing behind it that would keep the others back for long enough. Where they are worth it,
the first request of a prompt leads: it has the prompt computed by a request that generates nothing, as SGLang itself
does for the `n` samples of one request, and the others follow when that is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

AT_A_TIME = 32  # requests that are being sent
BLOCK_TOKENS = 16_384  # of prompts, each counted once: SGLang's --max-prefill-tokens
LED_TOKENS = 2048  # of the others with a prompt: about what is computed in the time of the one more prefill


@dataclass(frozen=True)
class Turn:
    """The turn of one request, which says with `pass_on` that it is on its way: it is the next one's turn then.

    If it `leads`, others with its prompt wait until `let_follow`. Leaving the turn does both.
    """

    leads: bool
    pass_on: Callable[[], None]
    let_follow: Callable[[], None]


@dataclass(eq=False)
class _Waiting:
    prompt: int
    num_tokens: int
    is_first: bool  # no other request with this prompt was there before
    may_lead: bool
    called: asyncio.Future[None]
    leads: bool = False


class Turns:
    """Gives turns to requests that wait to be sent to one server."""

    def __init__(self) -> None:
        self._num_free = AT_A_TIME
        self._waiting: deque[_Waiting] = deque()
        self._block: deque[_Waiting] = deque()
        self._later: list[_Waiting] = []  # others of the block's prompts, which go after the first of the next block
        self._following: dict[int, list[_Waiting]] = {}  # others of the prompts that are led
        self._prompts: Counter[int] = Counter()  # of requests that wait, or are with the server

    @contextlib.asynccontextmanager
    async def turn(self, prompt: int, num_tokens: int, *, may_lead: bool = False) -> AsyncGenerator[Turn]:
        """Wait for the turn of a request, and keep its prompt in mind until the block is left.

        `prompt` says which prompts are the same.
        """
        called = asyncio.get_running_loop().create_future()
        waiting = _Waiting(prompt, num_tokens, prompt not in self._prompts, may_lead, called)
        self._prompts[prompt] += 1
        with contextlib.ExitStack() as held, contextlib.ExitStack() as leading:
            leading.callback(self._let_follow, waiting)
            try:
                await self._wait(waiting)
                held.callback(self._give)
                yield Turn(waiting.leads, held.close, leading.close)
            finally:
                self._prompts[prompt] -= 1
                if not self._prompts[prompt]:
                    del self._prompts[prompt]

    async def _wait(self, waiting: _Waiting) -> None:
        self._waiting.append(waiting)
        if self._num_free:  # after those that come in this turn of the loop, too
            asyncio.get_running_loop().call_soon(self._call)
        try:
            await waiting.called
        except asyncio.CancelledError:
            if waiting.called.done() and not waiting.called.cancelled():  # it was called, and does not come
                self._give()
            raise

    def _give(self) -> None:
        self._num_free += 1
        self._call()

    def _let_follow(self, leader: _Waiting) -> None:
        if leader.leads:
            self._block += self._following.pop(leader.prompt)
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
                if waiting.is_first:
                    taken += waiting.num_tokens
                    self._block.append(waiting)
                else:
                    self._following.get(waiting.prompt, later).append(waiting)
            if taken < BLOCK_TOKENS:
                later = self._behind_leaders(later)
            if not self._block and not self._later:
                self._later, later = later, []
            self._block += self._later
            self._later = later
        return self._block.popleft() if self._block else None

    def _behind_leaders(self, others: list[_Waiting]) -> list[_Waiting]:
        """Have the first request lead where enough others wait in this block; returns those that are not led."""
        count = Counter(other.prompt for other in others)
        for first in self._block:
            is_there = first.may_lead and not first.called.done()
            if is_there and count[first.prompt] * first.num_tokens >= LED_TOKENS:
                first.leads = True
                self._following[first.prompt] = []
        unled: list[_Waiting] = []
        for other in others:
            self._following.get(other.prompt, unled).append(other)
        return unled
