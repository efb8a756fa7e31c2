"""Where the prompts of a run are: a data file, folder or task with a slice of its rows, its format and its files."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Generator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, cast

import pyarrow as pa
import xxhash

from furlong.config.checks.value_checks import DATA_FORMATS, join_command, split_slice
from furlong.config.task_specs import PACKAGE, is_task, num_episodes
from furlong.core.text import shortened
from furlong.core.user_objects import find_object, object_name
from furlong.errors import ConfigError, DataError

HASHED_BYTES = 1 << 20
HASHED_ROWS = 1024
AGAIN = "copy the folder again, or save the dataset again with save_to_disk"
STATE, SPLITS = "state.json", "dataset_dict.json"  # in folders of save_to_disk

DataKind = Literal["jsonl", "parquet", "arrow", "tasks", "objects"]
# Errors of libraries that read damaged content.
DAMAGE = (
    pa.ArrowException,
    OSError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    MemoryError,
)


class SourceFile:
    """A file with rows that a run may read for days, as it was when the run opened it first.

    Damage in it, and any change meanwhile, are a DataError that names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp = self._read_stamp()

    @property
    def num_bytes(self) -> int:
        """Its size when the run opened it first."""
        return self._stamp[0]

    def check_unchanged(self) -> None:
        """Raise DataError if the file was deleted, or its size or modification time differs from the first time."""
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        (before, _), (now, _) = self._stamp, stamp
        change = (
            "modified" if now == before else f"{'cut' if now < before else 'extended'} from {before} to {now} bytes"
        )
        raise DataError(
            f"{self.path} was {change} while the run read it, so its rows are no longer those that the run counted; "
            "restore the file and resume with --load, or start a new run"
        )

    @contextlib.contextmanager
    def reading(self, what: str = "") -> Generator[None]:
        """Turn an error of reading the file into a DataError; `what` is the place in it, such as "row group 3"."""
        try:
            yield
        except DataError:
            raise
        except DAMAGE as error:
            self.check_unchanged()
            reason = " ".join(str(error).split()) or "no further details"
            raise DataError(
                f"{self.path}{what and f', {what},'} cannot be read: {type(error).__name__}: {reason[:300]}; the file "
                "is damaged or incomplete: copy or write it again"
            ) from error

    def _read_stamp(self) -> tuple[int, int]:
        try:
            facts = os.stat(self.path)
        except OSError as error:
            raise DataError(
                f"{self.path} cannot be opened: {error.strerror or error}; restore the file, or check --prompt-data"
            ) from error
        return facts.st_size, facts.st_mtime_ns


@dataclass(frozen=True)
class PromptDataPath:
    """A data file or folder, procedural tasks, or rows in this process, and a slice of them, as in `--prompt-data`.

    >>> PromptDataPath.parse("math.jsonl@[100:]")
    PromptDataPath(path=PosixPath('math.jsonl'), start=100, stop=None)
    """

    path: Path
    start: int | None = None
    stop: int | None = None

    @classmethod
    def parse(cls, text: str) -> PromptDataPath:
        """Split `file@[a:b]` into path and slice. Raises ConfigError for an invalid slice."""
        file, start, stop = split_slice(text)
        if "@[" in file:
            raise ConfigError(
                f"--prompt-data {text!r}: the suffix is not a slice; write file@[a:b], file@[a:] or file@[:b]"
            )
        return cls(Path(file), start, stop)

    @property
    def slice_text(self) -> str:
        """The slice as text, "[:]" for all rows."""
        return f"[{'' if self.start is None else self.start}:{'' if self.stop is None else self.stop}]"

    @property
    def kind(self) -> DataKind:
        """The format, from the suffix or the content of the folder. Raises DataError if it is unknown."""
        path = self.path
        if is_task(str(path)):
            return "tasks" if object_name(str(path)) is None else "objects"
        if path.is_dir():
            if (path / STATE).is_file():
                return "arrow"
            raise DataError(_folder_problem(path))
        if not path.is_file():
            if path.exists():
                raise DataError(f"{path} is a pipe or a device, which can be read only once; write it to a file first")
            raise DataError(f"no data at {path}: no such file or folder; check --prompt-data")
        if path.suffix in (".jsonl", ".ndjson"):
            return "jsonl"
        if path.suffix == ".parquet":
            return "parquet"
        raise DataError(
            f"{path}: unknown format {path.suffix!r}; "
            "use .jsonl, .parquet, or a folder written by datasets' save_to_disk"
        )

    def check_streamable(self) -> None:
        """Raise ConfigError for a slice that counts from the end, which a stream does not know."""
        if (self.start or 0) < 0 or (self.stop or 0) < 0:
            raise ConfigError(
                f"{self.path}@{self.slice_text}: a negative slice needs the number of rows, which is unknown for a "
                "stream; use non-negative bounds, or remove --streaming-data"
            )

    def files(self) -> list[Path]:
        """Return the files with rows, in row order; [] for procedural tasks and objects."""
        if self.kind in ("tasks", "objects"):
            return []
        return arrow_files(self.path) if self.kind == "arrow" else [self.path]

    def fingerprint(self) -> dict[str, Any]:
        """Return what identifies the data, not its path: size, hashes of the first and last MiB, and the slice."""
        if self.kind == "tasks":
            package = None if num_episodes(str(self.path)) else version(PACKAGE)
            return {"tasks": str(self.path), "package": package, "slice": self.slice_text}
        if self.kind == "objects":
            return {**object_fingerprint(find_object(str(self.path))), "slice": self.slice_text}
        files = [SourceFile(path) for path in self.files()]
        return {
            "size": sum(file.num_bytes for file in files),
            "head": _checksum(files[0], 0),
            "tail": _checksum(files[-1], max(0, files[-1].num_bytes - HASHED_BYTES)),
            "slice": self.slice_text,
        }


