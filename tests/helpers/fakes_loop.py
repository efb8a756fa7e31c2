"""Minimal fakes of all parts that the loop drives: each implements its port and records the calls."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from furlong.core.algorithms import Role
from furlong.core.batch import RolloutBatch
from furlong.core.metric import Metrics, mean
from furlong.core.sample import Group
from furlong.core.weights import SyncReport, WeightSource
from furlong.files.atomic import PendingFiles
from furlong.interfaces import Completion, DeviceSharing, Engine, Parts, PauseMode, SamplingParams, Trainer, WeightSync


@dataclass
class World:
    """The state shared by the fakes, and the log of their calls."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    delay: float = 1e-3
    version: int = -1
    trained_steps: int = 0
    busy: int = 0
    log: list[tuple[str, Any]] = field(default_factory=list)
    params: dict[str, int] = field(default_factory=lambda: {"trained": 0})

    async def pause(self) -> None:
        await asyncio.sleep(self.rng.random() * self.delay)


def tiny_batch(rollout_id: int, version: int, groups: Sequence[int] = (0,)) -> RolloutBatch:
    n = len(groups)
    return RolloutBatch(
        rollout_id=rollout_id,
        tokens=np.arange(2 * n, dtype=np.int32),
        lengths=np.full(n, 2),
        response_lengths=np.ones(n, np.int64),
        loss_masks=np.ones(n, np.uint8),
        rewards=np.zeros(n, np.float32),
        raw_rewards=np.zeros(n, np.float32),
        group_ids=np.array(groups, np.int64),
        rollout_ids=np.array(groups, np.int64),
        sample_ids=np.array(groups, np.int64),
        truncated=np.zeros(n, np.uint8),
        columns={"token_versions": np.full(n, version, np.int32)},
    )


@dataclass
class FakeRollout:
    world: World
    fail_at: int | None = None
    end_at: int | None = None

    async def produce(self, rollout_id: int) -> RolloutBatch | None:
        if rollout_id == self.fail_at:
            raise RuntimeError(f"rollout {rollout_id} failed")
        if self.end_at is not None and rollout_id >= self.end_at:
            return None
        self.world.busy += 1
        version = self.world.version
        self.world.log.append(("start", rollout_id))
        await self.world.pause()
        self.world.busy -= 1
        return tiny_batch(rollout_id, version, [rollout_id])

    async def evaluate(self, rollout_id: int) -> Metrics:
        version = self.world.version
        await self.world.pause()
        assert self.world.version == version, "weights changed while an evaluation ran"
        self.world.log.append(("eval", rollout_id))
        return {"eval/fake": mean(float(version))}


@dataclass
class FakeTrainer(Trainer):
    world: World

    async def train(self, batch: RolloutBatch) -> Metrics:
        await self.world.pause()
        self.world.log.append(("train", batch.rollout_id))
        self.world.trained_steps += 1
        return {"train/loss": mean(float(batch.rollout_id))}

    def weights(self) -> WeightSource:
        return WeightSource(list)

    async def save(self, folder: Path) -> None:
        (folder / "steps").write_text(str(self.world.trained_steps))

    async def snapshot(self, folder: Path) -> PendingFiles:
        files = PendingFiles()
        files.add_text(folder / "steps", str(self.world.trained_steps))
        return files

    async def load(self, folder: Path) -> None:
        self.world.trained_steps = int((folder / "steps").read_text())

    async def save_hf(self, folder: Path, *, model: Role = "actor") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")

    async def close(self) -> None:
        pass


@dataclass
class FakeSync(WeightSync):
    world: World
    may_change_in_flight: bool = False

    async def update_weights(self, version: int) -> SyncReport:
        if not self.may_change_in_flight:
            assert self.world.busy == 0, "weights were updated while a rollout was running"
        self.world.log.append(("update", version))
        self.world.version = version
        return SyncReport(version, 0, 0, 0.0)


class FakeEngineControl(Engine):
    """The part of an engine that the stream needs: pausing."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def generate(self, prompt: list[int], params: SamplingParams, *, session: str | None = None) -> Completion:
        raise AssertionError("the stream only pauses")

    async def pause(self, mode: PauseMode) -> None:
        self.world.log.append(("pause", mode))

    async def resume(self) -> None:
        self.world.log.append(("resume", None))

    async def abort(self, sessions: Iterable[str]) -> None:
        raise AssertionError("the stream only pauses")

    async def load_weights(self, source: WeightSource, version: int) -> dict[str, str]:
        return {}

    async def close(self) -> None:
        pass


class FakeSource:
    def __init__(self) -> None:
        self.position = 0

    def next_groups(self, n: int) -> list[Group]:
        return []

    def return_groups(self, groups: Sequence[Group]) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"position": self.position}

    def restore(self, state: dict[str, Any], *, data_changed: bool = False) -> None:
        self.position = state["position"]

    groups_per_epoch = None


class FakeLedger:
    def __init__(self) -> None:
        self.trained_groups: list[tuple[int, int]] = []
        self.restored_groups: list[tuple[int, int]] = []
        self.ends: list[bool] = []

    def issued(self, groups: Iterable[Group], rollout_id: int) -> None: ...
    def generated(self, group: Group, rollout_id: int) -> None: ...
    def dropped(self, group: Group, reason: str) -> None: ...
    def returned(self, group: Group, reason: str) -> None: ...

    def trained(self, group_ids: Iterable[int], step: int) -> None:
        self.trained_groups += [(g, step) for g in group_ids]

    def restored(self, group_ids: Iterable[int], rollout_id: int) -> None:
        self.restored_groups += [(g, rollout_id) for g in group_ids]

    def ended(self, *, is_saved: bool) -> None:
        self.ends.append(is_saved)

    def data_changed(self) -> None: ...

    def mark(self) -> dict[str, Any]:
        return {"events": len(self.trained_groups)}


class ListTracker:
    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.records.append((step, metrics))

    def close(self) -> None: ...


class Unobserved:
    """An `Observer` that ignores all events."""

    stop_requested = False

    def notify(self, event: str, **fields: Any) -> None: ...


def fake_parts(world: World, **changes: Any) -> Parts:
    parts: dict[str, Any] = {
        "trainer": FakeTrainer(world),
        "sync": FakeSync(world),
        "rollout": FakeRollout(world),
        "source": FakeSource(),
        "ledger": FakeLedger(),
        "device_sharing": DeviceSharing(),
        "trackers": [ListTracker()],
        "observer": Unobserved(),
        "engine": FakeEngineControl(world),
    }
    return Parts(**(parts | changes))
