"""Episodes: their limits, permits, and how busy episodes and engine are.

An episode is the generation of one sample: one turn, or a custom generate function. A limit ends it and keeps what was
sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import Any, Literal, TypeVar

from furlong.config.sections import RolloutFlags
from furlong.core.metric import Metrics, maximum, mean
from furlong.core.token_stream import TokenStream
from furlong.interfaces import Completion, Engine, SamplingParams

T = TypeVar("T")

Limit = Literal["turns", "tokens", "turn_time", "tool_time", "episode_time"]

LIMIT = "episode_limit"  # metadata of a sample: the limit that ended its episode
REISSUED = "episode_reissued"  # metadata of a sample: why its episode was started a second time
PROCESS_ENDED = "ProcessEndedError"  # begins REISSUED if the process of the episode's environment ended
SILENT = "ended_without_an_answer"  # metadata of a sample: its agent never asked the policy

PAUSE_CHECK_S = 1.0  # between two looks at the time of an episode that may be paused
MIN_BLOCK_S = 0.05  # a step of user code that blocks the event loop for less is normal


class EpisodeLimitError(Exception):
    """The time of an episode, or of something other than the engine that it waits for, is over."""


@dataclass
class EpisodeWatch:
    """Compares one episode with the limits in flags. `reached` is the one that ended it.

    --episode-timeout limits the whole function, --turn-timeout one call of the policy, --tool-timeout the time between
    two calls, --max-episode-tokens the sampled tokens of all turns. timeout_s: --generate-timeout, after which the
    function has failed: `is_overdue`.
    """

    limits: RolloutFlags = field(default_factory=RolloutFlags)
    timeout_s: float | None = None
    reached: Limit | None = None
    is_overdue: bool = False
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
        if self.reached is None and self.room is not None and self.room <= 0:
            self.reached = "tokens"
        return self.reached is not None

    @property
    def room(self) -> int | None:
        """Number of tokens that may still be sampled; None without a limit."""
        limit = self.limits.max_episode_tokens
        return None if limit is None else limit - self.num_tokens

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

    @contextmanager
    def held(self) -> Generator[Callable[[], None]]:
        """Let no time pass until the function that it yields is called, or the block ends.

        The episode waits for others, such as for a free thread.
        """
        if self._held_at is None:
            self._held_at = monotonic()
        try:
            yield self.release
        finally:
            self.release()

    def release(self) -> None:
        """Continue to count the time of the episode, without that in which it was held."""
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
        if self.timeout_s is self.limits.episode_timeout is self.limits.tool_timeout is None:
            return await work
        self.restart()
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
        if self.limits.episode_timeout is not None:
            left = self._started + self.limits.episode_timeout - now
            if left <= 0:
                self.reached = "episode_time"
        if (tool_s := self.limits.tool_timeout) is not None and left > 0:
            tool_left = tool_s if self._calls else self._since + tool_s - now
            if tool_left <= 0:
                self.reached = "tool_time"
            left = min(left, tool_left)
        if self.timeout_s is not None and left > 0:
            left = min(left, self._started + self.timeout_s - now)
            self.is_overdue = left <= 0
        return left

    def _now(self) -> float:
        return monotonic() if self._held_at is None else self._held_at


class EpisodeLoad:
    """Lets at most `max_episodes` episodes run at a time, in the order in which they ask, and measures the load.

    All episodes of a run share one: those of training and of evaluations. For one event loop. scoring: permits, of the
    same number, for episodes that have ended and are scored in their environments.
    """

    def __init__(self, max_episodes: int | None = None) -> None:
        self._permits = None if max_episodes is None else asyncio.Semaphore(max_episodes)
        self.scoring = contextlib.nullcontext() if max_episodes is None else asyncio.Semaphore(max_episodes)
        self._episodes = self._requests = self._most = 0
        self._since = self._last = perf_counter()
        self._episode_s = self._waiting_s = self._idle_s = self._blocked_s = 0.0
        self._repeated = self._cached = 0

    async def begin_episode(self) -> None:
        """Wait for a permit, and keep it until `end_episode`."""
        if self._permits is not None:
            await self._permits.acquire()
        self._change(1, 0)

    def end_episode(self) -> None:
        """Return the permit of an episode."""
        self._change(-1, 0)
        if self._permits is not None:
            self._permits.release()

    async def complete(
        self,
        engine: Engine,
        ids: list[int],
        params: SamplingParams,
        *,
        session: str | None,
        stream: TokenStream | None = None,
    ) -> Completion:
        """Send a request of an episode to the engine. stream: receives the tokens as they are sampled."""
        self._change(0, 1)
        try:
            if stream is None:
                return await engine.generate(ids, params, session=session)
            return await engine.stream(ids, params, stream, session=session)
        finally:
            self._change(0, -1)

    def prefixes(self, repeated: int, cached: int) -> None:
        """Count prompt tokens that an earlier prompt of the episode has too, and those of them that were cached."""
        self._repeated, self._cached = self._repeated + repeated, self._cached + cached

    async def timed(self, function: Callable[[], Awaitable[T]]) -> T:
        """Await `function()`, a user's, and count the time in which its steps block the event loop."""

        async def call() -> T:
            return await function()

        return await _Steps(call(), self._count_step)

    def take_blocked(self) -> float:
        """Return the seconds in which user functions blocked the event loop since the last call."""
        seconds, self._blocked_s = self._blocked_s, 0.0
        return seconds

    def take(self) -> Metrics:
        """Return the load since the last call.

        `perf/episodes_in_flight` and `_max`: episodes running at a time. `perf/engine_idle_frac`: fraction of the time
        without any request. `perf/env_wait_frac`: fraction of the time of episodes in which they wait for something
        else than the engine; absent without episodes. `rollout/prefix_cache_hit_frac`: fraction of the prompt tokens
        that turns repeat under the same weights and that the engine had cached; absent without any.
        """
        self._change(0, 0)
        seconds = self._last - self._since
        if not seconds:
            return {}
        metrics = {
            "perf/episodes_in_flight": mean(self._episode_s / seconds, seconds),
            "perf/episodes_in_flight_max": maximum(float(self._most)),
            "perf/engine_idle_frac": mean(self._idle_s / seconds, seconds),
        }
        if self._episode_s:
            metrics["perf/env_wait_frac"] = mean(self._waiting_s / self._episode_s, self._episode_s)
        if self._repeated:
            metrics["rollout/prefix_cache_hit_frac"] = mean(self._cached / self._repeated, self._repeated)
        self._repeated = self._cached = 0
        self._since, self._most = self._last, self._episodes
        self._episode_s = self._waiting_s = self._idle_s = 0.0
        return metrics

    def _count_step(self, seconds: float) -> None:
        if seconds >= MIN_BLOCK_S:
            self._blocked_s += seconds

    def _change(self, episodes: int, requests: int) -> None:
        now = perf_counter()
        seconds, self._last = now - self._last, now
        running, asked = self._episodes, self._requests
        self._episode_s += seconds * running
        if not asked:
            self._idle_s += seconds
        if running > asked:
            self._waiting_s += seconds * (running - asked)
        self._episodes, self._requests = running + episodes, asked + requests
        if self._episodes > self._most:
            self._most = self._episodes


