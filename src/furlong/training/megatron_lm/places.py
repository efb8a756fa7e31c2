"""Load Megatron-LM checkpoints (torch_dist) into models of any layout, and write them.

Megatron-core's `sharded_state_dict` gives the place of each parameter in such a checkpoint: its key, leading axes for
layers and experts, offset and shape. So every rank reads its own part, and no family needs a table of names.
"""

from __future__ import annotations

# Megatron-core's annotations do not match what its functions accept and return.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false
import argparse
import contextlib
import dataclasses
import logging
import re
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from furlong.core.algorithms import Role
from furlong.errors import CheckpointError
from furlong.models.stored_tensors import TensorSource, open_tensors
from furlong.models.value_head import ValueHead
from furlong.training.checkpoint import trainer_files
from furlong.training.megatron.distributed_optimizer import MASTER, OptimizerState
from furlong.training.megatron.model_build import build_chunks, transformer_config
from furlong.training.megatron.parallel_layout import Layout
from furlong.training.megatron.weight_names import local_tensors
from furlong.training.megatron_lm.dist_files import DistReader, DistWriter, is_dist_folder
from furlong.training.megatron_lm.dist_optimizer import FRESH, MOMENTS, DistOptimizer
from furlong.training.ranks import Ranks

logger = logging.getLogger(__name__)

ReadBox = Callable[[str, Sequence[int], Sequence[int]], Tensor]  # (tensor name, offset, shape)
# Tensors that are not weights of a layer that is built.
OTHERS = re.compile(r"(^|\.)(optimizer|rng_state|opt_param_scheduler|rerun_state_machine_state)\b|_extra_state|^mtp\.")
NUMBERED_LAYER = re.compile(r"(^|\.)layers\.\d+\.")


def empty_model(hf: Any, dtype: torch.dtype) -> list[GPTModel]:
    """Build the whole model on the meta device. Needs Megatron-core's process groups of one rank."""
    config = transformer_config(hf, Layout(), dtype)
    config.use_cpu_initialization = True  # on a machine with a GPU, too
    with torch.device("meta"):
        return build_chunks(config, hf)


class DistPlaces:
    """The places of this rank's parameters in a torch_dist checkpoint.

    numbered: every layer has its own keys, as Megatron-core stores models whose layers differ.
    """

    def __init__(self, chunks: Sequence[GPTModel], *, numbered: bool) -> None:
        metadata = {"non_homogeneous_layers": numbered, "singleton_local_shards": False}
        self._of: dict[tuple[int, str], Any] = {}
        self._objects: list[str] = []
        for number, chunk in enumerate(chunks):
            for name, place in chunk.sharded_state_dict(metadata=metadata).items():
                if isinstance(place, ShardedObject):
                    self._objects.append(place.unique_key)
                else:
                    self._of[number, name] = place

    @staticmethod
    def of(chunks: Sequence[GPTModel], files: DistReader) -> DistPlaces:
        """Return the places in an existing checkpoint."""
        return DistPlaces(chunks, numbered=any(NUMBERED_LAYER.search(name) for name in files.names))

    @staticmethod
    def of_whole(chunk: GPTModel) -> DistPlaces:
        """Return the places in a checkpoint to be written of a whole model."""
        layers: dict[str, set[str]] = {}
        for name, _ in chunk.named_parameters():
            if match := NUMBERED_LAYER.search(name):
                layers.setdefault(match[0], set()).add(name[match.end() :])
        return DistPlaces([chunk], numbered=len({frozenset(names) for names in layers.values()}) > 1)

    def drop_value_head(self, chunks: Sequence[GPTModel], files: DistReader) -> frozenset[str]:
        """Forget the places of a scalar head that the checkpoint does not have; returns its parameters' names."""
        head = getattr(chunks[-1], "output_layer", None)
        weight = "output_layer.weight"
        if not isinstance(head, ValueHead) or (weight in files.names and files.shape(weight)[0] == 1):
            return frozenset()
        for name in (names := frozenset({weight, "output_layer.bias"})):
            self._of.pop((len(chunks) - 1, name), None)
        return names

    def check(self, files: DistReader, *, is_whole: bool = True) -> None:
        """Raise CheckpointError if a checkpoint is of another model. The vocabulary may be padded.

        is_whole: these are the places of the whole model, so every other tensor is an error too.
        """
        parts = {part.key: part for place in self._of.values() for part in _parts(place)}
        mismatched = {
            "are missing": sorted(parts.keys() - files.names),
            "belong to no parameter": sorted(
                name for name in files.names - parts.keys() if is_whole and not OTHERS.search(name)
            ),
            "have another shape": [
                f"{key} {files.shape(key)}, expected {part.global_shape}"
                for key, part in parts.items()
                if key in files.names and files.shape(key) != part.global_shape and not part.allow_shape_mismatch
            ],
        }
        problems = [
            f"{len(names)} tensors {what}: {', '.join(names[:3])}" for what, names in mismatched.items() if names
        ]
        if problems:
            raise CheckpointError(
                f"{files.folder} is of another model than config.json: {'; '.join(problems)}; give the folder of its "
                "own model as --hf-checkpoint"
            )

    def read(self, read_box: ReadBox, chunk: int, name: str) -> Tensor:
        """Read this rank's part of a parameter, or of a moment of its shape."""
        place = self._place(chunk, name)
        parts = [_read(read_box, part) for part in _parts(place)]
        return place.merge_fn(parts) if isinstance(place, ShardedTensorFactory) else parts[0]

    def keys(self, chunk: int, name: str) -> frozenset[str]:
        """Return the keys of a parameter in the checkpoint."""
        return frozenset(part.key for part in _parts(self._place(chunk, name)))

    def write(self, writer: DistWriter, chunk: int, name: str, parameter: Tensor) -> None:
        """Write a whole parameter."""
        place = self._place(chunk, name)
        stored = {"dtype": parameter.dtype} if isinstance(place, ShardedTensor) else {}
        filled = dataclasses.replace(place, data=parameter, **stored)
        for part in _parts(filled):
            leading = [1] * part.prepend_axis_num
            stored = part.data.reshape(*leading, *part.data.shape)
            writer.add(part.key, stored, offset=part.global_offset, shape=part.global_shape)

    def write_objects(self, writer: DistWriter) -> None:
        """Write the empty objects that Megatron-core expects in addition to the tensors."""
        for name in self._objects:
            writer.add_empty_object(name)

    def _place(self, chunk: int, name: str) -> Any:
        place = self._of.get((chunk, name))
        if place is None:
            raise CheckpointError(
                f"Megatron-core has no place in a checkpoint for {name}; use this model's Hugging Face folder"
            )
        return place


