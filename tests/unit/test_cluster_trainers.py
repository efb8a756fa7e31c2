"""Calling all ranks at once: the first failure ends the call, with its cause, and nobody is waited for. No Ray runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ray.exceptions import RayActorError

from furlong.cluster.failure import Failure
from furlong.cluster.placement import Placement
from furlong.cluster.trainers import Rank, RayTrainer, call_all
from furlong.cluster.worker import Setting, Whereabouts
from furlong.errors import CheckpointError, TrainerError

SETTING = Setting(
    build="", config_json="", folder="", num_rollout=1, cwd="", path=(), log_level="INFO", num_threads=1,
    ranks_per_node=1, backend="gloo", timeout_s=1.0,
)  # fmt: skip


class FakeActor:
    """Answers `work` with what a coroutine returns or raises."""

    def __init__(self, answer: Callable[[], Awaitable[Any]]) -> None:
        self.work = self
        self.remote = answer


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


def call(*found: Callable[[], Awaitable[Any]], log: Path = Path("none")) -> tuple[Any, int]:
    aborted: list[int] = []
    ranks = [Rank(n, FakeActor(answer), Whereabouts("vm", "10.0.0.1", 7, str(log))) for n, answer in enumerate(found)]
    try:
        return asyncio.run(call_all(ranks, "work", lambda _: (), abort=lambda: aborted.append(1))), len(aborted)
    except Exception as error:  # noqa: BLE001
        return error, len(aborted)


def test_answers_come_in_the_order_of_the_ranks():
    assert call(answers("a"), answers("b"), answers(None)) == (["a", "b", None], 0)


def test_a_failure_is_the_ranks_own_error_and_the_others_are_aborted(monkeypatch):
    monkeypatch.setattr("furlong.cluster.trainers.SETTLE_S", 0.01)
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
    assert str(error).startswith("WorkerCrashed: trainer rank 1, process 7 on vm (10.0.0.1) is gone")
    assert "MemoryError" in str(error)
    assert aborted == 1


def test_a_dead_rank_ends_the_call_while_others_would_wait_for_ever():
    started = time.monotonic()
    error, _ = call(never, fails(RayActorError(error_msg="gone")), never)
    assert isinstance(error, TrainerError)
    assert time.monotonic() - started < 30


def test_the_message_is_not_nested_noise():
    found, _ = call(fails(RayActorError()))
    assert "RayTaskError" not in str(found)
    assert "Traceback" not in str(found)


def test_a_rank_that_dies_while_nobody_calls_it_is_noticed(monkeypatch):
    monkeypatch.setattr("furlong.cluster.trainers.LOOK_S", 0.001)
    monkeypatch.setattr("furlong.cluster.trainers.ray.kill", lambda actor: None)

    class Mortal(FakeActor):
        def __init__(self, answer: Callable[[], Awaitable[Any]]) -> None:
            super().__init__(answer)
            self.whereabouts = self.save = self

    async def scenario() -> BaseException:
        trainer = RayTrainer(SETTING, Placement(None, [], []), split=lambda batch, flops: [])  # type: ignore[arg-type]
        gone, answer = asyncio.Event(), asyncio.Event()

        async def work(*arguments: Any) -> None:
            if arguments:
                await answer.wait()
            elif gone.is_set():
                raise RayActorError(error_msg="gone")

        trainer.ranks = [Rank(0, Mortal(work), Whereabouts("vm", "10.0.0.1", 7, "none"))]
        watching = asyncio.create_task(trainer.lost())
        saving = asyncio.create_task(trainer.save(Path("folder")))
        await asyncio.sleep(0)
        gone.set()
        await asyncio.sleep(0.01)
        assert not watching.done()  # the call that is under way would notice
        answer.set()
        await saving
        return await asyncio.wait_for(watching, 10)

    assert str(asyncio.run(scenario())).startswith("WorkerCrashed: trainer rank 0, process 7 on vm (10.0.0.1) is gone")
