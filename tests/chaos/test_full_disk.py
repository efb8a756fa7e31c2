"""Full disks: the run ends with an error, keeps all completed work, and resumes once space is free.

The disks are small file systems in memory, in the mount namespace of a separate process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from furlong.data.audit import audit
from furlong.errors import CheckpointError, ConfigError, DataError, SyncError
from furlong.training.packing import RankPart
from furlong.training.worker import RoundWorker
from runs import flags, rows, train, write_prompts

pytestmark = pytest.mark.nightly

TRAIN_PART = RoundWorker.train_part
CLONE_NEWNS = 0x00020000
NOT_ALLOWED = 77  # exit code


def mount(folder: Path, size: str) -> None:
    """Make a file system of this size."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)


def with_own_mounts(body: Callable[..., None], *arguments: Any) -> None:
    """Run `body` in a mount namespace of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        raise SystemExit(NOT_ALLOWED)
    if subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True, check=False).returncode:
        raise SystemExit(NOT_ALLOWED)
    body(*arguments)


@pytest.fixture
def small_disk(forked: Any) -> Callable[..., None]:
    """Run a function in a process that may mount small file systems."""

    def run(body: Callable[..., None], *arguments: Any) -> None:
        process = forked.Process(target=with_own_mounts, args=(body, *arguments))
        process.start()
        process.join(100)
        process.kill()
        if process.exitcode == NOT_ALLOWED:
            pytest.skip("this process may not mount file systems")
        assert process.exitcode == 0

    return run


def fill_at(rollout_id: int, disk: Path) -> None:
    """Have somebody else take all room on the disk while a rollout is trained on."""
    train_part = RoundWorker.train_part

    def train_and_fill(worker: RoundWorker, part: RankPart, **options: Any) -> Any:
        if part.batch.rollout_id == rollout_id:
            with (disk / "taken").open("ab", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
        return train_part(worker, part, **options)

    RoundWorker.train_part = train_and_fill  # for the life of this process


def goes_on(argv: list[str], disk: Path, num_rollout: int) -> list[int]:
    """Make room, and check that the same command ends the run with every group accounted for; returns its steps."""
    (disk / "taken").unlink()
    RoundWorker.train_part = TRAIN_PART
    assert train(argv) == num_rollout
    folder = Path(argv[argv.index("--output-dir") + 1])
    assert audit(folder / "ledger.jsonl", finished=True).ok
    return [row["step"] for row in rows(folder)]


def full_save(model: Path, folder: Path) -> None:
    disk = folder / "disk"
    mount(disk, "8m")
    fill_at(2, disk)
    save = disk / "save"
    argv = flags(
        model, write_prompts(folder / "p.jsonl"), folder / "run", num_rollout=5, save=save, load=save, save_interval=1
    )
    with pytest.raises(CheckpointError, match=r"cannot write into .*No space left on device"):
        train(argv)
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "2\n"
    assert json.loads((save / "iter_0000002" / "manifest.json").read_text())["step"] == 2
    assert goes_on(argv, disk, 5) == [1, 2, 3, 4, 5]


def no_room_at_all(model: Path, folder: Path) -> None:
    disk = folder / "disk"
    mount(disk, "64k")
    (disk / "taken").write_bytes(bytes(60 * 1024))
    argv = flags(model, write_prompts(folder / "p.jsonl"), disk / "run", num_rollout=1)
    with pytest.raises(ConfigError, match=r"DISK01.*/run/model: the trained model needs at least .*, but the disk has"):
        train(argv)


def full_run_folder(model: Path, folder: Path) -> None:
    disk, save = folder / "disk", folder / "save"
    mount(disk, "8m")
    fill_at(2, disk)
    argv = flags(
        model, write_prompts(folder / "p.jsonl"), disk / "run", num_rollout=20, save=save, load=save, save_interval=1
    )
    with pytest.raises(DataError, match=r"cannot write .*ledger.jsonl: No space left on device.*--load"):
        train(argv)
    assert goes_on(argv, disk, 20)[:2] == [1, 2]


def full_folder_of_weights(model: Path, folder: Path) -> None:
    disk, save = folder / "disk", folder / "save"
    mount(disk, "8m")
    fill_at(1, disk)
    argv = flags(
        model, write_prompts(folder / "p.jsonl"), folder / "run", num_rollout=3, save=save, load=save, save_interval=1,
        rollout_num_gpus=1, update_weight_transport="disk", update_weight_mode="delta",
        update_weight_disk_dir=disk / "weights",
    )  # fmt: skip
    with pytest.raises(SyncError, match=r"version 2: cannot write into .*No space left on device"):
        train(argv)
    assert goes_on(argv, disk, 3) == [1, 2, 3]


def full_export(model: Path, folder: Path) -> None:
    disk, save = folder / "disk", folder / "save"
    mount(disk, "8m")
    fill_at(1, disk)
    argv = flags(
        model, write_prompts(folder / "p.jsonl"), folder / "run", num_rollout=3, save=save, load=save, save_interval=1,
        save_hf=disk / "step_{rollout_id}",
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"cannot write .*step_2.*No space left on device"):
        train(argv)
    assert [path.name for path in disk.iterdir() if path.is_dir()] == ["step_1"]
    assert goes_on(argv, disk, 3) == [1, 2, 3]


@pytest.mark.parametrize("body", [full_save, no_room_at_all, full_run_folder, full_folder_of_weights, full_export])
def test_full_disk_is_reported_and_run_resumes_once_space_is_free(body, small_disk, model, tmp_path):
    small_disk(body, model, tmp_path)
