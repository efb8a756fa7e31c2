"""Log-probs of a text under one tokenizer as those of its tokens under another.

Both cut the same bytes. Tokens between two common cuts form a group on each side, and the log-prob of the group is that
of its bytes under either model. It is shared among the group's tokens in proportion to their log-probs under the
policy, so the log-ratio of each token has the sign of that of the group, and their sum is exact.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from furlong.errors import ConfigError

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_of_character() -> dict[str, int]:
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenBytes:
    """The bytes of each token of a tokenizer. Raises ConfigError for one that is not of the library `tokenizers`."""

    def __init__(self, tokenizer: Any) -> None:
        if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
            raise ConfigError(
                f"{type(tokenizer).__name__} does not tell which bytes its tokens cover; use a tokenizer with a "
                "tokenizer.json"
            )
        decoder = json.dumps(json.loads(backend.to_str()).get("decoder"), ensure_ascii=False)
        self._bytes = _byte_of_character() if "ByteLevel" in decoder else None
        self._has_marks = "▁" in decoder
        self._added = {number: str(token).encode() for number, token in tokenizer.added_tokens_decoder.items()}
        self._tokenizer = tokenizer

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token; b"" for ids that the tokenizer does not have."""
        names: list[str | None] = self._tokenizer.convert_ids_to_tokens(list(ids))
        return [self._added.get(number) or self._piece(name) for number, name in zip(ids, names, strict=True)]

    def _piece(self, name: str | None) -> bytes:
        if name is None:
            return b""
        if self._bytes is not None and all(letter in self._bytes for letter in name):
            return bytes(self._bytes[letter] for letter in name)
        if self._bytes is None and (byte := _BYTE.fullmatch(name)):
            return bytes([int(byte[1], 16)])
        return (name.replace("▁", " ") if self._has_marks else name).encode()


def common_groups(left: Sequence[bytes], right: Sequence[bytes]) -> list[tuple[slice, slice]]:
    """Return the shortest groups of tokens that cover the same bytes on both sides, up to the first different byte."""
    ends, others = list(accumulate(map(len, left))), list(accumulate(map(len, right)))
    pairs = enumerate(zip(b"".join(left), b"".join(right), strict=False))
    same = next((i for i, (one, other) in pairs if one != other), min(sum(map(len, left)), sum(map(len, right))))
    cuts = [0, *sorted(end for end in {*ends} & {*others} if 0 < end <= same)]
    places = [(bisect_right(ends, cut), bisect_right(others, cut)) for cut in cuts]
    places[0] = (0, 0)
    return [(slice(i, k), slice(j, n)) for (i, j), (k, n) in pairwise(places)]


def shared_log_probs(
    groups: Sequence[tuple[slice, slice]], teacher: NDArray[np.float32], policy: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Return log-probs per token of the policy, and 1 for those in a group; the others are 0.

    policy: log-probs of its tokens; zeros share a group's log-prob evenly.
    """
    log_probs, mask = np.zeros(len(policy), np.float32), np.zeros(len(policy), np.uint8)
    for own, theirs in groups:
        weights = policy[own].astype(np.float64)
        weights = weights / weights.sum() if weights.sum() else np.full(len(weights), 1 / len(weights))
        log_probs[own], mask[own] = teacher[theirs].sum(dtype=np.float64) * weights, 1
    return log_probs, mask
