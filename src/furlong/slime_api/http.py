"""HTTP for user functions: `slime.utils.http_utils`. With `--sglang-api-key`, pass the key in `headers`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from furlong.core.text import redact_credentials
from furlong.errors import RolloutError
from furlong.rewards.group_reward import ReplyError, read_json

ATTEMPTS = 60  # of a request that cannot connect, or that the server answers with 429 or its own error
MAX_CONNECTIONS = 4096
MAX_REPLY_BYTES = 256 << 20
WAIT_S = 1.0  # between two attempts

_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()


async def post(
    url: str, payload: Any, max_retries: int = ATTEMPTS, headers: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Post `payload` as JSON and return the reply's JSON.

    Connection errors, 429 and 5xx are repeated, `max_retries` times in all. Raises RolloutError with the server's text
    if no attempt succeeds; other 4xx are not repeated, as the same request would be refused again.
    """
    return await _exchange("POST", url, max_retries, json=payload, headers=dict(headers or {}))


async def get(url: str) -> Any:
    """Return the JSON at `url`. Raises RolloutError for an error reply."""
    return await _exchange("GET", url, 1)


async def _exchange(method: str, url: str, max_attempts: int, **request: Any) -> Any:
    problem = ""
    for attempt in range(max(1, max_attempts)):
        if attempt:
            await asyncio.sleep(WAIT_S)
        try:
            async with _client().stream(method, url, **request) as response:
                return await read_json(response, MAX_REPLY_BYTES)
        except httpx.TransportError as error:
            problem = f"{type(error).__name__}: {error}"
        except ReplyError as error:
            problem = str(error)
            if error.status < 500 and error.status != 429:
                break
    raise RolloutError(
        f"{method} {redact_credentials(url)} failed: {problem}; check the address and the fields of the request"
    )


def _client() -> httpx.AsyncClient:
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        limits = httpx.Limits(max_connections=MAX_CONNECTIONS)
        _clients[loop] = httpx.AsyncClient(limits=limits, timeout=None, trust_env=False)
    return _clients[loop]


def is_port_available(port: int) -> bool:
    """Return whether a TCP port of this machine can be bound."""
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except (OSError, OverflowError):
            return False
    return True


def find_available_port(base_port: int) -> int:
    """Return the first free TCP port from `base_port` upward. Raises RolloutError if there is none."""
    for port in range(base_port, 65536):
        if is_port_available(port):
            return port
    raise RolloutError(f"no free TCP port from {base_port} to 65535; give a lower one")


def get_rollout_num_engines(args: Any) -> int:
    """Return the number of engines that generate: 1 if the run generates in its own process."""
    num_gpus, each = args.rollout_num_gpus or 0, args.rollout_num_gpus_per_engine or 1
    return max(1, num_gpus // each)


def init_http_client(args: Any) -> None:
    """Do nothing: the client is created on first use."""
