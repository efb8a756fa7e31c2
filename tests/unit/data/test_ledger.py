from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from furlong.core.sample import Group
from furlong.data.audit import audit
from furlong.data.ledger import FLUSH_EVENTS, FileLedger
from furlong.errors import CheckpointError, DataError


def groups(*indices: int) -> list[Group]:
    return [Group(i, [], epoch=i // 10, row=i % 10) for i in indices]


def train(ledger: FileLedger, step: int, *indices: int) -> None:
    for group in groups(*indices):
        ledger.generated(group, step)
    ledger.trained(indices, step)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "ledger.jsonl"


def test_events_are_short_json_lines(path: Path) -> None:
    ledger = FileLedger(path)
    ledger.issued(groups(12), 3)
    ledger.generated(groups(12)[0], 3)
    ledger.returned(groups(12)[0], 'cut "short"')
    ledger.dropped(groups(12)[0], "zero\nstd")
    ledger.trained([12], 3)
    ledger.close()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert events[0].keys() == {"e", "id"}
    assert events[1:] == [
        {"e": "issued", "g": 12, "ep": 1, "row": 2, "r": 3},
        {"e": "generated", "g": 12, "r": 3},
        {"e": "returned", "g": 12, "why": 'cut "short"'},
        {"e": "dropped", "g": 12, "why": "zero\nstd"},
        {"e": "trained", "g": 12, "s": 3},
    ]


def test_a_complete_run_has_no_problems(path: Path) -> None:
    ledger = FileLedger(path)
    ledger.issued(groups(0, 1, 2, 3, 4), 0)
    ledger.returned(groups(2)[0], "partial")
    ledger.dropped(groups(3)[0], "zero_std")
    train(ledger, 0, 0, 1)
    ledger.issued(groups(2), 1)
    ledger.generated(groups(2)[0], 1)
    ledger.close()
    result = audit(path)
    assert result.ok, result.summary()
    assert (result.num_groups, result.num_trained, result.num_dropped, result.last_step) == (5, 2, 1, 0)
    assert result.in_flight == {"generated": 1, "issued": 1}
    assert result.drop_reasons == {"zero_std": 1}
    assert (
        "groups of 1 steps: 5 issued = 2 trained + 1 dropped + 2 in flight (1 generated, 1 issued)\n"
        in result.summary()
    )
    assert "every group is accounted for" in result.summary()


def test_epochs_of_equal_size_share_a_line(path: Path) -> None:
    ledger = FileLedger(path)
    epochs = (0, 1, 2, 2, 3)
    ledger.issued([Group(index, [], epoch, index) for index, epoch in enumerate(epochs)], 0)
    ledger.close()
    lines = audit(path).summary().splitlines()
    assert lines[2:5] == ["  epochs 0 to 1: 1 group each", "  epoch 2: 2 groups", "  epoch 3: 1 group"]


def test_an_incomplete_line_after_a_kill_is_kept_and_counted(path: Path) -> None:
    ledger = FileLedger(path)
    ledger.issued(groups(0), 0)
    mark = ledger.mark()
    ledger.issued(groups(1), 0)
    ledger.close()
    path.write_bytes(path.read_bytes()[:-7])
    torn = path.read_bytes()
    assert (audit(path).num_torn, audit(path).ok) == (1, True)
    resumed = FileLedger.resume(path, mark)
    train(resumed, 0, 0)
    second = resumed.mark()
    resumed.close()
    assert path.read_bytes().startswith(torn + b'\n{"e":"resume"')
    assert (audit(path).num_torn, audit(path).ok, audit(path).num_trained) == (1, True, 1)
    assert second["events"] == len(path.read_bytes().splitlines())
    FileLedger.resume(path, second).close()
    assert audit(path).num_trained == 1


def test_a_damaged_line_that_counts_is_a_problem(path: Path) -> None:
    ledger = FileLedger(path)
    ledger.issued(groups(0, 1), 0)
    ledger.close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[1][:9] + b"\n", lines[2]]))
    assert audit(path).problems[0] == "line 2 is damaged, and no resume rolled it back"


