"""The models of one rank by their role: the one that is trained, and frozen ones."""

from __future__ import annotations

# Megatron-core's annotations are not what its functions take and return.
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
    """Load this rank's parts from what `save` wrote, from Megatron-LM's checkpoint, or from a Hugging Face folder."""
    if (folder / state.META).exists():
        checkpoint.load_frozen(folder, state.read_meta(folder), state.WEIGHTS, chunks, hf)
    elif is_dist_folder(folder):
        torch_dist.load(chunks, folder)
    else:
        with open_tensors(folder) as stored:
            names.load(chunks, hf, stored)
    logger.info("loaded weights from %s", folder)


class RoleModels:
    """This rank's parts of each model. Frozen models are built when they are first asked for.

    load: builds a model of what is in a folder. start: what the actor begins with; whole: --hf-checkpoint; folders: of
    frozen models. diverged: frozen models that are no longer what their folder holds.
    """

    def __init__(
        self, load: Callable[[Path], list[GPTModel]], *, start: Path, whole: Path, folders: Mapping[Role, Path]
    ) -> None:
        self._load, self._whole = load, whole
        self._folders: dict[Role, Path] = {"ref": whole, **folders}
        self._of: dict[Role, list[GPTModel]] = {"actor": load(start)}
        self.diverged: set[Role] = set()

    def __getitem__(self, role: Role) -> list[GPTModel]:
        """A model. Raises TrainerError for one that this run does not have."""
        if role not in self._of:
            if role not in self._folders:
                raise TrainerError(f"there is no model {role!r}; this run has {sorted({*self._folders, *self._of})}")
            self._of[role] = _frozen(self._load(self._folders[role]))
        return self._of[role]

    def chunks(self) -> Iterator[GPTModel]:
        """The parts of all models that are built."""
        for chunks in self._of.values():
            yield from chunks

    def replaced(self, role: Role) -> list[GPTModel]:
        """The frozen model `role`, whose weights will be replaced."""
        if role not in self._of:
            self._of[role] = _frozen(self._load(self._whole))
        self.diverged.add(role)
        return self._of[role]

    @torch.no_grad()
    def copy(self, source: Role, target: Role) -> None:
        """Make the frozen model `target` equal to `source`. Raises TrainerError if `target` is the actor."""
        if target == "actor" or target == source:
            raise TrainerError(f"copy_weights({source!r}, {target!r}): only a frozen model can be replaced, by another")
        values = _tensors(self[source])
        for to, value in zip(_tensors(self.replaced(target)), values, strict=True):
            to.copy_(value)


def _frozen(chunks: list[GPTModel]) -> list[GPTModel]:
    return [chunk.requires_grad_(False) for chunk in chunks]


def _tensors(chunks: Sequence[GPTModel]) -> Iterator[Tensor]:
    """What a checkpoint holds of a rank's parts of a model."""
    for chunk in chunks:
        yield from (tensor for _, tensor in names.checkpoint_tensors(chunk))
