"""Calling all ranks at once: the first failure ends the call, with its cause, and nobody is waited for. No Ray runs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError

from furlong.cluster.actor_process import Failure
from furlong.cluster.gpu_placement import Placement
from furlong.cluster.rank_actor import CheckpointWriter, RankLocation, RankSettings, written_marker
from furlong.cluster.ray_trainer import Rank, RayTrainer, call_all, low_memory
from furlong.config.sections import CheckpointFlags, ClusterFlags, Config
from furlong.diagnosis.postmortem.matcher import LogText, find_cause
from furlong.diagnosis.postmortem.signatures import SIGNATURES
from furlong.errors import CheckpointError, ClusterError, SyncError, TrainerError
from furlong.files.atomic import PendingFiles
from furlong.wiring.cluster import checkpoint_folders

SETTING = RankSettings(
    build="", config_json="", folder="", num_rollout=1, cwd="", path=(), log_level="INFO",
    cluster=ClusterFlags(),
)  # fmt: skip


class FakeActor:
    """Answers a call with what a coroutine returns or raises."""

    def __init__(self, answer: Callable[..., Awaitable[Any]]) -> None:
        self.call = self
        self.remote = lambda _method, *arguments: answer(*arguments)


async def never() -> None:
    await asyncio.sleep(60)


def answers(value: Any) -> Callable[[], Awaitable[Any]]:
    async def answer() -> Any:
        return value

    return answer


def fails(error: Exception, after_s: float = 0.0) -> Callable[[], Awaitable[Any]]:
    async def answer() -> Any:
        await asyncio.sleep(after_s)
        raise error

    return answer


def call(*replies: Callable[[], Awaitable[Any]], log: Path = Path("none"), may_fail: bool = False) -> tuple[Any, int]:
    aborted: list[int] = []
    ranks = [
        Rank(n, FakeActor(answer), RankLocation("vm", "10.0.0.1", 7, str(log))) for n, answer in enumerate(replies)
    ]
    try:
        results = asyncio.run(call_all(ranks, "work", lambda _: (), abort=lambda: aborted.append(1), may_fail=may_fail))
        return results, len(aborted)
    except Exception as error:  # noqa: BLE001
        return error, len(aborted)


def test_answers_come_in_the_order_of_the_ranks():
    assert call(answers("a"), answers("b"), answers(None)) == (["a", "b", None], 0)


def test_a_failure_is_the_ranks_own_error_and_the_others_are_aborted(monkeypatch):
    monkeypatch.setattr("furlong.cluster.ray_trainer.SETTLE_S", 0.01)
    error, aborted = call(answers(Failure.of(CheckpointError("no such folder"))), never)
    assert isinstance(error, CheckpointError)
    assert "no such folder (on trainer rank 0, process 7 on vm (10.0.0.1))" in str(error)
    assert aborted == 1


def test_a_rank_that_died_is_the_cause_of_what_its_peers_say_first(tmp_path):
    log = tmp_path / "rank.log"
    log.write_text("line one\nMemoryError\n")
    peer = answers(Failure.of(RuntimeError("connection closed by peer")))
    error, aborted = call(peer, fails(RayActorError(error_msg="Worker exit type: SYSTEM_ERROR"), after_s=0.02), log=log)
    assert isinstance(error, TrainerError)
    assert str(error).startswith("WorkerCrashed: trainer rank 1, process 7 on vm (10.0.0.1) died: ")
    assert "MemoryError" in str(error)
    assert aborted == 1


def test_a_dead_rank_ends_the_call_while_others_would_wait_for_ever():
    started = time.monotonic()
    error, _ = call(never, fails(RayActorError(error_msg="gone")), never)
    assert isinstance(error, TrainerError)
    assert time.monotonic() - started < 30


def test_ranks_survive_a_weight_update_that_fails_in_an_engine(monkeypatch):
    ended: list[int] = []

    async def slow() -> None:
        await asyncio.sleep(0.005)
        ended.append(1)

    failure = answers(Failure.of(SyncError("version 3: engine x did not answer")))
    error, aborted = call(failure, slow, may_fail=True)
    assert isinstance(error, SyncError)
    assert "engine x did not answer" in str(error)
    assert (aborted, ended) == (0, [1])
    error, aborted = call(failure, fails(RayActorError(error_msg="gone"), after_s=0.005), never, may_fail=True)
    assert isinstance(error, TrainerError)
    assert "WorkerCrashed: trainer rank 1" in str(error)
    assert aborted == 1
    monkeypatch.setattr("furlong.cluster.ray_trainer.SETTLE_S", 0.01)  # no other cause will show
    error, aborted = call(answers(Failure.of(RuntimeError("no memory"))), never, may_fail=True)
    assert isinstance(error, TrainerError)
    assert aborted == 1


RAY_ON_MEMORY = """3 worker(s) were killed due to the node running low on memory. \
Memory on the node (IP: 127.0.0.1, ID: 16) was 22.45GB used / 23.54GB limit (0.953757)
Object store memory usage: [- objects spillable: 2
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
10898\t16.99\tpython somebody_else.py
5210\t2.43\t/usr/bin/node
9888\t0.32\tray::TrainerRank
9498\t0.31\tpython -m furlong train
Refer to the documentation on how to address the out of memory issue"""


def test_a_rank_ended_by_ray_for_memory_is_reported_with_the_largest_processes(tmp_path):
    error, _ = call(fails(OutOfMemoryError(RAY_ON_MEMORY)), log=tmp_path / "log")
    assert isinstance(error, TrainerError)
    assert "WorkerCrashed: trainer rank 0" in str(error)
    assert low_memory(RAY_ON_MEMORY) in str(error)
    assert low_memory(RAY_ON_MEMORY) == (
        "Ray ended it, as its machine ran low on memory (22.45GB used / 23.54GB): process 10898 has 16.99 GB (python "
        "somebody_else.py); process 5210 has 2.43 GB (/usr/bin/node); process 9888 has 0.32 GB (ray::TrainerRank)"
    )
    found = find_cause(SIGNATURES, [LogText("traceback", str(error))])
    assert found is not None
    assert found.id == "MEM02"
    assert "process 10898 has 16.99 GB" in found.finding


def test_the_message_is_not_nested_noise():
    error, _ = call(fails(RayActorError()))
    assert "RayTaskError" not in str(error)
    assert "Traceback" not in str(error)


def test_a_rank_that_dies_while_idle_is_detected(monkeypatch):
    monkeypatch.setattr("furlong.cluster.ray_trainer.POLL_S", 0.001)
    monkeypatch.setattr("furlong.cluster.ray_trainer.ray.kill", lambda actor: None)

    async def scenario() -> BaseException:
        trainer = RayTrainer(SETTING, Placement(None, [], []), split=lambda batch, flops: [])  # type: ignore[arg-type]
        gone, answer = asyncio.Event(), asyncio.Event()

        async def work(*arguments: Any) -> None:
            if arguments:
                await answer.wait()
            elif gone.is_set():
                raise RayActorError(error_msg="gone")

        trainer.ranks = [Rank(0, FakeActor(work), RankLocation("vm", "10.0.0.1", 7, "none"))]
        watching = asyncio.create_task(trainer.wait_for_failure())
        saving = asyncio.create_task(trainer.save(Path("folder")))
        await asyncio.sleep(0)
        gone.set()
        await asyncio.sleep(0.01)
        assert not watching.done()  # the call that is under way would notice
        answer.set()
        await saving
        return await asyncio.wait_for(watching, 10)

    assert str(asyncio.run(scenario())).startswith("WorkerCrashed: trainer rank 0, process 7 on vm (10.0.0.1) died: ")


class Copied:
    """A rank that has copied its part of a checkpoint, and writes it when `gate` opens; trains meanwhile if `busy`."""

    def __init__(self, number: int, *, busy: bool = False, fails: Exception | None = None) -> None:
        self.number, self.gate, self.fails = number, threading.Event(), fails
        self.is_busy, self.is_gone = busy, False
        self.call = self

    async def remote(self, method: str, *arguments: Any) -> Any:
        if self.is_gone:
            raise RayActorError(error_msg="gone")
        if method == "snapshot":
            return self.copy(*arguments)
        assert method == "writing"
        if self.is_busy:
            await never()
        return self.written.failure

    def copy(self, folder: Path) -> None:
        files = PendingFiles()
        files.add(lambda: self.gate.wait(20))
        if self.fails is not None:
            files.add(self.fail)
        files.add_text(folder / f"part_{self.number}", "all of it")
        self.written = CheckpointWriter(files, folder, self.number)

    def fail(self) -> None:
        assert self.fails is not None
        raise self.fails


def written_in_the_background(folder: Path, ranks: list[Copied], act: Callable[[], object]) -> None:
    """Take a checkpoint of all ranks, and begin to wait for it in a thread before `act` is called."""

    async def scenario() -> None:
        trainer = RayTrainer(SETTING, Placement(None, [], []), split=lambda batch, flops: [])  # type: ignore[arg-type]
        trainer.ranks = [Rank(n, rank, RankLocation("vm", "10.0.0.1", 7, "none")) for n, rank in enumerate(ranks)]
        files = await trainer.snapshot(folder)
        waiting = asyncio.create_task(asyncio.to_thread(files.write))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        act()
        await asyncio.wait_for(waiting, 10)

    asyncio.run(scenario())


@pytest.fixture
def looks_often(monkeypatch):
    monkeypatch.setattr("furlong.cluster.ray_trainer.WRITTEN_POLL_S", 0.001)


def test_a_checkpoint_is_written_when_the_last_rank_has_written_though_another_trains(looks_often, tmp_path):
    ranks = [Copied(0), Copied(1, busy=True)]
    ranks[0].gate.set()
    written_in_the_background(tmp_path, ranks, ranks[1].gate.set)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part_0", "part_1"]


def test_a_write_error_of_a_rank_is_the_error_of_the_checkpoint(looks_often, tmp_path):
    ranks = [Copied(0), Copied(1, fails=OSError(28, "No space left on device"))]
    with pytest.raises(CheckpointError, match=r"cannot write into .*No space left.* \(on trainer rank 1"):
        written_in_the_background(tmp_path, ranks, ranks[1].gate.set)
    ranks[0].gate.set()
    assert not written_marker(tmp_path, 1).exists()


def test_a_rank_that_dies_while_it_writes_is_the_error_of_the_checkpoint(looks_often, tmp_path):
    ranks = [Copied(0), Copied(1)]
    ranks[0].gate.set()
    with pytest.raises(TrainerError, match=r"trainer rank 1, .* died"):
        written_in_the_background(tmp_path, ranks, lambda: setattr(ranks[1], "is_gone", True))
    ranks[1].gate.set()


class Machine:
    """A rank of a machine that sees the first `sees` of the folders that it is asked for."""

    def __init__(self, sees: int) -> None:
        self.asked: list[str] = []

        async def answer(path: str) -> bool:
            assert Path(path).exists()
            self.asked.append(path)
            return len(self.asked) <= sees

        self.call = FakeActor(answer)


@pytest.mark.parametrize(("sees", "flag"), [(0, "--save"), (1, "--save-hf"), (2, None)])
def test_a_checkpoint_folder_not_visible_to_a_rank_is_reported_before_the_run(sees, flag, tmp_path):
    flags = CheckpointFlags(save=str(tmp_path / "save"), save_hf=str(tmp_path / "hf" / "step_{rollout_id}" / "model"))
    folders = checkpoint_folders(Config(checkpoint=flags))
    assert folders == {"--save": tmp_path / "save", "--save-hf": tmp_path / "hf"}
    machines = [Machine(2), Machine(sees)]

    async def scenario() -> None:
        trainer = RayTrainer(SETTING, Placement(None, [], []), split=lambda batch, flops: [], outputs=folders)  # type: ignore[arg-type]
        trainer.ranks = [Rank(n, one, RankLocation(f"vm{n}", "10.0.0.1", 7, "none")) for n, one in enumerate(machines)]
        await trainer.check_outputs()

    if flag is None:
        asyncio.run(scenario())
    else:
        words = f"{flag}: trainer rank 1, process 7 on vm1 .* does not see what the driver writes into {folders[flag]},"
        with pytest.raises(ClusterError, match=words):
            asyncio.run(scenario())
    assert not [path for folder in folders.values() if folder.exists() for path in folder.iterdir()]


def test_a_checkpoint_folder_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "file").touch()
    outputs = {"--save": tmp_path / "file" / "save"}
    trainer = RayTrainer(SETTING, Placement(None, [], []), split=lambda batch, flops: [], outputs=outputs)  # type: ignore[arg-type]
    with pytest.raises(ClusterError, match=r"--save: cannot write into .*file/save: .*; use another folder"):
        asyncio.run(trainer.check_outputs())
