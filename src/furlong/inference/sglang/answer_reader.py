"""Answers to SGLang's /generate: validated, and converted to completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from furlong.core.routing import Routes, RoutingShape, routes_from_text
from furlong.core.sample import UNKNOWN_VERSION
from furlong.core.text import shortened
from furlong.core.token_stream import TextTokenizer
from furlong.errors import DataError, EngineError
from furlong.inference.sglang.engine_answers import EXPECTED, as_object, readable, unexpected
from furlong.inference.sglang.generate_requests import InFlightRequest
from furlong.interfaces import Completion

MAX_LOG_PROB = 1e-3  # of rounding
MAX_VERSION = (1 << 63) - 1
ANSWER_BYTES, TOKEN_BYTES, ROUTE_BYTES = 1 << 20, 4096, 8  # limits of an answer: in all, per token, per routed expert
SHOWN_CHARS = 40


@dataclass(frozen=True)
class AnswerReader:
    """Parses answers.

    tokenizer: Decodes the tokens, for text that the server leaves out and to check the text that it sends.
    routing: The model's expert routing. vocab_size: Number of its token ids; None if unknown.
    """

    tokenizer: TextTokenizer | None = None
    routing: RoutingShape | None = None
    vocab_size: int | None = None

    def limit_bytes(self, request: InFlightRequest) -> int:
        """Return the most bytes that an answer may have."""
        num_tokens = len(request.prompt) + request.params.max_new_tokens
        routes = 0 if self.routing is None else self.routing.num_layers * self.routing.top_k
        return ANSWER_BYTES + num_tokens * (TOKEN_BYTES + ROUTE_BYTES * routes)

    def completion(self, request: InFlightRequest, reply: Any, *, newest: int | None, seconds: float) -> Completion:
        """Validate and convert an answer. Raises EngineError for one that cannot be trained on.

        `newest` is the last weight version given to any server that may have answered; None if unknown.
        """
        try:
            meta = reply["meta_info"]
            answered = meta.get("id", request.rid)
            rows = meta.get("output_token_logprobs") or []
            tokens, log_probs = [row[1] for row in rows], [row[0] for row in rows]
            reason = meta["finish_reason"]["type"]
            label = meta["weight_version"]
            text = reply.get("text") or ""
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            shown = repr(readable(str(reply)[:200]))
            what = f"without {error}: {shown}" if isinstance(error, KeyError) else f"with something else: {shown}"
            raise EngineError(f"{request.where} answered {what}; {EXPECTED}") from error
        if answered != request.rid:
            raise unexpected(request.where, "for the request", answered, f"the answer for {request.rid}")
        self._check_values(request, tokens=tokens, log_probs=log_probs, text=text, label=label)
        label, output_ids = str(label), reply.get("output_ids")
        ids = _as_list(output_ids)
        if output_ids is not None and ids is None:
            raise unexpected(request.where, "output_ids", output_ids, "a list of token ids")
        if ids is not None and ids != tokens:
            raise EngineError(
                f"{request.where} answered {len(ids)} tokens, but log-probs of {len(tokens)} other ones; they must be "
                "the same"
            )
        if len(tokens) > request.params.max_new_tokens:
            raise EngineError(
                f"{request.where} answered {len(tokens)} tokens, but max_new_tokens was "
                f"{request.params.max_new_tokens}; {EXPECTED}"
            )
        if reason not in ("stop", "length", "abort"):
            raise EngineError(f"{request.where} answered with finish_reason {shortened(reason)}")
        _check_version(request, label, newest)
        return Completion(
            tokens=tokens,
            log_probs=log_probs,
            versions=_versions(request, meta, label, len(tokens), newest),
            finish_reason=reason,
            text=self._text(request, text, tokens, reason),
            cached_tokens=cached_tokens(request, reply) if request.cached_tokens is None else request.cached_tokens,
            latency_s=seconds,
            routed_experts=self._routes(request, meta, len(tokens), is_aborted=reason == "abort")
            if request.params.return_routed_experts
            else None,
        )

    def put_progress(self, request: InFlightRequest, event: dict[str, Any]) -> None:
        """Pass the tokens of an event to the request's stream. Raises EngineError for values that are not SGLang's."""
        assert request.stream is not None
        rows: Any = as_object(event.get("meta_info") or {}, request.where).get("output_token_logprobs") or []
        position = request.stream.position
        try:
            rows = rows[position:]
            tokens, log_probs = [row[1] for row in rows], [row[0] for row in rows]
        except (TypeError, IndexError) as error:
            raise unexpected(request.where, "output_token_logprobs", rows, "a list of [log-prob, id, text]") from error
        self._check_values(request, tokens=tokens, log_probs=log_probs, text="", label="")
        if (num_tokens := position + len(tokens)) > request.params.max_new_tokens:
            raise EngineError(
                f"{request.where} streamed {num_tokens} tokens, but max_new_tokens was "
                f"{request.params.max_new_tokens}; {EXPECTED}"
            )
        request.stream.put(position, tokens, log_probs)

    def _check_values(
        self, request: InFlightRequest, *, tokens: list[Any], log_probs: list[Any], text: Any, label: Any
    ) -> None:
        """Raise EngineError for values of other types or ranges than SGLang's."""
        where = request.where
        if not isinstance(text, str):
            raise unexpected(where, "text", text, "a string")
        if type(label) not in (str, int):
            raise unexpected(where, "weight_version", label, "a string or an integer")
        if set(map(type, tokens)) - {int} or min(tokens, default=0) < 0:
            wrong = next(token for token in tokens if type(token) is not int or token < 0)
            raise unexpected(where, "a token", wrong, "an id, an integer from 0")
        if self.vocab_size is not None and (highest := max(tokens, default=0)) >= self.vocab_size:
            raise unexpected(where, "a token", highest, f"an id of this model, from 0 to {self.vocab_size - 1}")
        if set(map(type, log_probs)) - {float, int} or not _is_finite(log_probs):
            raise EngineError(f"{where} answered a log-prob that is not finite; its weights are broken")
        if (largest := max(log_probs, default=0.0)) > MAX_LOG_PROB:
            raise unexpected(where, "a log-prob", largest, "0 or less")

    def _text(self, request: InFlightRequest, text: str, tokens: list[int], reason: str) -> str:
        """Return the text of an answer, or decode it if the server sent none.

        Raises EngineError for text that its tokens do not have. Servers decode tokens one after the other, with the
        prompt before them, so white space and characters of incomplete UTF-8 may differ; they show special tokens or
        not as the first request of a batch asked for, and ids beyond the tokenizer's as nothing or, like SGLang, as
        the first id; they cut text at a stop string or a stop token, and that of an aborted request anywhere.
        """
        if self.tokenizer is None:
            return text
        skips = request.params.skip_special_tokens
        decoded = self.tokenizer.decode(tokens, skip_special_tokens=skips)
        if not text or text == decoded:
            return text or decoded
        texts = {token: self.tokenizer.decode([token], skip_special_tokens=False) for token in {0, *tokens}}
        special = [texts[token] for token in texts if not self.tokenizer.decode([token], skip_special_tokens=True)]
        special.sort(key=len, reverse=True)
        shown = _squeezed(text, without=special)
        stops = [_squeezed(stop, without=special) for stop in request.params.stop]

        def squeezed(ids: list[int]) -> str:
            assert self.tokenizer is not None
            return _squeezed(self.tokenizer.decode(ids, skip_special_tokens=False), without=special)

        def may_end(rest: str, last: list[int]) -> bool:
            if not rest or reason == "abort":
                return True
            return reason == "stop" and (any(rest.startswith(stop) for stop in stops) or rest == squeezed(last))

        for ids in (tokens, [token if texts[token] else 0 for token in tokens]):
            if (expected := squeezed(ids)).startswith(shown) and may_end(expected[len(shown) :], ids[-1:]):
                return text
        expected = squeezed(tokens)
        at = next((i for i, pair in enumerate(zip(shown, expected, strict=False)) if pair[0] != pair[1]), None)
        at = min(len(shown), len(expected)) if at is None else at
        raise unexpected(
            request.where,
            f"text that its {len(tokens)} tokens do not have, from character {at} without spaces,",
            shown[at : at + SHOWN_CHARS],
            f"{expected[at : at + SHOWN_CHARS]!r}, which this model's tokenizer decodes; does the server have another "
            "tokenizer",
        )

    def _routes(
        self, request: InFlightRequest, meta: dict[str, Any], num_tokens: int, *, is_aborted: bool
    ) -> Routes | None:
        """Parse the routed experts. Raises EngineError if they are missing for some tokens.

        An aborted request may lack some; the request that continues it reports them.
        """
        text = meta.get("routed_experts")
        if self.routing is None:
            raise EngineError("the request asks for routed experts, but this HttpEngine was built without `routing`")
        if text is None:
            if is_aborted:
                return None
            raise EngineError(
                f"{request.where} answered without routed_experts; start the server with "
                "--enable-return-routed-experts. A router in front of it must pass that field through"
            )
        try:
            routes = routes_from_text(text, self.routing, request.where)
        except DataError as error:
            raise EngineError(str(error)) from error
        expected = len(request.prompt) + num_tokens - 1
        if len(routes) != expected and not (is_aborted and len(routes) < expected):
            raise EngineError(
                f"{request.where} answered routed experts of {len(routes)} tokens; expected {expected}, for all but "
                f"the last of {len(request.prompt)} + {num_tokens} tokens"
            )
        return routes


