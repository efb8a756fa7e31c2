"""Build the parts of one training rank in its own process, from the configuration as JSON."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from furlong.cluster.rank_actor import RankParts
from furlong.config.command_line import config_from_json
from furlong.config.hooks import usable_hooks
from furlong.inference.sglang.server import connected
from furlong.training.ranks import Ranks
from furlong.weight_sync.remote_sync import RankSync
from furlong.wiring.engine_parts import build_transport
from furlong.wiring.run_context import RunContext
from furlong.wiring.training_parts import build_worker


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
            connect=partial(connected, api_key=config.cluster.sglang_api_key),
            rank=ranks.rank,
            world_size=ranks.world_size,
        )

    return RankParts(worker, sync)


def seed_everything(seed: int) -> None:
    """Seed the global random generators, which hooks may use; checkpoints contain their states."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
