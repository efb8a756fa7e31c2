"""Structured output: the tokens that may follow in JSON of a schema. llguidance, an optional package, decides it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from furlong.inference.request_error import RequestError

INSTALL = "pip install 'furlong-rl[structured]'"
# As json.dumps writes it. With free whitespace, an untrained policy writes nothing else.
STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammar:
    """What one request may sample next. stop_ids: tokens that end it, once the JSON is complete."""

    def __init__(self, matcher: Any, vocab_size: int, stop_ids: Sequence[int]) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._stop_ids = [token for token in stop_ids if token < vocab_size]

    def banned(self) -> Tensor:
        """Return a mask [V] of the tokens that may not follow."""
        allowed = np.zeros(self._vocab_size, np.bool_)
        if not self._matcher.is_stopped():
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            known = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
            allowed[: len(known)] = known
        allowed[self._stop_ids] = self._matcher.is_accepting()
        if not allowed.any():  # the JSON cannot be continued within the limits of llguidance
            allowed[self._stop_ids] = True
        return torch.from_numpy(~allowed)

    def add(self, token: int) -> None:
        """Note the sampled token."""
        if token not in self._stop_ids:
            self._matcher.consume_token(token)


class Grammars:
    """Compiles schemas for a tokenizer, which takes llguidance about a second for the first one."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._converted: dict[int, Any] = {}  # by the token that ends

    def compile(self, schema: str, stop_ids: Sequence[int]) -> Grammar:
        """Return the grammar of a JSON schema. Raises RequestError if it cannot be compiled."""
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise RequestError(f"structured output needs the package llguidance: {INSTALL}") from None
        if not stop_ids:
            raise RequestError("structured output needs a token that ends it; unset ignore_eos, or set stop_token_ids")
        convert: Callable[..., Any] = from_tokenizer
        end = stop_ids[0]
        if end not in self._converted:
            try:
                size = max(self._vocab_size, len(self._tokenizer))
                self._converted[end] = convert(self._tokenizer, n_vocab=size, eos_token=end)
            except (TypeError, ValueError) as error:
                raise RequestError(f"structured output needs a fast tokenizer of Hugging Face: {error}") from error
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=STYLE)
        except ValueError as error:
            raise RequestError(f"json_schema is not a JSON schema: {error}") from error
        matcher: Any = LLMatcher(self._converted[end], grammar)
        if matcher.is_error():
            raise RequestError(f"json_schema cannot be compiled: {str(matcher.get_error())[:300]}")
        return Grammar(matcher, self._vocab_size, stop_ids)
