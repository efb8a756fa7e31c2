"""Checkpoints that a thread writes while the loop trains on."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path

import pytest

from fakes_loop import FakeTrainer, World, fake_parts
from furlong.errors import CheckpointError
from furlong.files.atomic import PendingFiles
from furlong.files.checkpoint_folder import find_complete_folders
from furlong.files.manifest import changed_files
from furlong.loop.checkpoints import Checkpoints
from furlong.loop.schedule import RunSchedule
from furlong.loop.train import train

TRACKER = "latest_checkpointed_iteration.txt"
WAIT_S = 20


class HeldFiles(PendingFiles):
    """Files that are written when `gate` opens; `fails` is what happens then."""

    gate: threading.Event
    writing: threading.Event
    fails: Exception | None = None

    def write(self) -> None:
        self.writing.set()
        assert self.gate.wait(WAIT_S)
        if self.fails is not None:
            raise self.fails
        super().write()


class HeldTrainer(FakeTrainer):
    """Holds back the write of the checkpoint of `at` steps until `until` steps are trained, or `gate` is opened."""

    def __init__(self, world: World, *, at: int, until: int | None = None, fails: Exception | None = None) -> None:
        super().__init__(world)
        self.at, self.until, self.fails = at, until, fails
        self.gate, self.writing = threading.Event(), threading.Event()

    async def train(self, batch):
        found = await super().train(batch)
        if self.world.trained_steps == self.until:
            self.gate.set()
        return found

    async def snapshot(self, folder):
        if self.world.trained_steps != self.at:
            return await super().snapshot(folder)
        files = HeldFiles()
        files.gate, files.writing, files.fails = self.gate, self.writing, self.fails
        files.add_text(folder / "steps", str(self.world.trained_steps))
        return files


def run(trainer: HeldTrainer, folder: Path, num_rollout: int, **options) -> int:
    parts = dataclasses.replace(fake_parts(trainer.world), trainer=trainer)
    plan = RunSchedule(num_rollout=num_rollout, save_every=2)
    return asyncio.run(train(parts, plan, Checkpoints(save_dir=folder, in_background=True, **options)))


def tracker(folder: Path) -> str:
    return (folder / TRACKER).read_text()


def test_a_background_checkpoint_has_the_state_of_its_step(tmp_path):
    trainer = HeldTrainer(World(), at=2, until=3)
    assert run(trainer, tmp_path, 6) == 6
    assert [p.name for p in find_complete_folders(tmp_path)] == ["iter_0000002", "iter_0000004", "iter_0000006"]
    assert [(p / "trainer" / "steps").read_text() for p in find_complete_folders(tmp_path)] == ["2", "4", "6"]
    assert tracker(tmp_path) == "6\n"


def test_nothing_is_committed_or_deleted_before_all_files_are_written(tmp_path):
    seen: list[tuple[str, list[str]]] = []

    class Looking(HeldTrainer):
        async def train(self, batch):
            if self.world.trained_steps == 4:  # the checkpoint of 4 is being written
                assert await asyncio.to_thread(self.writing.wait, WAIT_S)
                seen.append((tracker(tmp_path), [p.name for p in find_complete_folders(tmp_path)]))
            return await super().train(batch)

    assert run(Looking(World(), at=4, until=5), tmp_path, 6, keep=1) == 6
    assert seen == [("2\n", ["iter_0000002"])]
    assert [p.name for p in find_complete_folders(tmp_path)] == ["iter_0000006"]


def test_write_that_fails_ends_the_run_with_the_folder_and_leaves_the_last_checkpoint(tmp_path):
    trainer = HeldTrainer(World(), at=4, until=5, fails=OSError(28, "No space left on device"))
    with pytest.raises(CheckpointError, match=r"cannot write into .*iter_0000004.partial: .*No space left"):
        run(trainer, tmp_path, 60)
    assert trainer.world.trained_steps in (5, 6)  # at the next step, at the latest at the next save
    assert tracker(tmp_path) == "2\n"
    (complete,) = find_complete_folders(tmp_path)
    assert changed_files(complete) == []


@pytest.mark.parametrize("ends", ["cancelled", "failed"])
def test_a_run_that_ends_waits_for_the_checkpoint_that_is_being_written(ends, tmp_path):
    class Ending(HeldTrainer):
        async def train(self, batch):
            if self.world.trained_steps == 2:
                assert await asyncio.to_thread(self.writing.wait, WAIT_S)
                threading.Timer(0.1, self.gate.set).start()
                assert not (tmp_path / TRACKER).exists()
                raise asyncio.CancelledError if ends == "cancelled" else RuntimeError("the step failed")
            return await super().train(batch)

    with pytest.raises(asyncio.CancelledError if ends == "cancelled" else RuntimeError):
        run(Ending(World(), at=2), tmp_path, 6)
    assert tracker(tmp_path) == "2\n"


def test_run_error_is_raised_and_write_error_is_logged(tmp_path, caplog):
    class Failing(HeldTrainer):
        async def train(self, batch):
            if self.world.trained_steps == 2:
                self.gate.set()
                raise RuntimeError("the step failed")
            return await super().train(batch)

    with pytest.raises(RuntimeError, match="the step failed"):
        run(Failing(World(), at=2, fails=OSError(5, "Input/output error")), tmp_path, 6)
    assert "the last checkpoint was not written" in caplog.text
    assert "Input/output error" in caplog.text
    assert not find_complete_folders(tmp_path)