def _parts(place: Any) -> list[ShardedTensor]:
    """Return the stored parts of a parameter: itself, or those that its factory builds."""
    if isinstance(place, ShardedTensor):
        return [place]
    built = place.build()
    return list(built.values() if isinstance(built, dict) else built)


def _read(read_box: ReadBox, part: ShardedTensor) -> Tensor:
    leading = [1] * part.prepend_axis_num
    stored = read_box(part.key, part.global_offset, [*leading, *part.local_shape])
    return stored.reshape(part.local_shape)


@contextlib.contextmanager
def open_source(folder: Path, role: Role = "actor") -> Generator[TensorSource | DistReader]:
    """Open a Hugging Face folder, the `trainer` folder of a checkpoint, or a torch_dist checkpoint.

    role: whose weights to read from the `trainer` folder, if it has them; the policy's otherwise.
    """
    if (folder / trainer_files.META).is_file():
        meta = trainer_files.read_meta(folder)
        stem = trainer_files.weights_stem(role)
        stem = stem if stem in meta["files"] else trainer_files.WEIGHTS
        with trainer_files.reader(folder, meta, stem) as reader:
            yield reader
    elif is_dist_folder(folder):
        yield DistReader(folder)
    else:
        with open_tensors(folder) as stored:
            yield stored


@torch.no_grad()
def load(chunks: Sequence[GPTModel], files: DistReader) -> None:
    """Load this rank's part of a model from a checkpoint of any layout. Raises CheckpointError for another model's.

    A scalar head that the checkpoint does not have keeps its values.
    """
    files.check()
    places = DistPlaces.of(chunks, files)
    kept = places.drop_value_head(chunks, files)
    places.check(files, is_whole=False)
    for (chunk, name), target in local_tensors(chunks).items():
        if name not in kept:
            target.copy_(places.read(files.read, chunk, name))


def load_optimizer(chunks: Sequence[GPTModel], folder: Path, optimizer: OptimizerState, ranks: Ranks) -> int:
    """Load master weights and moments from a checkpoint of any layout; returns the step count.

    A collective. Raises CheckpointError on all ranks if the states are of other parameters, another optimizer or a
    format that is not supported, or if one rank cannot read its part.
    """
    with ranks.agreed():
        files = DistReader(folder)
    if optimizer.moment_names != MOMENTS:
        raise CheckpointError(
            f"{folder} has moments of Adam, not those of {optimizer.kind}; resume with --optimizer adam, {FRESH}"
        )
    places, local = DistPlaces.of(chunks, files), local_tensors(chunks)
    with ranks.agreed():
        states = DistOptimizer(files)
    differing = [
        " + ".join(sorted(keys))
        for (chunk, name), parameter in local.items()
        if (keys := places.keys(chunk, name)) and parameter.requires_grad != (keys <= states.keys)
    ]
    if names := ranks.first(", ".join(sorted(differing)[:3])):
        raise CheckpointError(
            f"{folder} was saved by a run that trained other parameters: {names} are trained in only one of the two "
            f"runs; resume with the same lists of parameters, {FRESH}"
        )
    optimizer.set_step(states.step)
    with ranks.agreed():
        for (chunk, name), parameter in local.items():
            if parameter.requires_grad:
                for kind in (MASTER, *MOMENTS):
                    whole = places.read(partial(states.read, kind), chunk, name)
                    optimizer.put(parameter, whole, kind=kind)
    logger.info("loaded master weights and moments after %d steps from %s", states.step, folder)
    return states.step


def common_state(hf: Any, iteration: int) -> dict[str, Any]:
    """Return the contents of common.pt that Megatron-LM needs to load a checkpoint of weights alone."""
    args = argparse.Namespace(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        add_position_embedding=False,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        world_size=1,
        data_parallel_size=1,
        padded_vocab_size=hf.vocab_size,
        no_save_optim=True,
        no_save_rng=True,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        skipped_train_samples=0,
    )
    content = {"singleton_local_shards": False}
    return {"args": args, "checkpoint_version": 3.0, "iteration": iteration, "content_metadata": content}
