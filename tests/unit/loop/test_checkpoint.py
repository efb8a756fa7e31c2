from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from fakes_loop import FakeRollout, FakeTrainer, World, fake_parts, tiny_batch
from furlong.errors import CheckpointError
from furlong.files import atomic as files
from furlong.files.checkpoint_folder import find_complete_folders, recovery, saved_num_threads, step_from_folder
from furlong.files.manifest import changed_files, file_checksum, missing_or_cut
from furlong.loop import checkpoints as checkpoint
from furlong.loop.checkpoints import Checkpoints
from furlong.loop.schedule import RunSchedule
from furlong.loop.train import RolloutStream, train


def save(folder: Path, *steps: int, ahead: int = 0, **options: int) -> None:
    """Write checkpoints as the loop does, with `ahead` rollouts that wait for training."""

    async def write() -> None:
        for step in steps:
            parts = fake_parts(World(trained_steps=step))
            async with RolloutStream(parts, first=step, end=step + ahead, ahead=ahead, pause="finish") as stream:
                stream.restore([tiny_batch(step + i, step) for i in range(ahead)])
                await Checkpoints(save_dir=folder, **options).save(parts, stream.finished, step)

    asyncio.run(write())


def tracker(folder: Path) -> str:
    return (folder / "latest_checkpointed_iteration.txt").read_text()


def test_layout_is_the_one_that_scripts_know(tmp_path):
    save(tmp_path, 10, ahead=1)
    folder = tmp_path / "iter_0000010"
    assert tracker(tmp_path) == "10\n"
    assert {p.name for p in tmp_path.iterdir()} == {"iter_0000010", "latest_checkpointed_iteration.txt"}
    files = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    assert set(files) == {"manifest.json", "state.json", "rollout_0000010.safetensors", "trainer/steps"}
    manifest = json.loads((folder / "manifest.json").read_text())
    del files["manifest.json"]
    assert manifest["files"] == {name: [size, file_checksum(folder / name)] for name, size in files.items()}
    assert manifest["step"] == 10
    assert saved_num_threads(tmp_path, step=None) == saved_num_threads(tmp_path, step=10) == torch.get_num_threads()
    assert saved_num_threads(tmp_path / "other", step=None) is None


def test_rollouts_that_were_ahead_come_back_equal(tmp_path):
    save(tmp_path, 4, ahead=2)
    parts = fake_parts(World())
    step, ahead = asyncio.run(Checkpoints(load_dir=tmp_path).restore(parts))
    assert step == 4
    assert [batch.rollout_id for batch in ahead if batch] == [4, 5]
    assert parts.trainer.world.trained_steps == 4


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_run_saves_when_data_ends_early_and_resumes_with_more_data(ahead, tmp_path):
    world = World()
    parts = fake_parts(world, rollout=FakeRollout(world, end_at=3))
    plan = RunSchedule(num_rollout=5, ahead=ahead, save_every=2)
    checkpoints = Checkpoints(save_dir=tmp_path, load_dir=tmp_path)
    assert asyncio.run(train(parts, plan, checkpoints)) == 3
    assert tracker(tmp_path) == "3\n"
    assert world.version == 3
    more = fake_parts(World())
    assert asyncio.run(train(more, plan, checkpoints)) == 5
    assert more.ledger.trained_groups == [(3, 3), (4, 4)]


def test_later_rollout_with_data_is_trained_where_an_earlier_one_came_out_empty():
    class Uneven(FakeRollout):
        async def produce(self, rollout_id):
            return None if rollout_id in (3, 5) else await super().produce(rollout_id)

    world = World()
    parts = fake_parts(world, rollout=Uneven(world))
    assert asyncio.run(train(parts, RunSchedule(num_rollout=9, ahead=3), Checkpoints())) == 4
    assert [group for group, _ in parts.ledger.trained_groups] == [0, 1, 2, 4]


def test_a_folder_that_cannot_be_made_is_an_error_with_its_path(tmp_path):
    (tmp_path / "iter_0000004.partial").touch()
    with pytest.raises(CheckpointError, match=r"iter_0000004.partial: "):
        save(tmp_path, 4)


