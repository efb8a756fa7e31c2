"""The order in which rollouts take groups and groups come back: recorded always, followed with `--replay`.

What else decides a rollout on one machine (weights, seeds, data) is the same in every run. The time that requests take
is not: it says which of several rollouts takes the next prompts, which groups fill a batch when more were asked for
than are needed, and where a response is cut off when the batch is full. Rows of `order.jsonl`:

    {"step": 3, "event": "issued", "groups": [8, 9]}              the rollout took these groups
    {"step": 3, "event": "judged", "groups": [9]}                 this group was looked at next
    {"step": 3, "event": "returned", "groups": [8], "cut": {"34": 5}}    given back; sample 34 was cut off at 5 tokens
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from furlong.core.sample import Group, Status
from furlong.errors import RolloutError

Turn = Literal["issued", "returned"]
Record = Callable[[int, Mapping[str, Any]], object]


class Order:
    """Records what happens, in the order in which it does. `record(step, row)` keeps a row; without it none is kept."""

    def __init__(self, record: Record | None = None) -> None:
        self._record = record

    @property
    def is_followed(self) -> bool:
        """Whether an earlier run says what comes next."""
        return False

    async def turn(self, rollout_id: int, event: Turn) -> None:
        """Wait until it is this rollout's turn to take groups from the source, or to give them back."""

    def issued(self, rollout_id: int, groups: Sequence[Group]) -> None:
        """The rollout took these groups; none where the data has ended."""
        self._write(rollout_id, "issued", groups)

    def returned(self, rollout_id: int, groups: Sequence[Group]) -> None:
        """The rollout is about to give these groups back, with what was generated of them."""
        cut = {
            str(sample.index): sample.response_length
            for group in groups
            for sample in group.samples
            if sample.status is Status.ABORTED
        }
        self._write(rollout_id, "returned", groups, **({"cut": cut} if cut else {}))

    def judged(self, rollout_id: int, group: Group) -> None:
        """The rollout decides what becomes of a group that came back."""
        self._write(rollout_id, "judged", [group])

    def next_judged(self, rollout_id: int) -> int | None:  # noqa: ARG002  a followed order reads it
        """Index of the group that has to be judged next; None where any may be."""
        return None

    def cuts(self, rollout_id: int, group: Group) -> Mapping[int, int]:  # noqa: ARG002  a followed order reads them
        """Sample index -> response length at which the sample is cut off in this rollout."""
        return {}

    def ended(self, rollout_id: int) -> None:
        """The rollout is complete."""

    def _write(self, rollout_id: int, event: str, groups: Sequence[Group], **more: Any) -> None:
        if self._record is not None:
            self._record(rollout_id + 1, {"event": event, "groups": [group.index for group in groups], **more})


class FollowedOrder(Order):
    """Follows the rows of an earlier run, and records too.

    `name` is the run's, for messages. Raises RolloutError where the two runs cannot be brought together: other groups
    come, one that was judged then does not, or the recorded run had ended.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], record: Record | None = None, *, name: str) -> None:
        super().__init__(record)
        self._name = name
        self._turns: deque[tuple[Turn, int, list[int]]] = deque()
        self._judged: dict[int, deque[int]] = defaultdict(deque)
        self._cuts: dict[int, dict[int, int]] = defaultdict(dict)
        self._last = -1
        self._is_started = False
        self._waiting: dict[int, Turn] = {}
        self._moved = asyncio.Event()
        for row in rows:
            rollout_id, event, groups = row["step"] - 1, row["event"], row["groups"]
            self._last = max(self._last, rollout_id)
            if event == "judged":
                self._judged[rollout_id].extend(groups)
            else:
                self._turns.append((event, rollout_id, groups))
                self._cuts[rollout_id] |= {int(index): length for index, length in row.get("cut", {}).items()}

    @property
    def is_followed(self) -> bool:
        """It is."""
        return True

    async def turn(self, rollout_id: int, event: Turn) -> None:
        """Wait until the recorded run comes to this event of this rollout."""
        self._start(rollout_id)
        self._waiting[rollout_id] = event
        try:
            while (head := self._head(rollout_id, event)) != (event, rollout_id):
                if (waits_for := self._waiting.get(head[1])) is not None and waits_for != head[0]:
                    raise self._error(rollout_id, f"rollout {head[1]} had groups {head[0]} then, and not {waits_for}")
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
        """Compare with the groups that the recorded run gave back."""
        self._pass(rollout_id, groups)
        super().returned(rollout_id, groups)

    def judged(self, rollout_id: int, group: Group) -> None:
        """The recorded run's next group was judged."""
        self._judged[rollout_id].popleft()
        super().judged(rollout_id, group)

    def next_judged(self, rollout_id: int) -> int:
        """The group that the recorded run judged next."""
        if not self._judged[rollout_id]:
            raise self._error(rollout_id, "no further group was judged then")
        return self._judged[rollout_id][0]

    def cuts(self, rollout_id: int, group: Group) -> Mapping[int, int]:
        """Where the recorded run cut the group's samples off."""
        lengths = self._cuts[rollout_id]
        return {int(s.index): lengths[s.index] for s in group.samples if s.index is not None and s.index in lengths}

    def ended(self, rollout_id: int) -> None:
        """Check that nothing is left of the recorded rollout."""
        if self._judged[rollout_id]:
            raise self._error(rollout_id, f"group {self._judged[rollout_id][0]} was judged then, too")
        if left := next((turn for turn in self._turns if turn[1] == rollout_id), None):
            raise self._error(rollout_id, f"groups {left[2]} were {left[0]} then, too")

    def _start(self, rollout_id: int) -> None:
        """Leave out what was before the rollout that this run begins with."""
        if not self._is_started:
            self._is_started = True
            self._turns = deque(turn for turn in self._turns if turn[1] >= rollout_id)

    def _head(self, rollout_id: int, event: Turn) -> tuple[Turn, int]:
        if not self._turns:
            raise self._error(rollout_id, f"no groups were {event} then: its record ends with step {self._last + 1}")
        return self._turns[0][:2]

    def _pass(self, rollout_id: int, groups: Sequence[Group]) -> None:
        event, _, expected = self._turns.popleft()
        self._moved.set()
        if (found := [group.index for group in groups]) != expected:
            raise self._error(rollout_id, f"groups {expected} were {event} then, and now {found}")

    def _error(self, rollout_id: int, what: str) -> RolloutError:
        return RolloutError(
            f"--replay {self._name} cannot be followed at rollout {rollout_id} (step {rollout_id + 1}): {what}. Give "
            "the recorded run's flags, data and model; custom functions have to do the same each time"
        )
