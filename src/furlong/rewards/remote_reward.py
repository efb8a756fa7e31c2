"""Rewards from a server: POST {prompt, response, label}; the reply is a number or a dict."""

from __future__ import annotations

import asyncio

import httpx

from furlong.core.outcome import Outcome, outcome_from_value
from furlong.core.sample import Sample

MAX_CONNECTIONS = 64
CONNECT_RETRIES = 2  # for connecting only: a request is never sent twice
_MAX_REPLY_LEN = 200


class RemoteReward:
    """Client of the reward server at `url`, with at most 64 concurrent requests of up to `timeout_s` seconds each."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)

    async def score(self, sample: Sample, response: str) -> Outcome:
        """Score `response` with the prompt and label of the sample. Any failure is an outcome with the reason."""
        client = self._loop_client()
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
            return Outcome.failed(f"POST {self._url}: HTTP {reply.status_code}: {reply.text[:_MAX_REPLY_LEN]}")
        try:
            return outcome_from_value(reply.json())
        except ValueError:
            return Outcome.failed(f"POST {self._url}: the reply is not JSON: {reply.text[:_MAX_REPLY_LEN]}")

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None and self._loop is asyncio.get_running_loop():
            await self._client.aclose()
        self._client = None

    def _loop_client(self) -> httpx.AsyncClient:
        """Return a client for the running event loop; connections belong to the loop that opened them."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            transport = httpx.AsyncHTTPTransport(
                retries=CONNECT_RETRIES, limits=httpx.Limits(max_connections=MAX_CONNECTIONS)
            )
            self._client = httpx.AsyncClient(transport=transport, timeout=self._timeout_s)
            self._loop, self._slots = loop, asyncio.Semaphore(MAX_CONNECTIONS)
        return self._client
