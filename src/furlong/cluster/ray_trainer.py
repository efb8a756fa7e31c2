"""The driver side of a trainer with several ranks: `RayTrainer`, an `interfaces.Trainer` with one actor per rank.

A rollout is split on the driver. Each data-parallel rank reads its part from the object store, without a copy on its
machine; ranks that share a part (context, tensor and pipeline parallelism) read the same object. A rank returns a value
or a `Failure`. If a rank dies, the call ends immediately and the other ranks are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from furlong.cluster.actor_process import Failure, ask_for_stacks
from furlong.cluster.gpu_placement import Placement
from furlong.cluster.rank_actor import RankLocation, RankSettings, TrainerRank, written_marker
from furlong.core.algorithms import Role
from furlong.core.batch import FlopsModel, IntArray, RolloutBatch
from furlong.core.device_memory import DeviceMemory, MemoryTransfer
from furlong.core.metric import Metrics, merge
from furlong.core.weights import EngineAddress, WeightSource
from furlong.errors import MACHINE_MEMORY, WORKER_DIED, ClusterError, FurlongError, SyncError, TrainerError
from furlong.files.atomic import PendingFiles
from furlong.inference.supervisor.process import tail
from furlong.interfaces import Trainer
from furlong.training.packing import RankPart
from furlong.training.ranks import Ranks
from furlong.weight_sync.weight_record import WeightRecord

logger = logging.getLogger(__name__)

SLOT_SHARE = 0.4  # of a slot, so that trainer and engine host can share one
SETTLE_S = 3.0  # to wait for the cause of a failure: when a rank dies, others may fail first
LAST_LINES = 12
MOST_USERS = 3  # processes to name when a machine runs low on memory
END_S = 2.0  # for ranks to flush their traces, and to release what weight sync holds
REMOTE_STACKS_S = 20.0  # for another machine to answer, where Ray starts a process first
POLL_S = 1.0  # between two checks of idle ranks
WRITTEN_POLL_S = 0.1  # between two checks of what ranks have written

LAYERS_TIME = "perf/layers_time"  # seconds in the layers of a rank

Split = Callable[[RolloutBatch, Any], Sequence[RankPart]]


@dataclass(frozen=True)
class Rank:
    """One actor, as the driver sees it."""

    number: int
    actor: Any
    where: RankLocation

    def __str__(self) -> str:
        return f"trainer rank {self.number}, {self.where}"


class RayTrainer(Trainer):
    """Drives all ranks of a trainer, whose processes `open` creates, and whose model `start` builds.

    Args:
        settings: What every rank needs to start.
        placement: The slots of the ranks.
        split: Splits a batch into the parts of the data-parallel ranks, given the model's FLOPs.
        sizes: Parallel sizes; its rank and world size are ignored.
        environment: Additional environment variables of the ranks.
        outputs: Folders that the ranks and this process write into, by flag.
        on_event: Called with `ranks_timed` after each rollout (`rank_times`, and the seconds of the rollout).
    """

    def __init__(
        self,
        settings: RankSettings,
        placement: Placement,
        *,
        split: Split,
        sizes: Ranks | None = None,
        environment: Mapping[str, str] | None = None,
        outputs: Mapping[str, Path] | None = None,
        on_event: Callable[..., None] = lambda _event, **_fields: None,
    ) -> None:
        self._settings, self._placement, self._split = settings, placement, split
        self._on_event = on_event
        self._sizes, self._environment = sizes or Ranks(), dict(environment or {})
        self._outputs = outputs or {}
        self.ranks: Sequence[Rank] = ()
        self._flops: Any = None
        self._num_calls = 0  # in progress
        self._is_ended = self._has_sent_weights = False

    async def open(self) -> None:
        """Start one actor on each slot, which imports what it needs and uses no device yet.

        Raises the error of a rank that failed, and ClusterError if one does not see a folder of `outputs`.
        """
        slots = self._placement.trainers
        unknown = [RankLocation("?", slot.address, 0, self._settings.log_of(n)) for n, slot in enumerate(slots)]
        self.ranks = [Rank(n, self._actor(n), where) for n, where in enumerate(unknown)]
        locations = await self._all("location")
        self.ranks = [replace(rank, where=where) for rank, where in zip(self.ranks, locations, strict=True)]
        await self.check_outputs()
        await self._all("import_parts")

    async def start(self) -> None:
        """Build the model over all ranks. Raises the error of a rank that failed."""
        address = self.ranks[0].where.address
        port = (await self._all("listen", address, ranks=self.ranks[:1]))[0]
        self._flops = (await self._all("start", address, port))[0]
        for rank in self.ranks:
            logger.info("%s; log %s", rank, rank.where.log)

    async def check_outputs(self) -> None:
        """Check that all ranks see the output folders, before the first checkpoint fails on it."""
        for flag, folder in self._outputs.items():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                marker = tempfile.NamedTemporaryFile(prefix=".seen-", dir=folder.resolve())  # noqa: SIM115
            except OSError as error:
                raise ClusterError(f"{flag}: cannot write into {folder}: {error}; use another folder") from error
            with marker:
                exists = await self._all("path_exists", marker.name)
            if blind := [rank for rank, seen in zip(self.ranks, exists, strict=True) if not seen]:
                raise ClusterError(
                    f"{flag}: {blind[0]} does not see what the driver writes into {folder}, so checkpoints would be "
                    "incomplete; use a folder on a file system that all machines mount at the same path"
                )

    def _place_of(self, number: int) -> Ranks:
        return replace(self._sizes, rank=number, world_size=len(self._placement.trainers))

    def _actor(self, number: int) -> Any:
        slots = self._placement.trainers
        actor_class: Any = ray.remote(TrainerRank)
        return actor_class.options(
            num_cpus=SLOT_SHARE,
            num_gpus=0 if slots[number].gpu is None else SLOT_SHARE,
            scheduling_strategy=self._placement.strategy(slots[number]),
            runtime_env={"env_vars": self._environment} if self._environment else None,
        ).remote(self._settings, self._place_of(number))

    async def train(self, batch: RolloutBatch) -> Metrics:
        """Run all optimizer steps of one rollout on all ranks."""
        started = time.perf_counter()
        refs, costs = await asyncio.to_thread(self._put, batch)
        spent = time.perf_counter() - started
        metrics = await self._call("train", lambda rank: (refs[self._place_of(rank.number).data_rank], spent))
        seconds, rank_costs = (
            time.perf_counter() - started,
            [costs[self._place_of(r.number).data_rank] for r in self.ranks],
        )
        if (fields := rank_times(metrics, rank_costs, [str(rank) for rank in self.ranks])) is not None:
            stages = self._sizes.pipeline
            self._on_event("ranks_timed", rollout=batch.rollout_id, seconds=round(seconds, 6), stages=stages, **fields)
        # the last rank of each part: of a pipeline, the one that computes the loss
        parts = {self._place_of(number).data_rank: values for number, values in enumerate(metrics)}
        return merge(list(parts.values()))

    def _put(self, batch: RolloutBatch) -> tuple[list[Any], list[float]]:
        parts = self._split(batch, self._flops)
        return [ray.put(part) for part in parts], [cost_of(part.batch.lengths, self._flops) for part in parts]

    def weights(self) -> WeightSource:
        """Raise TrainerError: the weights are on the ranks, which send them themselves."""
        raise TrainerError(f"the weights of {len(self.ranks)} trainer ranks are not in the driver's process")

    async def save(self, folder: Path) -> None:
        """Write weights, optimizer, schedule and RNG into `folder`, which all machines see."""
        await self._all("save", folder.resolve())

    async def snapshot(self, folder: Path) -> PendingFiles:
        """Have all ranks copy what `save` writes and start writing it. Writing the returned files waits for all ranks.

        `folder` must be on a file system that all machines share.
        """
        folder = folder.resolve()
        await self._all("snapshot", folder)
        loop, files = asyncio.get_running_loop(), PendingFiles()
        files.add(lambda: asyncio.run_coroutine_threadsafe(self._written(folder), loop).result())
        return files

    async def _written(self, folder: Path) -> None:
        markers = [written_marker(folder, rank.number) for rank in self.ranks]
        check = None
        try:
            while not all(path.exists() for path in markers):
                if check is None or check.done():  # ranks answer only when they are not training
                    if check is not None:
                        check.result()
                    check = asyncio.ensure_future(call_all(self.ranks, "writing", lambda _: (), abort=lambda: None))
                await asyncio.sleep(WRITTEN_POLL_S)
        finally:
            if check is not None:
                check.cancel()
                await asyncio.gather(check, return_exceptions=True)
        for path in markers:
            path.unlink()

    async def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        await self._all("load", folder.resolve())

    async def save_hf(self, folder: Path, *, model: Role = "actor") -> None:
        """Write a folder that transformers loads."""
        await self._all("save_hf", folder.resolve(), model)

    async def send_weights(self, addresses: Sequence[EngineAddress], version: int) -> WeightRecord:
        """Have all ranks send their parts of the weights; return rank 0's record."""
        self._has_sent_weights = True
        return (await self._all("send_weights", addresses, version, may_fail=True))[0]

    async def resend(self, addresses: Sequence[EngineAddress], version: int) -> bool:
        """Have rank 0 load `version` into these servers from a stored copy; False if there is none."""
        return (await self._all("resend", addresses, version, ranks=self.ranks[:1], may_fail=True))[0]

    async def offload(self) -> MemoryTransfer:
        """Offload all ranks; return the total bytes and the time of the slowest."""
        return _together(await self._all("offload"))

    async def onload(self) -> MemoryTransfer:
        """Undo `offload`; return the same."""
        return _together(await self._all("onload"))

    async def empty_cache(self) -> None:
        """Free cached device memory on all ranks."""
        await self._all("empty_cache")

    async def device_memory(self) -> DeviceMemory | None:
        """Return the memory use of the device with the least free memory; None on CPUs."""
        devices = [memory for memory in await self._all("device_memory") if memory is not None]
        return min(devices, key=lambda memory: memory.total - memory.used, default=None)

    async def close_sync(self) -> None:
        """Release the weight sync resources of all ranks. Ranks that do not answer are left to `close`."""
        if self._is_ended or not self._has_sent_weights:
            return
        try:
            async with asyncio.timeout(END_S):
                await self._all("close_sync")
        except TimeoutError:
            logger.warning("trainer ranks are busy and do not release their weight sync resources: they will be killed")

    def stack_traces(self) -> dict[str, str]:
        """Return the stack traces of each rank's threads. Called from the hang watchdog's thread."""
        here = str(ray.get_runtime_context().get_node_id())
        answers: dict[str, Any] = {}
        for rank, slot in zip(self.ranks, self._placement.trainers, strict=True):
            arguments = (rank.where.process, rank.where.log)
            if slot.node_id == here:
                answers[str(rank)] = ask_for_stacks(*arguments)
                continue
            there = NodeAffinitySchedulingStrategy(slot.node_id, soft=False)
            task: Any = ray.remote(ask_for_stacks)
            answers[str(rank)] = task.options(num_cpus=0, scheduling_strategy=there).remote(*arguments)
        return {name: answer if isinstance(answer, str) else _awaited(answer) for name, answer in answers.items()}

    async def wait_for_failure(self) -> FurlongError:
        """Wait until a rank dies while idle, for example while engines generate; return the error."""
        while True:
            await asyncio.sleep(POLL_S)
            if self._num_calls or not self.ranks:
                continue
            try:
                await call_all(self.ranks, "location", lambda _: (), abort=self._kill)
            except FurlongError as error:
                if not self._num_calls:
                    return error

    async def close(self) -> None:
        """Kill all ranks."""
        if self._settings.trace is not None and self.ranks and not self._is_ended:
            with contextlib.suppress(TimeoutError, FurlongError):  # a rank died or hangs
                async with asyncio.timeout(END_S):
                    await self._all("end")
        self._kill()

    def _kill(self) -> None:
        self._is_ended = True
        for rank in self.ranks:
            ray.kill(rank.actor)

    async def _all(
        self, method: str, *arguments: Any, ranks: Sequence[Rank] | None = None, may_fail: bool = False
    ) -> list[Any]:
        return await self._call(method, lambda _: arguments, ranks, may_fail=may_fail)

    async def _call(
        self,
        method: str,
        arguments: Callable[[Rank], tuple[Any, ...]],
        ranks: Sequence[Rank] | None = None,
        *,
        may_fail: bool = False,
    ) -> list[Any]:
        self._num_calls += 1
        called = self.ranks if ranks is None else ranks
        try:
            return await call_all(called, method, arguments, abort=self._kill, may_fail=may_fail)
        finally:
            self._num_calls -= 1


