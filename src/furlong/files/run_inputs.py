"""The inputs of a run: its data, tokenizer, chat template, model configuration and weights, identified by content.

A checkpoint contains a record of all inputs: files by the xxh3-128 checksum of every block, settings by key and value.
A run that resumes from it compares the record with its own, so that a change underneath is refused with its place.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import xxhash

from furlong.core.json_values import parse_json
from furlong.core.text import abbreviate, shortened
from furlong.errors import CheckpointError, DataError
from furlong.files.checkpoint_folder import read_verified

InputKind = Literal["data", "tokenizer", "chat-template", "config", "weights", "reference"]

INPUTS = "inputs.json"  # in a checkpoint folder
FORMAT = 1
BLOCK_BYTES = 4 << 20
MAX_THREADS = 4
SHOWN = 3  # blocks or keys in a message

Place = Callable[[Path, int, int], str]


@dataclass(frozen=True)
class InputFile:
    """A file that is compared by blocks.

    name: what identifies it in the record, as paths may change; "" for a single file. place: describes a range of
    bytes in terms of the format, such as "lines 5 to 9".
    """

    path: Path
    name: str = ""
    place: Place | None = None


@dataclass(frozen=True)
class RunInput:
    """Files and settings of one kind. `settings` is called in a thread and returns JSON values by key.

    source: the flag and path, for messages. follows_path: whether the input is compared only if its source is the same
    as in the checkpoint, because another path is a changed flag, which the run logs.
    """

    kind: InputKind
    source: str
    files: Sequence[InputFile] = ()
    settings: Callable[[], Mapping[str, Any]] | None = None
    follows_path: bool = False


@dataclass(frozen=True)
class Change:
    """A difference between a run and the record in its checkpoint."""

    kind: InputKind
    text: str

    def __str__(self) -> str:
        """Return both, for messages."""
        return f"{self.kind}: {self.text}"


class RunInputs:
    """Computes the record of a run's inputs in threads, from `start` on, and compares it with a saved one."""

    def __init__(self, inputs: Sequence[RunInput], *, accepted: Collection[str] = ()) -> None:
        """`accepted`: kinds of inputs that may differ from those of the checkpoint."""
        self.accepted = frozenset(accepted)
        self._inputs: dict[InputKind, RunInput] = {each.kind: each for each in inputs}
        self._closing = threading.Event()
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="inputs")
        self._files: dict[InputKind, list[Future[dict[str, Any]]]] = {}
        self._settings: dict[InputKind, Future[dict[str, Any]]] = {}

    def start(self) -> None:
        """Begin to read the inputs: small ones first."""
        for kind, each in self._inputs.items():
            self._settings[kind] = self._threads.submit(_settings, each)
        for kind, each in self._inputs.items():
            self._files[kind] = [self._threads.submit(_file_record, file, self._closing) for file in each.files]

    async def record(self) -> dict[str, Any]:
        """Return the record of all inputs, as JSON values. Raises DataError for a file that could not be read."""
        kinds = {kind: await self._kind_record(kind) for kind in self._inputs}
        return {"format": FORMAT, "block_bytes": BLOCK_BYTES, "inputs": kinds}

    async def changes(self, saved: Mapping[str, Any], kinds: Iterable[InputKind]) -> list[Change]:
        """Return what differs between a saved record and this run, for some kinds of inputs."""
        changes: list[Change] = []
        for kind in kinds:
            run_input, before = self._inputs.get(kind), saved["inputs"].get(kind)
            if run_input is None or before is None:
                continue
            if run_input.follows_path and before["source"] != run_input.source:
                continue
            now = await self._kind_record(kind)
            texts = await asyncio.to_thread(list, _differences(run_input, before, now))
            changes += [Change(kind, text) for text in texts]
        return changes

    def check_accepted(self, folder: Path, changes: Sequence[Change]) -> None:
        """Raise CheckpointError that names the changes since the checkpoint in `folder`, unless all are accepted."""
        if refused := sorted({change.kind for change in changes} - self.accepted):
            raise CheckpointError(
                f"{folder} was saved with other inputs than this run has: {'; '.join(map(str, changes))}; restore "
                "them, start a new run from its weights with --finetune, or accept the change with "
                f"--allow-changed-inputs {' '.join(refused)}, which records it in the run's folder"
            )

    def close(self) -> None:
        """Stop reading."""
        self._closing.set()
        self._threads.shutdown(cancel_futures=True)

    async def _kind_record(self, kind: InputKind) -> dict[str, Any]:
        settings = await asyncio.wrap_future(self._settings[kind])
        files = [await asyncio.wrap_future(each) for each in self._files[kind]]
        return {"source": self._inputs[kind].source, "settings": settings, "files": files}


