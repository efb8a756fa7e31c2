"""The KV cache of prompts that finished requests leave for the next call of their session."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from furlong.core.routing import Routes
from furlong.inference.embedded.decode_steps import SlotCache
from furlong.inference.embedded.request import TokenIds

GROWTH = 1.5  # of the memory of a prompt that no longer fits
MAX_BRANCHES = 8  # prompts of one session, such as those of its roles


@dataclass(eq=False)
class StoredPrompt:
    """Keys and values of a prompt by layer, each [K, capacity, D], and its routed experts if they are recorded."""

    key: str
    tokens: NDArray[np.int64]
    layers: list[tuple[Tensor, Tensor]]
    routes: Routes | None

    @property
    def capacity(self) -> int:
        """Positions for which memory is allocated."""
        return self.layers[0][0].shape[1] if self.layers else 0

    def shared_with(self, tokens: NDArray[np.int64]) -> int:
        """Length of the longest common prefix."""
        count = min(len(self.tokens), len(tokens))
        differs = np.flatnonzero(self.tokens[:count] != tokens[:count])
        return int(differs[0]) if len(differs) else count


class PrefixCache:
    """Prompts by the key of their session, at most `max_tokens` positions; the least recently used are dropped first.

    A prompt that continues a stored one replaces it, others are branches. Only what prefills computed is stored. The
    next prompt of a session computes the sampled tokens again, together with those that follow, because the sums of
    decode steps differ in the last bits.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0  # positions of allocated memory
        self._prompts: OrderedDict[int, StoredPrompt] = OrderedDict()  # by id, the least recently used first
        self._by_key: dict[str, list[StoredPrompt]] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def clear(self) -> None:
        """Drop everything."""
        self._prompts.clear()
        self._by_key.clear()
        self.num_tokens = 0

    def match(self, key: str, prompt: Sequence[int]) -> int:
        """Length of the longest prefix of `prompt` that `key` stores; less than the whole prompt."""
        _, length = self._longest(key, _array(prompt))
        return min(length, len(prompt) - 1)

    def _longest(self, key: str, tokens: NDArray[np.int64]) -> tuple[StoredPrompt | None, int]:
        """The stored prompt that shares the longest prefix, and its length; None if there is none."""
        best: StoredPrompt | None = None
        length = 0
        for stored in self._by_key.get(key, ()):
            if (shared := stored.shared_with(tokens)) > length:
                best, length = stored, shared
        if best is not None:
            self._prompts.move_to_end(id(best))
        return best, length

    def insert(self, key: str, prompt: Sequence[int], length: int, cache: SlotCache, slot: int) -> Routes | None:
        """Write the first `length` positions of a matched prompt into a slot; return their routed experts."""
        stored, _ = self._longest(key, _array(prompt)[:length])
        assert stored is not None
        for index, (keys, values) in enumerate(stored.layers):
            slot_keys, slot_values = cache.layer(index, keys[None], values[None])
            slot_keys[slot, :, :length] = keys[:, :length]
            slot_values[slot, :, :length] = values[:, :length]
        return None if stored.routes is None else stored.routes[:length]

    def store(self, key: str, prompt: Sequence[int], cache: SlotCache, slot: int, routes: Routes | None) -> None:
        """Store the prompt in `slot` under `key`, copying only what follows the stored prompt that it continues."""
        length, tokens = len(prompt), _array(prompt)
        known, shared = self._longest(key, tokens)
        if known is not None and shared == length:
            return
        layers: list[tuple[Tensor, Tensor]] = []
        if known is not None and shared == len(known.tokens):
            self._drop(known)
            layers = known.layers
        else:
            shared = 0
        if length > self.max_tokens:
            return
        capacity = layers[0][0].shape[1] if layers else 0
        if capacity < length:
            capacity = min(max(length, int(GROWTH * capacity)), self.max_tokens)
            layers = [
                (_longer(old, shared, like, capacity), _longer(old_values, shared, like_values, capacity))
                for (old, old_values), (like, like_values) in zip(
                    layers or [(None, None)] * len(cache.layers), cache.layers, strict=True
                )
            ]
        for (keys, values), (slot_keys, slot_values) in zip(layers, cache.layers, strict=True):
            keys[:, shared:length] = slot_keys[slot, :, shared:length]
            values[:, shared:length] = slot_values[slot, :, shared:length]
        self._add(StoredPrompt(key, tokens, layers, routes))

    def _add(self, stored: StoredPrompt) -> None:
        branches = self._by_key.setdefault(stored.key, [])
        if len(branches) == MAX_BRANCHES:
            self._drop(next(each for each in self._prompts.values() if each.key == stored.key))
            branches = self._by_key.setdefault(stored.key, [])
        branches.append(stored)
        self._prompts[id(stored)] = stored
        self.num_tokens += stored.capacity
        while self.num_tokens > self.max_tokens:
            self._drop(next(iter(self._prompts.values())))

    def _drop(self, stored: StoredPrompt) -> None:
        del self._prompts[id(stored)]
        self.num_tokens -= stored.capacity
        branches = self._by_key[stored.key]
        branches.remove(stored)
        if not branches:
            del self._by_key[stored.key]


def _array(ids: Sequence[int]) -> NDArray[np.int64]:
    return ids.array if isinstance(ids, TokenIds) else np.asarray(ids, np.int64)


def _longer(old: Tensor | None, known: int, like: Tensor, capacity: int) -> Tensor:
    """Memory [K, capacity, D] for a layer of the cache [S, K, L, D], with the `known` first positions of `old`."""
    new = like.new_empty(like.shape[1], capacity, like.shape[3])
    if old is not None:
        new[:, :known] = old[:, :known]
    return new