def test_a_run_that_fails_before_its_first_event_leaves_the_ledger_unchanged(path: Path) -> None:
    FileLedger(path).close()
    assert not path.exists()
    ledger = FileLedger(path)
    ledger.issued(groups(0, 1), 0)
    mark = ledger.mark()
    train(ledger, 0, 0)
    ledger.close()
    path.write_bytes(path.read_bytes()[:-7])
    before = path.read_bytes()
    for refused in (FileLedger.resume(path, mark), FileLedger(path), FileLedger(path, is_partial=True)):
        refused.close()
        assert path.read_bytes() == before
    resumed = FileLedger.resume(path, mark)
    resumed.begin()
    resumed.begin()
    assert path.read_bytes().startswith(before + b'\n{"e":"resume","events":3')
    assert resumed.mark()["events"] == len(path.read_bytes().splitlines())
    resumed.close()
    assert audit(path).num_resumes == 1


def test_events_after_the_mark_of_a_resume_are_rolled_back(path: Path) -> None:
    ledger = FileLedger(path)
    ledger.issued(groups(0, 1), 0)
    early = json.loads(json.dumps(ledger.mark()))
    train(ledger, 0, 0)
    late = ledger.mark()
    assert late["bytes"] == path.stat().st_size
    ledger.issued(groups(2), 1)
    train(ledger, 1, 1, 2)
    ledger.close()
    for mark, trained, again, rolled_back in ((late, 1, (1,), 5), (early, 0, (0, 1), 10), (late, 1, (1,), 13)):
        resumed = FileLedger.resume(path, mark)  # the last one from a branch that was given up
        train(resumed, trained, *again)
        resumed.close()
        result = audit(path, finished=True)
        assert result.ok, result.summary()
        assert (result.num_trained, result.num_rolled_back) == (2, rolled_back)
    new = FileLedger(path)  # of a new run in the same folder
    new.issued(groups(0), 0)
    train(new, 0, 0)
    new.close()
    assert (audit(path, finished=True).ok, audit(path).num_trained) == (True, 1)


def test_a_mark_of_another_ledger_is_rejected(path: Path, tmp_path: Path) -> None:
    ledger = FileLedger(path)
    ledger.issued(groups(0, 1), 0)
    mark = ledger.mark()
    ledger.close()
    with pytest.raises(CheckpointError, match="which is missing"):
        FileLedger.resume(tmp_path / "none.jsonl", mark)
    other = FileLedger(tmp_path / "other.jsonl")
    other.issued(groups(0, 1, 2), 0)
    other.close()
    with pytest.raises(CheckpointError, match="is not the ledger that the checkpoint continues"):
        FileLedger.resume(tmp_path / "other.jsonl", mark)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match="the file has 3 events"):
        FileLedger.resume(path, mark)


def test_a_ledger_whose_events_before_the_mark_were_changed_is_rejected(path: Path) -> None:
    ledger = FileLedger(path)
    ledger.issued(groups(0, 1), 0)
    ledger.close()
    ledger = FileLedger(path)  # a later start appends
    ledger.issued(groups(2), 1)
    mark = ledger.mark()
    ledger.close()
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"row":1', b'"row":7'))
    with pytest.raises(CheckpointError, match=rf"ledger\.jsonl: the first {len(content)} bytes were changed"):
        FileLedger.resume(path, mark)
    path.write_bytes(content + b'{"e":')
    FileLedger.resume(path, mark).close()


def test_a_missing_ledger_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no ledger at"):
        audit(tmp_path / "ledger.jsonl")


def test_more_events_than_the_buffer_size_stay_in_order(path: Path) -> None:
    ledger = FileLedger(path)
    count = 2 * FLUSH_EVENTS + 10
    ledger.issued([Group(i, [], 0, i) for i in range(count)], 0)
    assert ledger.mark()["events"] == count + 1
    assert [json.loads(line)["g"] for line in path.read_text().splitlines()[1:]] == list(range(count))
    ledger.close()
    ledger.close()


