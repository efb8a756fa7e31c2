"""The ledger audit passes for every sequence of valid events, and detects every injected fault."""

from __future__ import annotations

import json
import logging
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_zoo import numbered_rows, write_jsonl
from furlong.core.sample import Group
from furlong.data.audit import audit
from furlong.data.dataset import open_prompts
from furlong.data.ledger import FileLedger
from furlong.data.prompt import PromptFormat
from furlong.data.source import RolloutDataSource

NUM_ROWS = 11
logging.getLogger("furlong.data.ledger").setLevel(logging.ERROR)  # torn lines are logged, and frequent here


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("rows") / "a.jsonl", numbered_rows(NUM_ROWS))


class Run:
    """A simulated run: groups move between source, rollout and trainer, and are recorded in the ledger."""

    def __init__(self, rows: Path, folder: Path, rng: random.Random) -> None:
        self.rows, self.path, self.rng = rows, folder / "ledger.jsonl", rng
        self.checkpoint: dict[str, Any] | None = None
        self.start()

    def start(self) -> None:
        prompts = open_prompts(str(self.rows), tokenizer=None, prompt_format=PromptFormat())
        self.source = RolloutDataSource(prompts, shuffle=True, num_epoch=4)
        self.running: list[Group] = []
        self.waiting: list[Group] = []
        self.step = 0
        if self.checkpoint is None:
            self.ledger = FileLedger(self.path)
            return
        saved = json.loads(self.checkpoint["json"])
        self.ledger = FileLedger.resume(self.path, saved["mark"])
        self.source.restore(saved["source"])
        self.step = saved["step"]
        self.waiting = [Group.from_dict(g) for g in saved["waiting"]]
        if self.rng.random() < 0.5:  # older ledgers lack this event
            self.ledger.restored([group.index for group in self.waiting], self.step)
        unfinished = [Group.from_dict(g) for g in saved["running"]]
        if self.rng.random() < 0.5:  # optional: a resume implicitly ends running groups
            for group in unfinished:
                self.ledger.returned(group, "resume")
        self.source.return_groups(unfinished)

    def issue(self) -> None:
        groups = self.source.next_groups(self.rng.randint(0, 6))
        self.ledger.issued(groups, self.step)
        self.running += groups

    def generate(self) -> None:
        for _ in range(self.rng.randint(0, len(self.running))):
            group = self.running.pop(self.rng.randrange(len(self.running)))
            self.ledger.generated(group, self.step)
            self.waiting.append(group)

    def drop(self) -> None:
        pool = self.rng.choice([self.running, self.waiting])
        if pool:
            self.ledger.dropped(pool.pop(self.rng.randrange(len(pool))), "zero_std")

    def return_groups(self) -> None:
        if self.running:
            group = self.running.pop(self.rng.randrange(len(self.running)))
            self.ledger.returned(group, "partial")
            self.source.return_groups([group])

    def train(self) -> None:
        if self.waiting:
            self.ledger.trained([g.index for g in self.waiting], self.step)
            self.waiting.clear()
            self.step += 1

    def save(self) -> None:
        state = {
            "mark": self.ledger.mark(),
            "source": self.source.state(),
            "step": self.step,
            "running": [g.to_dict() for g in self.running],
            "waiting": [g.to_dict() for g in self.waiting],
        }
        self.checkpoint = {"json": json.dumps(state), "bytes": state["mark"]["bytes"]}

    def crash(self) -> None:
        """Lose any number of bytes written after the last checkpoint, and resume from it."""
        self.ledger.close()
        kept = self.checkpoint["bytes"] if self.checkpoint else 0
        if self.path.exists():  # it is created with the first event
            with self.path.open("r+b") as file:
                file.truncate(self.rng.randint(kept, self.path.stat().st_size))
        self.start()

    def finish(self) -> None:
        while groups := self.source.next_groups(5):
            self.ledger.issued(groups, self.step)
            self.running += groups
        for group in self.running:
            self.ledger.generated(group, self.step)
        self.waiting += self.running
        self.running = []
        self.train()


