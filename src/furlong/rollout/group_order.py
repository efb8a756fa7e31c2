"""Completion order of prompt groups: always recorded, reproduced with `--replay`.

On one machine a rollout is determined by weights, seeds, data, and the time that requests take. Only the last varies
between runs: it decides which of several rollouts takes the next prompts, which groups fill the batch when more are
submitted than needed, and where responses are cut off when the batch is full. Rows of `order.jsonl`:

    {"step": 3, "event": "issued", "groups": [8, 9]}              the rollout took these groups
    {"step": 3, "event": "judged", "groups": [9]}                 this group was judged next
    {"step": 3, "event": "returned", "groups": [8], "cut": {"34": 5}}    returned; sample 34 was cut off at 5 tokens

If rollouts share the groups in flight, they take groups in the order of the data, and which weights answer a request
depends on time, too. Instead of the first and last row there are:

    {"step": 3, "event": "judged", "groups": [9], "versions": {"36": [1, 1, 2]}}    weights of each request of sample 36
    {"step": 3, "event": "batch", "groups": [7, 9]}               the rollout consists of these groups
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from furlong.core.sample import UNKNOWN_VERSION, Group, Status
from furlong.errors import RolloutError

Turn = Literal["issued", "returned"]
Record = Callable[[int, Mapping[str, Any]], object]


class GroupOrder:
    """Records the events of rollouts in order through `record(step, row)`, if given."""

    def __init__(self, record: Record | None = None) -> None:
        self._record = record
        self._versions: dict[int, list[int]] = defaultdict(list)  # of the requests of each sample

    @property
    def is_replayed(self) -> bool:
        """Whether the order of an earlier run is reproduced."""
        return False

    async def turn(self, rollout_id: int, event: Turn) -> None:
        """Wait until it is this rollout's turn to take groups from the source, or to return them."""

    def issued(self, rollout_id: int, groups: Sequence[Group]) -> None:
        """Record that the rollout took these groups, none if the data has ended."""
        self._write(rollout_id, "issued", groups)

    def returned(self, rollout_id: int, groups: Sequence[Group]) -> None:
        """Record that the rollout returns these groups with their partial responses."""
        cut = {
            str(sample.index): sample.response_length
            for group in groups
            for sample in group.samples
            if sample.status is Status.ABORTED
        }
        for index in (sample.index for group in groups for sample in group.samples):
            self._versions.pop(-1 if index is None else index, None)
        self._write(rollout_id, "returned", groups, **({"cut": cut} if cut else {}))

    def judged(self, rollout_id: int, group: Group, *, is_shared: bool = False) -> None:
        """Record that the rollout judges this group next; with `is_shared`, also the weights of its requests."""
        indices = dict.fromkeys(s.index for s in group.samples if s.index is not None)
        versions = {str(index): self._versions.pop(index, []) for index in indices}
        self._write(rollout_id, "judged", [group], **({"versions": versions} if is_shared else {}))

    async def request(self, sample: int | None) -> None:
        """Wait until the next request of this sample may be sent; None is not part of the record."""

    def answered(self, sample: int | None, versions: Sequence[int]) -> None:
        """Note the weight versions of an answer."""
        if sample is not None:
            self._versions[sample].append(versions[0] if versions else UNKNOWN_VERSION)

    async def before_update(self, version: int, *, until: int) -> None:
        """Wait until the requests that earlier weights must answer, of rollouts before `until`, are answered."""

    def updated(self, version: int) -> None:
        """Note that requests are answered by these weights from now on."""

    def batch_of(self, rollout_id: int) -> list[int] | None:  # noqa: ARG002  used by ReplayedOrder
        """Return the groups of the rollout, [] while others must be judged first; None if any may be chosen."""
        return None

    def collected(self, rollout_id: int, groups: Sequence[Group]) -> None:
        """Record that the rollout consists of these groups."""
        self._write(rollout_id, "batch", groups)

    def next_judged(self, rollout_id: int) -> int | None:  # noqa: ARG002  used by ReplayedOrder
        """Return the index of the group that must be judged next; None if any may be."""
        return None

    def cuts(self, rollout_id: int, group: Group) -> Mapping[int, int]:  # noqa: ARG002  used by ReplayedOrder
        """Return sample index -> response length at which the sample is cut off in this rollout."""
        return {}

    def ended(self, rollout_id: int) -> None:
        """Note that the rollout is complete."""

    def _write(self, rollout_id: int, event: str, groups: Sequence[Group], **more: Any) -> None:
        if self._record is not None:
            self._record(rollout_id + 1, {"event": event, "groups": [group.index for group in groups], **more})


