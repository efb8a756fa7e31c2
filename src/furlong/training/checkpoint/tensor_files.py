"""Named tensors in safetensors files, written and read by several ranks together.

Writing: every rank iterates all full tensors. Files are assigned to ranks in turn; each rank writes its file while the
next one is filled, and buffers the tensors of at most two files. Reading: each rank reads only its slices, so the
number of ranks may differ. All ranks share the file system.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from furlong.core.files import PendingFiles, save_tensors
from furlong.core.weights import host_copy
from furlong.errors import CheckpointError
from furlong.models import hf_model as hf
from furlong.models.hf_model import Rows
from furlong.training.ranks import Ranks
from furlong.training.sharding import Sharding

FILE_BYTES = 4 * 2**30


def write(
    folder: Path,
    name_of: Callable[[int], str],
    tensors: Iterable[tuple[str, Tensor]],
    ranks: Ranks,
    *,
    max_bytes: int = FILE_BYTES,
    later: PendingFiles | None = None,
    save: Callable[..., None] = save_tensors,
) -> dict[str, tuple[str, int]]:
    """Write tensors to `name_of(0)`, `name_of(1)`, ... of at most `max_bytes` each; a larger tensor gets its own file.

    With `later` this rank's files are only copied to host memory and added there; without it, `save(path, tensors,
    metadata)` writes each. A collective. Returns file and bytes of each tensor. Raises CheckpointError on all ranks if
    one cannot write.
    """
    written: dict[str, tuple[str, int]] = {}
    buffered: dict[str, Tensor] = {}
    number = size = 0
    with ThreadPoolExecutor(max_workers=1) as thread:
        pending: list[Future[None]] = []

        def end_file() -> None:
            if number % ranks.world_size != ranks.rank:
                return
            path, metadata = folder / name_of(number), {"format": "pt"}
            if later is not None:
                later.add_tensors(path, buffered, metadata)
            else:
                if pending:
                    pending[-1].exception()  # wait; errors are reported at the end
                pending.append(thread.submit(save, path, dict(buffered), metadata))
            buffered.clear()

        for name, tensor in tensors:
            if size and size + tensor.nbytes > max_bytes:
                end_file()
                number, size = number + 1, 0
            size += tensor.nbytes
            written[name] = (name_of(number), tensor.nbytes)
            if number % ranks.world_size == ranks.rank:
                buffered[name] = tensor.detach().cpu().contiguous() if later is None else host_copy(tensor)
        end_file()
        failed = next((error for future in pending if (error := future.exception()) is not None), None)
    if problem := ranks.first("" if failed is None else f"cannot write into {folder}: {failed}"):
        raise CheckpointError(f"{problem}; free disk space, or use another folder") from failed
    return written


def _export(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    save_file(tensors, path, metadata)


def write_model(
    folder: Path,
    build: Callable[[], PreTrainedModel],
    tensors: Iterable[tuple[str, Tensor]],
    ranks: Ranks,
    *,
    dtype: torch.dtype,
    companions: Path,
) -> int:
    """Write a folder that transformers can load; returns the bytes of its tensors, in `dtype`. A collective.

    The first rank writes the config of the model that `build` returns, and the tokenizer and other files of
    `companions`. Ranks write tensor files in turn; none buffers the whole model.
    """
    if ranks.rank == 0:
        hf.write_config(build(), folder, dtype=dtype, companions=companions)
    ranks.wait()
    written = write(folder, hf.part_name, tensors, ranks, save=_export)
    if ranks.rank == 0:
        hf.write_index(folder, written)
    ranks.wait()
    return sum(size for _, size in written.values())


class TensorReader:
    """Reads files written by `write`. Raises CheckpointError if one is missing or damaged."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._files: dict[str, Any] = {}
        self._joined: dict[str, Rows] = {}
        self._pieces = set[str]()
        for name in names:
            try:
                opened = safe_open(folder / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"cannot read {folder / name}: {error}; the checkpoint is incomplete, resume from an earlier one"
                ) from error
            self._files |= dict.fromkeys(opened.keys(), opened)
        self.path = folder / names[0]

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
            return tuple(self._files[name].get_slice(name).get_shape())
        row = [self.shape(piece) for piece in form.pieces[0]]
        if form.axis < 0:
            return row[0]
        joined = list(row[0])
        joined[form.axis] = sum(shape[form.axis] for shape in row)
        return len(form.pieces), *joined

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
        if rows is None:
            return self._files[name].get_tensor(name)
        return self._files[name].get_slice(name)[rows]

    @torch.no_grad()
    def copy_into(self, targets: dict[str, Tensor], sharding: Sharding) -> None:
        """Copy tensors into `targets` in place; of sharded ones, this rank's shard.

        Raises CheckpointError if names or shapes differ.
        """
        names = self.names
        missing, extra = sorted(targets.keys() - names), sorted(names - targets.keys())
        shapes = [n for n in targets if n in names and tuple(targets[n].shape) != self.shape(n)]
        if missing or extra or shapes:
            raise CheckpointError(
                f"{self.path} is of another model: missing {missing[:3]}, unknown {extra[:3]}, other shape "
                f"{shapes[:3]}. Resume with the --hf-checkpoint of the run that saved it"
            )
        for name, target in targets.items():
            if not isinstance(target, DTensor):
                target.copy_(self.read(name))
            elif len(part := sharding.local(target)):
                part.copy_(self.read(name, sharding.rows(len(target))))