def _awaited(answer: Any) -> str:
    try:
        return str(ray.get(answer, timeout=REMOTE_STACKS_S))
    except RayError as error:
        return f"(its machine does not answer: {type(error).__name__})"


def _together(moved: Sequence[MemoryTransfer]) -> MemoryTransfer:
    return MemoryTransfer(sum(one.num_bytes for one in moved), max(one.seconds for one in moved))


async def call_all(
    ranks: Sequence[Rank],
    method: str,
    arguments: Callable[[Rank], tuple[Any, ...]],
    *,
    abort: Callable[[], None],
    may_fail: bool = False,
) -> list[Any]:
    """Call a method of every rank at the same time. If one fails or dies, the call ends and `abort` is called.

    With `may_fail`, a SyncError is raised only after all ranks have answered, and none is aborted: an engine caused it,
    and `RankSync` leaves no rank waiting for another.

    Raises the rank's own error, or TrainerError with the reason why its process died and the end of its log.
    """

    async def one(rank: Rank) -> Any:
        try:
            answer = await rank.actor.call.remote(method, *arguments(rank))
        except RayActorError as error:
            raise _CrashedError(rank, _reason(error), WORKER_DIED) from None
        except OutOfMemoryError as error:
            raise _CrashedError(rank, low_memory(str(error)), MACHINE_MEMORY) from None
        except RayError as error:
            raise TrainerError(f"{rank}: {type(error).__name__}: {error}") from None
        if isinstance(answer, Failure):
            raise answer.error(str(rank))
        return answer

    calls = [asyncio.ensure_future(one(rank)) for rank in ranks]
    try:
        done, running = await _until_failed(calls, may_fail=may_fail)
        failed = [call for call in done if call.exception() is not None]
        if not failed:
            return [call.result() for call in calls]
        if may_fail and all(isinstance(call.exception(), SyncError) for call in failed):
            failed[0].result()
        if not any(isinstance(call.exception(), _CrashedError) for call in failed) and running:
            await asyncio.wait(running, timeout=SETTLE_S, return_when=asyncio.FIRST_COMPLETED)
        errors = [error for call in calls if call.done() and (error := call.exception()) is not None]
        abort()
        raise _cause(errors)
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def _until_failed(
    calls: Sequence[asyncio.Future[Any]], *, may_fail: bool
) -> tuple[set[asyncio.Future[Any]], set[asyncio.Future[Any]]]:
    """Wait until all calls are done or one has failed; with `may_fail`, other than with a SyncError."""
    done, running = set[asyncio.Future[Any]](), set(calls)
    while running:
        ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        done |= ended
        errors = [error for call in ended if (error := call.exception()) is not None]
        if any(not (may_fail and isinstance(error, SyncError)) for error in errors):
            break
    return done, running


