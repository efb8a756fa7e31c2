"""Audit a ledger: every prompt group must be trained once, dropped with a reason, or in flight."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from furlong.core.sample import MADE_BY_FUNCTION
from furlong.data.ledger import parse_event
from furlong.errors import DataError

OpenState = Literal["issued", "held", "generated", "returned", "restored", "saved"]
READY = ("generated", "restored")  # for training
IN_CHECKPOINT = ("restored", "saved")
GIVEN_UP = "run_ended"  # drop reason
MAX_PROBLEMS = 100
OPEN, TRAINED, DROPPED = 1, 2, 3
_ENDED = {TRAINED: "trained", DROPPED: "dropped"}


@dataclass
class Audit:
    """The result of an audit. `ok` if there are no problems; each of `problems` names a group and what happened to it.

    Counts are of groups, without events that were rolled back. `in_flight` counts open groups by state: generating
    ("issued"), kept by a rollout function for a later call ("held"), waiting for training ("generated", or "restored"
    from the checkpoint that the run resumed from), waiting in the data source ("returned"), or, if the run ended early,
    in its checkpoint ("saved"). `last_step` is the last rollout that was trained on, counted from 0 as in the ledger.
    """

    path: str
    num_events: int = 0
    num_rolled_back: int = 0
    num_resumes: int = 0
    num_torn: int = 0
    num_groups: int = 0
    num_trained: int = 0
    num_dropped: int = 0
    last_step: int | None = None
    in_flight: Counter[str] = field(default_factory=Counter[str])
    drop_reasons: Counter[str] = field(default_factory=Counter[str])
    groups_by_epoch: Counter[int] = field(default_factory=Counter[int])
    num_problems: int = 0
    problems: list[str] = field(default_factory=list[str])

    @property
    def ok(self) -> bool:
        """Whether every group is accounted for."""
        return not self.num_problems

    def problem(self, text: str) -> None:
        """Record a violation; after the first hundred they are only counted."""
        self.num_problems += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(text)

    def summary(self) -> str:
        """Return plain text for a terminal: counts, reasons, and problems."""
        steps = "no step" if self.last_step is None else f"{self.last_step + 1} steps"  # numbered as in metrics.jsonl
        states = ", ".join(f"{count} {state}" for state, count in sorted(self.in_flight.items()))
        lines = [
            f"{self.path}: {self.num_events} events, resumed {self.num_resumes} times, {self.num_rolled_back} events "
            f"rolled back, {self.num_torn} lines cut off",
            f"groups of {steps}: {self.num_groups} issued = {self.num_trained} trained + {self.num_dropped} dropped + "
            f"{sum(self.in_flight.values())} in flight{states and f' ({states})'}",
        ]
        lines += [f"  dropped, {reason}: {count}" for reason, count in self.drop_reasons.most_common()]
        lines += [f"  {line}" for line in _epochs(sorted(self.groups_by_epoch.items()))]
        verdict = "every group is accounted for" if self.ok else f"{self.num_problems} problems:"
        lines += [verdict, *(f"  {problem}" for problem in self.problems)]
        if self.num_problems > len(self.problems):
            lines.append(f"  and {self.num_problems - len(self.problems)} more")
        return "\n".join(lines)


def _epochs(counts: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Yield one line for each range of epochs with the same number of groups."""
    for _, stretch in itertools.groupby(enumerate(counts), key=lambda item: (item[1][0] - item[0], item[1][1])):
        epochs = [epoch for _, (epoch, _) in stretch]
        count = dict(counts)[epochs[0]]
        groups = f"{count} group{'s' * (count != 1)}"
        if epochs == [MADE_BY_FUNCTION]:
            yield f"made by the rollout function: {groups}"
            continue
        yield (
            f"epoch {epochs[0]}: {groups}" if len(epochs) == 1 else f"epochs {epochs[0]} to {epochs[-1]}: {groups} each"
        )


def audit(path: Path | str, *, finished: bool = False, lag: int = 8) -> Audit:
    """Check a ledger after any number of crashes and resumes.

    A group that is open at the end is in flight, unless its rollout was trained on and `lag` or more steps have passed
    since the group's last event: then it is lost. A returned group may wait longer if user code selects from the
    buffer. If the run is `finished`, the only open groups may be those in the data source, and those of later rollouts
    that a checkpoint contains for a resume. Raises DataError if there is no ledger, or if it cannot be read.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"no ledger at {path}; expected ledger.jsonl in the run's folder")
    result = Audit(str(path))
    replay = _Replay(result)
    try:
        alive = _alive(path, result)
        for number, event in _events(path, alive, result):
            replay.apply(number, event)
    except OSError as error:
        raise _unreadable(path, error) from error
    replay.finish(finished=finished, lag=lag)
    return result


def living_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a ledger that no resume rolled back, without damaged lines.

    Raises DataError if it cannot be read.
    """
    scratch = Audit(str(path))
    try:
        for _, event in _events(path, _alive(path, scratch), scratch):
            yield event
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"the ledger {path} cannot be read: {error.strerror or error}; fix its permissions, or restore it from an "
        "intact copy"
    )