def test_rollouts_behind_an_empty_one_and_those_of_more_data_have_names_of_their_own(tmp_path):
    """Rollout 3 came out empty as the data ended, 4 and 5 had data; the run then goes on with more."""

    async def write() -> None:
        parts = fake_parts(World(trained_steps=3))
        async with RolloutStream(parts, first=3, end=6, ahead=3, pause="finish") as stream:
            stream.restore([tiny_batch(4, 3, groups=(3,)), tiny_batch(5, 3, groups=(4,))])
            await Checkpoints(save_dir=tmp_path).save(parts, stream.finished, 3)

    asyncio.run(write())
    checkpoints = Checkpoints(save_dir=tmp_path, load_dir=tmp_path)
    parts = fake_parts(World())
    assert asyncio.run(train(parts, RunSchedule(num_rollout=8, ahead=3, save_every=1), checkpoints)) == 8
    assert parts.ledger.trained_groups == [(step, step) for step in range(3, 8)]
    for folder in find_complete_folders(tmp_path)[1:]:
        _, ahead = asyncio.run(
            Checkpoints(load_dir=tmp_path, load_step=step_from_folder(folder)).restore(fake_parts(World()))
        )
        assert [int(batch.group_ids[0]) for batch in ahead] == list(
            range(step_from_folder(folder), min(step_from_folder(folder) + 3, 8))
        )


def test_rollouts_ahead_are_kept_for_the_resumed_run(tmp_path):
    save(tmp_path, 4, ahead=3)
    checkpoints = Checkpoints(save_dir=tmp_path, load_dir=tmp_path)
    assert asyncio.run(train(fake_parts(World()), RunSchedule(num_rollout=4, ahead=3), checkpoints)) == 4
    sooner = fake_parts(World())
    assert asyncio.run(train(sooner, RunSchedule(num_rollout=5, ahead=3, save_every=1), checkpoints)) == 5
    assert [step for _, step in sooner.ledger.trained_groups] == [4]
    assert [rollout for _, rollout in sooner.ledger.restored_groups] == [4, 5, 6]
    _, ahead = asyncio.run(checkpoints.restore(fake_parts(World())))
    assert [batch.rollout_id for batch in ahead] == [5, 6]
    later = fake_parts(World())
    assert asyncio.run(train(later, RunSchedule(num_rollout=8, ahead=3), checkpoints)) == 8
    assert [step for _, step in later.ledger.trained_groups] == [5, 6, 7]


class Crash(BaseException):
    pass


