"""`TextDeltas`: the text of a growing list of tokens, decoded piece by piece."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

MAX_WINDOW = 256  # tokens that are decoded again for the next piece of text


class TextDeltas:
    """The text of a growing completion. tokenizer: None for no text.

    `delta` returns only text that cannot change: not an incomplete character, a last token that is one of
    `end_ids`, or a possible start of a stop string. held_chars: at the end of the text; those of stop strings.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        skip_special_tokens: bool = True,
        end_ids: Collection[int] = (),
        stops: Sequence[str] = (),
        held_chars: int = 0,
    ) -> None:
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        self._end_ids, self._stops, self._held_chars = end_ids, stops, held_chars
        self._prefix = self._read = 0
        self._fixed = ""  # of `whole`: the text of the tokens before `_read`
        self._pending = ""  # of `delta`: the end of that text
        self._num_sent = self._sent_chars = 0  # characters of `_pending` and what follows, and of all text

    def whole(self, tokens: list[int]) -> str:
        """Return the text of all tokens; "" without a tokenizer. `tokens` grows from call to call."""
        fixed, open_end = self._new(tokens)
        self._fixed += fixed
        return self._fixed + open_end

    def _new(self, tokens: list[int]) -> tuple[str, str]:
        """Return the text since the last call that later tokens do not change, and what follows it."""
        if self._tokenizer is None:
            return "", ""
        before = self._decode(tokens[self._prefix : self._read])
        after = self._decode(tokens[self._prefix :])
        new = after[len(before) :]
        if (new and not new.endswith("\ufffd")) or len(tokens) - self._prefix > MAX_WINDOW:
            self._prefix, self._read = self._read, len(tokens)
            return new, ""
        return "", new

    def delta(self, tokens: list[int]) -> str:
        """Return the text since the last call, as far as it is final."""
        fixed, open_end = self._new(tokens[:-1] if tokens and tokens[-1] in self._end_ids else tokens)
        self._pending += fixed
        text = (self._pending + open_end)[self._num_sent :]
        matches = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        new = text[: max(0, min([len(text) - self._held_chars, *matches]))].rstrip("\ufffd")
        self._num_sent += len(new)
        self._sent_chars += len(new)
        dropped = min(self._num_sent, len(self._pending))
        self._pending, self._num_sent = self._pending[dropped:], self._num_sent - dropped
        return new

    def rest(self, text: str) -> str:
        """Return the end of the complete text that no `delta` contained."""
        return text[self._sent_chars :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skips)) if tokens else ""
