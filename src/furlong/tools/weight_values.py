"""Finds non-finite tensors and all-zero matrices in stored weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from furlong.catalogue import Diagnosis, Severity, diagnosis
from furlong.core.text import abbreviate
from furlong.errors import CheckpointError, ConfigError
from furlong.files.checkpoint_folder import TRACKER, find_checkpoint, find_complete_folders, recovery
from furlong.files.manifest import MANIFEST, changed_files, missing_or_cut
from furlong.files.tensor_file import Shard, TensorFile, read_header
from furlong.tools.model_folder import INDEX, SINGLE, check_model, read_model

CHUNK_VALUES = 1 << 24
SHOWN = 5
NOT_CHECKED = ("F8_E8M0", "F4", "F6_E2M3", "F6_E3M2")  # scales without a sign, and packed values
UNREAD = {"shard", "unread"}  # evidence keys of files whose values cannot be checked


@dataclass(frozen=True)
class BadValues:
    """A tensor with non-finite values (`num_not_finite` of `size`), or all zeros."""

    tensor: str
    num_not_finite: int
    size: int

    def text(self) -> str:
        """`model.norm.weight (3 of 64 values)`."""
        return f"{self.tensor} ({self.num_not_finite} of {self.size} values)" if self.num_not_finite else self.tensor


def bad_values(shard: Shard) -> Iterator[BadValues]:
    """Check every floating-point tensor of a file, in parts. Raises CheckpointError if it cannot be read."""
    with TensorFile(shard.path) as file:
        for name, stored in file.tensors.items():
            if not stored.dtype.startswith(("F", "BF")) or stored.dtype in NOT_CHECKED:
                continue
            num_bad, is_zero = 0, True
            tensor = file.mapped(name).flatten()
            for part in tensor.split(CHUNK_VALUES):
                values = part.float() if part.itemsize == 1 else part  # torch tests no 8-bit values
                num_bad += int((~values.isfinite()).sum())
                is_zero = is_zero and not values.any()
            if num_bad or (is_zero and len(stored.shape) > 1 and len(tensor)):
                yield BadValues(name, num_bad, len(tensor))


def check_weights(folder: Path, *, with_values: bool = True) -> list[Diagnosis]:
    """Check a model folder, a `--save` folder, or one `iter_*` in it. Raises ConfigError for other folders."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; use a model folder, or one that --save wrote")
    is_trainer = os.path.lexists(folder / TRACKER) or find_complete_folders(folder) or (folder / MANIFEST).is_file()
    if is_trainer or folder.name.startswith("iter_"):
        return _check_trainer(folder, with_values=with_values)
    if not (folder / "config.json").is_file() and not list(folder.glob("*.safetensors*")):
        content = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise ConfigError(
            f"{folder} is neither a model folder (config.json) nor one that --save wrote ({TRACKER}); "
            f"it contains {content}"
        )
    diagnoses = [*_missing_files(folder), *check_model(folder)]
    if with_values and not any(each.severity == "error" and each.evidence.keys() & UNREAD for each in diagnoses):
        diagnoses += _check_values(folder, read_model(folder).shards)
    return diagnoses


def _missing_files(folder: Path) -> list[Diagnosis]:
    """CKPT04: a folder without weights, with shards but no index, or without config.json."""
    names = sorted(path.name for path in folder.iterdir())
    evidence = {"held": names[:16]}
    if not {SINGLE, INDEX} & set(names):
        shards = [name for name in names if name.endswith(".safetensors")]
        problem = f"{len(shards)} safetensors files but no {INDEX}" if shards else f"no {SINGLE} and no {INDEX}"
        remedy = "download or convert the weights; to examine a run, use `furlong doctor --run`"
        if shards:
            remedy = f"also download {INDEX}"
        return [
            diagnosis(
                "CKPT04", f"{folder}: {problem}; it contains {', '.join(names[:8])}", remedy=remedy, evidence=evidence
            )
        ]
    if "config.json" not in names:
        finding = f"{folder}: no config.json, without which no model can be built"
        return [diagnosis("CKPT04", finding, remedy="also download config.json", evidence=evidence)]
    return []


def _check_trainer(folder: Path, *, with_values: bool) -> list[Diagnosis]:
    """CKPT01: a checkpoint that --load refuses, with the same message, or an unreadable file or tracker."""
    diagnoses: list[Diagnosis] = []
    try:
        if os.path.lexists(folder / TRACKER) or find_complete_folders(folder):
            step = find_checkpoint(folder, step=None, save_dir=None, flag="checkpoint")
            assert step is not None  # without save_dir a missing checkpoint raises
            if (why := recovery(folder)) is not None:
                remedy = f"no action needed to resume; the next save writes {TRACKER}"
                diagnoses.append(diagnosis("CKPT01", f"{why}, which is checked", remedy=remedy, severity="warning"))
            folder = step
        elif (folder / MANIFEST).is_file():
            if problems := missing_or_cut(folder):
                raise CheckpointError("; ".join(problems))
        else:
            raise CheckpointError(f"{folder} has no {MANIFEST}, which is written last: the save was interrupted")
        if with_values and (damaged := changed_files(folder)):
            raise CheckpointError("; ".join(damaged))
    except CheckpointError as error:
        return [diagnosis("CKPT01", str(error), remedy="resume from another checkpoint with --ckpt-step")]
    shards: dict[str, Shard] = {}
    for path in sorted((folder / "trainer").rglob("*.safetensors")):
        try:
            shards[path.name] = read_header(path)
        except CheckpointError as error:
            diagnoses.append(
                diagnosis("CKPT01", f"{folder}: {error}", remedy="resume from another checkpoint with --ckpt-step")
            )
    return diagnoses + (_check_values(folder, shards, has_moments=True) if with_values else [])


def _check_values(folder: Path, shards: Mapping[str, Shard], *, has_moments: bool = False) -> list[Diagnosis]:
    """Report non-finite tensors as errors and all-zero matrices, except moments, as warnings."""
    broken: list[str] = []
    zero: list[str] = []
    for name, shard in shards.items():
        for bad in bad_values(shard):
            if bad.num_not_finite:
                broken.append(bad.text())
            elif not (has_moments and "optimizer" in name):
                zero.append(bad.text())
    return value_findings(folder, broken, zero)


def value_findings(folder: Path, broken: Sequence[str], zero: Sequence[str]) -> list[Diagnosis]:
    """CKPT04: tensors with non-finite values are an error, matrices that are all zero a warning."""
    problems: tuple[tuple[Sequence[str], str, str, str, Severity], ...] = (
        (broken, "tensors contain non-finite values", "The run that saved them diverged, or a conversion overflowed.",
         "use an earlier checkpoint, or convert the weights again", "error"),
        (zero, "matrices are all zero",
         "The conversion that wrote the folder skipped them, or they are zero in the original.",
         "compare with the original; convert it again if they are not zero there", "warning"),
    )  # fmt: skip
    return [
        diagnosis(
            "CKPT04",
            f"{folder}: {len(names)} {problem}: {abbreviate(names, SHOWN)}",
            cause=cause,
            remedy=remedy,
            severity=severity,
            evidence={"folder": str(folder), "tensors": list(names[:SHOWN]), "num_tensors": len(names)},
        )
        for names, problem, cause, remedy, severity in problems
        if names
    ]