def cached_tokens(request: InFlightRequest, reply: Any) -> int:
    """Tokens that the server took from its cache; 0 if it does not report them. Raises EngineError for other values."""
    try:
        value = reply["meta_info"]["cached_tokens"]
    except (KeyError, TypeError, IndexError):
        return 0
    if value is None:
        return 0
    most = len(request.prompt) + request.params.max_new_tokens  # a retracted request finds its own tokens, too
    if type(value) is not int or not 0 <= value <= most:
        raise unexpected(request.where, "cached_tokens", value, f"an integer from 0 to {most}")
    return value


def abort_reason(reply: Any) -> str:
    """The server's reason for an abort that was not requested."""
    return readable(str(reply["meta_info"]["finish_reason"].get("message", "no reason given")))


def _as_list(value: Any) -> list[Any] | None:
    return cast("list[Any]", value) if isinstance(value, list) else None


def _is_finite(values: list[Any]) -> bool:
    """Whether all values are finite numbers; the sum is ten times faster than testing each."""
    try:
        return math.isfinite(sum(values))
    except TypeError:  # null
        return False


def _check_version(request: InFlightRequest, label: str, newest: int | None) -> None:
    if request.version is None or newest is None or request.version <= _number(label) <= newest:
        return
    assert request.server is not None
    raise EngineError(
        f"{request.server.url} answered with weight version {label!r}, but it was given {request.version} .. {newest}: "
        "it was restarted, or another program updates it; the answer is discarded"
    )


