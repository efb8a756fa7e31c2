"""Builds the parts of a run that Ray places: the session, the slots, the trainer, and the ranks in their processes."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from furlong.algo import advantage, policy_loss
from furlong.cluster.rank_actor import RankParts, RankSettings
from furlong.cluster.ray_session import RaySession, open_session
from furlong.config.command_line import config_from_json, config_from_values, config_to_json
from furlong.config.critic import critic_settings
from furlong.config.flag_spec import flag_specs
from furlong.config.hooks import HOOKS, function_paths, usable_hooks
from furlong.config.sections import Config
from furlong.config.topology import Topology
from furlong.core import tracing
from furlong.core.algorithms import BUILTIN_ALGORITHMS, find_algorithm
from furlong.core.user_objects import object_name
from furlong.errors import ConfigError
from furlong.inference.sglang.server import connected
from furlong.inference.supervisor.process import HostGpus
from furlong.machine import chosen_log_level
from furlong.training.packing import split_batch
from furlong.training.ranks import Ranks
from furlong.weight_sync.remote_sync import RankSync
from furlong.wiring.context import RunContext
from furlong.wiring.training import (
    build_packing,
    build_sizes,
    build_transport,
    build_worker,
    engine_scheme,
    seed_everything,
)

if TYPE_CHECKING:
    from furlong.cluster.gpu_placement import Placement
    from furlong.cluster.ray_trainer import RayTrainer


@dataclass(frozen=True)
class Cluster:
    """A session and the slots of the run in it."""

    session: RaySession
    placement: Placement

    @property
    def device(self) -> str:
        """Device of the slots: "cuda" or "cpu"."""
        slots = [*self.placement.trainers, *(slot for engine in self.placement.engines for slot in engine)]
        return "cpu" if any(slot.gpu is None for slot in slots) else "cuda"

    def engine_placements(self) -> list[list[HostGpus]]:
        """Start hosts for engine servers; returns the places of each engine."""
        from furlong.cluster.ray_host import engine_placements

        return engine_placements(self.placement, environment=self.session.environment)

    @property
    def first_ranks(self) -> list[int]:
        """Of each engine: the trainer rank on its first slot, where they share slots."""
        ranks = {slot.bundle: rank for rank, slot in enumerate(self.placement.trainers)}
        return [ranks.get(engine[0].bundle, 0) for engine in self.placement.engines]

    def close(self) -> None:
        """Release the slots, which ends their processes, and disconnect from Ray."""
        self.placement.release()
        self.session.close()


def build_cluster(context: RunContext, *, on_event: Callable[..., None]) -> Cluster:
    """Connect to Ray and reserve the run's slots. `on_event` receives `placement_waiting`.

    Raises ConfigError for more GPUs than the cluster has, or an algorithm that trainer processes do not know.
    """
    flags, topology = context.config.cluster, Topology.of(context.config)
    if topology.num_ranks:
        check_known_to_ranks(context.config.algo.advantage_estimator)
    session = open_session(flags.ray_address, num_slots=topology.num_gpus)
    try:
        from furlong.cluster.gpu_placement import place  # imports Ray, which reads its settings then

        return Cluster(session, place(topology, timeout_s=flags.placement_timeout, on_event=on_event))
    except BaseException:
        session.close()
        raise


def build_ray_trainer(
    context: RunContext, cluster: Cluster, num_rollout: int, *, on_event: Callable[..., None]
) -> RayTrainer:
    """Build the trainer over all ranks, not started; `on_event` receives their timings."""
    from furlong.cluster.ray_trainer import RayTrainer

    config, flags = context.config, context.config.cluster
    num_ranks = len(cluster.placement.trainers)
    setting = RankSettings(
        build="furlong.wiring.cluster:build_rank",
        config_json=config_to_json(without_objects(config)),
        folder=str(context.folder.resolve()),
        num_rollout=num_rollout,
        cwd=os.getcwd(),
        path=list(sys.path),
        log_level=chosen_log_level(config.track.log_level),
        cluster=flags,
        deterministic=config.train.deterministic_mode,
        trace=os.environ.get(tracing.FOLDER),
    )
    packing, sizes = build_packing(config), build_sizes(config, num_ranks)
    return RayTrainer(
        setting,
        cluster.placement,
        split=lambda batch, flops: split_batch(
            batch,
            algo=config.algo,
            packing=packing,
            num_ranks=sizes.num_data,
            max_response_len=config.rollout.rollout_max_response_len,
            flops=flops,
        ),
        sizes=sizes,
        environment={**cluster.session.environment, **flags.train_env_vars},
        outputs=checkpoint_folders(config),
        on_event=on_event,
    )


def build_rank(config_json: str, *, folder: Path, num_rollout: int, ranks: Ranks) -> RankParts:
    """Build the worker and weight sync of this rank. The process group of all ranks must exist."""
    config = config_from_json(config_json)
    context = RunContext.read(config, usable_hooks(config), folder)
    seed_everything(config.train.seed)
    worker = build_worker(context, num_rollout, ranks)

    def sync(device_types: Sequence[str]) -> RankSync:
        return RankSync(
            worker.weights,
            build_transport(context, device_types, ranks),
            connect=partial(
                connected, api_key=config.cluster.sglang_api_key, report_s=config.sync.update_weight_timeout
            ),
            rank=ranks.rank,
            world_size=ranks.world_size,
            scheme=engine_scheme(context),
        )

    return RankParts(worker, sync)


def without_objects(config: Config) -> Config:
    """Return a copy without the functions that are objects of this process, which ranks do not have or call."""
    fields = {spec.flag: spec for spec in flag_specs(Config).values()}
    left_out: dict[str, Any] = {}
    for name, paths in function_paths(config).items():
        if any(map(object_name, paths)):
            spec = fields[HOOKS[name].flag]
            left_out[spec.field] = spec.default
    return config_from_values(left_out, config)


def checkpoint_folders(config: Config) -> dict[str, Path]:
    """The folders that ranks write checkpoints into, by flag; of models what is above those of rollouts."""
    flags = config.checkpoint
    folders = {} if flags.save is None else {"--save": Path(flags.save)}
    models = {"--save-hf": flags.save_hf}
    if config.algo.uses_critic:
        models["--critic-save"] = critic_settings(config).save
    for flag, template in models.items():
        if template is not None:
            parts = itertools.takewhile(lambda part: "{rollout_id}" not in part, Path(template).parts)
            folders[flag] = Path(*parts)
    return folders


def check_known_to_ranks(name: str) -> None:
    """Check that trainer processes on Ray know an algorithm.

    Raises ConfigError for a row or a function that this program has registered: ranks know those of furlong's files.
    """
    row = find_algorithm(name)
    registered = [f"the row {name!r} of ALGORITHMS"] if row != BUILTIN_ALGORITHMS.get(name) else []
    for table, function, home in (
        ("ADVANTAGES", advantage.ADVANTAGES.get(row.advantages), advantage),
        ("POLICY_LOSSES", policy_loss.POLICY_LOSSES.get(row.policy), policy_loss),
    ):
        if getattr(function, "__module__", None) != home.__name__:
            registered.append(f"{function!r} in {table}")
    if registered:
        raise ConfigError(
            f"--advantage-estimator {name}: {' and '.join(registered)} was registered by this program, which trainer "
            "processes on Ray do not run; train in one process (no --ray-address, one GPU), give the function to "
            "--custom-advantage-function-path or --custom-loss-function-path, or add it to furlong's own files"
        )
