"""`ReplyStream`: an answer of the policy while it is sampled, for clients that asked for a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from furlong.chat.parsers.growing_reply import final_parts
from furlong.chat.parsers.parsed_reply import ParsedReply, ToolParser
from furlong.chat.text_deltas import TextDeltas
from furlong.core.token_stream import TokenStream

if TYPE_CHECKING:  # imports torch
    from furlong.interfaces import Completion


@dataclass(frozen=True)
class ReplyPiece:
    """What an answer grew by: tokens with their log-probs, and the text that is final by now.

    texts: of the tokens one by one, if they are wanted.
    """

    reasoning: str = ""
    content: str = ""
    tokens: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])
    texts: list[str] = field(default_factory=list[str])

    def joined(self, other: ReplyPiece) -> ReplyPiece:
        """Return one piece of two that follow each other."""
        return ReplyPiece(
            self.reasoning + other.reasoning,
            self.content + other.content,
            [*self.tokens, *other.tokens],
            [*self.log_probs, *other.log_probs],
            [*self.texts, *other.texts],
        )


class ReplyStream:
    """Collects the pieces of one answer, for any number of readers. `on_change` is called after each piece.

    The text of tool calls is in no piece: calls are sent when the answer is complete. `response_id` and `prompt_tokens`
    are set when the engine is called. wants_texts: pieces have the text of each token.
    """

    def __init__(self, on_change: Callable[[], None], *, wants_texts: bool = False) -> None:
        self.pieces: list[ReplyPiece] = []
        self.tokens = TokenStream(self._grow)
        self.response_id, self.prompt_tokens = "", 0
        self._on_change, self._wants_texts = on_change, wants_texts
        self._decode: Callable[[list[int]], str] = str
        self._num_tokens = 0
        self._sent = ("", "")  # reasoning and content
        self._deltas = TextDeltas(None)
        self._parser: ToolParser | None = None
        self._has_tools = self._is_opened = False

    def begin(
        self,
        response_id: str,
        prompt_tokens: int,
        *,
        deltas: TextDeltas,
        decode: Callable[[list[int]], str],
        parser: ToolParser | None,
        has_tools: bool,
        is_opened: bool,
    ) -> None:
        """Set how tokens become text. is_opened: the prompt ends with an open `<think>`."""
        self.response_id, self.prompt_tokens = response_id, prompt_tokens
        self._deltas, self._decode, self._parser = deltas, decode, parser
        self._has_tools, self._is_opened = has_tools, is_opened

    def stop(self) -> None:
        """End the answer: its last client is gone."""
        self.tokens.stop()

    def finish(self, parsed: ParsedReply, completion: Completion) -> None:
        """Add the rest of the answer."""
        self._add((parsed.reasoning or "", parsed.content), completion.tokens, completion.log_probs)

    def _grow(self) -> None:
        text = self._deltas.final(self.tokens.tokens)
        parts = final_parts(text, self._parser, has_tools=self._has_tools, opened=self._is_opened)
        self._add(parts, self.tokens.tokens, self.tokens.log_probs)

    def _add(self, parts: tuple[str, str], tokens: list[int], log_probs: list[float]) -> None:
        old, new = self._sent, parts
        rests = [now[len(before) :] if now.startswith(before) else "" for now, before in zip(new, old, strict=True)]
        self._sent = (old[0] + rests[0], old[1] + rests[1])
        start, self._num_tokens = self._num_tokens, max(self._num_tokens, len(tokens))
        texts = [self._decode([token]) for token in tokens[start:]] if self._wants_texts else []
        self.pieces.append(ReplyPiece(rests[0], rests[1], tokens[start:], log_probs[start:], texts))
        self._on_change()


class Broadcast:
    """Wakes all that wait for the next change. For one event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake those that wait."""
        self._event.set()
        self._event = asyncio.Event()

    @property
    def next(self) -> asyncio.Event:
        """An event that the next change sets."""
        return self._event