def _alive(path: Path, result: Audit) -> list[tuple[int, int]]:
    """Return the half-open ranges of line numbers that are not rolled back, ascending.

    Each resume starts a segment. Its history is the ledger up to the mark: the earlier segment's part before the mark,
    that segment's own history, and so on.
    """
    starts, keeps, num_lines = [0], [0], 0
    with path.open("rb") as file:
        for number, line in enumerate(file):
            num_lines += 1
            if number and line.startswith((b'{"e":"resume"', b'{"e":"start"')):
                event = parse_event(line)
                if event is not None:
                    starts.append(number)
                    keeps.append(event.get("events", 0))
    result.num_resumes = len(starts) - 1
    ranges: list[tuple[int, int]] = []
    end = num_lines
    while end > 0:
        segment = bisect_right(starts, end - 1) - 1
        ranges.append((starts[segment], end))
        end = keeps[segment]
    return ranges[::-1]


def _events(path: Path, alive: list[tuple[int, int]], result: Audit) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line numbers, from 1, and events that are not rolled back.

    Damaged lines are counted, and are a problem unless they are rolled back or the last of the file.
    """
    ranges = iter([*alive, (1 << 62, 1 << 62)])
    start, end = next(ranges)
    damaged: int | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file):
            result.num_events += 1
            if number == end:
                start, end = next(ranges)
            if number < start:
                result.num_rolled_back += 1
                result.num_torn += parse_event(line) is None
                continue
            if damaged is not None:
                result.problem(f"line {damaged + 1} is damaged, and no resume rolled it back")
                damaged = None
            event = parse_event(line)
            if event is None:
                result.num_torn += 1
                damaged = number
            else:
                yield number + 1, event


@dataclass(slots=True)
class _OpenGroup:
    epoch: int
    row: int
    rollout: int
    state: OpenState
    era: int  # number of resumes before its last event
    steps: int  # number of steps before its last event


class _Replay:
    """Replays the events of every group: issued -> generated -> trained, with returns and drops."""

    def __init__(self, result: Audit) -> None:
        self.result = result
        self.open: dict[int, _OpenGroup] = {}
        self.groups: dict[int, int] = {}  # OPEN, TRAINED or DROPPED by number
        self.rows: dict[int, set[int]] = {}  # issued, by epoch
        self.is_partial = self.may_wait = self.has_other_rows = False
        self.highest = -1
        self.era = 0
        self.num_steps = 0

    def apply(self, number: int, event: dict[str, Any]) -> None:
        """Apply one event, from line `number`."""
        try:
            match event["e"]:
                case "start" | "resume":
                    self.era += 1
                    self.is_partial |= event.get("partial", False)
                    self.may_wait |= event.get("waits", False)
                case "issued":
                    self._issued(event["g"], event["ep"], event["row"], event["r"], number)
                case "held":
                    self._held(event["g"], number)
                case "generated":
                    self._generated(event["g"], number)
                case "returned":
                    self._returned(event["g"], number)
                case "dropped":
                    self._dropped(event["g"], event["why"], number)
                case "restored":
                    self._restored(event["g"], event["r"], number)
                case "trained":
                    self._trained(event["g"], event["s"], number)
                case "data_changed":
                    self.rows.clear()
                    self.has_other_rows = True
                case "ended":
                    self._ended(is_saved=event["saved"])
                case other:
                    self.result.problem(f"line {number}: unknown event {other!r}")
        except KeyError as error:
            self.result.problem(f"line {number}: the event has no {error}: {event}")

    def finish(self, *, finished: bool, lag: int) -> None:
        """Check the groups that are still open, and those that are missing."""
        for g, group in self.open.items():
            self.result.in_flight[group.state] += 1
            is_ahead = group.rollout > self._last
            if (group.state in IN_CHECKPOINT and is_ahead) or (group.state == "returned" and self.may_wait):
                continue
            if group.state == "saved" or (group.state == "held" and not finished):
                continue
            idle_steps = self.num_steps - group.steps
            name = f"group {g} (epoch {group.epoch}, row {group.row}) was lost"
            if finished and group.state != "returned":
                self.result.problem(
                    f"{name}: {group.state} for rollout {group.rollout}, but the run finished without it"
                )
            elif idle_steps >= lag and not is_ahead:
                self.result.problem(
                    f"{name}: {group.state} for rollout {group.rollout}, without an event for {idle_steps} steps"
                )
        if not self.is_partial:
            self._check_completeness()

    @property
    def _last(self) -> int:
        return -1 if self.result.last_step is None else self.result.last_step

    def _check_completeness(self) -> None:
        """Check for numbers that were never issued, and for incomplete epochs.

        Sources without epochs (epoch -1) choose their own group numbers and are not checked. Epochs of a run that
        resumed with other data may differ in size.
        """
        for g in range(self.highest + 1):
            if g not in self.groups:
                self.result.problem(f"group {g} was never issued, though group {self.highest} was")
        if self.has_other_rows:
            return
        counts = {epoch: count for epoch, count in self.result.groups_by_epoch.items() if epoch >= 0}
        whole = {epoch: count for epoch, count in counts.items() if epoch + 1 in counts}
        for epoch, count in whole.items():
            if count < max(whole.values()):
                self.result.problem(
                    f"epoch {epoch} ended after {count} groups, another epoch has {max(whole.values())}: "
                    "rows were skipped"
                )

    def _touch(self, group: _OpenGroup, state: OpenState) -> None:
        group.state, group.era, group.steps = state, self.era, self.num_steps

    def _issued(self, g: int, epoch: int, row: int, rollout: int, number: int) -> None:
        group = self.open.get(g)
        if group is not None:
            if group.state != "returned" and group.era == self.era:
                self.result.problem(f"group {g} was issued again (line {number}) while it was {group.state}")
            if (group.epoch, group.row) != (epoch, row):
                self.result.problem(f"group {g} was of epoch {group.epoch}, row {group.row}, then of {epoch}, {row}")
            group.rollout = rollout
            self._touch(group, "issued")
            return
        if code := self.groups.get(g):
            self.result.problem(f"group {g} was issued again (line {number}) after it was {_ENDED[code]}")
            return
        rows = self.rows.setdefault(epoch, set())
        if row in rows:
            self.result.problem(
                f"epoch {epoch}, row {row} was issued twice, the second time as group {g} (line {number})"
            )
        rows.add(row)
        self.result.num_groups += 1
        self.highest = max(self.highest, g) if epoch >= 0 else self.highest
        self.result.groups_by_epoch[epoch] += 1
        self.open[g] = _OpenGroup(epoch, row, rollout, "issued", self.era, self.num_steps)
        self.groups[g] = OPEN

    def _find_open(self, g: int, verb: str, number: int) -> _OpenGroup | None:
        group = self.open.get(g)
        if group is None:
            code = self.groups.get(g)
            before = f"after it was {_ENDED[code]}" if code else "without being issued"
            self.result.problem(f"group {g} was {verb} (line {number}) {before}")
        return group

    def _held(self, g: int, number: int) -> None:
        group = self._find_open(g, "held", number)
        if group is not None:
            if group.state != "issued" and group.era == self.era:
                self.result.problem(f"group {g} was held (line {number}) while it was {group.state}")
            self._touch(group, "held")

    def _generated(self, g: int, number: int) -> None:
        group = self._find_open(g, "generated", number)
        if group is not None:
            if group.state not in ("issued", "held") and group.era == self.era:
                self.result.problem(f"group {g} was generated (line {number}) while it was {group.state}")
            self._touch(group, "generated")

    def _returned(self, g: int, number: int) -> None:
        group = self._find_open(g, "returned", number)
        if group is not None:
            if group.state == "returned" and group.era == self.era:
                self.result.problem(f"group {g} was returned twice (line {number})")
            self._touch(group, "returned")

    def _restored(self, g: int, rollout: int, number: int) -> None:
        if self.is_partial and g not in self.groups:  # issued before this ledger began
            self.result.num_groups += 1
            self.groups[g] = OPEN
            self.open[g] = _OpenGroup(-1, -1, rollout, "restored", self.era, self.num_steps)
            return
        group = self._find_open(g, "restored", number)
        if group is not None:
            if group.state not in READY:
                self.result.problem(f"group {g} was restored (line {number}) while it was {group.state}")
            group.rollout = rollout
            self._touch(group, "restored")

    def _dropped(self, g: int, reason: str, number: int) -> None:
        if not reason:
            self.result.problem(f"group {g} was dropped without a reason (line {number})")
        if self._find_open(g, "dropped", number) is not None:
            self._drop(g, reason)

    def _drop(self, g: int, reason: str) -> None:
        self._end(g, DROPPED)
        self.result.num_dropped += 1
        self.result.drop_reasons[reason] += 1

    def _ended(self, *, is_saved: bool) -> None:
        """Close the groups of rollouts ahead of training, and those held; others of trained rollouts stay open."""
        for g, group in list(self.open.items()):
            if group.state in ("returned", "restored") or (group.rollout <= self._last and group.state != "held"):
                continue
            if is_saved and group.state in ("generated", "held"):
                self._touch(group, "saved")
            else:
                self._drop(g, GIVEN_UP)

    def _trained(self, g: int, step: int, number: int) -> None:
        if self.result.last_step != step:
            self.result.last_step = step
            self.num_steps += 1
        group = self._find_open(g, f"trained in step {step}", number)
        if group is not None:
            if group.state not in READY:
                self.result.problem(f"group {g} was trained in step {step} (line {number}) while it was {group.state}")
            self._end(g, TRAINED)
            self.result.num_trained += 1

    def _end(self, g: int, code: int) -> None:
        del self.open[g]
        self.groups[g] = code
