"""Checkpoints of a model that Megatron-core trains: the files of `training.checkpoint.trainer_state`, of any layout and for any.

Tensors are whole and under the names of the Hugging Face checkpoint, as those of --train-backend fsdp are, so a run
goes on with other sizes of every parallelism, and with the other backend. Writing sends one tensor at a time to all
ranks, which write files in turn; reading takes one parameter's tensors at a time from the files.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from furlong.core.pending_files import PendingFiles
from furlong.errors import CheckpointError
from furlong.interfaces import Role
from furlong.training.checkpoint import tensor_files
from furlong.training.checkpoint import trainer_state as state
from furlong.training.checkpoint.tensor_files import TensorReader
from furlong.training.megatron import weight_names as names
from furlong.training.megatron.distributed_optimizer import MASTER, OptimizerState
from furlong.training.optimizer import check_moments
from furlong.training.ranks import Ranks

logger = logging.getLogger(__name__)

Model = Any  # this rank's part of one, as `names` takes it


def save(
    folder: Path,
    model: Model,
    hf: Any,
    *,
    optimizer: OptimizerState,
    frozen: Mapping[Role, Model],
    ranks: Ranks,
    meta: Mapping[str, Any],
    with_moments: bool,
    later: PendingFiles | None = None,
) -> None:
    """Write masters, moments, frozen models that have changed, and random states, or hold them in `later`.

    A collective of all ranks.
    """

    def write(stem: str, tensors: Iterator[tuple[str, Tensor]]) -> int:
        written = tensor_files.write(folder, partial(state.file_name, stem), tensors, ranks, later=later)
        return len({name for name, _ in written.values()}) or 1

    masters = names.export(model, hf, value_of=partial(optimizer.whole, what=MASTER))
    counts = {state.WEIGHTS: write(state.WEIGHTS, masters)}
    if with_moments:
        counts[state.OPTIMIZER] = write(state.OPTIMIZER, _moments(model, hf, optimizer))
    for role in sorted(frozen):
        counts[f"trainer_{role}"] = write(f"trainer_{role}", names.export(frozen[role], hf))
    written = {"has_optimizer": with_moments, "roles": sorted(frozen), "files": counts, "num_ranks": ranks.world_size}
    state.write_meta(folder, {**meta, **written}, ranks, later)
    ranks.wait()


def _moments(model: Model, hf: Any, optimizer: OptimizerState) -> Iterator[tuple[str, Tensor]]:
    """Each moment of each tensor of the checkpoint, then the steps that were counted for it."""
    for moment in optimizer.moments:
        for name, tensor in names.export(model, hf, value_of=partial(optimizer.whole, what=moment)):
            if name in optimizer.trained:
                yield f"{name}/{moment}", tensor
    if optimizer.kind != "adam":
        return
    step = torch.tensor(optimizer.step)
    dist.all_reduce(step, dist.ReduceOp.MAX)  # a rank may have no slice
    for name in sorted(optimizer.trained):
        yield f"{name}/step", step.clone()


def load_weights(folder: Path, meta: Mapping[str, Any], model: Model, hf: Any, optimizer: OptimizerState) -> None:
    """Fill the model that is trained, and its masters. Raises CheckpointError for a checkpoint of another model."""
    reader = state.reader(folder, meta, state.WEIGHTS)

    def put(parameter: Tensor, part: Tensor) -> None:
        optimizer.put(parameter, MASTER, part)

    names.load(model, hf, reader, put=put)


def load_frozen(folder: Path, meta: Mapping[str, Any], stem: str, model: Model, hf: Any) -> None:
    """Fill a model that is not trained from the files of `stem`. Raises CheckpointError for those of another model."""
    names.load(model, hf, state.reader(folder, meta, stem))


def load_moments(folder: Path, meta: Mapping[str, Any], model: Model, hf: Any, optimizer: OptimizerState) -> None:
    """Fill the moments. Raises CheckpointError if they are not those of every parameter after the same steps."""
    optimizer.reset()
    reader = state.reader(folder, meta, state.OPTIMIZER)
    check_moments(reader, optimizer.kind)
    if not reader.names:  # saved before the first step
        return
    if odd := {name.rpartition("/")[0] for name in reader.names} ^ optimizer.trained:
        raise CheckpointError(
            f"{folder} was saved by a run that trained other parameters: {', '.join(sorted(odd)[:3])} are trained in "
            "one of both only; resume with its lists of parameters, or with --no-load-optim"
        )
    steps = {float(reader.read(name)) for name in reader.names if name.endswith("/step")}
    if len(steps) > 1:
        raise CheckpointError(
            f"{folder} was saved when parameters had taken {', '.join(f'{n:g}' for n in sorted(steps))} steps; "
            "--train-backend megatron has one number for all: resume with fsdp, or with --no-load-optim"
        )
    optimizer.set_step(steps.pop() if steps else 0.0)
    weights = state.reader(folder, meta, state.WEIGHTS)
    for moment in optimizer.moments:

        def put(parameter: Tensor, part: Tensor, moment: str = moment) -> None:
            optimizer.put(parameter, moment, part)

        names.load(model, hf, _Moment(reader, moment, weights), put=put)


class _Moment:
    """One moment of all tensors, under the names of the tensors; of those that are not trained something as large."""

    def __init__(self, reader: TensorReader, moment: str, weights: TensorReader) -> None:
        self._reader, self._end, self._weights = reader, f"/{moment}", weights

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._weights.names)

    def read(self, name: str) -> Tensor:
        own = name + self._end
        return self._reader.read(own) if own in self._reader.names else self._weights.read(name)