class _CrashedError(Exception):
    """A rank's process died."""

    def __init__(self, rank: Rank, reason: str, code: str) -> None:
        super().__init__(rank, reason, code)
        self.rank, self.reason, self.code = rank, reason, code


def _cause(errors: Sequence[BaseException]) -> BaseException:
    """Return the root cause: a process that died rather than an exception, which it causes in its peers."""
    crashed = next((error for error in errors if isinstance(error, _CrashedError)), None)
    if crashed is None:
        return errors[0]
    lines = tail(Path(crashed.rank.where.log), LAST_LINES)
    shown = "".join(f"\n    {line}" for line in lines)
    logger.error("WorkerCrashed: %s: %s", crashed.rank, crashed.reason)
    return TrainerError(
        f"WorkerCrashed: {crashed.rank} died: {crashed.reason}; the last lines of {crashed.rank.where.log}:{shown}",
        code=crashed.code,
    )


def low_memory(message: str) -> str:
    """Summarize Ray's message about a process that it killed for low memory: the usage and the largest processes."""
    used = re.search(r"was (\S+ used / \S+) limit", message)
    largest = re.findall(r"^(\d+)\t([\d.]+)\t(.+)$", message, re.MULTILINE)[:MOST_USERS]
    users = "; ".join(f"process {pid} has {size} GB ({command[:80]})" for pid, size, command in largest)
    return f"Ray ended it, as its machine ran low on memory ({used[1] if used else '?'}): {users or message[:300]}"


