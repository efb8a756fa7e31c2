"""The session server: agents in other processes talk to the policy over HTTP, each in a session of its own.

Routes are `/sessions/ID/v1/...`, with roles `/sessions/ID/roles/NAME/v1/...`, and `/v1/...` with the session's key, or
KEY:NAME, as bearer token or `x-api-key`. It has no endpoint for weights. Its own process (`sessions.front`) speaks
HTTP with the clients, within the limits of `furlong serve`; this one has the sessions, and answers its messages.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from furlong.core.addresses import host_and_port
from furlong.errors import EngineError, FurlongError
from furlong.inference.server.limits import RefusedError, ServerLimits
from furlong.inference.server.listener import listening_socket
from furlong.sessions.endpoints.answered_call import AnsweredCall
from furlong.sessions.front.front_host import FrontHost
from furlong.sessions.front.wire import call_from, error_values, piece_values, reply_values
from furlong.sessions.open_session import Abort, OpenSession
from furlong.sessions.reply import Reply
from furlong.sessions.session import Session
from furlong.sessions.session_errors import EndedError
from furlong.sessions.session_offers import SessionOffers, read_result

# All agents of a run have one address, and any of them may stream.
LIMITS = ServerLimits(max_requests_per_client=4096, max_concurrent_streams=4096, max_streams_per_client=4096)
MAX_ENDED = 65536  # ids of ended sessions that are known to have ended

logger = logging.getLogger(__name__)


class SessionServer:
    """Serves sessions. The port is open from the start; the first session starts what answers.

    model_name: the name that clients may give as `model`; None for any name. client_sampling: clients set temperature,
    top_p, top_k and min_p; otherwise those of the run apply. offers: sessions that applications take with POST
    /sessions.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        model_name: str | None = "default",
        client_sampling: bool = False,
        limits: ServerLimits | None = None,
        offers: SessionOffers | None = None,
    ) -> None:
        self.offers, self._client_sampling = offers, client_sampling
        self._by_id: dict[str, OpenSession] = {}
        self._by_key: dict[str, OpenSession] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()  # with the reason
        self._readers: dict[int, AnsweredCall] = {}  # calls of clients that wait, by the number of the request
        self._taking: set[int] = set()  # requests for a session
        self._tasks: dict[int, asyncio.Task[None]] = {}  # what takes time, by the number of the request
        listener = listening_socket(host, port)
        self.address: tuple[str, int] = (host, listener.getsockname()[1])
        settings = {
            "model_name": model_name,
            "limits": dataclasses.asdict(limits or LIMITS),
            "has_offers": offers is not None,
            "offers_key": None if offers is None else offers.key,
            "log_level": logging.getLogger("furlong").getEffectiveLevel(),
        }
        self._front = FrontHost(listener, settings, self._receive, self._lose)
        self._handlers: dict[str, Callable[..., None]] = {
            "call": self._call,
            "left": self._leave,
            "find": self._find,
            "size": self._check_size,
            "count": lambda number, id, fields: self._run(number, self._opened(id).count_tokens(call_from(fields))),
            "earlier": lambda number, id, name: self._run(number, self._opened(id).earlier(name)),
            "end": lambda number, id, body: self._run(number, self._end(self._opened(id), body)),
            "take": self._take,
            "taken": lambda _, id: self._confirm(id),
            "give back": lambda number, id: self._run(number, self._give_back(id)),
        }

    async def start(self) -> None:
        """Start the process that answers requests if applications take sessions. Raises EngineError if it ends.

        Otherwise the first session starts it: most functions call the policy without HTTP.
        """
        if self.offers is not None:
            await self._front.start()

    async def close(self) -> None:
        """Stop answering and close the port."""
        for task in list(self._tasks.values()):
            task.cancel()
        await self._front.close()

    @property
    def num_open(self) -> int:
        """Number of open sessions."""
        return len(self._by_id)

    def open(self, session: Session, abort: Abort, *, key: str | None = None) -> OpenSession:
        """Make a session reachable; `abort` ends its requests in the engine. key: None for a random one.

        Raises EngineError if nothing answers requests any more.
        """
        if self._front.failure:
            raise EngineError(f"{self._front.failure}; its messages are in the log")
        self._front.start_soon()
        id, key = secrets.token_hex(16), key or f"sk-{secrets.token_hex(24)}"
        self._ended.pop(key, None)
        url = f"http://{host_and_port(*self.address)}/sessions/{id}"
        opened = OpenSession(id, url, key, session, abort, self._client_sampling)
        self._by_id[id] = self._by_key[key] = opened
        return opened

    async def end(self, opened: OpenSession) -> None:
        """End a session: its requests in flight are aborted, and later ones get status 410."""
        if self._by_id.pop(opened.id, None) is None:
            return
        del self._by_key[opened.key]
        opened.session.end()
        for name in (opened.id, opened.key):
            self._ended[name] = opened.session.end_reason
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        self._front.send("ended", opened.id, opened.key)
        running = [each.task for each in opened.requests.values() if not each.task.done()]
        if running:
            await opened.abort()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        opened.requests.clear()

    def admit(self, opened: OpenSession) -> None:
        """Raise RefusedError for a call that the session may not make; all are allowed."""

    # -- messages of the process that speaks HTTP --------------------------------------------------------------

    def _receive(self, message: list[Any]) -> None:
        kind, number, *values = message
        try:
            self._handlers[kind](number, *values)
        except Exception as error:  # noqa: BLE001  answered
            self._fail(number, error)

    def _fail(self, number: int, error: BaseException) -> None:
        if not isinstance(error, FurlongError):
            logger.error("a request of a session failed", exc_info=error)
        self._front.send("failed", number, *error_values(error))

    def _opened(self, id: str) -> OpenSession:
        """Return a session that the other process has found. Raises EndedError."""
        opened = self._by_id.get(id)
        if opened is None:
            raise EndedError(f"the session has ended: {self._ended.get(id, 'long ago')}")
        return opened

    def _find(self, number: int, id: str, key: str) -> None:
        name = id or key
        opened = (self._by_id if id else self._by_key).get(name)
        if opened is not None:
            self._front.send("value", number, [opened.id, opened.context_len])
        elif name in self._ended:
            raise EndedError(f"the session has ended: {self._ended[name]}")
        elif id:
            raise RefusedError(f"there is no session {id[:64]!r}; use the URL that furlong.agent.session returned", 404)
        else:
            raise RefusedError("the key of a session is required: Authorization: Bearer KEY, or x-api-key: KEY", 401)

    def _check_size(self, number: int, id: str, size: int) -> None:
        self._opened(id).session.check_num_chars(size)
        self._front.send("value", number, None)

    def _call(self, number: int, id: str, role: str, key: str, is_retry: bool, fields: dict[str, Any]) -> None:
        opened = self._opened(id)
        self.admit(opened)
        known = opened.call(call_from(fields), role=role, key=key, is_retry=is_retry)
        self._readers[number] = known
        if known.streams:
            self._run(number, self._stream(number, known))
        else:
            known.task.add_done_callback(partial(self._answer, number, known))

    def _answer(self, number: int, known: AnsweredCall, _: Any) -> None:
        """Send the replies of a call that is done, unless its client left."""
        if self._readers.pop(number, None) is None:
            return
        try:
            self._send_replies(number, known, known.deliver())
        except Exception as error:  # noqa: BLE001  of the engine, for example
            self._fail(number, error)

    def _send_replies(self, number: int, known: AnsweredCall, replies: list[Reply]) -> None:
        self._front.send("done", number, [reply_values(each, with_tokens=known.wants_tokens) for each in replies])

    async def _stream(self, number: int, known: AnsweredCall) -> None:
        """Send a streamed answer while it is sampled."""
        try:
            await known.begun()
            self._front.send("begun", number, [[each.response_id, each.prompt_tokens] for each in known.streams])
            replies: list[Reply] = []
            async for index, part in known.parts(None):
                if isinstance(part, Reply):
                    replies.append(part)
                else:
                    self._front.send("grew", number, index, piece_values(part, with_tokens=known.wants_tokens))
            self._send_replies(number, known, replies)
        finally:
            self._readers.pop(number, None)

    def _leave(self, number: int, id: str, key: str) -> None:
        """A client has left, before or after its answer was sent."""
        known = self._readers.pop(number, None)
        if (task := self._tasks.get(number)) is not None:
            task.cancel()
        if known is not None:
            known.leave()
        elif (opened := self._by_id.get(id)) is not None and (known := opened.requests.get(key)) is not None:
            known.retract()

    def _lose(self) -> None:
        """The other process has ended, and with it all connections."""
        for number in list(self._readers):
            self._leave(number, "", "")
        if self.offers is not None:
            for number in list(self._taking):
                self._tasks[number].cancel()
            self._run(-1, self.offers.give_all_back())

    def _run(self, number: int, answer: Awaitable[Any]) -> None:
        """Send what `answer` returns, or its error; None if it has sent it itself."""
        task = self._tasks[number] = asyncio.ensure_future(self._send_result(number, answer))
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    async def _send_result(self, number: int, answer: Awaitable[Any]) -> None:
        try:
            self._front.send("value", number, await answer)
        except Exception as error:  # noqa: BLE001  answered
            self._fail(number, error)

    # -- ends and offers ---------------------------------------------------------------------------------------

    async def _end(self, opened: OpenSession, body: dict[str, Any]) -> None:
        offer = None if self.offers is None else self.offers.of(opened)
        opened.result = read_result(body, needs_reward=offer is not None and offer.needs_reward)
        await self.end(opened)
        if offer is not None:
            offer.is_ended.set()

    def _take(self, number: int, wait_s: float) -> None:
        if self.offers is not None:
            self._run(number, self.offers.take(wait_s))
            self._taking.add(number)
            self._tasks[number].add_done_callback(lambda _: self._taking.discard(number))

    def _confirm(self, id: str) -> None:
        if self.offers is not None:
            self.offers.confirm(id)

    async def _give_back(self, id: str) -> None:
        if self.offers is not None:
            await self.offers.give_back(id)
