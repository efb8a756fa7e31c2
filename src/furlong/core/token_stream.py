"""`TokenStream`: the tokens of one completion while an engine samples them, and the protocol of what decodes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from furlong.errors import EngineError


class TextTokenizer(Protocol):
    """A tokenizer that can decode."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of `token_ids`."""
        ...


class TokenStream:
    """Receives tokens from an engine, and can end the completion early. For one event loop.

    `on_tokens` is called after new tokens arrived. A completion may take several requests of the engine: one that a
    weight update aborted is continued from its tokens, and one whose engine was lost is sent again.
    """

    def __init__(self, on_tokens: Callable[[], None] = lambda: None) -> None:
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.is_stopped = False
        self._on_tokens = on_tokens
        self._start = 0  # tokens before the current request of the engine
        self._abort: Callable[[], None] | None = None

    @property
    def position(self) -> int:
        """Number of the next token in the completion of the current request."""
        return max(0, len(self.tokens) - self._start)

    def put(self, position: int, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        """Add tokens of the current request, the first of which is number `position` of its completion.

        Tokens that are already known are compared. Raises EngineError if they differ, or if tokens are missing.
        """
        at = self._start + position
        num_known = max(0, min(len(self.tokens) - at, len(tokens)))
        if at > len(self.tokens) or self.tokens[at : at + num_known] != list(tokens[:num_known]):
            raise EngineError(
                f"tokens {at} to {at + len(tokens) - 1} of a streamed answer do not continue the {len(self.tokens)} "
                "that the client has: an engine was lost, and another one samples differently. Do not stream, or set a "
                "sampling seed"
            )
        if num_known < len(tokens):
            self.tokens += tokens[num_known:]
            self.log_probs += log_probs[num_known:]
            self._on_tokens()

    def begin_request(self, num_tokens: int) -> None:
        """Note that the next request of the engine continues the first `num_tokens` tokens."""
        self._start = num_tokens

    def set_abort(self, abort: Callable[[], None] | None) -> None:
        """Set what ends the current request in the engine; it is called at once if the stream was stopped."""
        self._abort = abort
        if self.is_stopped and abort is not None:
            abort()

    def stop(self) -> None:
        """End the completion: the engine aborts the request, which returns the tokens it has."""
        if not self.is_stopped:
            self.is_stopped = True
            if self._abort is not None:
                self._abort()