ACTIONS = st.lists(
    st.sampled_from(["issue", "issue", "generate", "generate", "train", "drop", "return_groups", "save", "crash"]),
    min_size=6,
    max_size=40,
)


def play(rows: Path, folder: Path, actions: list[str], seed: int) -> Run:
    run = Run(rows, folder, random.Random(seed))
    for action in actions:
        getattr(run, action)()
    return run


@settings(max_examples=200, deadline=None)
@given(actions=ACTIONS, seed=st.integers(0, 2**32))
def test_any_run_with_any_crashes_has_a_clean_ledger(rows: Path, actions: list[str], seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = play(rows, Path(folder), actions, seed)
        run.ledger.mark()
        during = audit(run.path, lag=10**6)
        assert during.ok, during.summary()
        assert during.in_flight.get("generated", 0) <= len(run.waiting)
        run.finish()
        run.ledger.close()
        result = audit(run.path, finished=True, lag=1)
        assert result.ok, result.summary()
        assert result.num_groups == 4 * NUM_ROWS == result.num_trained + result.num_dropped
        assert set(result.groups_by_epoch.values()) == {NUM_ROWS}


def _lose(run: Run) -> None:
    run.running.pop(run.rng.randrange(len(run.running)))


def _lose_returned(run: Run) -> None:
    group = run.running.pop(run.rng.randrange(len(run.running)))
    run.ledger.returned(group, "partial")  # but not to the source


def _skip_row(run: Run) -> None:
    run.source.next_groups(len(run.source.state()["returned"]) + 1)  # issued but not recorded


def _train_unissued(run: Run) -> None:
    run.ledger.trained([10**9], run.step)


def _resume_without_running(run: Run) -> None:
    """Resume from a checkpoint without the groups in flight."""
    run.save()
    assert run.checkpoint is not None
    saved = json.loads(run.checkpoint["json"])
    run.checkpoint["json"] = json.dumps({**saved, "running": []})
    run.crash()


def _resume_behind(run: Run) -> None:
    """Resume from a data position older than the ledger's mark: rows repeat under new numbers."""
    saved = run.source.state()
    groups = run.source.next_groups(2)
    run.ledger.issued(groups, run.step)
    for group in groups:
        run.ledger.generated(group, run.step)
    run.ledger.trained([g.index for g in groups], run.step)
    run.source.restore(saved)


FAULTS = [_lose, _lose_returned, _skip_row, _train_unissued, _resume_without_running, _resume_behind]


@settings(max_examples=120, deadline=None)
@given(actions=ACTIONS, seed=st.integers(0, 2**32), fault=st.sampled_from(FAULTS))
def test_an_injected_fault_is_found_after_any_history(rows: Path, actions: list[str], seed: int, fault: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = play(rows, Path(folder), actions[:12], seed)
        fresh = run.source.next_groups(2)  # faults can lose these, twice
        if len(fresh) < 2:
            return
        run.ledger.issued(fresh, run.step)
        run.running += fresh
        if fault in (_skip_row, _resume_behind) and run.source.state()["next_group"] > 4 * NUM_ROWS - 2:
            return  # these faults need new rows
        fault(run)
        run.finish()
        run.ledger.close()
        assert not audit(run.path, finished=True, lag=1).ok


@settings(max_examples=60, deadline=None)
@given(actions=ACTIONS, seed=st.integers(0, 2**32))
def test_training_any_group_a_second_time_is_found(rows: Path, actions: list[str], seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = play(rows, Path(folder), actions, seed)
        run.finish()
        run.ledger.trained([run.rng.randrange(4 * NUM_ROWS)], run.step)
        run.ledger.close()
        result = audit(run.path)
        assert result.num_problems == 1
        assert "trained in step" in result.problems[0]
