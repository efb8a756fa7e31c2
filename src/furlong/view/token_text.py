"""Tokens as text: the piece that each token of a sample adds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

TOKENIZER_FILE = "tokenizer.json"
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
CONTEXT = 4  # earlier tokens that decide about spaces


class Decoder(Protocol):
    """Decodes token ids, special tokens included."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of the ids."""
        ...


def load_decoder(flags: dict[str, Any]) -> Decoder | None:
    """Return the tokenizer of a run's model; None if there is no `tokenizer.json`, for example on another machine.

    `transformers` is not imported, which takes seconds.
    """
    folder = flags.get("hf_checkpoint")
    path = Path(str(folder)) / TOKENIZER_FILE
    if not folder or not path.is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(path))
    return tokenizer


def token_pieces(decoder: Decoder, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds. The pieces of a character of several tokens are with the last of them.

    >>> token_pieces(decoder, [5, 6])  # doctest: +SKIP
    ['Hel', 'lo']
    """
    pieces: list[str] = []
    start = done = 0  # tokens before `done` have their text; `start` is where decoding begins
    for end in range(1, len(ids) + 1):
        before = decoder.decode(ids[start:done], skip_special_tokens=False)
        now = decoder.decode(ids[start:end], skip_special_tokens=False)
        if now.endswith(INCOMPLETE) and end < len(ids) and end - done < CONTEXT:
            pieces.append("")
            continue
        pieces.append(now[len(before) :])
        done = end
        start = max(0, end - CONTEXT)
    return pieces