def _number(label: str) -> int:
    """The version number of a label; UNKNOWN_VERSION for a label that furlong did not assign."""
    is_number = label.isascii() and label.isdecimal() and len(label) < 20 and int(label) <= MAX_VERSION
    return int(label) if is_number else UNKNOWN_VERSION


def _versions(request: InFlightRequest, meta: dict[str, Any], label: str, count: int, newest: int | None) -> list[int]:
    """The version of each token. Raises EngineError for anything but one integer per token, up to `newest`."""
    if (value := meta.get("token_versions")) is not None:
        per_token = _as_list(value)
        if per_token is None or len(per_token) != count or set(map(type, per_token)) - {int}:
            raise unexpected(request.where, "token_versions", value, f"a list of {count} integers, one for each token")
        highest = newest if request.version is not None and newest is not None else MAX_VERSION
        if per_token and not 0 <= min(per_token) <= max(per_token) <= highest:
            raise unexpected(request.where, "token_versions", value, f"versions from 0 to {highest}")
        return per_token
    return [_number(label) if request.version is None else request.version] * count


def _squeezed(text: str, *, without: Sequence[str] = ()) -> str:
    """Remove the strings `without`, white space and U+FFFD."""
    for removed in (*without, "\ufffd"):
        text = text.replace(removed, "")
    return "".join(text.split())
