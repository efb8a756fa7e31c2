"""Fakes for rollout tests: scripted engine, list data source, label reward, in-memory ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar

from furlong.core.outcome import Outcome
from furlong.core.sample import Group, Sample
from furlong.core.weights import WeightSource
from furlong.data.source import adopted
from furlong.interfaces import Completion, Engine, PauseMode, SamplingParams


class ScriptedEngine(Engine):
    """Answers with the tokens of `script(prompt, params)`, one per loop turn; can be aborted and paused."""

    def __init__(
        self, script: Callable[[list[int], SamplingParams], list[int]] | None = None, *, slow: Collection[int] = ()
    ) -> None:
        self.script = script or (lambda prompt, params: [prompt[-1] + 1])
        self.slow = set(slow)  # requests with these first prompt tokens run until aborted
        self.version = 0
        self.calls: list[tuple[list[int], SamplingParams]] = []
        self._running: dict[str, asyncio.Event] = {}

    async def generate(self, prompt: list[int], params: SamplingParams, *, session: str | None = None) -> Completion:
        self.calls.append((prompt, params))
        stop = self._running.setdefault(str(session), asyncio.Event())
        if prompt[0] in self.slow:
            await stop.wait()
        else:
            await asyncio.sleep(0)
        del self._running[str(session)]
        reason = "abort" if stop.is_set() else "stop"
        tokens = self.script(prompt, params)[: params.max_new_tokens]
        if reason == "abort":
            tokens = tokens[:1]
        elif len(tokens) == params.max_new_tokens:
            reason = "length"
        return Completion(tokens, [-0.5] * len(tokens), [self.version] * len(tokens), reason, text="x" * len(tokens))

    async def abort(self, sessions: Collection[str]) -> None:
        for session in sessions:
            if session in self._running:
                self._running[session].set()

    async def pause(self, mode: PauseMode) -> None: ...
    async def resume(self) -> None: ...

    async def load_weights(self, source: WeightSource, version: int) -> dict[str, str]:
        self.version = version
        return {}

    async def close(self) -> None: ...


class ListSource:
    """Groups of `n` samples whose prompt is [group index, 0]."""

    def __init__(self, count: int, n: int = 2) -> None:
        self.count, self.n, self.next = count, n, 0
        self.returned: list[Group] = []

    def next_groups(self, n: int) -> list[Group]:
        groups, self.returned = self.returned[:n], self.returned[n:]
        while len(groups) < n and self.next < self.count:
            i = self.next
            samples = [
                Sample(
                    group_index=i,
                    index=i * self.n + k,
                    rollout_id=i * self.n + k,
                    tokens=[i, 0],
                    prompt="p",
                    seed=k,
                    label=k,
                )
                for k in range(self.n)
            ]
            groups.append(Group(i, samples, 0, i))
            self.next += 1
        return groups

    def return_groups(self, groups: Sequence[Group]) -> None:
        self.returned += groups

    def adopt(self, samples: list[Sample]) -> Group:
        group, self.next = adopted(samples, self.next, self.next * self.n, seed=0), self.next + 1
        return group

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any], *, data_changed: bool = False) -> None: ...

    groups_per_epoch = None
    num_long_prompts = 0

    def close(self) -> None: ...


class LabelReward:
    """The reward of a sample is its label; a string label is a failure with that reason."""

    async def __call__(self, group: Sequence[Sample]) -> list[Outcome]:
        return [Outcome.failed(s.label) if isinstance(s.label, str) else Outcome.scored(float(s.label)) for s in group]


class MemoryLedger:
    """Keeps the last state of each group, and rejects invalid transitions."""

    NEXT: ClassVar[dict[str | None, set[str]]] = {
        None: {"issued"},
        "issued": {"generated", "dropped", "returned", "held"},
        "held": {"generated", "dropped", "returned"},
        "returned": {"issued"},
        "generated": {"trained", "dropped"},
    }

    def __init__(self) -> None:
        self.states: dict[int, str] = {}
        self.reasons: dict[int, str] = {}

    def _move(self, index: int, state: str) -> None:
        before = self.states.get(index)
        assert state in self.NEXT.get(before, set()), f"group {index}: {before} -> {state}"
        self.states[index] = state

    def issued(self, groups: Iterable[Group], rollout_id: int) -> None:
        for group in groups:
            self._move(group.index, "issued")

    def held(self, group: Group, rollout_id: int) -> None:
        self._move(group.index, "held")

    def generated(self, group: Group, rollout_id: int) -> None:
        self._move(group.index, "generated")

    def dropped(self, group: Group, reason: str) -> None:
        self._move(group.index, "dropped")
        self.reasons[group.index] = reason

    def returned(self, group: Group, reason: str) -> None:
        self._move(group.index, "returned")

    def trained(self, group_ids: Iterable[int], step: int) -> None:
        for index in set(group_ids):
            self._move(index, "trained")

    def restored(self, group_ids: Iterable[int], rollout_id: int) -> None:
        assert {self.states.get(index) for index in group_ids} <= {"generated"}

    def ended(self, *, is_saved: bool) -> None: ...

    def data_changed(self) -> None: ...

    def mark(self) -> dict[str, Any]:
        return {}
