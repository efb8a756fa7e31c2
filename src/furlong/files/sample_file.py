"""Files of samples: every field of every sample, restored exactly, without pickle. Dumps of rollouts are such files.

A dump is one safetensors file, whatever its suffix (slime's `rollout_{rollout_id}.pt` works too):

- metadata: `format` "furlong.samples", `version` "1", `rollout_id`;
- tensor `json` (uint8): UTF-8 JSON {"groups": [{"index", "epoch", "row", "name", "samples": [{...}]}]}; a sample has
all fields that differ from their default, except the per-token lists;
- for each per-token list in `COLUMNS`: tensor `<field>`, the lists of all samples concatenated, and tensor
  `<field>.lengths` (int64), one per sample, -1 for None. Floats are float32 if that is lossless, else float64.

JSON has no tuples and only string keys; such values are tagged, {"$tuple": [...]} and {"$dict": [[key, value], ...]}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from furlong.core.sample import Group, Sample
from furlong.errors import CheckpointError, DataError
from furlong.files.atomic import atomic_file
from furlong.files.tensor_file import read_arrays, read_header

FORMAT = "furlong.samples"
VERSION = "1"
COLUMNS = ("tokens", "loss_mask", "token_versions", "rollout_log_probs", "teacher_log_probs", "teacher_mask")

PICKLED = (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")  # starts of torch.save's and pickle's files

_DEFAULTS = {**Sample().to_dict(), "attributes": {}}
_SCALARS = frozenset((bool, int, float, str, type(None)))


@dataclass(frozen=True)
class SampleDump:
    """The content of a dump. `names` has one entry per group: its evaluation set, "" for training."""

    rollout_id: int
    groups: list[Group]
    names: list[str] = field(default_factory=list[str])


def save_samples(path: Path | str, rollout_id: int, groups: Sequence[Group], *, names: Sequence[str] = ()) -> None:
    """Write groups to one file, atomically.

    Raises DataError naming the sample and the field for a value that is not plain data (numbers, text, lists, dicts).
    """
    samples = [sample.to_dict() for group in groups for sample in group.samples]
    tensors = dict(_tensors(samples))
    rows = iter(samples)
    shown = [
        {
            "index": group.index,
            "epoch": group.epoch,
            "row": group.row,
            "name": name,
            "samples": [_plain_sample(next(rows)) for _ in group.samples],
        }
        for group, name in zip(groups, names or [""] * len(groups), strict=True)
    ]
    tensors["json"] = np.frombuffer(json.dumps({"groups": shown}, check_circular=False).encode("ascii"), np.uint8)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as draft:
        save_file(tensors, draft, {"format": FORMAT, "version": VERSION, "rollout_id": str(rollout_id)})


def load_samples(path: Path | str, rollout_id: int | None = None) -> SampleDump:
    """Read a file written by `save_samples`; with `rollout_id`, one of that training rollout.

    Raises DataError for damaged files, other files, other versions, and dumps of something else than `rollout_id`.
    """
    path = Path(path)
    check_dump(path, rollout_id)
    try:
        tensors, metadata = read_arrays(path)
        dump = _dump_of(tensors, int(metadata["rollout_id"]))
    except CheckpointError as error:
        raise DataError(f"{error}; write the dump again") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error}); write the dump again") from error
    if rollout_id is not None and (sets := sorted({name for name in dump.names if name})):
        raise DataError(
            f"{path} contains the samples of the evaluation after rollout {dump.rollout_id} ({', '.join(sets)}), but "
            f"its name is that of rollout {rollout_id}; restore the dump of rollout {rollout_id}"
        )
    return dump


def check_dump(path: Path, rollout_id: int | None = None) -> None:
    """Check that a dump exists and has the header of one, without reading samples. Raises DataError.

    rollout_id: the rollout that the path names, which must be the recorded one; None accepts any.
    """
    if not path.is_file():
        what = "is a folder, not a rollout dump" if path.is_dir() else "does not exist"
        raise DataError(f"{path} {what}; write one with --save-debug-rollout-data or --dump-details")
    try:
        metadata = read_header(path).texts
    except CheckpointError as error:
        with path.open("rb") as file:
            is_pickled = file.read(2) in PICKLED
        if is_pickled:
            raise DataError(
                f"the rollout dump {path} was written with torch.save or pickle, as slime does: it contains pickled "
                "objects, which furlong does not load; write it again with furlong's --save-debug-rollout-data"
            ) from error
        raise DataError(f"{error}; write the dump again") from error
    if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
        raise DataError(
            f"{path} has format {metadata.get('format')!r} version {metadata.get('version')!r}, expected {FORMAT!r} "
            f"version {VERSION!r}; use a file that --save-debug-rollout-data wrote"
        )
    if rollout_id is not None and metadata.get("rollout_id") != str(rollout_id):
        raise DataError(
            f"{path} contains the dump of rollout {metadata.get('rollout_id')}, but its name is that of rollout "
            f"{rollout_id}; restore the dump of rollout {rollout_id}, or rename the file"
        )


def _dump_of(tensors: Mapping[str, NDArray[Any]], rollout_id: int) -> SampleDump:
    shown = json.loads(tensors["json"].tobytes())["groups"]
    rows = [sample for group in shown for sample in group["samples"]]
    for name in (each for each in COLUMNS if each in tensors):
        for row, values in zip(rows, _lists(tensors[name], tensors[f"{name}.lengths"]), strict=True):
            row[name] = values
    groups = [
        Group(g["index"], [Sample.from_dict(_from_tagged(s)) for s in g["samples"]], g["epoch"], g["row"])
        for g in shown
    ]
    return SampleDump(rollout_id, groups, [g["name"] for g in shown])


def _tensors(samples: Sequence[dict[str, Any]]) -> list[tuple[str, NDArray[Any]]]:
    tensors: list[tuple[str, NDArray[Any]]] = []
    for name in COLUMNS:
        lists = [sample.pop(name) for sample in samples]
        lengths = np.array([-1 if values is None else len(values) for values in lists], np.int64)
        flat = list(chain.from_iterable(values for values in lists if values is not None))
        tensors += [(name, _array(name, flat)), (f"{name}.lengths", lengths)]
    return tensors


def _array(name: str, flat: list[Any]) -> NDArray[Any]:
    array = np.asarray(flat) if flat else np.zeros(0, np.int64)
    if array.dtype.kind not in "biuf" or array.ndim != 1:
        kinds = sorted({type(value).__name__ for value in flat})
        raise DataError(f"the per-token field {name} of a sample contains {kinds}; expected only numbers")
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            narrow = array.astype(np.float32)
        return narrow if np.array_equal(narrow.astype(np.float64), array, equal_nan=True) else array.astype(np.float64)
    if array.dtype.kind == "i" and array.size and array.min() >= -(2**31) and array.max() < 2**31:
        return array.astype(np.int8 if array.min() >= 0 and array.max() < 2**7 else np.int32)
    return array


def _lists(flat: NDArray[Any], lengths: NDArray[Any]) -> list[list[Any] | None]:
    ends = np.cumsum(np.maximum(lengths, 0))
    values = flat.tolist()
    return [
        None if length < 0 else values[end - length : end]
        for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)
    ]


def _plain_sample(data: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, value in data.items():
        if value is (default := _DEFAULTS[name]):  # most are
            continue
        kind = type(value)
        if kind is not type(default) or value != default:
            plain[name] = value if kind in _SCALARS else _tagged(value, f"sample {data['index']}, field {name}")
    return plain


def _tagged(value: Any, where: str) -> Any:
    """Return JSON data that `_from_tagged` restores to an equal value. Numpy and torch scalars become numbers."""
    if type(value) in _SCALARS or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_tagged(each, where) for each in value]
    if isinstance(value, tuple):
        return {"$tuple": [_tagged(each, where) for each in value]}
    if isinstance(value, dict):
        if all(type(key) is str and key[:1] != "$" for key in value):
            return {
                key: each if type(each) in _SCALARS else _tagged(each, f"{where}[{key!r}]")
                for key, each in value.items()
            }
        return {"$dict": [[_tagged(key, where), _tagged(each, f"{where}[{key!r}]")] for key, each in value.items()]}
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        return value.item()
    raise DataError(
        f"{where} has a {type(value).__name__}, which a rollout dump cannot store; use numbers, text, lists or dicts, "
        "or remove --save-debug-rollout-data and --dump-details"
    )


def _from_tagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_tagged(each) for each in value]
    if isinstance(value, dict):
        if value.keys() == {"$tuple"}:
            return tuple(_from_tagged(value["$tuple"]))
        if value.keys() == {"$dict"}:
            return {_from_tagged(key): _from_tagged(each) for key, each in value["$dict"]}
        return {key: _from_tagged(each) for key, each in value.items()}
    return value
