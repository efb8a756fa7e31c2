"""Answers of servers that speak SGLang's protocol: JSON, errors, completions of /generate and its streamed events."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import orjson

from furlong.core.routing import Routes, RoutingShape, routes_from_text
from furlong.core.sample import UNKNOWN_VERSION
from furlong.core.text import redact_credentials, shortened
from furlong.core.token_stream import TextTokenizer
from furlong.errors import EngineError, UnreachableError
from furlong.interfaces import Completion, SamplingParams, TokenScores

EXPECTED = "furlong expects the protocol of SGLang 0.5.16"
REASON_CHARS = 500
BUSY = (502, 503, 504)  # the server ends, or a router has no worker for the request
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # would change the terminal that shows a message
_DONE = b"[DONE]"
_GROWING = ("output_token_logprobs", "token_versions")  # in meta_info of a stream


def parse_answer(content: bytes, where: str) -> Any:
    """Return the value of a JSON body; {} for an empty one. `where` is method and URL, for messages."""
    if not content:
        return {}
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        shown = f"{content[:200]!r} ({len(content):,} bytes)"
        raise EngineError(f"{where} did not answer JSON in UTF-8: {shown}; {error}. {EXPECTED}") from error


def reason_in(content: bytes) -> str:
    """Return the server's message in an error reply, in any of the usual forms, shortened."""
    try:
        body: Any = orjson.loads(content)
    except orjson.JSONDecodeError:
        if title := re.search(rb"<title>(.{0,500}?)</title>", content[: 1 << 16], re.DOTALL | re.IGNORECASE):
            page = readable(title[1].decode(errors="replace"))
            return f"a web page ({page}): this is not the address of an inference server"
        return readable(content[: 2 * REASON_CHARS].decode(errors="replace")) or "no reason given"
    if isinstance(body, dict):
        for key in ("error", "message", "detail"):
            if value := body.get(key):
                value = value.get("message", value) if isinstance(value, dict) else value
                return readable(value)
    return readable(body)


def readable(value: Any) -> str:
    """Return a value of a server for a message: shortened, without control characters and credentials."""
    text = value if isinstance(value, str) else shortened(value)
    cut = text[:REASON_CHARS] + (f"... ({len(text):,} characters)" if len(text) > REASON_CHARS else "")
    return redact_credentials(_CONTROL.sub("\ufffd", cut)).strip()