def read_inputs(folder: Path) -> dict[str, Any] | None:
    """Return the record of inputs in a checkpoint; None if an older version saved it. Raises CheckpointError."""
    path = folder / INPUTS
    if not path.exists():
        return None
    try:
        record = parse_json(read_verified(folder, INPUTS))
        if record["format"] != FORMAT or record["block_bytes"] != BLOCK_BYTES or not isinstance(record["inputs"], dict):
            raise CheckpointError(f"{path} has format {record['format']!r}; use the furlong version that wrote it")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{path} is corrupt ({type(error).__name__}: {error}); use another --ckpt-step"
        ) from error
    return record


def flat_settings(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested objects, sorted by key.

    >>> dict(flat_settings({"b": {"c": [1]}, "a": 2}))
    {'a': 2, 'b.c': [1]}
    """
    for key, value in sorted(values.items()):
        if isinstance(value, Mapping) and value:
            yield from flat_settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _settings(run_input: RunInput) -> dict[str, Any]:
    return {} if run_input.settings is None else dict(run_input.settings())


def _file_record(file: InputFile, closing: threading.Event) -> dict[str, Any]:
    """Return name, size and checksums of the blocks of a file. Raises DataError if it cannot be read or changes."""
    blocks: list[str] = []
    num_bytes, buffer = 0, memoryview(bytearray(BLOCK_BYTES))
    try:
        before = os.stat(file.path)
        with file.path.open("rb", buffering=0) as opened:
            while (size := _fill(opened, buffer)) and not closing.is_set():
                blocks.append(xxhash.xxh3_128_hexdigest(buffer[:size]))
                num_bytes += size
        after = os.stat(file.path)
    except OSError as error:
        raise DataError(f"{file.path} cannot be read: {error.strerror or error}; restore it") from error
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise DataError(f"{file.path} was modified while the run read it; restore the file and start again")
    return {"name": file.name, "bytes": num_bytes, "blocks": blocks}


def _fill(opened: Any, buffer: memoryview) -> int:
    """Read until the buffer is full or the file ends; return the number of bytes."""
    filled = 0
    while filled < len(buffer) and (size := opened.readinto(buffer[filled:])):
        filled += size
    return filled


def _differences(run_input: RunInput, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence per changed file, and one for all changed settings."""
    keys = sorted(before["settings"].keys() | now["settings"].keys())
    changed = [key for key in keys if before["settings"].get(key) != now["settings"].get(key)]
    if changed:
        shown = [_setting(key, before["settings"].get(key), now["settings"].get(key)) for key in changed]
        yield f"{run_input.source}: {abbreviate(shown, SHOWN, separator='; ')}"
    names = [[file["name"] for file in record["files"]] for record in (before, now)]
    if names[0] != names[1]:
        yield f"{run_input.source}: the files were {abbreviate(names[0])}, are {abbreviate(names[1])}"
        return
    for file, old, new in zip(run_input.files, before["files"], now["files"], strict=True):
        if (text := _changed_blocks(file, old, new)) is not None:
            yield text


def _setting(key: str, before: Any, now: Any) -> str:
    """Describe a changed value; of text with several lines, the first line that differs."""
    if isinstance(before, str) and isinstance(now, str) and "\n" in before + now:
        pairs = zip_longest(before.splitlines(), now.splitlines())
        number, (old, new) = next(((n, pair) for n, pair in enumerate(pairs, 1) if pair[0] != pair[1]), (0, ("", "")))
        return f"{key}, line {number}, was {shortened(old)}, is {shortened(new)}"
    return f"{key} was {shortened(before)}, is {shortened(now)}"


def _changed_blocks(file: InputFile, before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Describe which blocks of a file differ; None if none does."""
    pairs = zip_longest(before["blocks"], now["blocks"])
    changed = [index for index, (old, new) in enumerate(pairs) if old != new]
    if not changed:
        return None
    size = "" if before["bytes"] == now["bytes"] else f"its size was {before['bytes']} bytes, is {now['bytes']}; "
    first, last = changed[0] * BLOCK_BYTES, min((changed[0] + 1) * BLOCK_BYTES, max(now["bytes"], before["bytes"])) - 1
    place = f"bytes {first} to {last}"
    if file.place is not None and first < now["bytes"] and (inside := file.place(file.path, first, last)):
        place += f", {inside}"
    num_blocks = max(len(before["blocks"]), len(now["blocks"]))
    return (
        f"{file.path}: {size}{len(changed)} of {num_blocks} blocks of {BLOCK_BYTES >> 20} MiB differ, the first is "
        f"block {changed[0]} ({place})"
    )
