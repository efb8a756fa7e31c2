"""Manifests: JSON files with the checksum of every file of a folder, and their own.

A checkpoint has `manifest.json` (`core.checkpoint_folder`), a model folder `furlong_manifest.json`
(`core.model_manifest`). Either is the last file that is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from furlong.core.file_kind import require_file
from furlong.core.json_values import parse_json
from furlong.errors import CheckpointError

FORMAT = 3
WITHOUT_BLOCKS = 2  # an older format, without checksums of blocks
WITHOUT_CHECKSUMS = 1  # an older format, which has the sizes of files only


@dataclass(frozen=True)
class FileRecord:
    """A file in a manifest. checksum: xxh3-128 of its content; None if an older version saved it.

    blocks: the checksums of its blocks, joined, for a file of tensors; see `core.verified_tensors`. header: instead of
    `checksum`, that of the header, of a file of tensors whose header has the checksums of their blocks.
    """

    num_bytes: int
    checksum: str | None
    blocks: str | None = None
    header: str | None = None


class DamagedManifestError(CheckpointError):
    """A manifest cannot be read, or does not have its own checksum."""


def manifest_text(step: int | None, files: Mapping[str, FileRecord], *, number: int = FORMAT) -> str:
    """Return the content of a manifest of format `number`; its last entry is the checksum of the others."""
    entries: dict[str, dict[str, Any]] = {
        name: {"bytes": record.num_bytes, "xxh3_128": record.checksum}
        | ({} if record.blocks is None else {"blocks": record.blocks})
        | ({} if record.header is None else {"header": record.header})
        for name, record in files.items()
    }
    content = {"format": number, "step": step, "files": entries}
    return json.dumps(content | {"xxh3_128": xxhash.xxh3_128_hexdigest(json.dumps(content).encode())}, indent=1)


def read_records(path: Path) -> dict[str, FileRecord]:
    """Return the files of a manifest, by their path in its folder.

    Raises DamagedManifestError, or CheckpointError if it has a format that this version does not read.
    """
    try:
        require_file(path)
        text = path.read_text()
        manifest = parse_json(text)
        if manifest["format"] == WITHOUT_CHECKSUMS:
            return {str(name): FileRecord(int(size), None) for name, size in manifest["files"].items()}
        if manifest["format"] not in (FORMAT, WITHOUT_BLOCKS):
            raise CheckpointError(
                f"{path.parent} has format {manifest['format']!r}, expected {FORMAT}; use the furlong version that "
                "wrote it"
            )
        records = {
            name: FileRecord(file["bytes"], file["xxh3_128"], file.get("blocks"), file.get("header"))
            for name, file in manifest["files"].items()
        }
        is_intact = text == manifest_text(manifest["step"], records, number=manifest["format"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedManifestError(f"{path} is corrupt ({type(error).__name__}: {error})") from error
    if not is_intact:
        raise DamagedManifestError(f"{path} does not have the checksum in its last line: it was changed")
    return records
