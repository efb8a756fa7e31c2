"""Values of stored weights: tensors that are not finite, matrices of zeros. Files are mapped, not loaded; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from furlong.core.catalogue import Diagnosis, diagnosis
from furlong.core.checkpoint_folder import MANIFEST, TRACKER, check_manifest, find_checkpoint
from furlong.core.text import abbreviate
from furlong.errors import CheckpointError, ConfigError
from furlong.tools.model_folder import INDEX, SINGLE, Shard, StoredTensor, check_model, read_header, read_model

CHUNK_BYTES = 1 << 26
SHOWN = 5
UNREAD = {"shard", "unread"}  # evidence of files whose values are not looked at then


@dataclass(frozen=True)
class FloatFormat:
    """A floating-point format by its bits: the integer that holds it, the bits below the sign, and of the exponent.

    `not_finite_above`: with the sign taken off, every greater or equal pattern is an infinity or no number.
    """

    holder: str
    magnitude: int
    not_finite_above: int


FORMATS: Mapping[str, FloatFormat] = {
    "F64": FloatFormat("<u8", 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    "F32": FloatFormat("<u4", 0x7FFF_FFFF, 0x7F80_0000),
    "F16": FloatFormat("<u2", 0x7FFF, 0x7C00),
    "BF16": FloatFormat("<u2", 0x7FFF, 0x7F80),
    "F8_E5M2": FloatFormat("<u1", 0x7F, 0x7C),
    "F8_E4M3": FloatFormat("<u1", 0x7F, 0x7F),  # has no infinity
}


@dataclass(frozen=True)
class BadValues:
    """A tensor whose values are suspicious: how many are not finite, or that it is all zero."""

    tensor: str
    num_not_finite: int
    size: int

    def text(self) -> str:
        """`model.norm.weight (3 of 64 values)`."""
        return f"{self.tensor} ({self.num_not_finite} of {self.size} values)" if self.num_not_finite else self.tensor


def bad_values(shard: Shard) -> Iterator[BadValues]:
    """Look at every floating-point tensor of a file that is as long as its header says."""
    data = np.memmap(shard.path, np.uint8, mode="r")
    for name, tensor in shard.tensors.items():
        found = FORMATS.get(tensor.dtype)
        if found is None or not tensor.num_bytes:
            continue
        num_bad, is_zero = _count(data, tensor, found)
        if num_bad or (is_zero and len(tensor.shape) > 1):
            size = tensor.num_bytes // np.dtype(found.holder).itemsize
            yield BadValues(name, num_bad, size)


def _count(data: NDArray[np.uint8], tensor: StoredTensor, kind: FloatFormat) -> tuple[int, bool]:
    num_bad, is_zero = 0, True
    end = tensor.offset + tensor.num_bytes
    holder = np.dtype(kind.holder)
    for start in range(tensor.offset, end, CHUNK_BYTES):
        bits: NDArray[Any] = np.frombuffer(data[start : min(start + CHUNK_BYTES, end)].tobytes(), holder)
        bits = bits & holder.type(kind.magnitude)
        num_bad += int(np.count_nonzero(bits >= holder.type(kind.not_finite_above)))
        is_zero = is_zero and not bits.any()
    return num_bad, is_zero


def check_weights(folder: Path, *, with_values: bool = True) -> list[Diagnosis]:
    """All that is wrong with a model folder, a folder of `--save`, or one `iter_*` in it; ConfigError for others."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give a model folder, or one that --save wrote")
    if (folder / TRACKER).is_file() or (folder / MANIFEST).is_file() or folder.name.startswith("iter_"):
        return _check_trainer(folder, with_values=with_values)
    if not (folder / "config.json").is_file() and not list(folder.glob("*.safetensors*")):
        held = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise ConfigError(
            f"{folder} is neither a model folder (config.json) nor one that --save wrote ({TRACKER}); it holds {held}"
        )
    found = [*_without_files(folder), *check_model(folder)]
    if with_values and not any(each.severity == "error" and each.evidence.keys() & UNREAD for each in found):
        found += _of_values(folder, read_model(folder).shards)
    return found


def _without_files(folder: Path) -> list[Diagnosis]:
    """CKPT04 of a folder that has no weights, shards without the index that names them, or no config.json."""
    held = sorted(path.name for path in folder.iterdir())
    evidence = {"held": held[:16]}
    if not {SINGLE, INDEX} & set(held):
        shards = [name for name in held if name.endswith(".safetensors")]
        lacks = f"{len(shards)} safetensors files and no {INDEX}" if shards else f"no {SINGLE} and no {INDEX}"
        remedy = f"fetch {INDEX}, too" if shards else "fetch or convert the weights; `furlong doctor --run` is for runs"
        return [
            diagnosis("CKPT04", f"{folder}: {lacks}; it holds {', '.join(held[:8])}", remedy=remedy, evidence=evidence)
        ]
    if "config.json" not in held:
        finding = f"{folder}: no config.json, so that nothing says how many layers it should have"
        return [diagnosis("CKPT04", finding, remedy="fetch config.json, too", severity="warning", evidence=evidence)]
    return []


def _check_trainer(folder: Path, *, with_values: bool) -> list[Diagnosis]:
    """CKPT01 in the words with which --load refuses a checkpoint; then its files."""
    try:
        if (folder / TRACKER).is_file():
            step = find_checkpoint(folder, step=None, save_dir=None, flag="checkpoint")
            assert step is not None  # there is a tracker
            folder = step
        elif (folder / MANIFEST).is_file():
            check_manifest(folder)
        else:
            raise CheckpointError(f"{folder} has no {MANIFEST}, which is written last: the save was cut off")
    except CheckpointError as error:
        return [diagnosis("CKPT01", str(error), remedy="resume from another one with --ckpt-step")]
    found: list[Diagnosis] = []
    shards: dict[str, Shard] = {}
    for path in sorted((folder / "trainer").rglob("*.safetensors")):
        try:
            shards[path.name] = read_header(path)
        except CheckpointError as error:
            found.append(diagnosis("CKPT01", f"{folder}: {error}", remedy="resume from another one with --ckpt-step"))
    return found + (_of_values(folder, shards, has_moments=True) if with_values else [])


def _of_values(folder: Path, shards: Mapping[str, Shard], *, has_moments: bool = False) -> list[Diagnosis]:
    """Tensors that are not finite (an error) and matrices of zeros (a warning, but for the optimizer's moments)."""
    broken: list[str] = []
    zero: list[str] = []
    for name, shard in shards.items():
        for bad in bad_values(shard):
            if bad.num_not_finite:
                broken.append(bad.text())
            elif not (has_moments and "optimizer" in name):
                zero.append(bad.text())
    found: list[Diagnosis] = []
    if broken:
        found.append(
            diagnosis(
                "CKPT04",
                f"{folder}: {len(broken)} tensors hold values that are not finite: {abbreviate(broken, SHOWN)}",
                cause="The run that saved them had diverged, or a conversion overflowed.",
                remedy="use an earlier checkpoint, or convert the weights again",
                evidence={"folder": str(folder), "tensors": broken[:SHOWN], "num_tensors": len(broken)},
            )
        )
    if zero:
        found.append(
            diagnosis(
                "CKPT04",
                f"{folder}: {len(zero)} matrices are all zero: {abbreviate(zero, SHOWN)}",
                cause="They were never written by the conversion that made the folder, or are meant to be zero.",
                remedy="compare with the folder that it was made from; convert it again if they are not zero there",
                severity="warning",
                evidence={"folder": str(folder), "tensors": zero[:SHOWN], "num_tensors": len(zero)},
            )
        )
    return found
