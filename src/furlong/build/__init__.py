"""From a configuration to the parts of a run: the only place that names concrete classes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from furlong.build.cluster import Cluster, build_cluster, build_ray_trainer
from furlong.build.data import build_ledger, build_source
from furlong.build.engines import build_engine, build_sync
from furlong.build.fleet import build_fleets, build_routers, check_sharing
from furlong.build.generation import build_rollout
from furlong.build.rank import seed_everything
from furlong.build.records import build_checkpoints, build_plan, build_watch
from furlong.build.shared import Shared
from furlong.build.training import build_trainer
from furlong.config.evaluation import EvalSpec, eval_specs
from furlong.config.flags import Resolved
from furlong.config.hooks import usable_hooks
from furlong.config.sections import Config
from furlong.config.topology import uses_ray
from furlong.config.validate_engine import is_started
from furlong.data.custom import CustomDataSource
from furlong.data.ledger import FileLedger
from furlong.data.source import RolloutDataSource
from furlong.doctor.monitors.watch import Watch
from furlong.engines.embedded import EmbeddedEngine
from furlong.engines.fleet import Fleet
from furlong.engines.sglang_http import HttpEngine
from furlong.engines.sglang_router import SglangRouter
from furlong.engines.silence import SilenceWatch
from furlong.errors import ConfigError
from furlong.loop.checkpoint import Checkpoints
from furlong.loop.residency import Colocated, TrainerMemory, Unshared
from furlong.loop.train import Plan
from furlong.ports import Engine, Parts, Residency, Trainer, Visible, WeightSync
from furlong.rewards.group import GroupReward
from furlong.rollout.measured import MeasuredRollout
from furlong.sync.none import NoEngines
from furlong.sync.remote import RemoteSync
from furlong.track.rows import StepFile
from furlong.trainers.frozen import FrozenTrainer

Start = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Built:
    """A run that is ready to start. Stages of `starting` go one after the other, what is in one at the same time."""

    parts: Parts
    plan: Plan
    checkpoints: Checkpoints
    ledger: FileLedger
    rewards: Sequence[GroupReward]
    tokenizer: Any
    watch: Watch
    files: Sequence[StepFile] = ()
    starting: Sequence[Sequence[Start]] = ()
    cluster: Cluster | None = None
    fleets: Sequence[Fleet] = ()
    silence: SilenceWatch | None = None

    async def start(self) -> None:
        """Load reward functions, and start what runs elsewhere: what cannot be ends the run before it begins."""
        for reward in self.rewards:
            await reward.start()
        for stage in self.starting:
            await asyncio.gather(*(start() for start in stage))

    async def close(self) -> None:
        """End threads and processes."""
        if isinstance(self.parts.sync, RemoteSync):
            await self.parts.sync.close()
        if self.parts.engine is not None:
            await self.parts.engine.close()
        if self.silence is not None:
            await self.silence.close()
        for fleet in self.fleets:
            await fleet.close()
        await self.parts.trainer.close()
        if isinstance(self.parts.source, RolloutDataSource | CustomDataSource):
            self.parts.source.close()
        for reward in self.rewards:
            await reward.close()
        if self.cluster is not None:
            self.cluster.close()

    def queues(self) -> dict[str, int]:
        """How many requests the engine of this process runs and has waiting."""
        engine = self.parts.engine
        if not isinstance(engine, EmbeddedEngine):
            return {}
        stats = engine.stats()
        return {"engine running": stats.running, "engine waiting": stats.waiting}

    def stacks(self) -> Mapping[str, str]:
        """The stacks of the trainer's processes, if it has any of its own."""
        trainer = self.parts.trainer
        return trainer.stacks() if isinstance(trainer, Visible) else {}

    def close_files(self) -> None:
        """Write out what is buffered."""
        self.ledger.close()
        for tracker in self.parts.trackers:
            tracker.close()
        for file in self.files:
            file.close()


def build(resolved: Resolved, folder: Path) -> Built:
    """Build everything that the loop drives. Raises ConfigError or DataError before anything is started."""
    shared = Shared.read(resolved.config, usable_hooks(resolved.config), folder)
    with contextlib.ExitStack() as opened:  # what is open is closed if a later part cannot be built
        built = _build(shared, opened)
        opened.pop_all()
    return built


