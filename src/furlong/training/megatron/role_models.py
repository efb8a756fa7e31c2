"""The models of one rank by role: the actor, and frozen models."""

from __future__ import annotations

# Megatron-core's annotations do not match what its functions accept and return.
# pyright: reportArgumentType=false
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from furlong.errors import TrainerError
from furlong.interfaces import Role
from furlong.models.stored_tensors import open_tensors
from furlong.training.checkpoint import trainer_state as state
from furlong.training.checkpoint.dist_files import is_dist_folder
from furlong.training.megatron import megatron_checkpoint as checkpoint
from furlong.training.megatron import weight_names as names
from furlong.training.megatron.megatron_lm import torch_dist

logger = logging.getLogger(__name__)


def fill(chunks: list[GPTModel], folder: Path, hf: Any) -> None:
    """Load this rank's model chunks from a checkpoint of `save`, of Megatron-LM, or from a Hugging Face folder."""
    if (folder / state.META).exists():
        checkpoint.load_frozen(folder, state.read_meta(folder), state.WEIGHTS, chunks, hf)
    elif is_dist_folder(folder):
        torch_dist.load(chunks, folder)
    else:
        with open_tensors(folder) as stored:
            names.load(chunks, hf, stored)
    logger.info("loaded weights from %s", folder)


class RoleModels:
    """This rank's chunks of each model. Frozen models are built on first use.

    load: builds a model from a folder. start: the actor's initial weights; whole: --hf-checkpoint; folders: of frozen
    models. diverged: frozen models whose weights are no longer those of their folder.
    """

    def __init__(
        self, load: Callable[[Path], list[GPTModel]], *, start: Path, whole: Path, folders: Mapping[Role, Path]
    ) -> None:
        self._load, self._whole = load, whole
        self._folders: dict[Role, Path] = {"ref": whole, **folders}
        self._of: dict[Role, list[GPTModel]] = {"actor": load(start)}
        self.diverged: set[Role] = set()

    def __getitem__(self, role: Role) -> list[GPTModel]:
        """Return the chunks of a model. Raises TrainerError for a role that this run does not have."""
        if role not in self._of:
            if role not in self._folders:
                raise TrainerError(f"no model {role!r}; this run has {sorted({*self._folders, *self._of})}")
            self._of[role] = _frozen(self._load(self._folders[role]))
        return self._of[role]

    def chunks(self) -> Iterator[GPTModel]:
        """Yield the chunks of all models that are built."""
        for chunks in self._of.values():
            yield from chunks

    def replaced(self, role: Role) -> list[GPTModel]:
        """Return the frozen model `role`, whose weights the caller replaces."""
        if role not in self._of:
            self._of[role] = _frozen(self._load(self._whole))
        self.diverged.add(role)
        return self._of[role]

    @torch.no_grad()
    def copy(self, source: Role, target: Role) -> None:
        """Make the frozen model `target` equal to `source`. Raises TrainerError if `target` is the actor."""
        if target == "actor" or target == source:
            raise TrainerError(
                f"copy_weights({source!r}, {target!r}): the target must be a frozen model, and not the source"
            )
        values = _tensors(self[source])
        for to, value in zip(_tensors(self.replaced(target)), values, strict=True):
            to.copy_(value)


def _frozen(chunks: list[GPTModel]) -> list[GPTModel]:
    return [chunk.requires_grad_(False) for chunk in chunks]


def _tensors(chunks: Sequence[GPTModel]) -> Iterator[Tensor]:
    """Yield the tensors of model chunks that checkpoints contain."""
    for chunk in chunks:
        yield from (tensor for _, tensor in names.checkpoint_tensors(chunk))