@contextlib.contextmanager
def reading(where: str, answer: Any) -> Generator[None]:
    """Convert the errors of reading an answer of another form to an EngineError that shows it."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        what = f"without {error}" if isinstance(error, KeyError) else f"something else ({error})"
        raise EngineError(f"{where} answered {what}: {readable(answer)}; {EXPECTED}") from error


class EventReader:
    """Parses the server-sent events of one answer as they arrive.

    Each event repeats the answer so far, so of those that arrive together only the last is parsed and passed to
    `on_event`. With `is_incremental` each has the new tokens only, and they are joined.
    """

    def __init__(
        self, where: str, on_event: Callable[[dict[str, Any]], None], *, url: str, is_incremental: bool
    ) -> None:
        self._where, self._url, self._on_event = where, url, on_event
        self._is_incremental = is_incremental
        self._buffer = bytearray()
        self._event: dict[str, Any] | None = None

    def feed(self, data: bytes) -> None:
        """Process a piece of the body."""
        self._buffer += data
        *events, self._buffer = self._buffer.split(b"\n\n")
        bodies = [bytes(event.strip()[5:].strip()) for event in events if event.strip().startswith(b"data:")]
        bodies = [body for body in bodies if body != _DONE]
        for body in bodies if self._is_incremental else bodies[-1:]:
            event = parse_answer(body, self._where)
            with reading(self._where, event):
                self._event = self._joined(event)
        if bodies:
            self._on_event(self.last())

    def last(self) -> dict[str, Any]:
        """Return the answer so far. Raises UnreachableError if there is none, and EngineError for an error event."""
        if self._event is None:
            raise UnreachableError(f"{self._where} answered with a stream without events", url=self._url)
        if (error := self._event.get("error")) is not None:
            fields = cast("dict[str, Any]", error) if isinstance(error, dict) else {}
            text = f"{self._where} answered {fields.get('code')}: {readable(fields.get('message', error))}"
            raise UnreachableError(text, url=self._url) if fields.get("code") in BUSY else EngineError(text)
        return self._event

    def _joined(self, event: dict[str, Any]) -> dict[str, Any]:
        before = self._event
        if before is None or not self._is_incremental or "error" in event:
            return event
        event["text"] = (before.get("text") or "") + (event.get("text") or "")
        event["output_ids"] = [*(before.get("output_ids") or []), *(event.get("output_ids") or [])]
        old, new = before.get("meta_info") or {}, event.get("meta_info") or {}
        for name in _GROWING:
            if old.get(name) or new.get(name):
                new[name] = [*(old.get(name) or []), *(new.get(name) or [])]
        event["meta_info"] = new
        return event


def streamed_tokens(event: dict[str, Any], position: int) -> tuple[list[int], list[float]]:
    """Return the tokens of an event from number `position` on, and their log-probs."""
    rows = ((event.get("meta_info") or {}).get("output_token_logprobs") or [])[position:]
    return [row[1] for row in rows], [row[0] for row in rows]


@dataclass(frozen=True)
class AnswerReader:
    """Converts answers of /generate to completions.

    tokenizer: Decodes the tokens where the server sends no text. routing: The model's expert routing.
    """

    tokenizer: TextTokenizer | None = None
    routing: RoutingShape | None = None

    def completion(
        self,
        reply: Any,
        *,
        where: str,
        prompt_len: int,
        params: SamplingParams,
        num_scored: int = 0,
        version: int | None,
        newest: int | None,
        prefilled: int | None = None,
        latency_s: float = 0.0,
    ) -> Completion:
        """Convert an answer. Raises EngineError for one that cannot be trained on.

        version: weight version of the server when the request was sent, newest: the last one given to any server that
        may have answered; None if unknown. prefilled: cached tokens of the request that computed its prompt ahead.
        num_scored: the last tokens of the prompt, which the log-probs are of, instead of a completion; they come with
        `scores`.
        """
        with reading(where, reply):
            meta = reply["meta_info"]
            rows = meta["input_token_logprobs"][-num_scored:] if num_scored else meta.get("output_token_logprobs") or []
            tokens, log_probs = [row[1] for row in rows], [row[0] for row in rows]
            reason = meta["finish_reason"]["type"]
            label = str(meta["weight_version"])
            ids = None if num_scored else reply.get("output_ids")
            if ids is not None and ids != tokens:
                raise EngineError(f"{where} answered {len(ids)} tokens, but log-probs of {len(tokens)} other ones")
            if None in log_probs or not math.isfinite(sum(log_probs)):
                raise EngineError(f"{where} answered a log-prob that is not finite; its weights are broken")
            if version is not None and newest is not None and not version <= _number(label) <= newest:
                raise EngineError(
                    f"{where} answered with weight version {label!r}, but the server was given {version} .. {newest}: "
                    "it was restarted, or another program updates it; the answer is discarded"
                )
            known = _number(label) if version is None else version
            return Completion(
                tokens=tokens,
                log_probs=log_probs,
                versions=meta.get("token_versions") or [known] * len(tokens),
                finish_reason=reason,
                text=reply.get("text") or self._decoded(tokens, params),
                cached_tokens=(meta.get("cached_tokens") or 0) if prefilled is None else prefilled,
                latency_s=latency_s,
                scores=_scores(meta, log_probs) if num_scored else None,
                routed_experts=self._routes(where, meta, prompt_len + len(tokens) - 1, is_aborted=reason == "abort")
                if params.return_routed_experts
                else None,
            )

    def _decoded(self, tokens: list[int], params: SamplingParams) -> str:
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens)

    def _routes(self, where: str, meta: dict[str, Any], expected: int, *, is_aborted: bool) -> Routes | None:
        """Parse the routed experts of `expected` tokens; an aborted request may lack some, and is continued."""
        text = meta.get("routed_experts")
        if self.routing is None:
            raise EngineError("the request asks for routed experts, but this HttpEngine was built without `routing`")
        if text is None:
            if is_aborted:
                return None
            raise EngineError(
                f"{where} answered without routed_experts; start the server with --enable-return-routed-experts. A "
                "router in front of it must pass that field through"
            )
        routes = routes_from_text(text, self.routing, where)
        if len(routes) != expected and not (is_aborted and len(routes) < expected):
            raise EngineError(f"{where} answered routed experts of {len(routes)} tokens; expected {expected}")
        return routes


def _scores(meta: dict[str, Any], log_probs: list[float]) -> TokenScores:
    """Read the log-probs of given tokens; with those of further tokens in the order of the request."""
    count = len(log_probs)
    top, asked = (meta.get(f"input_{name}_logprobs") or [] for name in ("top", "token_ids"))
    top_RK3, asked_RK3 = (
        np.array([[row[:2] for row in rows] for rows in each[-count:]], np.float64).reshape(count, -1, 2)
        for each in (top, asked)
    )
    return TokenScores(
        np.array(log_probs, np.float32),
        top_RK3[..., 1].astype(np.int32),
        top_RK3[..., 0].astype(np.float32),
        asked_RK3[..., 0].astype(np.float32),
    )


def cached_tokens(reply: Any) -> int:
    """Tokens that the server took from its cache; 0 if it does not report them."""
    try:
        return int(reply["meta_info"]["cached_tokens"] or 0)
    except (KeyError, TypeError, ValueError):
        return 0


def abort_reason(reply: Any) -> str:
    """The server's reason for an abort that was not requested."""
    return readable(str(reply["meta_info"]["finish_reason"].get("message", "no reason given")))


def _number(label: str) -> int:
    """The version number of a label; UNKNOWN_VERSION for a label that furlong did not assign."""
    return int(label) if label.isascii() and label.isdecimal() else UNKNOWN_VERSION
