"""Permits of episodes, and how busy episodes and engine are.

An episode is the generation of one sample: one turn, or a custom generate function.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from time import perf_counter

from furlong.core.metric import Metrics, maximum, mean
from furlong.core.token_stream import TokenStream
from furlong.interfaces import Completion, Engine, SamplingParams
from furlong.rollout.group_order import GroupOrder


class EpisodeLoad:
    """Lets at most `max_episodes` episodes run at a time, in the order in which they ask, and measures the load.

    All episodes of a run share one: those of training and of evaluations. For one event loop. `order` may delay the
    requests of a replayed run, and records the weight version of each.
    """

    def __init__(self, max_episodes: int | None = None) -> None:
        self._permits = None if max_episodes is None else asyncio.Semaphore(max_episodes)
        self.order = GroupOrder()
        self._episodes = self._requests = self._most = 0
        self._since = self._last = perf_counter()
        self._episode_s = self._waiting_s = self._idle_s = 0.0
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
        sample: int | None,
        stream: TokenStream | None = None,
    ) -> Completion:
        """Send a request of an episode to the engine. `sample`: index of the training sample, None in evaluations.

        stream: receives the tokens as they are sampled.
        """
        await self.order.request(sample)
        self._change(0, 1)
        try:
            if stream is None:
                completion = await engine.generate(ids, params, session=session)
            else:
                completion = await engine.stream(ids, params, stream, session=session)
        finally:
            self._change(0, -1)
        self.order.answered(sample, completion.versions)
        return completion

    def prefixes(self, repeated: int, cached: int) -> None:
        """Count prompt tokens that an earlier prompt of the episode has too, and those of them that were cached."""
        self._repeated, self._cached = self._repeated + repeated, self._cached + cached

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
