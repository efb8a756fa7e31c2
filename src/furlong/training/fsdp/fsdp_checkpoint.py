"""Checkpoints of the FSDP backend, under Hugging Face names and shapes; files: `training.checkpoint.trainer_files`.

With several ranks every function is a collective.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from furlong.files.atomic import PendingFiles
from furlong.interfaces import Role
from furlong.models import hf_model as hf
from furlong.training.checkpoint import trainer_files
from furlong.training.checkpoint.tensor_reader import TensorReader
from furlong.training.checkpoint.trainer_files import OPTIMIZER, WEIGHTS
from furlong.training.optimizer import MOMENTS, MasterOptimizer
from furlong.training.sharding import Sharding

logger = logging.getLogger(__name__)


def save(
    folder: Path,
    model: PreTrainedModel,
    optimizer: MasterOptimizer,
    sharding: Sharding,
    *,
    frozen: Mapping[Role, PreTrainedModel],
    with_moments: bool,
    later: PendingFiles | None = None,
) -> None:
    """Write the policy (as float32 master weights if it has them), moments, `frozen` models and random states.

    With `later`, only copy them to host memory.
    """

    def weights() -> Iterator[tuple[str, Tensor]]:
        with optimizer.loaded():
            yield from _whole(model, _policy(model, optimizer, sharding), sharding)

    tensors = {WEIGHTS: weights()}
    if with_moments:
        tensors[OPTIMIZER] = _moments(model, optimizer)
    for role, other in frozen.items():
        tensors[f"trainer_{role}"] = _whole(model, dict(hf.named_tensors(other)), sharding)
    trainer_files.save(folder, tensors, sharding.ranks, meta={"num_steps": optimizer.num_steps}, later=later)


def load_policy(
    folder: Path,
    meta: dict[str, Any],
    model: PreTrainedModel,
    optimizer: MasterOptimizer,
    sharding: Sharding,
    *,
    with_moments: bool,
) -> None:
    """Restore weights, master weights, moments (if `with_moments`) and the step count.

    Raises CheckpointError if something is missing or of another model.
    """
    with optimizer.loaded():
        with _reader(folder, meta, WEIGHTS, model) as reader:
            reader.copy_into(_policy(model, optimizer, sharding), sharding)
        optimizer.write_back()
    optimizer.zero_grad()
    optimizer.reset()
    optimizer.num_steps = int(meta["num_steps"])
    if meta["has_optimizer"] and with_moments:
        with _reader(folder, meta, OPTIMIZER, model) as reader:
            optimizer.restore(reader)
    elif with_moments:
        logger.warning("%s was saved without optimizer states (--no-save-optim); moments start at zero", folder)


def load_weights(folder: Path, meta: dict[str, Any], stem: str, model: PreTrainedModel, sharding: Sharding) -> None:
    """Load the tensors of the files `stem` into a model."""
    with _reader(folder, meta, stem, model) as reader:
        reader.copy_into(dict(hf.named_tensors(model)), sharding)


def _policy(model: PreTrainedModel, optimizer: MasterOptimizer, sharding: Sharding) -> dict[str, Tensor]:
    """Return the policy's tensors by name, master weights instead of parameters if they are separate."""
    separate = {} if sharding.is_sharded else {weight.name: weight.master for weight in optimizer.weights}
    return {name: separate.get(name, tensor) for name, tensor in hf.named_tensors(model)}


def _whole(model: PreTrainedModel, tensors: dict[str, Tensor], sharding: Sharding) -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors under their names in a Hugging Face checkpoint."""
    for name, tensor in tensors.items():
        yield from hf.on_disk(model, name, sharding.full(tensor))


def _moments(model: PreTrainedModel, optimizer: MasterOptimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the moments under the same names; a parameter's step count once for each of its checkpoint tensors."""
    forms = {name: hf.disk_rows(model, name, parameter) for name, parameter in hf.named_tensors(model)}
    for key, tensor in optimizer.state_tensors():
        name, _, moment = key.rpartition("/")
        if moment == "step":
            yield from ((f"{piece}/step", tensor.clone()) for row in forms[name].pieces for piece in row)
        else:
            yield from ((f"{n}/{moment}", part) for n, part in hf.on_disk(model, name, tensor))


@contextmanager
def _reader(folder: Path, meta: dict[str, Any], stem: str, model: PreTrainedModel) -> Generator[TensorReader]:
    """Open the files of `stem`, with tensors under their names in the model."""
    moments = ("step", *chain(*MOMENTS.values()))
    suffixes = [f"/{moment}" for moment in moments] if stem == OPTIMIZER else [""]
    with trainer_files.reader(folder, meta, stem) as reader:
        for name, tensor in hf.named_tensors(model):
            form = hf.disk_rows(model, name, tensor)
            for suffix in suffixes:
                reader.join(name, form, suffix=suffix)
        yield reader