def _build(shared: Shared, opened: contextlib.ExitStack) -> Built:
    """Build part after part; `opened` hears how to close each."""
    config = shared.config
    specs = eval_specs(config)
    checkpoints = build_checkpoints(config)
    ledger = build_ledger(shared, checkpoints.peek())
    opened.callback(ledger.close)
    source = build_source(shared, ledger)
    if isinstance(source, RolloutDataSource | CustomDataSource):
        opened.callback(source.close)
    plan = build_plan(shared, source, has_eval=bool(specs) or shared.hooks.eval_function is not None)
    seed_everything(config.train.seed)
    watch = build_watch(shared, plan.num_rollout)
    opened.callback(watch.close)
    cluster = build_cluster(shared, on_event=watch.notify) if uses_ray(config) else None
    if cluster is not None:
        opened.callback(cluster.close)
        shared = shared.on(cluster.device)
    if config.cluster.colocate and shared.device == "cuda":
        check_sharing(shared)
    trainer, training = _trainer(shared, cluster, plan.num_rollout)
    needs_engine = _needs_engine(config, specs)
    routers = build_routers(shared) if needs_engine else {}
    if routers:
        shared = shared.with_routers(asyncio.run(_addresses(routers)))
        opened.callback(lambda: asyncio.run(_let_go(routers)))
    engine = build_engine(shared) if needs_engine else None
    if engine is not None:
        opened.callback(lambda: asyncio.run(engine.close()))
    sync = NoEngines() if isinstance(trainer, FrozenTrainer) else build_sync(shared, trainer, engine)
    residency = _residency(shared, trainer, engine)
    fleets: list[Fleet] = []
    if isinstance(engine, HttpEngine) and is_started(config):
        fleets = _fleets(shared, engine, sync, residency, cluster, watch, routers)
    serving: list[Start] = [fleet.start for fleet in fleets]
    silence = None
    if isinstance(engine, HttpEngine) and not config.fault.use_fault_tolerance:
        silence = SilenceWatch(engine.pool, watch.notify)
        serving.append(silence.start)
    rollout = build_rollout(shared, engine, source, ledger, specs)
    return Built(
        parts=Parts(
            trainer=trainer,
            sync=sync,
            rollout=MeasuredRollout(rollout, engine.take_load) if isinstance(engine, HttpEngine) else rollout,
            source=source,
            ledger=ledger,
            residency=residency,
            trackers=[watch],
            engine=engine,
            observer=watch,
        ),
        plan=plan,
        checkpoints=checkpoints,
        ledger=ledger,
        rewards=shared.rewards,
        tokenizer=shared.tokenizer,
        watch=watch,
        files=shared.files,
        starting=_stages(config, training, residency, serving),
        cluster=cluster,
        fleets=fleets,
        silence=silence,
    )


def _needs_engine(config: Config, specs: Sequence[EvalSpec]) -> bool:
    """Whether anything is generated: demonstrations only are where they are evaluated."""
    is_sft = config.algo.loss_type == "sft_loss"
    return not config.debug.debug_train_only and (not is_sft or bool(specs))


def _trainer(shared: Shared, cluster: Cluster | None, num_rollout: int) -> tuple[Trainer, list[Start]]:
    """The trainer, and how to start what of it runs in other processes."""
    if shared.config.debug.debug_rollout_only:
        return FrozenTrainer(), []
    if cluster is None:
        return build_trainer(shared, num_rollout), []
    trainer = build_ray_trainer(shared, cluster, num_rollout)
    return trainer, [trainer.start]


async def _addresses(routers: Mapping[str, SglangRouter]) -> dict[str, tuple[str, int]]:
    """Where the routers will be."""
    return {name: await router.reserve() for name, router in routers.items()}


async def _let_go(routers: Mapping[str, SglangRouter]) -> None:
    """Give back the ports of routers that are not started."""
    for router in routers.values():
        await router.close()


def _fleets(
    shared: Shared,
    engine: HttpEngine,
    sync: WeightSync,
    residency: Residency,
    cluster: Cluster | None,
    watch: Watch,
    routers: Mapping[str, SglangRouter],
) -> list[Fleet]:
    """The servers that the run starts, on this machine or where the cluster places them."""
    fleets = build_fleets(
        shared,
        engine,
        sync,
        routers,
        on_event=watch.notify,
        places=None if cluster is None else cluster.engine_places(),
        first_ranks=() if cluster is None else cluster.first_ranks,
    )
    if isinstance(residency, Colocated):
        fleets[0].room = residency
    return fleets


def _stages(
    config: Config, training: list[Start], residency: Residency, serving: list[Start]
) -> Sequence[Sequence[Start]]:
    """What starts at the same time, in order: engines on the trainer's GPUs size their caches by the memory left."""
    if not config.cluster.colocate:
        return [[*training, *serving]]
    return [training, [residency.make_room] if isinstance(residency, Colocated) else [], serving]


def _residency(shared: Shared, trainer: Trainer, engine: Engine | None) -> Residency:
    """Who owns the devices. Raises ConfigError for a trainer that cannot leave them."""
    cluster = shared.config.cluster
    if not (cluster.offload_train or cluster.offload_rollout) or not isinstance(engine, HttpEngine):
        return Unshared()
    if not isinstance(trainer, TrainerMemory):
        raise ConfigError("this trainer stays where it is; remove --debug-rollout-only, or --offload")
    return Colocated(
        trainer, engine, offload_train=bool(cluster.offload_train), offload_rollout=bool(cluster.offload_rollout)
    )
