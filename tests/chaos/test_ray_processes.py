"""Runs on Ray end with a word about the cause, in seconds, and leave no process: whatever is killed, and whenever."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from diagnosed_runs import told
from faults_marker import fault
from forked_ray import RayWorkers
from furlong.cli import main
from furlong.files.atomic import PARTIAL
from furlong.files.checkpoint_folder import find_checkpoint, find_complete_folders
from furlong.files.manifest import changed_files
from runs import Child, flags, marked_processes, write_prompts

pytestmark = pytest.mark.nightly

LIMIT_S = 25.0  # for all processes to be gone; a quiet machine needs two
CUT_BY_LAYERS = {"train_backend": "megatron", "pipeline_model_parallel_size": 2} if find_spec("megatron") else {}


def run_of(
    forked: Any, workers: RayWorkers, model: Path, folder: Path, *, size: int = 8, label: str = "7", **changes: Any
) -> Child:
    """A run of two ranks that trains on `size` demonstrations a step until it is stopped."""
    folder.mkdir(parents=True, exist_ok=True)
    data = write_prompts(folder / "prompts.jsonl", 2 * size, label=label)
    argv = flags(
        model, data, folder / "run", loss_type="sft_loss", rm_type=None, n_samples_per_prompt=1,
        rollout_batch_size=size, num_rollout=100_000, actor_num_gpus_per_node=2, hang_timeout=5, **changes,
    )  # fmt: skip
    run = Child(forked, argv, folder, prepare=workers.use)
    run.wait_for_step(timeout_s=120)
    return run


def ranks_of(run: Child) -> list[psutil.Process]:
    """The processes of the trainer's ranks."""
    found = [p for p in psutil.process_iter() if "TrainerRank" in " ".join(safely(p.cmdline))]
    return [p for p in found if safely(p.environ).get("RUN_OF_TEST") == run.mark]


def safely(read: Any) -> Any:
    try:
        return read()
    except psutil.Error:
        return {}


def assert_nothing_is_left(run: Child) -> None:
    deadline = time.monotonic() + LIMIT_S
    while (left := marked_processes(run.mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"processes outlive the run: {left}"


def reports_of(run: Child) -> str:
    """What the watch over a run that hangs has written."""
    return "".join(path.read_text() for path in (run.folder / "run").glob("hang_*.txt"))


def slow_down(process: psutil.Process, until: Callable[[], bool]) -> None:
    """Stop a process most of the time, in turns too short for any rollout to escape."""
    deadline = time.monotonic() + 120
    while not until():
        assert time.monotonic() < deadline
        for _ in range(50):  # `until` computes, and who has computed has to wait for a core
            process.suspend()
            time.sleep(0.006)
            process.resume()
            time.sleep(0.001)
        process.suspend()
    process.resume()


@fault("RANK01", "HANG01")
def test_a_rank_that_is_slow_or_stops_is_named_and_a_signal_ends_the_run_that_waits_for_it(
    forked, ray_workers, model, tmp_path, capsys
):
    run = run_of(forked, ray_workers, model, tmp_path, size=32, label="1" * 100)  # layers that take several turns
    ranks = ranks_of(run)
    assert len(ranks) == 2
    slow_down(ranks[0], lambda: "RANK01" in told(run.folder / "run"))
    capsys.readouterr()
    main(["doctor", "--run", str(run.folder / "run")])
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(rf"\[RANK01\] .* the layers of trainer rank \d, process {ranks[0].pid} on ", said), said
    ranks[1].suspend()
    deadline = time.monotonic() + 60
    stopped = rf"process {ranks[1].pid} on [^;]* \(no answer within 3 s.*; trainer rank \d: waits in \w+ \(distributed/"
    while not re.search(stopped, reports_of(run)):
        assert time.monotonic() < deadline, reports_of(run) or run.log.read_text()
        time.sleep(0.1)
    assert_ends_in_good_order(run, signal.SIGTERM, 143)


def test_ctrl_c_ends_the_run_in_good_order(forked, ray_workers, model, tmp_path):
    assert_ends_in_good_order(run_of(forked, ray_workers, model, tmp_path), signal.SIGINT, 130)


def assert_ends_in_good_order(run: Child, number: signal.Signals, code: int) -> None:
    os.kill(run.process.pid, number)
    run.process.join(LIMIT_S)
    assert run.process.exitcode == code, run.log.read_text()
    assert "Traceback" not in run.log.read_text()
    assert_nothing_is_left(run)


def wait_until_ranks_write(run: Child, save: Path) -> None:
    """Return in the middle of a checkpoint, when there is a complete one."""
    deadline = time.monotonic() + 60
    while not (find_complete_folders(save) and list(save.glob(f"*{PARTIAL}/trainer/*"))):
        assert run.process.is_alive(), run.log.read_text()
        assert time.monotonic() < deadline, "no checkpoint in time"
        time.sleep(0.0005)


def assert_the_last_good_one_stands(save: Path) -> Path:
    """The newest checkpoint is whole, is the one that is found, and has what both ranks wrote."""
    newest = find_complete_folders(save)[-1]
    assert changed_files(newest) == []
    assert {"trainer_rng_1.safetensors", "worker.json"} < {path.name for path in (newest / "trainer").iterdir()}
    assert not list(newest.rglob("written_*"))
    assert find_checkpoint(save, step=None, save_dir=None) in find_complete_folders(save)
    return newest


def test_a_rank_and_then_a_driver_that_is_killed_while_ranks_write_leaves_the_last_good_checkpoint_and_no_process(
    forked, ray_workers, model, tmp_path
):
    how = {"save": tmp_path / "save", "save_interval": 1, "async_save": True, "keep_checkpoints": 2}
    run = run_of(forked, ray_workers, model, tmp_path / "first", **how, **CUT_BY_LAYERS)
    wait_until_ranks_write(run, how["save"])
    ranks_of(run)[1].kill()
    run.process.join(LIMIT_S)
    assert run.process.exitcode == 1, run.log.read_text()
    text = run.log.read_text()
    assert "WorkerCrashed: trainer rank" in text
    assert "Traceback" not in text
    assert "RayTaskError" not in text
    assert_nothing_is_left(run)
    newest = assert_the_last_good_one_stands(how["save"])

    run = run_of(forked, ray_workers, model, tmp_path / "second", **how, load=how["save"])
    assert f"loaded checkpoint from {newest} at" in (tmp_path / "second" / "run" / "run.log").read_text()
    wait_until_ranks_write(run, how["save"])
    run.process.kill()
    run.process.join()
    assert_nothing_is_left(run)
    assert_the_last_good_one_stands(how["save"])