def _reason(error: RayActorError) -> str:
    text = " ".join(str(error).split())
    return text.removeprefix("The actor died unexpectedly before finishing this task. ")[:600]


def cost_of(lengths: IntArray, flops: FlopsModel | None) -> float:
    """Return the TFLOPs of a forward pass over sequences of these lengths; their tokens without a FLOPs model."""
    return float(lengths.sum() if flops is None else flops.cost(lengths).sum() / 1e12)


def rank_times(results: Sequence[Metrics], costs: Sequence[float], names: Sequence[str]) -> dict[str, Any] | None:
    """Return the fields of the event `ranks_timed`; None if a rank did not time its layers.

    Args:
        results: Metrics of each rank.
        costs: Work of each rank (`cost_of`).
        names: Name and machine of each rank.
    """
    if not all(LAYERS_TIME in metrics for metrics in results):
        return None
    layers_s = [metrics[LAYERS_TIME].value for metrics in results]
    per_cost_s = [seconds / cost if cost else 0.0 for seconds, cost in zip(layers_s, costs, strict=True)]
    slowest = max(range(len(per_cost_s)), key=per_cost_s.__getitem__)
    return {
        "layers_s": [float(f"{seconds:.4g}") for seconds in layers_s],
        "per_cost_s": [float(f"{seconds:.4g}") for seconds in per_cost_s],
        "slowest": slowest,
        "place": names[slowest],
    }