class EpisodePermit:
    """The permit of one sample's episode, which may begin again after it has ended."""

    def __init__(self, load: EpisodeLoad) -> None:
        self._load, self._is_open = load, False

    async def begin(self) -> None:
        """Wait for a permit, unless there is one."""
        if not self._is_open:
            await self._load.begin_episode()
            self._is_open = True

    def end(self) -> None:
        """Return the permit, unless that has been done."""
        if self._is_open:
            self._is_open = False
            self._load.end_episode()


class _Steps(Generator[Any, Any, T]):
    """Runs a coroutine step by step. It is exposed as `cr_await`, so that tools can follow what a task waits for."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], count: Callable[[float], None]) -> None:
        self.cr_await, self._count = coroutine, count

    def __await__(self) -> Generator[Any, Any, T]:
        return self

    def send(self, value: Any, /) -> Any:
        return self._timed(self.cr_await.send, value)

    def throw(self, *error: Any) -> Any:
        return self._timed(self.cr_await.throw, *error)

    def _timed(self, step: Callable[..., Any], *values: Any) -> Any:
        started = perf_counter()
        try:
            return step(*values)
        finally:
            self._count(perf_counter() - started)


class RewardWait:
    """Adds up the seconds in which samples of a rollout or evaluation are scored while none is generated.

    A group is scored after its last sample is generated, so this is the time after the last generation, and between
    two rounds of groups if a filter drops the first. `seconds` is final when all groups are done.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._taken = 0.0
        self._generating = self._scoring = 0
        self._last = 0.0

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self._taken = self.seconds - self._taken, self.seconds
        return seconds

    @contextmanager
    def phase(self, *, generating: int = 0, scoring: int = 0) -> Generator[None]:
        """Wrap the generation of a group (custom generate functions included), or its reward call."""
        self._change(generating, scoring)
        try:
            yield
        finally:
            self._change(-generating, -scoring)

    def _change(self, generating: int, scoring: int) -> None:
        now = perf_counter()
        if self._scoring and not self._generating:
            self.seconds += now - self._last
        self._generating, self._scoring, self._last = self._generating + generating, self._scoring + scoring, now
