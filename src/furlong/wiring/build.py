"""From a configuration to the parts of a run: the only place that names concrete classes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from furlong.config.checks.validate import validate
from furlong.config.command_line import Resolved
from furlong.config.evaluation import EvalSpec, used_eval_specs
from furlong.config.hooks import usable_hooks
from furlong.config.sections import Config
from furlong.config.topology import uses_ray
from furlong.data.ledger import FileLedger
from furlong.diagnosis.monitors.monitor import RunMonitor
from furlong.errors import ConfigError
from furlong.inference.supervisor.server_launch import check_startable
from furlong.interfaces import Parts
from furlong.loop.checkpoints import Checkpoints
from furlong.loop.schedule import RunSchedule
from furlong.rewards.group_reward import GroupReward
from furlong.rollout.agent_hooks import AgentHooks
from furlong.tracking.run_files import StepFile
from furlong.training.local_trainer import FrozenTrainer
from furlong.wiring.cluster_parts import Cluster, build_cluster, build_ray_trainer
from furlong.wiring.engine_parts import ServingParts, Start, build_serving, check_sharing
from furlong.wiring.gateway_parts import MODEL, build_gateway
from furlong.wiring.input_parts import build_inputs
from furlong.wiring.record_parts import build_checkpoints, build_ledger, build_monitor, build_schedule
from furlong.wiring.rollout_parts import build_rollout, build_source, pool_of
from furlong.wiring.run_context import RunContext
from furlong.wiring.session_parts import build_agent_hooks, build_session_server
from furlong.wiring.training_parts import TrainingParts, build_trainer, seed_everything

if TYPE_CHECKING:
    from furlong.inference.server.gateway import Gateway
    from furlong.sessions.session_server import SessionServer


@dataclass(frozen=True)
class Built:
    """A run that is ready to start. Stages of `starting` go one after the other, what is in one at the same time."""

    parts: Parts
    schedule: RunSchedule
    checkpoints: Checkpoints
    ledger: FileLedger
    serving: ServingParts
    rewards: Sequence[GroupReward]
    watch: RunMonitor
    files: Sequence[StepFile] = ()
    starting: Sequence[Sequence[Start]] = ()
    cluster: Cluster | None = None
    listeners: Sequence[Gateway | SessionServer] = ()
    hooks: AgentHooks | None = None

    async def start(self) -> None:
        """Load reward functions, and start what runs elsewhere: what cannot be ends the run before it begins."""
        for reward in self.rewards:
            await reward.start()
        if self.hooks is not None:
            await self.hooks.set_up()
        for listener in self.listeners:
            await listener.start()
        for stage in self.starting:
            await asyncio.gather(*(start() for start in stage))

    async def close(self) -> None:
        """Stop all threads and processes, even if one raises."""
        async with contextlib.AsyncExitStack() as stack:  # the last one first
            if self.cluster is not None:
                stack.callback(self.cluster.close)
            if self.hooks is not None:
                stack.push_async_callback(self.hooks.tear_down)
            for reward in self.rewards:
                stack.push_async_callback(reward.close)
            stack.callback(self.parts.source.close)
            if self.checkpoints.inputs is not None:
                stack.callback(self.checkpoints.inputs.close)
            stack.push_async_callback(self.parts.trainer.close)
            stack.push_async_callback(self.serving.close)
            for listener in self.listeners:
                stack.push_async_callback(listener.close)

    def queues(self) -> dict[str, int]:
        """Return the number of running and waiting requests of the engine in this process."""
        engine = self.serving.engine
        return {} if engine is None else engine.queue_lengths()

    def close_files(self) -> None:
        """Write out what is buffered."""
        with contextlib.ExitStack() as stack:
            for each in (*self.files, *self.parts.trackers, self.ledger):
                stack.callback(each.close)


def build(resolved: Resolved, folder: Path) -> Built:
    """Build everything that the loop drives. Raises ConfigError or DataError before anything is started."""
    context = RunContext.read(resolved.config, usable_hooks(resolved.config), folder)
    with contextlib.ExitStack() as opened:  # what is open is closed if a later part cannot be built
        built = _build(context, opened)
        opened.pop_all()
    return built


def _build(context: RunContext, opened: contextlib.ExitStack) -> Built:
    """Build the parts in order; register their close methods with `opened`."""
    config = context.config
    specs = used_eval_specs(config)
    if (inputs := build_inputs(context)) is not None:
        opened.callback(inputs.close)
    checkpoints = build_checkpoints(config, inputs)
    ledger = build_ledger(context, checkpoints.peek())
    opened.callback(ledger.close)
    source = build_source(context, ledger)
    opened.callback(source.close)
    schedule = build_schedule(context, source, has_eval=bool(specs) or context.hooks.eval_function is not None)
    seed_everything(config.train.seed)
    watch = build_monitor(context, schedule.num_rollout)
    opened.callback(watch.close)
    cluster = build_cluster(context, on_event=watch.notify) if uses_ray(config) else None
    if cluster is not None:
        opened.callback(cluster.close)
        context = _on_cluster(context, cluster)
    if config.cluster.colocate and context.device == "cuda":
        check_sharing(context)
    generates = _generates(config, specs)
    if generates:
        check_startable(config, context.device)
    training = _training(context, cluster, schedule.num_rollout, watch)
    serving = build_serving(context, training, cluster, watch, opened) if generates else ServingParts()
    engine = serving.engine
    routers, gateway = serving.router_addresses, None
    session_server = None if engine is None else build_session_server(context, specs, opened)
    if engine is not None and not routers:
        gateway = build_gateway(context, engine, specs, opened)
        routers = {} if gateway is None else {MODEL: gateway.address}
    rollout_context = dataclasses.replace(context.with_routers(routers), session_server=session_server)
    rollout = build_rollout(rollout_context, engine, source, ledger, specs)
    return Built(
        parts=Parts(
            trainer=training.trainer,
            sync=serving.sync,
            rollout=rollout,
            source=source,
            ledger=ledger,
            device_sharing=serving.device_sharing,
            trackers=[watch],
            engine=engine,
            pool=pool_of(rollout),
            observer=watch,
        ),
        schedule=schedule,
        checkpoints=checkpoints,
        ledger=ledger,
        serving=serving,
        rewards=context.rewards,
        watch=watch,
        files=context.files,
        starting=_stages(config, training, serving),
        cluster=cluster,
        hooks=build_agent_hooks(context),
        listeners=[each for each in (gateway, session_server) if each is not None],
    )


def _on_cluster(context: RunContext, cluster: Cluster) -> RunContext:
    """Return the context on the cluster's device. Raises ConfigError for flags that do not suit it."""
    if problems := validate(context.config, device_type=cluster.device):  # of GPUs, which only the cluster knows
        raise ConfigError(*problems)
    return context.on(cluster.device)


def _generates(config: Config, specs: Sequence[EvalSpec]) -> bool:
    """Whether anything is generated: demonstrations only are where they are evaluated."""
    is_sft = config.algo.loss_type == "sft_loss"
    return not config.debug.debug_train_only and (not is_sft or bool(specs))


def _training(context: RunContext, cluster: Cluster | None, num_rollout: int, watch: RunMonitor) -> TrainingParts:
    if context.config.debug.debug_rollout_only:
        return TrainingParts(FrozenTrainer())
    if cluster is None:
        return TrainingParts(build_trainer(context, num_rollout))
    trainer = build_ray_trainer(context, cluster, num_rollout, on_event=watch.notify)
    return TrainingParts(trainer, trainer)


def _stages(config: Config, training: TrainingParts, serving: ServingParts) -> Sequence[Sequence[Start]]:
    """Return the start-up stages, each of parts that start concurrently: colocated engines start after the trainer."""
    trainer = [] if training.ray_trainer is None else [training.ray_trainer.start]
    if not config.cluster.colocate:
        return [[*trainer, *serving.starting]]
    return [trainer, [serving.device_sharing.make_room], serving.starting]
