"""Server-sent events of SGLang's /generate with `stream`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from furlong.errors import EngineError, UnreachableError
from furlong.inference.sglang.engine_answers import as_object, parse_answer, readable
from furlong.inference.sglang.http_client import ForbiddenAnswerError

BUSY = 503  # of an error event: the server ends, or a router has no worker
_DONE = b"[DONE]"
_GROWING = ("output_token_logprobs", "token_versions")  # in meta_info


class EventReader:
    """Parses the events of one answer as they arrive.

    Each event repeats the answer so far, so of those that arrive together only the last is parsed and passed to
    `on_event`. With `is_incremental` each has the new tokens only, and they are joined. where: method and URL, for
    messages. limit_bytes: of one event.
    """

    def __init__(
        self,
        where: str,
        on_event: Callable[[dict[str, Any]], None],
        *,
        url: str,
        limit_bytes: int,
        is_incremental: bool,
    ) -> None:
        self._where, self._url, self._on_event = where, url, on_event
        self._limit_bytes, self._is_incremental = limit_bytes, is_incremental
        self._buffer = bytearray()
        self._event: dict[str, Any] | None = None

    def feed(self, data: bytes) -> None:
        """Process a piece of the body. Raises ForbiddenAnswerError for an event of more than `limit_bytes`."""
        self._buffer += data
        *events, rest = self._buffer.split(b"\n\n")
        if max(map(len, (*events, rest))) > self._limit_bytes:
            raise ForbiddenAnswerError(f"an event of more than {self._limit_bytes:,} bytes, the limit for this request")
        self._buffer = rest
        bodies = [bytes(event.strip()[5:].strip()) for event in events if event.strip().startswith(b"data:")]
        bodies = [body for body in bodies if body != _DONE]
        for body in bodies if self._is_incremental else bodies[-1:]:
            self._add(as_object(parse_answer(body, self._where), self._where))
        if bodies:
            self._on_event(self.last())

    def last(self) -> dict[str, Any]:
        """Return the answer so far. Raises UnreachableError if there is none, and EngineError for an error event."""
        if self._event is None:
            raise UnreachableError(f"{self._where} answered with a stream without events", url=self._url)
        if (error := self._event.get("error")) is not None:
            fields = cast("dict[str, Any]", error) if isinstance(error, dict) else {}
            text = f"{self._where} answered {fields.get('code')}: {readable(str(fields.get('message', error)))}"
            raise UnreachableError(text, url=self._url) if fields.get("code") == BUSY else EngineError(text)
        return self._event

    def _add(self, event: dict[str, Any]) -> None:
        before, self._event = self._event, event
        if before is None or not self._is_incremental or "error" in event:
            return
        event["text"] = (before.get("text") or "") + (event.get("text") or "")
        event["output_ids"] = [*(before.get("output_ids") or []), *(event.get("output_ids") or [])]
        old, new = before.get("meta_info") or {}, as_object(event.get("meta_info") or {}, self._where)
        for name in _GROWING:
            if old.get(name) or new.get(name):
                new[name] = [*(old.get(name) or []), *(new.get(name) or [])]
        event["meta_info"] = new
