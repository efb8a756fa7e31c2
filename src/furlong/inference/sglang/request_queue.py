"""The order in which concurrent requests are sent to one server.

At most `MAX_SENDING` requests are being sent at a time, so the first ones reach the server while the last ones are
still being serialized. One request of each prompt is sent before the others: SGLang 0.5.16 (first come, first served)
prefills the front of its queue together and computes a shared prefix once per request; only requests of a later
prefill find it in the cache. Requests are therefore taken in blocks whose distinct prompts fill one prefill: first one
request of each prompt in the block, then the remaining requests of the previous block. Blocks keep the order of
arrival, or all groups would finish late.

A block that is not full has nothing behind it that would delay the other requests long enough. If their prompts are
long enough, the first request of a prompt becomes the leader: it has the server compute the prompt without generating,
as SGLang does for the `n` samples of one request, and the others follow once that is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

MAX_SENDING = 32  # requests
BLOCK_TOKENS = 16_384  # of distinct prompts: SGLang's --max-prefill-tokens
MIN_SHARED_TOKENS = 2048  # prompt tokens of followers: about what one additional prefill costs


@dataclass(frozen=True)
class SendTicket:
    """Permission to send one request. Leaving its context does what the two callbacks do.

    `mark_sent` lets the next request be sent. If the request `leads`, others with its prompt wait until
    `release_followers`.
    """

    leads: bool
    mark_sent: Callable[[], None]
    release_followers: Callable[[], None]


@dataclass(eq=False)
class _QueuedRequest:
    prompt: int
    num_tokens: int
    is_first: bool  # no other request with this prompt is queued or running
    may_lead: bool
    admitted: asyncio.Future[None]
    leads: bool = False


class RequestQueue:
    """Orders the requests to one server."""

    def __init__(self) -> None:
        self._num_free = MAX_SENDING
        self._queue: deque[_QueuedRequest] = deque()
        self._block: deque[_QueuedRequest] = deque()
        self._deferred: list[_QueuedRequest] = []  # rest of the block; sent after the first ones of the next block
        self._followers: dict[int, list[_QueuedRequest]] = {}  # by prompt, of requests that lead
        self._prompts: Counter[int] = Counter()  # of requests that are queued or running

    @contextlib.asynccontextmanager
    async def ticket(self, prompt: int, num_tokens: int, *, may_lead: bool = False) -> AsyncGenerator[SendTicket]:
        """Wait until a request may be sent; its prompt counts as known until the context exits.

        `prompt` identifies equal prompts.
        """
        admitted = asyncio.get_running_loop().create_future()
        request = _QueuedRequest(prompt, num_tokens, prompt not in self._prompts, may_lead, admitted)
        self._prompts[prompt] += 1
        with contextlib.ExitStack() as sending, contextlib.ExitStack() as leading:
            leading.callback(self._release_followers, request)
            try:
                await self._wait(request)
                sending.callback(self._free_slot)
                yield SendTicket(request.leads, sending.close, leading.close)
            finally:
                self._prompts[prompt] -= 1
                if not self._prompts[prompt]:
                    del self._prompts[prompt]

    async def _wait(self, request: _QueuedRequest) -> None:
        self._queue.append(request)
        if self._num_free:  # later, so that requests of this iteration of the event loop are queued, too
            asyncio.get_running_loop().call_soon(self._admit)
        try:
            await request.admitted
        except asyncio.CancelledError:
            if request.admitted.done() and not request.admitted.cancelled():  # it has a slot and will not use it
                self._free_slot()
            raise

    def _free_slot(self) -> None:
        self._num_free += 1
        self._admit()

    def _release_followers(self, leader: _QueuedRequest) -> None:
        if leader.leads:
            self._block += self._followers.pop(leader.prompt)
            self._admit()

    def _admit(self) -> None:
        while self._num_free and (request := self._next()) is not None:
            if not request.admitted.done():  # else it was cancelled
                self._num_free -= 1
                request.admitted.set_result(None)

    def _next(self) -> _QueuedRequest | None:
        if not self._block:
            taken, deferred = 0, list[_QueuedRequest]()
            while self._queue and taken < BLOCK_TOKENS:
                request = self._queue.popleft()
                if request.is_first:
                    taken += request.num_tokens
                    self._block.append(request)
                else:
                    self._followers.get(request.prompt, deferred).append(request)
            if taken < BLOCK_TOKENS:
                deferred = self._choose_leaders(deferred)
            if not self._block and not self._deferred:
                self._deferred, deferred = deferred, []
            self._block += self._deferred
            self._deferred = deferred
        return self._block.popleft() if self._block else None

    def _choose_leaders(self, others: list[_QueuedRequest]) -> list[_QueuedRequest]:
        """Make the first requests of the block lead where it pays off; returns the requests without a leader."""
        count = Counter(other.prompt for other in others)
        for first in self._block:
            can_lead = first.may_lead and not first.admitted.done()
            if can_lead and count[first.prompt] * first.num_tokens >= MIN_SHARED_TOKENS:
                first.leads = True
                self._followers[first.prompt] = []
        unled: list[_QueuedRequest] = []
        for other in others:
            self._followers.get(other.prompt, unled).append(other)
        return unled
