"""The manifest of a checkpoint: size and xxh3-128 checksum of every file, compared when a file is loaded.

    {"format": 1, "step": 10, "files": {"state.json": [412, "99aa06d3014798d8..."], ...}}

It is the last file of a checkpoint. A rank that writes a large file computes its checksum at once, while the content is
in the page cache, and leaves it in a file next to it (`leave_checksum`), so that no process reads all files of all
ranks.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import xxhash

from furlong.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
LEFT = ".xxh3"  # suffix of the file with the checksum of another
CHUNK_BYTES = 1 << 20
MAX_THREADS = 8


def file_checksum(path: Path, closing: threading.Event | None = None) -> str:
    """Return the xxh3-128 checksum of a file, as 32 hexadecimal digits; `closing` ends the read. Raises OSError."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while (closing is None or not closing.is_set()) and (size := file.readinto(buffer)):
            digest.update(buffer[:size])
    return digest.hexdigest()


def leave_checksum(path: Path) -> None:
    """Write the checksum of a file into a file next to it, for `write_manifest`. Raises OSError."""
    path.with_name(path.name + LEFT).write_text(file_checksum(path))


def write_manifest(folder: Path, step: int) -> None:
    """Write the manifest of all files in `folder`. Raises OSError."""
    files: dict[str, tuple[int, str]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != LEFT and p != folder / MANIFEST):
        left = path.with_name(path.name + LEFT)
        checksum = left.read_text() if left.is_file() else file_checksum(path)
        left.unlink(missing_ok=True)
        files[str(path.relative_to(folder))] = path.stat().st_size, checksum
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1))


def read_manifest(folder: Path) -> dict[str, tuple[int, str]]:
    """Return size and checksum of the files of a checkpoint, by their path in it.

    Raises CheckpointError if the manifest is damaged or has a format that this version does not read.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        number = manifest["format"]
        files = {str(name): (int(size), str(checksum)) for name, (size, checksum) in manifest["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}: {error}); use another --ckpt-step"
        ) from error
    if number != FORMAT:
        raise CheckpointError(f"{path} has format {number!r}, expected {FORMAT}; use the furlong version that wrote it")
    return files


def missing_or_cut(folder: Path) -> list[str]:
    """Return the files of a manifest that are missing or have another size, with both sizes."""
    found: list[str] = []
    for name, (expected, _) in read_manifest(folder).items():
        path = folder / name
        if not path.is_file():
            found.append(f"{path} is missing, expected {expected} bytes")
        elif (actual := path.stat().st_size) != expected:
            found.append(f"{path} has {actual} bytes, expected {expected} bytes")
    return found


def changed_files(folder: Path, names: Iterable[str] | None = None) -> list[str]:
    """Return the files of a checkpoint that do not have their checksum, by default of all files; reads them whole."""
    files = read_manifest(folder)
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        problems = threads.map(lambda name: _problem(folder / name, *files[name]), files if names is None else names)
    return [problem for problem in problems if problem]


def _problem(path: Path, size: int, checksum: str) -> str:
    try:
        actual, num_bytes = file_checksum(path), path.stat().st_size
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    if actual == checksum:
        return ""
    return (
        f"{path} was changed after it was saved: it has {num_bytes} bytes and the checksum {actual}, expected {size} "
        f"bytes and {checksum}"
    )


@contextmanager
def files_checked(folder: Path, names: Iterable[str]) -> Generator[None]:
    """Compare files of the checkpoint `folder` with its manifest, in a thread, while the body loads them.

    Raises CheckpointError that names those that differ, after the body and instead of an error that damage may cause.
    Does nothing without a manifest.
    """
    listed = read_manifest(folder) if (folder / MANIFEST).is_file() else {}
    with ThreadPoolExecutor(1, thread_name_prefix="checksum") as thread:
        check = thread.submit(changed_files, folder, [name for name in names if name in listed]) if listed else None
        try:
            yield
        except Exception as error:
            if check is not None and (changed := check.result()):
                raise CheckpointError(f"{'; '.join(changed)}; use another --ckpt-step") from error
            raise
        if check is not None and (changed := check.result()):
            raise CheckpointError(f"{'; '.join(changed)}; use another --ckpt-step")
