"""The manifest of a model folder that furlong writes, so that a change of any of its files is noticed and named.

Files are compared as a whole, those of tensors by their header, whose checksums cover the rest (`core.file_tensors`).
Folders without a manifest, such as downloads, are not compared. Imports no torch.
"""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

from furlong.errors import CheckpointError
from furlong.files.atomic import write_atomically
from furlong.files.checksums import changed_file, file_checksum
from furlong.files.file_manifest import DamagedManifestError, FileRecord, manifest_text, read_records
from furlong.files.safetensors_header import CHECKSUMS, header_length, read_header

MODEL_MANIFEST = "furlong_manifest.json"
# Of the files that loaders read. Others, such as a model card, may be added and changed.
SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py", ".safetensors")


def write_model_manifest(folder: Path) -> None:
    """Write the manifest of all files in `folder` that loaders read; it is the last file of a model folder.

    Raises OSError.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.name != MODEL_MANIFEST)
    records = {path.name: _record(path) for path in files if path.is_file()}
    write_atomically(folder / MODEL_MANIFEST, manifest_text(None, records))


def changed_files(folder: Path) -> list[str]:
    """Return how the files of a model folder differ from its manifest, each by name; [] without a manifest.

    Raises CheckpointError for a manifest of another version.
    """
    path = folder / MODEL_MANIFEST
    if not os.path.lexists(path):
        return []
    if not path.is_file():
        return [f"{path} is not a file"]
    try:
        records = read_records(path)
    except DamagedManifestError as error:
        return [str(error)]
    problems = (_problem(folder / name, record) for name, record in records.items())
    return [problem for problem in problems if problem is not None]


def _record(path: Path) -> FileRecord:
    size = path.stat().st_size
    if path.suffix == ".safetensors" and _has_checksums(path):
        return FileRecord(size, None, header=_header_checksum(path))
    return FileRecord(size, file_checksum(path))


def _has_checksums(path: Path) -> bool:
    try:
        return CHECKSUMS in read_header(path).texts
    except CheckpointError:
        return False  # another tool's, or damaged: compared as a whole


def _header_checksum(path: Path) -> str:
    """Return the checksum of the header of a file of tensors, with its length. Raises CheckpointError or OSError."""
    with path.open("rb") as file:
        start = file.read(8)
        return xxhash.xxh3_128_hexdigest(start + file.read(header_length(path, start)))


def _problem(path: Path, record: FileRecord) -> str | None:
    if not path.is_file():
        return f"{path} is missing, which was saved with the folder"
    try:
        size = path.stat().st_size
        if size != record.num_bytes:
            return f"{path} was changed after it was saved: it has {size} bytes, expected {record.num_bytes}"
        if record.header is not None:
            actual, expected = _header_checksum(path), record.header
        else:
            actual, expected = file_checksum(path), record.checksum
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    except CheckpointError as error:
        return f"{path} was changed after it was saved: {error}"
    return None if expected in (None, actual) else changed_file(path, actual, expected)