@pytest.mark.parametrize("existing", [(), (1,), (1, 2), (2,), (2, 3)], ids=str)
@pytest.mark.nightly
def test_crash_between_any_two_writes_leaves_the_old_checkpoint_or_the_new_one(existing, tmp_path, monkeypatch):
    calls = 0
    fatal: int | None = None

    def counted(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == fatal:
                raise Crash
            return function(*args, **kwargs)

        return call

    half = counted(lambda path: None)

    def remove(path, ignore_errors=False):
        """A crash in here leaves half a folder."""
        try:
            half(path)
        except Crash:
            next(p for p in sorted(Path(path).rglob("*")) if p.is_file()).unlink()
            raise
        rmtree(path, ignore_errors=ignore_errors)

    rmtree = shutil.rmtree
    synced = counted(files.sync_to_disk)
    monkeypatch.setattr(checkpoint, "sync_to_disk", synced)
    monkeypatch.setattr(files, "sync_to_disk", synced)
    monkeypatch.setattr(files.os, "replace", counted(os.replace))
    monkeypatch.setattr(checkpoint.Path, "rename", counted(Path.rename))
    monkeypatch.setattr(checkpoint.shutil, "rmtree", remove)
    seen: set[str] = set()
    attempt = 0
    while True:
        attempt += 1
        folder = tmp_path / str(attempt)
        fatal = None
        if existing:
            save(folder, *existing)
        calls, fatal = 0, attempt
        try:
            save(folder, 2, keep=1)
        except Crash:
            pass
        else:
            break
        fatal = None
        found = Checkpoints(load_dir=folder, save_dir=folder).find()
        seen.add("none" if found is None else found.name)
        for complete in find_complete_folders(folder):
            assert missing_or_cut(complete) == changed_files(complete) == []
    assert attempt > 8
    assert tracker(folder) == "2\n"
    allowed = {"iter_0000002", "none" if existing in ((), (2,), (2, 3)) else "iter_0000001"}
    assert "iter_0000002" in seen
    assert seen <= allowed | {f"iter_{step:07d}" for step in existing[-1:]}


def test_leftover_of_a_killed_save_is_not_a_checkpoint_and_is_replaced(tmp_path):
    save(tmp_path, 2)
    shutil.copytree(tmp_path / "iter_0000002", tmp_path / "iter_0000004.partial")
    (tmp_path / "iter_0000004.partial" / "junk").write_text("x")
    assert [p.name for p in find_complete_folders(tmp_path)] == ["iter_0000002"]
    save(tmp_path, 4)
    assert not (tmp_path / "iter_0000004" / "junk").exists()
    assert not list(tmp_path.glob("*.partial"))


def test_newest_checkpoints_are_kept(tmp_path):
    save(tmp_path, 1, 2, 3, 4, keep=2)
    assert [p.name for p in find_complete_folders(tmp_path)] == ["iter_0000003", "iter_0000004"]


def test_checkpoints_at_an_interval_are_kept(tmp_path):
    save(tmp_path, 1, 2, 3, 4, 5, retain_interval=2)
    assert [p.name for p in find_complete_folders(tmp_path)] == ["iter_0000002", "iter_0000004", "iter_0000005"]


def test_going_back_to_an_earlier_step_keeps_what_is_saved_then(tmp_path):
    save(tmp_path, 2, 4, 6, 8)
    save(tmp_path, 4, keep=1)  # a run that went on from checkpoint 2
    assert tracker(tmp_path) == "4\n"
    assert [p.name for p in find_complete_folders(tmp_path)] == ["iter_0000004", "iter_0000006", "iter_0000008"]
    found = Checkpoints(load_dir=tmp_path).find()
    assert found is not None
    assert found.name == "iter_0000004"


def test_ckpt_step_picks_a_checkpoint_even_without_tracker(tmp_path):
    save(tmp_path, 2, 4)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    found = Checkpoints(load_dir=tmp_path, load_step=2).find()
    assert found is not None
    assert found.name == "iter_0000002"


def test_newest_complete_checkpoint_is_resumed_without_a_usable_tracker(tmp_path):
    save(tmp_path, 2, 4)
    path = tmp_path / "latest_checkpointed_iteration.txt"
    (tmp_path / "iter_0000006").mkdir()  # without a manifest
    for damage in (path.unlink, path.touch, lambda: path.write_text("\0release")):
        damage()
        for save_dir in (tmp_path, None):
            assert asyncio.run(Checkpoints(load_dir=tmp_path, save_dir=save_dir).restore(fake_parts(World())))[0] == 4
        why = recovery(tmp_path)  # the preflight warns
        assert str(path) in why
        assert why.endswith(str(tmp_path / "iter_0000004"))
    path.write_text("2\n")  # a kill before the tracker names 4
    assert asyncio.run(Checkpoints(load_dir=tmp_path).restore(fake_parts(World())))[0] == 2
    assert recovery(tmp_path) is None


def test_a_tracker_that_names_no_checkpoint_is_named(tmp_path):
    save(tmp_path, 2)
    path = tmp_path / "latest_checkpointed_iteration.txt"
    path.write_text("24\n")
    with pytest.raises(CheckpointError, match=rf"iter_0000024, which {path} names, is not a complete.*\[2\]"):
        Checkpoints(load_dir=tmp_path).find()


def test_unusable_tracker_without_a_checkpoint_is_named(tmp_path):
    path = tmp_path / "latest_checkpointed_iteration.txt"
    for text in ("release", "\0", "é"):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=rf"{path}.*expected a checkpoint number.*--ckpt-step"):
            Checkpoints(load_dir=tmp_path, save_dir=tmp_path).find()