# Each fault as (what happens, what the audit says). All start from groups 0..3 issued and group 0 trained in step 0.
FAULTS = {
    "trained twice": (lambda led: train(led, 1, 0), "group 0 was trained in step 1 .* after it was trained"),
    "trained unissued": (lambda led: train(led, 1, 9), "group 9 was trained in step 1 .* without being issued"),
    "trained ungenerated": (lambda led: led.trained([1], 1), "group 1 was trained in step 1 .* while it was issued"),
    "generated unissued": (lambda led: led.generated(groups(9)[0], 1), "group 9 was generated .* without being issued"),
    "issued twice": (lambda led: led.issued(groups(1), 1), "group 1 was issued again .* while it was issued"),
    "reissued after end": (lambda led: led.issued(groups(0), 1), "group 0 was issued again .* after it was trained"),
    "row twice": (lambda led: led.issued([Group(4, [], 0, 2)], 1), "epoch 0, row 2 was issued twice.* as group 4"),
    "dropped and trained": (
        lambda led: (led.dropped(groups(1)[0], "x"), train(led, 1, 1)),
        "group 1 was trained in step 1 .* after it was dropped",
    ),
    "no reason": (lambda led: led.dropped(groups(1)[0], ""), "group 1 was dropped without a reason"),
    "restored unissued": (lambda led: led.restored([9], 1), "group 9 was restored .* without being issued"),
    "restored ungenerated": (lambda led: led.restored([1], 1), "group 1 was restored .* while it was issued"),
    "restored after end": (lambda led: led.restored([0], 1), "group 0 was restored .* after it was trained"),
    "lost": (
        lambda led: (led.issued(groups(4, 5, 6), 1), train(led, 1, 4), train(led, 2, 5), train(led, 3, 6)),
        r"group 1 \(epoch 0, row 1\) was lost: issued for rollout 0, .* 4 steps",
    ),
    "rows passed over": (
        lambda led: led.issued([*(Group(4 + i, [], 1, i) for i in range(5)), Group(9, [], 2, 0)], 1),
        "epoch 0 .* 4 groups, .* 5: rows were skipped",
    ),
    "missing number": (lambda led: led.issued(groups(5), 1), "group 4 was never issued, though group 5 was"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(path: Path, fault: str) -> None:
    act, message = FAULTS[fault]
    ledger = FileLedger(path)
    ledger.issued(groups(0, 1, 2, 3), 0)
    train(ledger, 0, 0)
    assert audit(path, lag=3).ok
    act(ledger)
    ledger.close()
    result = audit(path, lag=3)
    assert not result.ok
    assert re.search(message, "\n".join(result.problems)), result.problems
    assert result.problems[0] in result.summary()


def test_a_finished_run_has_nothing_in_flight(path: Path) -> None:
    ledger = FileLedger(path)
    ledger.issued(groups(0, 1, 2), 0)
    ledger.returned(groups(2)[0], "surplus")  # waits in the data source, which is no loss
    train(ledger, 0, 0)
    ledger.close()
    assert audit(path).ok
    assert audit(path, finished=True).problems == [
        "group 1 (epoch 0, row 1) was lost: issued for rollout 0, but the run finished without it"
    ]


def test_a_partial_ledger_may_start_after_other_groups(path: Path) -> None:
    for is_partial in (True, False):
        ledger = FileLedger(path, is_partial=is_partial)
        ledger.issued(groups(3, *range(7, 40)), 0)
        ledger.close()
        assert audit(path).ok == is_partial
    assert "group 0 was never issued, though group 39 was" in audit(path).problems


@pytest.mark.parametrize("is_partial", [False, True])
def test_groups_in_a_checkpoint_for_later_rollouts_are_not_lost(path: Path, is_partial: bool):
    ledger = FileLedger(path)
    ledger.issued(groups(0, 1, 2, 3), 0)
    for group in groups(0, 1, 2, 3):
        ledger.generated(group, 0)
    ledger.trained([0], 0)
    mark = ledger.mark()
    ledger.trained([1, 2, 3], 1)
    ledger.close()
    if is_partial:
        path.unlink()
    ledger = FileLedger(path, is_partial=True) if is_partial else FileLedger.resume(path, mark)
    for step in (1, 2, 3):
        ledger.restored([step, step], step)
    for step in (1, 2):
        ledger.trained([step], step)
        ledger.mark()
        result = audit(path, finished=True)
        assert result.ok, result.summary()
        assert result.num_groups == result.num_trained + sum(result.in_flight.values())
        assert result.in_flight == {"restored": 3 - step}
    ledger.issued(groups(4), 4)
    train(ledger, 4, 4)
    ledger.close()
    (problem,) = audit(path, finished=True).problems
    assert "was lost: restored for rollout 3, but the run finished without it" in problem


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_run_that_ends_early_saves_or_drops_groups_ahead(path: Path, is_saved: bool) -> None:
    ledger = FileLedger(path)
    ledger.issued(groups(0, 1, 2), 0)
    ledger.returned(groups(2)[0], "surplus")
    train(ledger, 0, 0)
    for rollout_id, group in enumerate(groups(3, 4), 1):
        ledger.issued([group], rollout_id)
    ledger.generated(groups(3)[0], 1)
    ledger.ended(is_saved=is_saved)
    ledger.close()
    result = audit(path, finished=True)
    (problem,) = result.problems
    assert problem == "group 1 (epoch 0, row 1) was lost: issued for rollout 0, but the run finished without it"
    assert result.in_flight == {"issued": 1, "returned": 1} | ({"saved": 1} if is_saved else {})
    assert result.drop_reasons == {"run_ended": 1 if is_saved else 2}


@pytest.mark.parametrize("may_wait", [False, True])
def test_returned_groups_may_wait_with_a_buffer_filter(path: Path, may_wait: bool) -> None:
    ledger = FileLedger(path)
    ledger.issued(groups(0), 0)
    ledger.returned(groups(0)[0], "surplus")
    mark = ledger.mark()
    ledger.close()
    ledger = FileLedger.resume(path, mark, may_wait=may_wait)
    for step in range(9):
        ledger.issued(groups(1 + step), step)
        train(ledger, step, 1 + step)
    ledger.close()
    result = audit(path, finished=True)
    assert (result.ok, result.in_flight) == (may_wait, {"returned": 1})


def test_groups_of_rollouts_far_ahead_of_training_are_not_lost(path: Path) -> None:
    ledger = FileLedger(path)
    ledger.issued(groups(9), 9)
    ledger.generated(groups(9)[0], 9)
    for step in range(9):
        ledger.issued(groups(step), step)
        train(ledger, step, step)
    ledger.mark()
    assert audit(path).ok
    ledger.issued(groups(10), 10)
    train(ledger, 10, 10)
    ledger.close()
    assert audit(path).problems == [
        "group 9 (epoch 0, row 9) was lost: generated for rollout 9, without an event for 10 steps"
    ]


def test_a_source_without_epochs_may_choose_group_numbers(path: Path) -> None:
    ledger = FileLedger(path)
    ledger.issued([Group(10**15, [], -1, 10**15), Group(5, [], -1, 5)], 0)
    ledger.generated(Group(5, []), 0)
    ledger.trained([5], 0)
    ledger.close()
    result = audit(path)
    assert result.ok
    assert result.num_trained == 1


def test_many_problems_are_counted_but_only_the_first_listed(path: Path) -> None:
    ledger = FileLedger(path)
    ledger.trained(range(250), 0)
    ledger.close()
    result = audit(path)
    assert (result.num_problems, len(result.problems)) == (250, 100)
    assert "and 150 more" in result.summary()


def test_a_deleted_ledger_is_an_error_at_the_next_step(path: Path) -> None:
    ledger = FileLedger(path)
    train(ledger, 0, 0)
    path.unlink()
    with pytest.raises(DataError, match=r"ledger\.jsonl was deleted"):
        train(ledger, 1, 1)
    with pytest.raises(DataError, match="was deleted"):
        ledger.close()
