"""Reads tensors of a trainer checkpoint, whole or by rows."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from furlong.errors import CheckpointError
from furlong.files.manifest import files_checked
from furlong.files.tensor_file import TensorFile
from furlong.models.hf_model import Rows
from furlong.training.sharding import Sharding


@contextmanager
def open_reader(folder: Path, names: Sequence[str], *, is_own: bool = False) -> Generator[TensorReader]:
    """Open files in the `trainer` folder of a checkpoint, and compare them with its manifest meanwhile.

    Ranks share the comparison, except for files that only this one reads (`is_own`). Raises CheckpointError, also from
    the body, if a file is missing or was changed.
    """
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    own = names if is_own else names[rank::num_ranks]
    with ExitStack() as stack:
        stack.enter_context(files_checked(folder.parent, [f"{folder.name}/{name}" for name in own]))
        yield TensorReader([stack.enter_context(TensorFile(folder / name)) for name in names])


class TensorReader:
    """Reads files written by `trainer_files.write`; `open_reader` opens them. Tensors own their memory."""

    def __init__(self, files: Sequence[TensorFile]) -> None:
        self._files = {name: file for file in files for name in file.tensors}
        self._order = {name: place for place, name in enumerate(self._files)}
        self._joined: dict[str, Rows] = {}
        self._pieces = set[str]()
        self.path = files[0].path
        self.texts = files[0].texts

    def join(self, name: str, form: Rows, *, suffix: str = "") -> None:
        """Present stored pieces as one tensor `name`; `suffix` is appended to all names.

        No effect if the tensor is stored as one, or if pieces are missing.
        """
        pieces = [piece + suffix for row in form.pieces for piece in row]
        if name + suffix in self._files or not all(piece in self._files for piece in pieces):
            return
        if form.axis < 0 or not self.shape(pieces[0]):
            form = Rows(((pieces[0],),), -1)
        else:
            form = Rows(tuple(tuple(piece + suffix for piece in row) for row in form.pieces), form.axis)
        self._joined[name + suffix] = form
        self._pieces.update(pieces)

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._files.keys() - self._pieces) | self._joined.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        form = self._joined.get(name)
        if form is None:
            return self._files[name].tensors[name].shape
        row = [self.shape(piece) for piece in form.pieces[0]]
        if form.axis < 0:
            return row[0]
        joined = list(row[0])
        joined[form.axis] = sum(shape[form.axis] for shape in row)
        return len(form.pieces), *joined

    def place(self, name: str) -> int:
        """Return the place of a tensor in the files, to read many in that order."""
        form = self._joined.get(name)
        return self._order[name if form is None else form.pieces[0][0]]

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Read a tensor, or a slice of its first dimension."""
        form = self._joined.get(name)
        if form is not None and form.axis < 0:
            return self._stored(form.pieces[0][0], rows)
        if form is not None:
            selected = form.pieces if rows is None else form.pieces[rows]
            parts = [torch.cat([self._stored(piece) for piece in row], dim=form.axis) for row in selected]
            return torch.stack(parts) if parts else torch.empty(0, *self.shape(name)[1:])
        return self._stored(name, rows)

    def _stored(self, name: str, rows: slice | None = None) -> Tensor:
        if name not in self._files:
            raise CheckpointError(
                f"{self.path} has no tensor {name}; the checkpoint is of another model, or incomplete"
            )
        return self._files[name].read(name, rows)

    @torch.no_grad()
    def copy_into(
        self, targets: dict[str, Tensor], sharding: Sharding, *, ignored: frozenset[str] = frozenset()
    ) -> None:
        """Copy tensors into `targets` in place; of sharded ones, this rank's shard.

        Raises CheckpointError if names, other than those `ignored`, or shapes differ.
        """
        names = self.names - ignored
        missing, extra = sorted(targets.keys() - names), sorted(names - targets.keys())
        shapes = [n for n in targets if n in names and tuple(targets[n].shape) != self.shape(n)]
        if missing or extra or shapes:
            raise CheckpointError(
                f"{self.path} is of another model: missing {missing[:3]}, unknown {extra[:3]}, other shape "
                f"{shapes[:3]}. Resume with the --hf-checkpoint of the run that saved it"
            )
        for name, target in sorted(targets.items(), key=lambda each: self.place(each[0])):
            if not isinstance(target, DTensor):
                self._copy(name, target)
            elif len(part := sharding.local(target)):
                part.copy_(self.read(name, sharding.rows(len(target))))

    def _copy(self, name: str, target: Tensor) -> None:
        is_stored = name not in self._joined and name in self._files
        target.copy_(self._files[name].mapped(name) if is_stored else self.read(name))
