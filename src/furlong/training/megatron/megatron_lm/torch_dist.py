"""Megatron-LM's checkpoints (torch_dist) and the models that are built here.

Megatron-core itself says where each parameter of a model lies in such a checkpoint: under which name, with how many
leading axes for layers and experts, and from where to where (`sharded_state_dict`). So any rank of any layout reads its
part, and every family that is built here is known without a table of its own.
"""

from __future__ import annotations

# Megatron-core's annotations are not what its functions take and return.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false
import argparse
import dataclasses
import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from furlong.errors import CheckpointError
from furlong.training.checkpoint.dist_files import DistFiles, DistWriter
from furlong.training.checkpoint.dist_optimizer import FRESH, MOMENTS, DistOptimizer, has_buffers
from furlong.training.megatron.megatron_lm.flat_optimizer import HEAD, FlatOptimizer
from furlong.training.megatron.model_build import build_chunks, transformer_config
from furlong.training.megatron.optimizer_state import MASTER, OptimizerState
from furlong.training.megatron.parallel_layout import Compute, Layout
from furlong.training.megatron.weight_names import Parameter, named, on_this_rank, parameters, part_of, whole_shape
from furlong.training.ranks import Ranks

logger = logging.getLogger(__name__)

ReadBox = Callable[[str, Sequence[int], Sequence[int]], Tensor]  # of a tensor's name, where it begins, its shape
# What a checkpoint holds besides weights, and what there are no layers for.
OTHERS = re.compile(r"(^|\.)(optimizer|rng_state|opt_param_scheduler|rerun_state_machine_state)\b|_extra_state|^mtp\.")
NUMBERED_LAYER = re.compile(r"(^|\.)layers\.\d+\.")


def empty_model(hf: Any, dtype: torch.dtype) -> list[GPTModel]:
    """The whole model without memory behind its tensors; Megatron-core's process groups of one rank exist."""
    config = transformer_config(hf, Layout(), dtype, compute=Compute())
    config.use_cpu_initialization = True  # on a machine with a GPU, too
    with torch.device("meta"):
        return build_chunks(config, hf)