def object_fingerprint(rows: Any) -> dict[str, Any]:
    """Return the number of rows and hashes of the first and last ones; only a mark for an iterable without a length."""
    if not hasattr(rows, "__len__"):
        return {"size": None}
    places = {"head": range(min(HASHED_ROWS, len(rows))), "tail": range(max(0, len(rows) - HASHED_ROWS), len(rows))}
    texts = {name: json.dumps([rows[i] for i in indices], default=repr) for name, indices in places.items()}
    return {"size": len(rows), **{name: xxhash.xxh3_128_hexdigest(text.encode()) for name, text in texts.items()}}


def _checksum(file: SourceFile, start: int) -> str:
    with file.reading(), file.path.open("rb") as opened:
        opened.seek(start)
        return xxhash.xxh3_128_hexdigest(opened.read(HASHED_BYTES))


def arrow_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a save_to_disk folder, in row order. Raises DataError if one is missing."""
    state = _read_object(folder / STATE)
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise DataError(f"{folder} has an indices mapping; call flatten_indices() on the dataset and save it again")
    entries = state.get("_data_files")
    try:
        names: list[str] = [Path(entry["filename"]).name for entry in cast("list[Any]", entries)]
    except (TypeError, KeyError) as error:
        raise DataError(
            f"{folder / STATE} is damaged: _data_files is {shortened(entries)}, expected a list of objects with file "
            f"names; {AGAIN}"
        ) from error
    if not names:
        raise DataError(f"{folder / STATE} lists no data files; save the dataset again with save_to_disk")
    files = [folder / name for name in names]
    if missing := [file.name for file in files if not file.is_file()]:
        raise DataError(f"{folder / STATE} lists missing files: {missing}; copy the whole folder")
    return files


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}; {AGAIN}") from error
    except ValueError as error:
        raise DataError(f"{path} is damaged: it is not JSON ({error}); {AGAIN}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is damaged: it contains {shortened(content)}, not an object; {AGAIN}")
    return cast("dict[str, Any]", content)


def _folder_problem(folder: Path) -> str:
    if (folder / SPLITS).is_file():
        splits = _read_object(folder / SPLITS).get("splits")
        names = [str(name) for name in cast("list[Any]", splits)] if isinstance(splits, list) else []
        return f"{folder} contains the splits {names}; select one: {folder / (names[0] if names else 'train')}"
    try:
        inside = sorted(p.name for p in folder.iterdir())[:8]
    except OSError as error:
        return f"{folder} cannot be read: {error.strerror or error}; check its permissions"
    suffix = next((suffix for suffix in DATA_FORMATS for name in inside if name.endswith(suffix)), None)
    fix = "use a .jsonl or .parquet file, or write the folder with save_to_disk"
    if suffix is not None:
        fix = f"give one file, or join them, {join_command(f'{folder}/*{suffix}')}"
    return f"{folder} was not written by datasets' save_to_disk (no {STATE}; it contains {inside}); {fix}"
