"""Limits of an episode: turns, tokens and time. A limit ends the episode and keeps what was sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, Literal, TypeVar

from furlong.config.sections import RolloutFlags

T = TypeVar("T")

Limit = Literal["turns", "tokens", "turn_time", "tool_time", "episode_time"]

LIMIT = "episode_limit"  # metadata of a sample: the limit that ended its episode
REISSUED = "episode_reissued"  # metadata of a sample: why its episode was started a second time
PROCESS_ENDED = "ProcessEndedError"  # begins REISSUED if the process of the episode's environment ended
SILENT = "ended_without_an_answer"  # metadata of a sample: its agent never asked the policy


PAUSE_CHECK_S = 1.0  # between two looks at the time of an episode that may be paused


class EpisodeLimitError(Exception):
    """The time of an episode, or of something other than the engine that it waits for, is over."""


@dataclass(frozen=True)
class EpisodeLimits:
    """None is no limit. episode_s: whole function. turn_s: one call of the policy. tool_s: time between two calls.

    max_tokens: sampled tokens of all turns.
    """

    episode_s: float | None = None
    turn_s: float | None = None
    tool_s: float | None = None
    max_turns: int | None = None
    max_tokens: int | None = None

    @staticmethod
    def of(flags: RolloutFlags) -> EpisodeLimits:
        """Return the limits that flags set."""
        return EpisodeLimits(
            flags.episode_timeout, flags.turn_timeout, flags.tool_timeout, flags.max_turns, flags.max_episode_tokens
        )

    def replaced(self, values: Mapping[str, Any]) -> EpisodeLimits:
        """Return these limits with those of an environment, which are named like the flags."""
        names = {"episode_timeout": "episode_s", "turn_timeout": "turn_s", "tool_timeout": "tool_s"}
        names["max_episode_tokens"] = "max_tokens"
        return replace(self, **{names.get(name, name): value for name, value in values.items()})


@dataclass
class EpisodeWatch:
    """Compares one episode with its limits. `reached` is the one that ended it."""

    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    reached: Limit | None = None
    num_turns: int = 0
    num_tokens: int = 0
    _started: float = field(default_factory=monotonic)
    _since: float = field(default_factory=monotonic)
    _calls: int = 0
    _held_at: float | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the policy samples no more. The first turn is always sampled."""
        limits = self.limits
        if self.reached is None and limits.max_turns is not None and self.num_turns >= limits.max_turns:
            self.reached = "turns"
        if self.reached is None and limits.max_tokens is not None and self.num_tokens >= limits.max_tokens:
            self.reached = "tokens"
        return self.reached is not None

    @property
    def room(self) -> int | None:
        """Number of tokens that may still be sampled; None without a limit."""
        return None if self.limits.max_tokens is None else self.limits.max_tokens - self.num_tokens

    @contextmanager
    def turn(self) -> Generator[None]:
        """Wrap one call of the policy."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._since = monotonic()

    def sampled(self, num_tokens: int) -> None:
        """Count one turn."""
        self.num_turns += 1
        self.num_tokens += num_tokens

    @property
    def idle_s(self) -> float:
        """Seconds since the last call of the policy; 0 during one."""
        return 0.0 if self._calls else self._now() - self._since

    def hold(self) -> None:
        """Let no time pass until `release`: the episode waits for others, such as for a free thread."""
        if self._held_at is None:
            self._held_at = monotonic()

    def release(self) -> None:
        """Continue to count the time of the episode, without that since `hold`."""
        if self._held_at is not None:
            waited_s, self._held_at = monotonic() - self._held_at, None
            self._started += waited_s
            self._since += waited_s

    def pause(self) -> None:
        """Let no time pass until `restart`."""
        self._started = self._since = float("inf")

    def restart(self) -> None:
        """Begin to count the time of the episode."""
        self._started = self._since = monotonic()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await the function of the episode. Raises EpisodeLimitError when its time is over, after it has ended."""
        if self.limits.episode_s is None and self.limits.tool_s is None:
            return await work
        self._started = self._since = monotonic()
        task = asyncio.create_task(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=min(self._check(), PAUSE_CHECK_S))
                if not task.done() and self._check() <= 0:
                    raise EpisodeLimitError(self.reached)
            return task.result()
        finally:
            while not task.done():  # a function may need several, if it handles the first one
                task.cancel()
                await asyncio.wait({task}, timeout=1.0)

    def _check(self) -> float:
        """Return the seconds until a limit may be reached; at most 0, with `reached` set, if it is."""
        now, left = self._now(), float("inf")
        if self.limits.episode_s is not None:
            left = self._started + self.limits.episode_s - now
            if left <= 0:
                self.reached = "episode_time"
        if self.limits.tool_s is not None and left > 0:
            tool_left = self.limits.tool_s if self._calls else self._since + self.limits.tool_s - now
            if tool_left <= 0:
                self.reached = "tool_time"
            left = min(left, tool_left)
        return left

    def _now(self) -> float:
        return monotonic() if self._held_at is None else self._held_at