class ReplayedOrder(GroupOrder):
    """Reproduces the order recorded by an earlier run, and records.

    `name` is the run's name for messages. Raises RolloutError if the runs diverge: different groups are issued, a
    recorded group is missing, or the record has ended.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], record: Record | None = None, *, name: str) -> None:
        super().__init__(record)
        self._name = name
        self._turns: deque[tuple[Turn, int, list[int]]] = deque()
        self._judged: dict[int, deque[int]] = defaultdict(deque)
        self._cuts: dict[int, dict[int, int]] = defaultdict(dict)
        self._batches: dict[int, list[int]] = {}
        self._due: dict[int, deque[int]] = {}  # versions of the requests of each sample
        self._unanswered: Counter[tuple[int, int]] = Counter()  # by rollout and version
        self._rollout_of: dict[int, int] = {}  # by sample
        self._version = 0
        self._last = -1
        self._is_started = False
        self._waiting: dict[int, Turn] = {}
        self._moved = asyncio.Event()
        for row in rows:
            rollout_id, event, groups = row["step"] - 1, row["event"], row["groups"]
            self._last = max(self._last, rollout_id)
            if event == "judged":
                self._judged[rollout_id].extend(groups)
                for sample, versions in row.get("versions", {}).items():
                    self._due[int(sample)] = deque(versions)
                    self._rollout_of[int(sample)] = rollout_id
                    self._unanswered.update((rollout_id, version) for version in versions)
            elif event == "batch":
                self._batches[rollout_id] = groups
            else:
                self._turns.append((event, rollout_id, groups))
                self._cuts[rollout_id] |= {int(index): length for index, length in row.get("cut", {}).items()}

    @property
    def is_replayed(self) -> bool:
        """True: the order of an earlier run is reproduced."""
        return True

    async def turn(self, rollout_id: int, event: Turn) -> None:
        """Wait until this event of this rollout is next in the record."""
        self._start(rollout_id)
        self._waiting[rollout_id] = event
        try:
            while (head := self._head(rollout_id, event)) != (event, rollout_id):
                if (waits_for := self._waiting.get(head[1])) is not None and waits_for != head[0]:
                    raise self._error(rollout_id, f"rollout {head[1]} had groups {head[0]} there, not {waits_for}")
                self._moved.clear()
                await self._moved.wait()
        finally:
            del self._waiting[rollout_id]
            self._moved.set()

    def issued(self, rollout_id: int, groups: Sequence[Group]) -> None:
        """Compare with the groups that the recorded run took."""
        self._pass(rollout_id, groups)
        super().issued(rollout_id, groups)

    def returned(self, rollout_id: int, groups: Sequence[Group]) -> None:
        """Compare with the groups that the recorded run returned."""
        self._pass(rollout_id, groups)
        super().returned(rollout_id, groups)

    def judged(self, rollout_id: int, group: Group, *, is_shared: bool = False) -> None:
        """Advance the record of judged groups."""
        self._judged[rollout_id].popleft()
        super().judged(rollout_id, group, is_shared=is_shared)

    async def request(self, sample: int | None) -> None:
        """Wait until the engine has the weights that answered this request in the recorded run."""
        while sample is not None and (due := self._due.get(sample)) and due[0] > self._version:
            self._moved.clear()
            await self._moved.wait()

    def answered(self, sample: int | None, versions: Sequence[int]) -> None:
        """Advance the record of the sample's requests."""
        super().answered(sample, versions)
        if sample is not None and (due := self._due.get(sample)):
            self._unanswered[self._rollout_of[sample], due.popleft()] -= 1
            self._moved.set()

    async def before_update(self, version: int, *, until: int) -> None:
        """Wait until earlier weights have answered all requests that they answered in the recorded run."""
        while any(n > 0 and r < until and v < version for (r, v), n in self._unanswered.items()):
            self._moved.clear()
            await self._moved.wait()

    def updated(self, version: int) -> None:
        """Let the requests start that these weights answered."""
        self._version = version
        self._moved.set()

    def batch_of(self, rollout_id: int) -> list[int] | None:
        """Return the groups of the recorded rollout, once all that it judged are judged."""
        if rollout_id not in self._batches:
            raise self._error(rollout_id, f"no batch was collected: the record ends with step {self._last + 1}")
        return [] if self._judged[rollout_id] else self._batches[rollout_id]

    def next_judged(self, rollout_id: int) -> int:
        """Return the group that the recorded run judged next."""
        if not self._judged[rollout_id]:
            raise self._error(rollout_id, "the recorded run judged no further group")
        return self._judged[rollout_id][0]

    def cuts(self, rollout_id: int, group: Group) -> Mapping[int, int]:
        """Return where the recorded run cut off the group's samples."""
        lengths = self._cuts[rollout_id]
        return {int(s.index): lengths[s.index] for s in group.samples if s.index is not None and s.index in lengths}

    def ended(self, rollout_id: int) -> None:
        """Check that no events of the recorded rollout are left."""
        if self._judged[rollout_id]:
            raise self._error(rollout_id, f"the recorded run also judged group {self._judged[rollout_id][0]}")
        if left := next((turn for turn in self._turns if turn[1] == rollout_id), None):
            raise self._error(rollout_id, f"in the recorded run groups {left[2]} were {left[0]}, too")

    def _start(self, rollout_id: int) -> None:
        """Skip the events before this run's first rollout."""
        if not self._is_started:
            self._is_started = True
            self._turns = deque(turn for turn in self._turns if turn[1] >= rollout_id)

    def _head(self, rollout_id: int, event: Turn) -> tuple[Turn, int]:
        if not self._turns:
            raise self._error(rollout_id, f"no groups were {event}: the record ends with step {self._last + 1}")
        return self._turns[0][:2]

    def _pass(self, rollout_id: int, groups: Sequence[Group]) -> None:
        event, _, expected = self._turns.popleft()
        self._moved.set()
        if (indices := [group.index for group in groups]) != expected:
            raise self._error(rollout_id, f"groups {expected} were {event} in the recorded run, but now {indices}")

    def _error(self, rollout_id: int, what: str) -> RolloutError:
        return RolloutError(
            f"--replay {self._name} diverges at rollout {rollout_id} (step {rollout_id + 1}): {what}. Use the recorded "
            "run's flags, data and model; custom functions must be deterministic"
        )
