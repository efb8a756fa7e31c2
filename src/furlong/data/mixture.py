"""Prompts of several environments, drawn by weight in an order that depends on the weights and the seed only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from furlong.data.prompt import Prompt
from furlong.data.source import Prompts
from furlong.errors import DataError


@dataclass
class MixturePart:
    """The prompts of one environment. epoch: of its own data. drawn: prompts so far."""

    name: str
    weight: float
    prompts: Prompts
    epoch: int = 0
    drawn: int = 0


def mixture_settings(weights: Mapping[str, float], parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a position in a mixture depends on: each setting of a prompt file by the name of the part."""
    settings: dict[str, dict[str, Any]] = {"weight": dict(weights)}
    for name, own in parts.items():
        for key, value in own.items():
            settings.setdefault(key, {})[name] = value
    return settings


class PromptMixture:
    """Draws each prompt from the part that is furthest behind its weight, and names the part in its metadata.

    Every part has its own epochs: one that ends begins again, in another order if `seed` is given. An epoch of the
    mixture has as many prompts as all parts together, and their rows are their numbers in it. Implements `Prompts`.

    `key`: of the metadata, for the name of the part.
    """

    def __init__(self, parts: Sequence[MixturePart], *, key: str, seed: int | None) -> None:
        self._parts, self._key, self._seed = list(parts), key, seed
        sizes = [part.prompts.size for part in parts]
        if None in sizes:
            raise DataError("a mixture needs prompts of known number in each part; remove --streaming-data")
        self.size: int | None = sum(size for size in sizes if size is not None)
        self.num_long = sum(part.prompts.num_long for part in parts)
        self._taken = 0
        for part in self._parts:
            part.prompts.begin(self._order(part))

    def begin(self, key: int | None) -> None:  # noqa: ARG002  parts have their own epochs
        """Start an epoch: the parts continue where they are."""
        self._taken = 0

    def take(self, n: int) -> list[Prompt]:
        """Return the next `n` prompts of the epoch; fewer at its end."""
        assert self.size is not None
        first, self._taken = self._taken, min(self._taken + n, self.size)
        return [self._draw(row) for row in range(first, self._taken)]

    def _draw(self, row: int) -> Prompt:
        total, weights = sum(part.drawn for part in self._parts), sum(part.weight for part in self._parts)
        behind = [part.weight * (total + 1) / weights - part.drawn for part in self._parts]
        part = self._parts[behind.index(max(behind))]
        part.drawn += 1
        prompts = part.prompts.take(1)
        if not prompts:
            part.epoch += 1
            part.prompts.begin(self._order(part))
            prompts = part.prompts.take(1)
        return dataclasses.replace(prompts[0], row=row, metadata={**prompts[0].metadata, self._key: part.name})

    def _order(self, part: MixturePart) -> int | None:
        return None if self._seed is None else self._seed + part.epoch

    def position(self) -> dict[str, Any]:
        """Return where each part is."""
        parts = {
            part.name: {"epoch": part.epoch, "drawn": part.drawn, "position": part.prompts.position()}
            for part in self._parts
        }
        return {"taken": self._taken, "parts": parts}

    def seek(self, key: int | None, position: dict[str, Any], *, by_row: bool = False) -> None:  # noqa: ARG002
        """Continue each part."""
        self._taken = int(position["taken"])
        for part in self._parts:
            saved = position["parts"][part.name]
            part.epoch, part.drawn = int(saved["epoch"]), int(saved["drawn"])
            part.prompts.seek(self._order(part), saved["position"], by_row=by_row)

    def settings(self) -> dict[str, Any]:
        """Return the settings of each part by its name, and the weights."""
        weights = {part.name: part.weight for part in self._parts}
        return mixture_settings(weights, {part.name: part.prompts.settings() for part in self._parts})

    def close(self) -> None:
        """Close the files of all parts."""
        for part in self._parts:
            part.prompts.close()
