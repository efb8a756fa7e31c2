"""Layout-independent checkpoints of a Megatron-core model, in the files of `checkpoint.trainer_files`.

Tensors are whole and under their Hugging Face names, as those of --train-backend fsdp, so a run can resume with any
layout and with either backend. Saving gathers one tensor at a time on all ranks, which take turns writing files;
loading reads one parameter's tensors at a time.
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

from furlong.errors import CheckpointError
from furlong.files.atomic import PendingFiles
from furlong.interfaces import Role
from furlong.training.checkpoint import trainer_files
from furlong.training.checkpoint.tensor_reader import TensorReader
from furlong.training.checkpoint.trainer_files import OPTIMIZER, WEIGHTS
from furlong.training.megatron import weight_names as names
from furlong.training.megatron.distributed_optimizer import MASTER, OptimizerState
from furlong.training.optimizer import check_moments
from furlong.training.ranks import Ranks

logger = logging.getLogger(__name__)

Model = Any  # this rank's model chunks


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
    """Write master weights, moments, changed frozen models and random states; with `later`, add them there instead.

    A collective of all ranks.
    """
    tensors = {WEIGHTS: names.export(model, hf, value_of=partial(optimizer.whole, kind=MASTER))}
    if with_moments:
        tensors[OPTIMIZER] = _moments(model, hf, optimizer)
    for role in sorted(frozen):
        tensors[f"trainer_{role}"] = names.export(frozen[role], hf)
    trainer_files.save(folder, tensors, ranks, meta=meta, later=later)


def _moments(model: Model, hf: Any, optimizer: OptimizerState) -> Iterator[tuple[str, Tensor]]:
    """Yield each moment of each trained tensor, then the step counts."""
    for moment in optimizer.moment_names:
        for name, tensor in names.export(model, hf, value_of=partial(optimizer.whole, kind=moment)):
            if name in optimizer.trained:
                yield f"{name}/{moment}", tensor
    if optimizer.kind != "adam":
        return
    step = torch.tensor(optimizer.step)
    dist.all_reduce(step, dist.ReduceOp.MAX)  # a rank may have no slice
    for name in sorted(optimizer.trained):
        yield f"{name}/step", step.clone()


def load_weights(folder: Path, meta: Mapping[str, Any], model: Model, hf: Any, optimizer: OptimizerState) -> None:
    """Load the trained model and its master weights. Raises CheckpointError for a checkpoint of another model."""
    with trainer_files.reader(folder, meta, WEIGHTS) as reader:
        names.load(model, hf, reader, put=partial(optimizer.put, kind=MASTER))


def load_moments(folder: Path, meta: Mapping[str, Any], model: Model, hf: Any, optimizer: OptimizerState) -> None:
    """Load the moments. Raises CheckpointError if they are of other parameters or of different step counts."""
    optimizer.reset()
    with (
        trainer_files.reader(folder, meta, OPTIMIZER) as reader,
        trainer_files.reader(folder, meta, WEIGHTS) as weights,
    ):
        check_moments(reader.path, reader.names, optimizer.kind)
        if reader.names:  # none if saved before the first step
            optimizer.set_step(_step_count(folder, reader, optimizer))
            for moment in optimizer.moment_names:
                names.load(model, hf, _MomentReader(reader, moment, weights), put=partial(optimizer.put, kind=moment))


def _step_count(folder: Path, reader: TensorReader, optimizer: OptimizerState) -> float:
    """Return the optimizer's step count. Raises CheckpointError if other parameters were trained or counts differ."""
    if differing := {name.rpartition("/")[0] for name in reader.names} ^ optimizer.trained:
        raise CheckpointError(
            f"{folder} was saved by a run that trained other parameters: {', '.join(sorted(differing)[:3])} are "
            "trained in only one of the two runs; resume with the same lists of parameters, or with --no-load-optim"
        )
    steps = {float(reader.read(name)) for name in reader.names if name.endswith("/step")}
    if len(steps) > 1:
        raise CheckpointError(
            f"{folder} has parameters with different step counts, {', '.join(f'{n:g}' for n in sorted(steps))}; "
            "--train-backend megatron has one count for all: resume with fsdp, or with --no-load-optim"
        )
    return steps.pop() if steps else 0.0


class _MomentReader:
    """Reads one moment under the names of the weights; for frozen tensors the weight, which has the same shape."""

    def __init__(self, reader: TensorReader, moment: str, weights: TensorReader) -> None:
        self._reader, self._suffix, self._weights = reader, f"/{moment}", weights

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._weights.names)

    def read(self, name: str) -> Tensor:
        moment = name + self._suffix
        return self._reader.read(moment) if moment in self._reader.names else self._weights.read(name)