class DistPlaces:
    """Where the parameters of this rank's part of a model lie in a torch_dist checkpoint.

    numbered: layers have names of their own, which is so where they are not all alike.
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
    def of(chunks: Sequence[GPTModel], files: DistFiles) -> DistPlaces:
        """The places in a checkpoint that is there."""
        return DistPlaces(chunks, numbered=any(NUMBERED_LAYER.search(name) for name in files.names))

    @staticmethod
    def of_whole(chunk: GPTModel) -> DistPlaces:
        """The places in a checkpoint that is to be written of a whole model."""
        layers: dict[str, set[str]] = {}
        for name, _ in chunk.named_parameters():
            if found := NUMBERED_LAYER.search(name):
                layers.setdefault(found[0], set()).add(name[found.end() :])
        return DistPlaces([chunk], numbered=len({frozenset(names) for names in layers.values()}) > 1)

    def check(self, files: DistFiles, *, is_whole: bool = True) -> None:
        """Raise CheckpointError if a checkpoint is of another model. The vocabulary may be padded.

        Tensors that belong to no parameter are looked for where `is_whole` says that this is the whole model.
        """
        parts = {part.key: part for place in self._of.values() for part in _parts(place)}
        missing = sorted(parts.keys() - files.names)
        odd = sorted(name for name in files.names - parts.keys() if is_whole and not OTHERS.search(name))
        other = [
            f"{key} {files.shape(key)} in place of {part.global_shape}"
            for key, part in parts.items()
            if key in files.names and files.shape(key) != part.global_shape and not part.allow_shape_mismatch
        ]
        found = [
            f"{len(names)} tensors {what}: {', '.join(names[:3])}"
            for what, names in (
                ("are missing", missing),
                ("belong to no parameter", odd),
                ("have another shape", other),
            )
            if names
        ]
        if found:
            raise CheckpointError(f"{files.folder} is of another model than config.json: {'; '.join(found)}")

    def read(self, read_box: ReadBox, chunk: int, name: str) -> Tensor:
        """Read a parameter, or another tensor of its shape such as a moment, as this rank has it."""
        place = self._place(chunk, name)
        parts = [_read(read_box, part) for part in _parts(place)]
        return place.merge_fn(parts) if isinstance(place, ShardedTensorFactory) else parts[0]

    def keys(self, chunk: int, name: str) -> frozenset[str]:
        """Under which names of the checkpoint a parameter is stored."""
        return frozenset(part.key for part in _parts(self._place(chunk, name)))

    def write(self, writer: DistWriter, chunk: int, name: str, parameter: Tensor) -> None:
        """Write a parameter that is whole."""
        place = self._place(chunk, name)
        stored = {"dtype": parameter.dtype} if isinstance(place, ShardedTensor) else {}
        filled = dataclasses.replace(place, data=parameter, **stored)
        for part in _parts(filled):
            leading = [1] * part.prepend_axis_num
            stored = part.data.reshape(*leading, *part.data.shape)
            writer.add(part.key, stored, offset=part.global_offset, shape=part.global_shape)

    def write_objects(self, writer: DistWriter) -> None:
        """Write the objects without content that Megatron-core asks for beside the tensors."""
        for name in self._objects:
            writer.add_nothing(name)

    def _place(self, chunk: int, name: str) -> Any:
        place = self._of.get((chunk, name))
        if place is None:
            raise CheckpointError(f"Megatron-core has no place in a checkpoint for {name}; convert this model to none")
        return place


def _parts(place: Any) -> list[ShardedTensor]:
    """The parts of a parameter that are stored: itself, or what a factory makes of it."""
    if isinstance(place, ShardedTensor):
        return [place]
    built = place.build()
    return list(built.values() if isinstance(built, dict) else built)


def _read(read_box: ReadBox, part: ShardedTensor) -> Tensor:
    leading = [1] * part.prepend_axis_num
    stored = read_box(part.key, part.global_offset, [*leading, *part.local_shape])
    return stored.reshape(part.local_shape)


@torch.no_grad()
def load(chunks: Sequence[GPTModel], folder: Path) -> None:
    """Fill this rank's part of a model from a checkpoint of any layout. Raises CheckpointError for another model's."""
    files = DistFiles(folder)
    files.check()
    places = DistPlaces.of(chunks, files)
    places.check(files, is_whole=False)
    for (chunk, name), target in named(chunks).items():
        target.copy_(places.read(files.read, chunk, name))


def load_optimizer(chunks: Sequence[GPTModel], folder: Path, hf: Any, optimizer: OptimizerState, ranks: Ranks) -> int:
    """Fill masters and moments from a checkpoint of any layout; returns the steps that were counted.

    A collective. Raises CheckpointError on all ranks if the states are those of other parameters or of another
    optimizer, are of a form that is not read, or one rank cannot read its part.
    """
    with ranks.agreed():
        files = DistFiles(folder)
    if optimizer.moments != MOMENTS:
        raise CheckpointError(
            f"{folder} has moments of Adam, not those of {optimizer.kind}; resume with --optimizer adam, {FRESH}"
        )
    fill = _fill_from_buffers if has_buffers(files) else _fill_by_name
    step = fill(chunks, files, hf, optimizer, ranks)
    logger.info("took over masters and moments after %d steps from %s", step, folder)
    return step


def _fill_by_name(
    chunks: Sequence[GPTModel], files: DistFiles, _hf: Any, optimizer: OptimizerState, ranks: Ranks
) -> int:
    """Fill masters and moments that are kept as their weights are."""
    places, own = DistPlaces.of(chunks, files), named(chunks)
    with ranks.agreed():
        states = DistOptimizer(files)
    odd = [
        " + ".join(sorted(keys))
        for (chunk, name), parameter in own.items()
        if (keys := places.keys(chunk, name)) and parameter.requires_grad != (keys <= states.keys)
    ]
    if reason := ranks.first(", ".join(sorted(odd)[:3])):
        raise CheckpointError(
            f"{files.folder} was saved by a run that trained other parameters: {reason} are trained in one of both "
            f"only; resume with its lists of parameters, {FRESH}"
        )
    optimizer.set_step(states.step)
    with ranks.agreed():
        for (chunk, name), parameter in own.items():
            if parameter.requires_grad:
                for what in (MASTER, *MOMENTS):
                    optimizer.put(parameter, what, places.read(partial(states.read, what), chunk, name))
    return states.step


def _fill_from_buffers(
    chunks: Sequence[GPTModel], files: DistFiles, hf: Any, optimizer: OptimizerState, ranks: Ranks
) -> int:
    """Fill masters and moments from buffers, in the order in which masters round to the weights that are here."""
    own = [(each, mine) for each, mine in on_this_rank(chunks, hf) if mine is not None and mine.requires_grad]
    head = named(chunks).get((len(chunks) - 1, HEAD))
    if hf.tie_word_embeddings and head is not None and head.requires_grad:  # the last stage's copy of the embedding
        own.append((next(parameters(hf, chunks[0].config)), head))
    mine = {each.rule.ours: whole_shape(each.rule, tensor) for each, tensor in own}
    shapes = {name: shape for rank in range(ranks.world_size) for name, shape in ranks.share(mine, rank).items()}
    with ranks.agreed():
        states = FlatOptimizer(files, hf, trained=optimizer.trained, shapes=shapes)
    first = list({each.rule.ours: (each, mine) for each, mine in own}.values())
    reason = ""
    for order in states.orders():
        with ranks.agreed():
            odd = next((each.ours for each, mine in first if not _is_rounded(states, each, mine)), "")
        if not (reason := ranks.first(odd)):
            logger.info("the optimizer's buffers in %s are in the order of %s", files.folder, order)
            break
    optimizer.set_step(states.step)
    if not reason:
        with ranks.agreed():
            odd = _put_all(states, own, optimizer)
        reason = ranks.first(odd)
    if reason:
        raise CheckpointError(
            f"{files.folder}: the buffers of its optimizer (dp_reshardable) hold no master of {reason} where "
            "Megatron-core or TransformerEngine would have it; have Megatron-LM save it again with "
            f"--dist-ckpt-optim-fully-reshardable, {FRESH}"
        )
    return states.step


def _put_all(states: FlatOptimizer, own: Sequence[tuple[Parameter, Tensor]], optimizer: OptimizerState) -> str:
    """Store masters and moments of this rank's parameters; the name of one whose master is another's, "" if none is."""
    for each, mine in own:
        if not _is_rounded(states, each, mine):
            return each.ours
        for what in (MASTER, *MOMENTS):
            optimizer.put(mine, what, part_of(each.rule, states.read(what, each)))
    return ""


def _is_rounded(states: FlatOptimizer, parameter: Parameter, mine: Tensor) -> bool:
    """Whether the weight, which was read from the same folder, is the rounding of the master."""
    master = part_of(parameter.rule, states.read(MASTER, parameter))
    return torch.equal(master.to(states.dtype).to(mine.dtype), mine.detach().cpu())


def common_state(hf: Any, iteration: int) -> dict[str, Any]:
    """What Megatron-LM reads of a checkpoint beside its tensors, for weights alone."""
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
