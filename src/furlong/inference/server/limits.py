"""Limits of `furlong serve`: what one request, one client and all clients together may use.

`LimitRequests` is the ASGI middleware that counts requests; a `RequestGuard` accompanies each of them. A refusal names
the limit, the value and the flag.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import resource
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from furlong.inference.request_error import RequestError
from furlong.inference.server.turns import Turns

logger = logging.getLogger(__name__)

MIB = 1 << 20
HEALTH_PATH = "/health"  # without limits and without a key
GENERATION_PATHS = ("/generate", "/completions", "/messages", "/responses")  # ends of paths
WEIGHT_PATH = "/update_weights_from_tensor"
SPARE_CONNECTIONS = 128  # beyond the limit, for /health
SPARE_FILES = 128 + SPARE_CONNECTIONS  # file descriptors that other connections leave for weights, groups and /health


class RefusedError(RequestError):
    """A request exceeds a limit. `status` is that of the reply."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def _limit(default: Any, text: str) -> Any:
    """A field that is also the flag of the same name; `text` is its help."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class ServerLimits:
    """Limits of one server. Each field is a flag; `*_bytes` are bytes, `*_timeout` seconds."""

    max_body_bytes: int = _limit(32 * MIB, "bytes of a request body")
    max_weight_body_bytes: int = _limit(256 * MIB, "bytes of a body of /update_weights_from_tensor")
    max_total_body_bytes: int = _limit(1024 * MIB, "bytes of all request bodies in memory together")
    max_total_reply_bytes: int = _limit(1024 * MIB, "bytes of all replies that clients have not read, without streams")
    max_json_depth: int = _limit(64, "nesting depth of a JSON body")
    max_connections: int = _limit(8192, "open connections; also bounded by the limit of open files")
    max_concurrent_requests: int = _limit(4096, "concurrent requests for generation")
    max_requests_per_client: int = _limit(2048, "concurrent requests for generation of one address")
    max_concurrent_streams: int = _limit(1024, "concurrent requests with stream")
    max_streams_per_client: int = _limit(512, "concurrent requests with stream of one address")
    max_control_requests: int = _limit(256, "concurrent requests that do not generate")
    max_samples_per_request: int = _limit(4096, "prompts times n of one request")
    max_total_samples: int = _limit(65536, "running and queued samples of all requests")
    max_stream_bytes: int = _limit(128 * MIB, "bytes of one stream")
    header_timeout: int = _limit(30, "seconds for a client to send the headers of a request")
    body_timeout: int = _limit(120, "seconds for a client to send the body of a request")
    write_timeout: int = _limit(60, "seconds that a client may leave sent data unread")
    request_timeout: int = _limit(3600, "seconds for the answer to a request")
    chat_template_timeout: int = _limit(5, "seconds for a chat template of a request")
    chat_template_bytes: int = _limit(512 * MIB, "bytes of memory for a chat template of a request")


def flag_of(name: str) -> str:
    """Return the flag of a field of `ServerLimits`."""
    return "--" + name.replace("_", "-")


def add_limit_flags(parser: argparse.ArgumentParser, number: Any) -> None:
    """Add one flag for each limit; `number` is the type of positive integers."""
    group = parser.add_argument_group("limits")
    for limit in dataclasses.fields(ServerLimits):
        text = f"{limit.metadata['help']} (default: {limit.default})"
        group.add_argument(flag_of(limit.name), type=number, default=limit.default, metavar="N", help=text)


def limits_from(args: argparse.Namespace) -> ServerLimits:
    """Return the limits of a parsed command line."""
    return ServerLimits(**{limit.name: getattr(args, limit.name) for limit in dataclasses.fields(ServerLimits)})


def connections_that_fit(limits: ServerLimits) -> int:
    """Return the number of connections that the limit of open files leaves room for, at most `max_connections`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limits.max_connections
    return max(1, min(limits.max_connections, soft - min(SPARE_FILES, soft // 2)))


class Slots:
    """Counts concurrent uses, in all and by client. `what` names them in messages."""

    def __init__(self, what: str, limit: int, flag: str, client_limit: int = 0, client_flag: str = "") -> None:
        self._what, self._limit, self._flag = what, limit, flag
        self._client_limit, self._client_flag = client_limit or limit, client_flag or flag
        self._by_client: Counter[str] = Counter()
        self.in_use = 0

    def enter(self, client: str) -> None:
        """Occupy a slot until `leave`. Raises RefusedError (429) if there is none."""
        if self.in_use >= self._limit:
            raise RefusedError(f"{self.in_use} {self._what} are open, the limit of {self._flag}; retry later", 429)
        if self._by_client[client] >= self._client_limit:
            raise RefusedError(
                f"{self._by_client[client]} {self._what} of this client are open, the limit of {self._client_flag}; "
                "wait for answers, then retry",
                429,
            )
        self.in_use += 1
        self._by_client[client] += 1

    def leave(self, client: str) -> None:
        """Release a slot."""
        self.in_use -= 1
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]


class Counts:
    """What all requests of a server use at the moment, and the turns they take on the event loop."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits, self.turns = limits, Turns()
        self.generations = Slots(
            "requests",
            limits.max_concurrent_requests,
            flag_of("max_concurrent_requests"),
            limits.max_requests_per_client,
            flag_of("max_requests_per_client"),
        )
        self.streams = Slots(
            "streams",
            limits.max_concurrent_streams,
            flag_of("max_concurrent_streams"),
            limits.max_streams_per_client,
            flag_of("max_streams_per_client"),
        )
        self.controls = Slots("control requests", limits.max_control_requests, flag_of("max_control_requests"))
        self.body_bytes = self.reply_bytes = 0
        self.num_bodies = 0  # requests with a body that were answered

    @property
    def is_idle(self) -> bool:
        """Whether no request is open."""
        return not self.generations.in_use and not self.controls.in_use


class RequestGuard:
    """What one request uses; `close` releases it. In endpoints it is `http.state.guard`."""

    def __init__(self, counts: Counts, client: str, path: str) -> None:
        self._counts, self._client, self._path = counts, client, path
        self._entered: list[Slots] = []
        self._body_bytes = self._reply_bytes = 0
        self.limits, self.turns = counts.limits, counts.turns
        self.deadline_s = asyncio.get_running_loop().time() + self.limits.request_timeout

    def open(self) -> None:
        """Count the request. Raises RefusedError (429) at a limit."""
        slots = self._counts.generations if self._path.endswith(GENERATION_PATHS) else self._counts.controls
        slots.enter(self._client)
        self._entered.append(slots)

    def open_stream(self) -> None:
        """Count the request as a stream. Raises RefusedError (429) at a limit."""
        self._counts.streams.enter(self._client)
        self._entered.append(self._counts.streams)

    @property
    def body_bytes(self) -> int:
        """Bytes of the body so far."""
        return self._body_bytes

    def check_declared(self, num_bytes: int) -> None:
        """Raise RefusedError (413) if a body of this size is too large."""
        flag = "max_weight_body_bytes" if self._path == WEIGHT_PATH else "max_body_bytes"
        if num_bytes > (limit := getattr(self.limits, flag)):
            raise RefusedError(
                f"the body has {num_bytes} bytes or more, but the limit is {limit}; send several smaller requests, or "
                f"start the server with a larger {flag_of(flag)}",
                413,
            )

    def add_body(self, num_bytes: int) -> None:
        """Count bytes of the body. Raises RefusedError (413 or 429) at a limit."""
        self.check_declared(self._body_bytes + num_bytes)
        if self._counts.body_bytes + num_bytes > (limit := self.limits.max_total_body_bytes):
            raise RefusedError(
                f"request bodies already occupy {self._counts.body_bytes} bytes, and the limit of "
                f"{flag_of('max_total_body_bytes')} is {limit}; retry later",
                429,
            )
        self._counts.body_bytes += num_bytes
        self._body_bytes += num_bytes

    def check_reply(self, num_bytes: int) -> None:
        """Raise RefusedError (413 or 429) if a reply of this size, or all together, are too large; thread-safe."""
        unread, limit = self._counts.reply_bytes, self.limits.max_total_reply_bytes
        if num_bytes > limit:
            raise RefusedError(
                f"the reply has more than {limit} bytes, the limit of {flag_of('max_total_reply_bytes')}; ask for "
                "fewer samples or tokens at once, or stream",
                413,
            )
        if unread + num_bytes > limit:
            raise RefusedError(
                f"{unread} bytes of replies are not read yet, and the limit of {flag_of('max_total_reply_bytes')} is "
                f"{limit}; read the answers, then retry",
                429,
            )

    def add_reply(self, num_bytes: int) -> None:
        """Count bytes of the reply. Raises RefusedError (413 or 429) at a limit."""
        self.check_reply(num_bytes)
        self._counts.reply_bytes += num_bytes
        self._reply_bytes += num_bytes

    def close(self) -> None:
        """Release everything."""
        self._counts.num_bodies += self._body_bytes > 0
        self._counts.body_bytes -= self._body_bytes
        self._counts.reply_bytes -= self._reply_bytes
        self._body_bytes = self._reply_bytes = 0
        while self._entered:
            self._entered.pop().leave(self._client)


class LimitRequests:
    """ASGI middleware: refuse requests over the limits with 429, and give each other one a `RequestGuard`."""

    def __init__(self, app: ASGIApp, counts: Counts, refuse: Any) -> None:
        self.app, self._counts, self._refuse = app, counts, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count HTTP requests; forward everything else."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        client = (scope.get("client") or ("", 0))[0]
        guard = RequestGuard(self._counts, client, scope["path"])
        scope.setdefault("state", {})["guard"] = guard
        try:
            if scope["path"] != HEALTH_PATH:
                guard.open()
            await self.app(scope, receive, send)
        except RefusedError as error:
            await self._refuse(str(error), error.status)(scope, receive, send)
        except asyncio.CancelledError:  # uvicorn cancels requests only when it exits, and would log a traceback
            logger.info("%s %s was cancelled: the server exits", scope["method"], scope["path"][:200])
        finally:
            guard.close()
