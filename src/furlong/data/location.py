"""Where prompts lie: a file or folder, a row slice, and the fingerprint that tells one data set from another."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from furlong.config.checks.path_checks import split_slice
from furlong.errors import ConfigError, DataError

DataKind = Literal["jsonl", "parquet", "arrow"]
HASHED_BYTES = 1 << 20


@dataclass(frozen=True)
class DataLocation:
    """A data file or folder and the slice of its rows, as `--prompt-data` names them.

    >>> DataLocation.parse("math.jsonl@[100:]")
    DataLocation(path=PosixPath('math.jsonl'), start=100, stop=None)
    """

    path: Path
    start: int | None = None
    stop: int | None = None

    @classmethod
    def parse(cls, text: str) -> DataLocation:
        """Split `file@[a:b]` into path and slice. Raises ConfigError for a suffix that is no slice."""
        file, start, stop = split_slice(text)
        if "@[" in file:
            raise ConfigError(
                f"--prompt-data {text!r}: the suffix is no slice; write file@[a:b], file@[a:] or file@[:b]"
            )
        return cls(Path(file), start, stop)

    @property
    def slice_text(self) -> str:
        """The slice as written, "[:]" for all rows."""
        return f"[{'' if self.start is None else self.start}:{'' if self.stop is None else self.stop}]"

    @property
    def kind(self) -> DataKind:
        """The format, by suffix or by what lies in the folder. Raises DataError for anything else."""
        path = self.path
        if path.is_dir():
            if (path / "state.json").is_file():
                return "arrow"
            raise DataError(_folder_problem(path))
        if not path.is_file():
            raise DataError(f"no data at {path}: there is no such file or folder; check --prompt-data")
        if path.suffix in (".jsonl", ".ndjson"):
            return "jsonl"
        if path.suffix == ".parquet":
            return "parquet"
        raise DataError(
            f"{path}: cannot tell the format from the suffix {path.suffix!r}; "
            "use .jsonl, .parquet, or a folder written by datasets' save_to_disk"
        )

    def files(self) -> list[Path]:
        """The files that hold rows, in row order."""
        return arrow_files(self.path) if self.kind == "arrow" else [self.path]

    def fingerprint(self) -> dict[str, Any]:
        """Size, hashes of the first and last MiB, and the slice: what makes it the same data. The path is left out."""
        files = self.files()
        head, tail = files[0], files[-1]
        with head.open("rb") as file:
            head_hash = xxhash.xxh3_128_hexdigest(file.read(HASHED_BYTES))
        with tail.open("rb") as file:
            file.seek(max(0, tail.stat().st_size - HASHED_BYTES))
            tail_hash = xxhash.xxh3_128_hexdigest(file.read(HASHED_BYTES))
        return {
            "size": sum(file.stat().st_size for file in files),
            "head": head_hash,
            "tail": tail_hash,
            "slice": self.slice_text,
        }


def arrow_files(folder: Path) -> list[Path]:
    """The Arrow files of a save_to_disk folder, in row order. Raises DataError if one is missing."""
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    entries = state.get("_data_files")
    if not entries:
        raise DataError(f"{folder}/state.json names no data files; write the folder again with save_to_disk")
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise DataError(f"{folder} has an indices mapping; call flatten_indices() on the dataset and save it again")
    files = [folder / entry["filename"] for entry in entries]
    if missing := [file.name for file in files if not file.is_file()]:
        raise DataError(f"{folder}/state.json names files that are not there: {missing}; copy the whole folder")
    return files


def _folder_problem(folder: Path) -> str:
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8")).get("splits", [])
        return f"{folder} holds the splits {splits}; name one of them: {folder / (splits[0] if splits else 'train')}"
    inside = sorted(p.name for p in folder.iterdir())[:8]
    return (
        f"{folder} is a folder but not one written by datasets' save_to_disk (no state.json; it holds {inside}); "
        "name one .jsonl or .parquet file, or write the folder with save_to_disk (pip install 'furlong[datasets]')"
    )
