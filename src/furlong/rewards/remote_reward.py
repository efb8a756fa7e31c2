"""Rewards from a server: POST {prompt, response, label}, answered with a number or a dict."""

from __future__ import annotations

import asyncio

import httpx

from furlong.core.outcome import Outcome, outcome_from_value
from furlong.core.sample import Sample

MAX_CONNECTIONS = 64
CONNECT_RETRIES = 2  # of the connection alone: a request that was sent is never sent twice
_SHOWN = 200


class RemoteReward:
    """Asks the server at `url`, at most 64 requests at a time, each with `timeout_s` seconds from its start."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)

    async def score(self, sample: Sample, response: str) -> Outcome:
        """Score `response` instead of the sample's. A failed request gives a failed outcome with the reason."""
        client = self._client_here()
        payload = {"prompt": sample.prompt, "response": response, "label": sample.label}
        async with self._slots:
            try:
                async with asyncio.timeout(self._timeout_s):
                    reply = await client.post(self._url, json=payload)
            except (TimeoutError, httpx.TimeoutException):
                return Outcome.timed_out(self._timeout_s)
            except (httpx.HTTPError, httpx.InvalidURL, TypeError, ValueError) as error:
                return Outcome.failed(f"POST {self._url}: {type(error).__name__}: {error}")
        if not reply.is_success:
            return Outcome.failed(f"POST {self._url}: HTTP {reply.status_code}: {reply.text[:_SHOWN]}")
        try:
            return outcome_from_value(reply.json())
        except ValueError:
            return Outcome.failed(f"POST {self._url}: the reply is not JSON: {reply.text[:_SHOWN]}")

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None and self._loop is asyncio.get_running_loop():
            await self._client.aclose()
        self._client = None

    def _client_here(self) -> httpx.AsyncClient:
        """Return a client of the running event loop: connections belong to the loop that opened them."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            transport = httpx.AsyncHTTPTransport(
                retries=CONNECT_RETRIES, limits=httpx.Limits(max_connections=MAX_CONNECTIONS)
            )
            self._client = httpx.AsyncClient(transport=transport, timeout=self._timeout_s)
            self._loop, self._slots = loop, asyncio.Semaphore(MAX_CONNECTIONS)
        return self._client
