"""How long only rewards are waited for: meanwhile no engine has anything to do for this rollout."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from time import perf_counter


class RewardWait:
    """Adds up the seconds in which a sample of a rollout, or of an evaluation, is scored and none is generated.

    A group is scored when its last sample is generated, so this is the time after the last generation, and that
    between two rounds of groups where a filter drops the first. `seconds` is final when all groups have come back.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._generating = self._scoring = 0
        self._last = 0.0

    @contextmanager
    def generating(self) -> Generator[None]:
        """Around the generation of a group: what a custom generate function does belongs to it."""
        self._change(generating=1)
        try:
            yield
        finally:
            self._change(generating=-1)

    @contextmanager
    def scoring(self) -> Generator[None]:
        """Around the reward call of a group."""
        self._change(scoring=1)
        try:
            yield
        finally:
            self._change(scoring=-1)

    def _change(self, generating: int = 0, scoring: int = 0) -> None:
        now = perf_counter()
        if self._scoring and not self._generating:
            self.seconds += now - self._last
        self._generating, self._scoring, self._last = self._generating + generating, self._scoring + scoring, now
