"""The inputs of a run: its data, tokenizer, chat template, model configuration and weights, each by one hash.

A checkpoint contains the hashes of all inputs. A run that resumes from it compares them with its own, so that a change
underneath is refused.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from furlong.errors import CheckpointError, DataError
from furlong.files.checkpoint_folder import read_object
from furlong.files.manifest import file_checksum

InputKind = Literal["data", "tokenizer", "chat-template", "config", "weights", "reference", "teacher"]

INPUTS = "inputs.json"  # in a checkpoint folder
MAX_THREADS = 4


@dataclass(frozen=True)
class RunInput:
    """Files, in order, and settings of one kind. `settings` is called in a thread and returns a JSON value.

    source: the flag and path, for messages. follows_path: whether the input is compared only if its source is the same
    as in the checkpoint, because another path is a changed flag, which the run logs.
    """

    kind: InputKind
    source: str
    files: Sequence[Path] = ()
    settings: Callable[[], Any] | None = None
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
    """Hashes a run's inputs in threads, from `start` on, and compares them with those of a checkpoint."""

    def __init__(self, inputs: Sequence[RunInput], *, accepted: Collection[str] = ()) -> None:
        """`accepted`: kinds of inputs that may differ from those of the checkpoint."""
        self.accepted = frozenset(accepted)
        self._closing = threading.Event()
        self._inputs: dict[InputKind, RunInput] = {each.kind: each for each in inputs}
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="inputs")
        self._parts: dict[InputKind, list[Future[str]]] = {}

    def start(self) -> None:
        """Begin to read the inputs: settings first, which are small."""
        for kind, each in self._inputs.items():
            self._parts[kind] = [] if each.settings is None else [self._threads.submit(_json_hash, each.settings)]
        for kind, each in self._inputs.items():
            self._parts[kind] += [self._threads.submit(self._file_hash, file) for file in each.files]

    async def record(self) -> dict[str, Any]:
        """Return source and hash of all inputs, by kind. Raises DataError for a file that could not be read."""
        return {
            kind: {"source": each.source, "hash": await self._hash(kind)}  #
            for kind, each in self._inputs.items()
        }

    async def changes(self, saved: Mapping[str, Any], kinds: Iterable[InputKind]) -> list[Change]:
        """Return what differs between a saved record and this run, for some kinds of inputs."""
        changes: list[Change] = []
        for kind in kinds:
            run_input, before = self._inputs.get(kind), saved.get(kind)
            if run_input is None or before is None:
                continue
            if run_input.follows_path and before["source"] != run_input.source:
                continue
            if before["hash"] != await self._hash(kind):
                was = "" if before["source"] == run_input.source else f" (was {before['source']})"
                changes.append(Change(kind, f"the content of {run_input.source}{was} differs"))
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

    def _file_hash(self, path: Path) -> str:
        try:
            return file_checksum(path, self._closing)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}; restore it") from error

    async def _hash(self, kind: InputKind) -> str:
        parts = [await asyncio.wrap_future(part) for part in self._parts[kind]]
        return parts[0] if len(parts) == 1 else xxhash.xxh3_128_hexdigest(" ".join(parts).encode())


def read_inputs(folder: Path) -> dict[str, Any] | None:
    """Return the record of inputs in a checkpoint; None without one. Raises CheckpointError if it is damaged."""
    if not (folder / INPUTS).exists():
        return None
    record = read_object(folder, INPUTS)
    if not all(isinstance(each, dict) and {"source", "hash"} <= each.keys() for each in record.values()):
        raise CheckpointError(f"{folder / INPUTS} is damaged: an input has no source or hash; use another --ckpt-step")
    return record


def _json_hash(settings: Callable[[], Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(settings(), sort_keys=True).encode())