def test_complete_folders_are_in_the_order_of_their_steps(tmp_path):
    for name in ("iter_9999999", "iter_10000000", "iter_0000002.partial", "iter_x", "iter_3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()
    assert [step_from_folder(folder) for folder in find_complete_folders(tmp_path)] == [9999999, 10000000]


def test_missing_step_names_those_that_are_there(tmp_path):
    save(tmp_path, 2, 4)
    with pytest.raises(CheckpointError, match=r"iter_0000003 is not a complete checkpoint.*\[2, 4\].*--ckpt-step"):
        Checkpoints(load_dir=tmp_path, load_step=3).find()


def test_truncated_file_is_named(tmp_path):
    save(tmp_path, 2, ahead=1)
    path = tmp_path / "iter_0000002" / "rollout_0000002.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(CheckpointError, match=rf"rollout_0000002.safetensors has {size - 1} bytes.*{size}"):
        Checkpoints(load_dir=tmp_path).find()
    path.unlink()
    with pytest.raises(CheckpointError, match=r"rollout_0000002.safetensors is missing"):
        Checkpoints(load_dir=tmp_path).find()


def test_loading_a_hugging_face_folder_names_the_right_flag(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"\['config.json'\].*--hf-checkpoint"):
        Checkpoints(load_dir=tmp_path, save_dir=tmp_path / "other").find()


def test_first_start_with_load_equal_to_save_begins_at_zero(tmp_path):
    checkpoints = Checkpoints(load_dir=tmp_path / "x", save_dir=tmp_path / "y" / ".." / "x")
    assert checkpoints.peek() is None
    assert asyncio.run(checkpoints.restore(fake_parts(World()))) == (0, [])


def test_start_that_contradicts_the_checkpoint_is_refused(tmp_path):
    save(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"--start-rollout-id 5 contradicts .*continues at 2"):
        asyncio.run(Checkpoints(load_dir=tmp_path, start=5).restore(fake_parts(World())))


def export(folder: Path, save_hf, finish=None) -> None:
    """Save checkpoint 2 with an export to `folder`, which a trainer with this `save_hf` writes."""

    class Trainer(FakeTrainer):
        async def save_hf(self, folder: Path, *, model="actor") -> None:
            save_hf(folder)

    async def write() -> None:
        world = World(trained_steps=2)
        parts = dataclasses.replace(fake_parts(world), trainer=Trainer(world))
        checkpoints = Checkpoints(hf_folder=lambda step: folder, finish_export=finish)
        async with RolloutStream(parts, first=2, end=2, ahead=0, pause="finish") as stream:
            await checkpoints.save(parts, stream.finished, 2)

    asyncio.run(write())


@pytest.mark.parametrize("crash_in", ["trainer", "template"])
def test_an_export_that_crashes_halfway_leaves_the_one_before_or_none(tmp_path, crash_in):
    folder = tmp_path / "hf_2"

    def written(text: str, crash: bool):
        def save_hf(at: Path) -> None:
            at.mkdir(exist_ok=True)
            (at / "config.json").write_text(text)
            if crash and crash_in == "trainer":
                raise Crash
            (at / "model.safetensors").write_text(text)

        def finish(at: Path) -> None:
            assert (at / "model.safetensors").read_text() == text
            if crash:
                raise Crash
            (at / "chat_template.jinja").write_text(text)

        return save_hf, finish

    with pytest.raises(Crash):
        export(folder, *written("half", True))
    assert list(tmp_path.iterdir()) == []
    export(folder, *written("old", False))
    with pytest.raises(Crash):
        export(folder, *written("half", True))
    for text in ("old", "new"):
        if text == "new":
            export(folder, *written("new", False))
        assert [path.name for path in tmp_path.iterdir()] == ["hf_2"]
        written_files = {path.name: path.read_text() for path in folder.iterdir()}
        assert written_files == dict.fromkeys(["chat_template.jinja", "config.json", "model.safetensors"], text)


def test_export_that_leaves_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"hf_2 is empty: .*--save-hf"):
        export(tmp_path / "hf_2", lambda folder: None)
    assert list(tmp_path.iterdir()) == []


def test_a_final_model_that_cannot_be_written_ends_the_run_only_if_a_flag_asked_for_it(tmp_path, caplog):
    class Trainer(FakeTrainer):
        async def save_hf(self, folder: Path, *, model="actor") -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    parts = dataclasses.replace(fake_parts(World()), trainer=Trainer(World()))
    asyncio.run(Checkpoints(model_folder=tmp_path / "model").save_model(parts, 2))
    assert "the trained model was not kept: cannot write" in caplog.text
    with pytest.raises(CheckpointError, match="No space left on device; free some space"):
        asyncio.run(Checkpoints(model_folder=tmp_path / "model", needs_model=True).save_model(parts, 2))
    assert list(tmp_path.iterdir()) == []
