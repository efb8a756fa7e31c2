"""Requests in the engine: their state, stop conditions, random numbers, and the buffer of their new tokens."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from furlong.core.routing import Routes, RoutingShape
from furlong.core.token_stream import TextTokenizer
from furlong.errors import EngineError
from furlong.inference.embedded.structured import Grammar
from furlong.inference.request_error import RequestError
from furlong.interfaces import Completion, FinishReason, SamplingParams

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6  # beyond them, float32 logits become infinite or all equal
MAX_INT32 = (1 << 31) - 1


@dataclass(frozen=True)
class Finished:
    """A completion, and the stop string or stop token id that ended it (None if none did)."""

    completion: Completion
    matched: int | str | None = None
    num_retractions: int = 0


@dataclass(frozen=True)
class Progress:
    """Tokens generated since the last report."""

    tokens: list[int]
    log_probs: list[float]
    version: int


class TokenIds(tuple[int, ...]):
    """Token ids as keys of dicts. A long prompt is hashed, and converted to an array, only once."""

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return super().__hash__()

    @functools.cached_property
    def array(self) -> NDArray[np.int64]:
        """The ids as an array."""
        return np.asarray(tuple(self), np.int64)


@dataclass(eq=False)
class Request:
    """A request and the tokens generated so far.

    limit: Maximum response tokens within the context length.
    key: 128 bits that determine its random numbers.
    deliver: Called with the result or an error, on the engine thread.
    report: Called with new tokens, on the engine thread.
    tokens: Excludes those that are still in the batch's `TokenBuffer`.
    """

    rid: str
    prompt: TokenIds
    params: SamplingParams
    stop_ids: tuple[int, ...]
    limit: int
    key: tuple[int, int]
    deliver: Callable[[Finished | EngineError], None]
    report: Callable[[Progress], None] | None = None
    session: str | None = None
    grammar: Grammar | None = None
    tokens: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    cached_tokens: int = 0
    num_retractions: int = 0
    routes: list[Routes] = field(default_factory=list[Routes])  # of the processed tokens, in pieces
    num_routed: int = 0
    started_s: float = field(default_factory=time.perf_counter)

    @property
    def prefix(self) -> TokenIds:
        """The tokens that must be cached before the next one: the prompt and the response so far."""
        return TokenIds((*self.prompt, *self.tokens)) if self.tokens else self.prompt

    def add_routes(self, routes: Routes) -> None:
        """Append the routed experts of the next tokens."""
        self.routes.append(routes)
        self.num_routed += len(routes)

    def finish(
        self, reason: FinishReason, tokenizer: TextTokenizer | None, matched: int | str | None = None
    ) -> Finished:
        """Build the result."""
        text = "" if tokenizer is None else self._text(tokenizer, matched)
        completion = Completion(
            tokens=self.tokens,
            log_probs=self.log_probs,
            versions=self.versions,
            finish_reason=reason,
            text=text,
            cached_tokens=self.cached_tokens,
            latency_s=time.perf_counter() - self.started_s,
            routed_experts=np.concatenate(self.routes) if self.params.return_routed_experts and self.routes else None,
        )
        return Finished(completion, matched, self.num_retractions)

    def _text(self, tokenizer: TextTokenizer, matched: int | str | None) -> str:
        trim = not self.params.no_stop_trim
        shown = self.tokens[:-1] if trim and isinstance(matched, int) else self.tokens
        text = tokenizer.decode(shown, skip_special_tokens=self.params.skip_special_tokens)
        if trim and isinstance(matched, str) and matched in text:
            text = text[: text.index(matched)]
        return text


def uniforms(key: tuple[int, int], start: int, count: int) -> NDArray[np.float64]:
    """Random numbers of tokens `start` to `start + count`, from a counter-based generator with random access."""
    counter, skipped = divmod(start, 4)  # Philox yields four numbers per counter value
    philox = np.random.Philox(counter=counter, key=np.array(key, np.uint64))
    return np.random.Generator(philox).random(skipped + count)[skipped:]


class StopStrings:
    """Finds stop strings at the end of a response. Caches the text of single tokens."""

    def __init__(self, tokenizer: TextTokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}

    def match(self, params: SamplingParams, before: list[int], recent: NDArray[np.int64]) -> str | None:
        """The stop string completed by the last token of the response `before` + `recent`; None if there is none."""
        assert self._tokenizer is not None
        last = self._piece(int(recent[-1]))
        if not any(stop[-1].isspace() or stop[-1] in last or "\ufffd" in last for stop in params.stop):
            return None
        tail = max(len(stop.encode()) for stop in params.stop) + 8
        tokens: list[int] = recent[-tail:].tolist()
        if len(tokens) < tail and before:
            tokens = before[len(tokens) - tail :] + tokens
        text = self._tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens)
        matches = [(text.index(stop), stop) for stop in params.stop if stop in text]
        return min(matches)[1] if matches else None

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            assert self._tokenizer is not None
            self._pieces[token] = self._tokenizer.decode([token])
        return self._pieces[token]


def check_request(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    tokenizer: TextTokenizer | None,
    context_len: int,
    vocab_size: int,
    records_routes: bool,
) -> None:
    """Raise RequestError naming each invalid parameter, or what is wrong with the prompt."""
    problems: list[str] = []
    if params.temperature != 0 and not MIN_TEMPERATURE <= params.temperature <= MAX_TEMPERATURE:
        problems.append(
            f"temperature is {params.temperature}, must be >= 0: 0, or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
        )
    if not 0 < params.top_p <= 1:
        problems.append(f"top_p is {params.top_p}, must be in (0, 1]")
    if params.top_k != -1 and params.top_k < 1:
        problems.append(f"top_k is {params.top_k}, must be -1 (off) or >= 1")
    if not 0 <= params.min_p <= 1:
        problems.append(f"min_p is {params.min_p}, must be in [0, 1]")
    if params.top_k > MAX_INT32:
        problems.append(f"top_k is {params.top_k}, must be at most {MAX_INT32}")
    if not 0 <= params.max_new_tokens <= MAX_INT32:
        problems.append(f"max_new_tokens is {params.max_new_tokens}, must be >= 0 and at most {MAX_INT32}")
    if params.stop_token_ids and not 0 <= min(params.stop_token_ids) <= max(params.stop_token_ids) <= MAX_INT32:
        problems.append(
            f"stop_token_ids are from {min(params.stop_token_ids)} to {max(params.stop_token_ids)}, must be in 0 .. "
            f"{MAX_INT32}"
        )
    if not 0 <= params.min_new_tokens <= params.max_new_tokens:
        problems.append(
            f"min_new_tokens is {params.min_new_tokens}, must be in 0 .. max_new_tokens {params.max_new_tokens}"
        )
    if params.json_schema is not None and params.min_new_tokens:
        problems.append("min_new_tokens cannot be combined with json_schema, which decides where the completion ends")
    if any(not stop for stop in params.stop):
        problems.append("a stop string is empty")
    if params.stop and tokenizer is None:
        problems.append("stop strings need a tokenizer; pass one to the engine, or use stop_token_ids")
    if problems:
        raise RequestError("invalid sampling parameters: " + "; ".join(problems))
    if params.return_routed_experts and not records_routes:
        raise RequestError(
            "return_routed_experts is set, but this engine does not record them; start it with "
            "--enable-return-routed-experts"
        )
    if not prompt:
        raise RequestError("the prompt is empty; it needs at least one token")
    if len(prompt) >= context_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens and max_new_tokens is {params.max_new_tokens}, but the context "
            f"length is {context_len}; shorten the prompt or raise the context length"
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise RequestError(
            f"the prompt has token ids from {min(prompt)} to {max(prompt)}, but the model's vocabulary is 0 .. "
            f"{vocab_size - 1}; tokenizer and model do not match"
        )


ROWS = 256


class TokenBuffer:
    """Arrays [row, slot] of tokens, log-probs, random numbers and routes, one row for each decode step.

    Rows are numbered by one clock for all slots, so a step writes whole rows and little else. A new request samples its
    first token in the newest row. Rows below `clock` are written. The tokens of slot s are in rows `starts[s]` to
    `clock`. It must stop when the clock reaches `ends[s]`, and may stop earlier from `may_stop[s]` on.
    """

    def __init__(self, slots: int, routing: RoutingShape | None) -> None:
        self.clock = 1
        self.tokens = np.zeros((ROWS, slots), np.int64)
        self.log_probs = np.zeros((ROWS, slots), np.float32)
        self._uniforms = np.zeros((ROWS, slots))
        sizes = (0, 0) if routing is None else (routing.num_layers, routing.top_k)
        self.routes = np.zeros((ROWS, slots, *sizes), np.int16)
        self.starts = np.zeros(slots, np.int64)
        self.ends = np.zeros(slots, np.int64)
        self.may_stop = np.zeros(slots, np.int64)
        self.has_stop_strings = np.zeros(slots, np.bool_)
        self.stop_ids = np.full((0, slots), -1, np.int64)
        self._before = np.zeros(slots, np.int64)  # response tokens in earlier rows
        self._reported = np.zeros(slots, np.int64)  # the row up to which tokens were reported
        self._routed = np.zeros(slots, np.int64)  # the first row with routes

    @property
    def is_full(self) -> bool:
        """Whether there is no row left for another step."""
        return self.clock == ROWS

    def open(self, slot: int, request: Request) -> None:
        """Assign a slot to a request whose next token is sampled in the newest row."""
        row, num_tokens = self.clock - 1, len(request.tokens)
        self.starts[slot] = self._reported[slot] = row
        self._before[slot] = num_tokens
        self._routed[slot] = self.clock
        self.ends[slot] = row + request.limit - num_tokens
        self.may_stop[slot] = row + request.params.min_new_tokens - num_tokens
        self.has_stop_strings[slot] = bool(request.params.stop)
        count = len(request.stop_ids)
        if count > len(self.stop_ids):
            more = np.full((count - len(self.stop_ids), self.stop_ids.shape[1]), -1, np.int64)
            self.stop_ids = np.concatenate([self.stop_ids, more])
        self.stop_ids[:count, slot] = request.stop_ids
        self.stop_ids[count:, slot] = -1
        self._draw_uniforms(slot, request, row)

    def rewind(self, requests: list[Request]) -> None:
        """Continue with the first row, after `take` of every slot; slot i has `requests[i]`."""
        passed, n = self.clock - 1, len(requests)
        for array in (self.starts, self.ends, self.may_stop, self._reported, self._routed):
            array[:n] -= passed
        self.clock = 1
        for slot, request in enumerate(requests):
            self._draw_uniforms(slot, request, 1)

    def _draw_uniforms(self, slot: int, request: Request, row: int) -> None:
        count = min(ROWS, int(self.ends[slot])) - row
        self._uniforms[row : row + count, slot] = uniforms(request.key, self.num_tokens(slot, row), count)

    def num_tokens(self, slot: int, row: int) -> int:
        """Number of response tokens of a slot before `row`."""
        return int(self._before[slot]) + row - int(self.starts[slot])

    def uniforms(self, row: int, slots: slice) -> Tensor:
        """Random numbers for the tokens of a row."""
        return torch.from_numpy(self._uniforms[row, slots])

    def response(self, slot: int) -> NDArray[np.int64]:
        """Tokens of a slot since the last `take`."""
        return self.tokens[self.starts[slot] : self.clock, slot]

    def take(self, slot: int) -> tuple[list[int], list[float], Routes]:
        """Remove and return a slot's tokens, log-probs and routes of the processed tokens."""
        rows = slice(int(self.starts[slot]), self.clock)
        routes = self.routes[int(self._routed[slot]) : self.clock, slot].copy()
        self._before[slot] += self.clock - rows.start
        self.starts[slot] = self._reported[slot] = self._routed[slot] = self.clock
        return self.tokens[rows, slot].tolist(), self.log_probs[rows, slot].tolist(), routes

    def unreported(self, slot: int) -> tuple[list[int], list[float]]:
        """Tokens and log-probs since the last call."""
        rows = slice(int(self._reported[slot]), self.clock)
        self._reported[slot] = self.clock
        return self.tokens[rows, slot].tolist(), self.log_probs[rows, slot].tolist()

    def move(self, source: int, target: int) -> None:
        """Move the contents of slot `source` to slot `target`."""
        arrays = (self.starts, self.ends, self.may_stop, self.has_stop_strings)
        for array in (*arrays, self._before, self._reported, self._routed):
            array[target] = array[source]
        self.stop_ids[:, target] = self.stop_ids[:, source]
        rows = slice(int(self.starts[source]), self.clock)
        for buffer in (self.tokens, self.log_probs, self.routes):
            buffer[rows, target] = buffer[rows, source]
        self._uniforms[self.clock :, target] = self._uniforms[self.clock :, source]
