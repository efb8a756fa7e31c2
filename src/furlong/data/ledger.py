"""The ledger: an append-only file of when each prompt group was issued, generated, trained or dropped.

One JSON object per line, `{"e": event, ...}` with short keys:

    {"e":"start","id":"5f0c..."}                        a ledger starts; earlier lines, if any, are rolled back; with
                                                        "partial":true earlier groups are missing; with "waits":true
                                                        user code selects from the groups in the data source
    {"e":"issued","g":12,"ep":0,"row":5,"r":3}          group g, from row of epoch ep, was issued to rollout r
                                                        ep is -1 if the source has no epochs, and -2 if a rollout
                                                        function made the group
    {"e":"held","g":12,"r":3}                           the rollout function kept it for a call after that of rollout r
    {"e":"generated","g":12,"r":3}                      all its samples are generated and scored
    {"e":"returned","g":12,"why":"partial"}             returned to the data source, unfinished
    {"e":"dropped","g":12,"why":"zero_std"}             will not be trained on
    {"e":"trained","g":12,"s":3}                        was part of the optimizer steps of rollout s
    {"e":"restored","g":12,"r":3}                       was loaded from a checkpoint, generated for rollout r
    {"e":"ended","saved":true}                          the run ended with groups in flight: those of later
                                                        rollouts, and held ones, are in the checkpoint, or dropped
    {"e":"data_changed"}                                the run resumed with other rows, so that epochs differ in size
    {"e":"resume","events":40,"bytes":2100}             the run resumed from a checkpoint: the lines after the 40th, up
                                                        to this one, are rolled back

The file is never truncated. `furlong.data.audit` reads it.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import Any

import orjson
import xxhash

from furlong.core.sample import Group
from furlong.errors import CheckpointError, DataError

log = logging.getLogger(__name__)

FLUSH_EVENTS = 8192
COUNT_BYTES = 1 << 20


class FileLedger:
    """Writes the ledger of one run. Events are buffered until `trained`, `mark` or `close`; for one thread.

    The file is first written at the first event, or by `begin`, so a run that fails before leaves it unchanged. Opening
    an existing file rolls back all its lines. To resume from a checkpoint use `resume` with its mark.
    `is_partial`: the run resumes from a checkpoint without its ledger. `may_wait`: user code decides when returned
    groups are issued again. The state of the data source in a checkpoint must be taken without any event between it and
    the mark.

    >>> ledger = FileLedger(run_folder / "ledger.jsonl")              # doctest: +SKIP
    >>> ledger.issued(source.next_groups(32), rollout_id=0)           # doctest: +SKIP
    """

    def __init__(self, path: Path | str, *, is_partial: bool = False, may_wait: bool = False) -> None:
        self._id = uuid.uuid4().hex
        partial = ',"partial":true' if is_partial else ""
        self._prepare(Path(path), f'{{"e":"start","id":"{self._id}"{partial}{_waits(may_wait)}}}\n')
        self._rolls_all_back = True

    @classmethod
    def resume(cls, path: Path | str, mark: dict[str, Any], *, may_wait: bool = False) -> FileLedger:
        """Resume from a checkpoint's `mark`, rolling back later events.

        Raises CheckpointError if the file is missing, shorter than the mark, or of another run.
        """
        path = Path(path)
        check_mark(path, mark)
        ledger = cls.__new__(cls)
        ledger._id = mark["id"]
        ledger._prepare(path, f'{{"e":"resume","events":{mark["events"]},"bytes":{mark["bytes"]}{_waits(may_wait)}}}\n')
        return ledger

    def _prepare(self, path: Path, opening: str) -> None:
        self.path = path
        self._lines: list[str] = []
        self._num_events, self._num_bytes, self._digest, self._is_torn = _count(path)
        self._opening = opening
        self._rolls_all_back = False
        self._file: FileIO | None = None

    def begin(self) -> None:
        """Write the line with which this start, or resume, begins. Later calls have no effect."""
        if self._file is not None:
            return
        if self._num_events and self._rolls_all_back:
            log.info(
                "%s: not resuming from a checkpoint; %d earlier events are rolled back", self.path, self._num_events
            )
        if self._is_torn:
            log.warning("%s: the last line is incomplete after a crash; it is kept and ignored", self.path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise self._unwritable(error) from error
        self._add(f"\n{self._opening}" if self._is_torn else self._opening)
        self._flush()

    def issued(self, groups: Iterable[Group], rollout_id: int) -> None:
        """Record that groups were issued to rollout `rollout_id`."""
        for g in groups:
            self._add(f'{{"e":"issued","g":{g.index},"ep":{g.epoch},"row":{g.row},"r":{rollout_id}}}\n')

    def held(self, group: Group, rollout_id: int) -> None:
        """Record that the rollout function kept the group for a call after that of rollout `rollout_id`."""
        self._add(f'{{"e":"held","g":{group.index},"r":{rollout_id}}}\n')

    def generated(self, group: Group, rollout_id: int) -> None:
        """Record that all samples of the group are generated and scored."""
        self._add(f'{{"e":"generated","g":{group.index},"r":{rollout_id}}}\n')

    def dropped(self, group: Group, reason: str) -> None:
        """Record that the group will not be trained on."""
        self._add(f'{{"e":"dropped","g":{group.index},"why":{json.dumps(reason)}}}\n')

    def returned(self, group: Group, reason: str) -> None:
        """Record that the group was returned to the data source, unfinished."""
        self._add(f'{{"e":"returned","g":{group.index},"why":{json.dumps(reason)}}}\n')

    def trained(self, group_ids: Iterable[int], step: int) -> None:
        """Record that the groups were in the optimizer steps of rollout `step`, and flush. Ids may repeat."""
        for g in dict.fromkeys(group_ids):
            self._add(f'{{"e":"trained","g":{g},"s":{step}}}\n')
        self._flush()

    def restored(self, group_ids: Iterable[int], rollout_id: int) -> None:
        """Record groups loaded from a checkpoint, generated for rollout `rollout_id`. Ids may repeat."""
        for g in dict.fromkeys(group_ids):
            self._add(f'{{"e":"restored","g":{g},"r":{rollout_id}}}\n')

    def ended(self, *, is_saved: bool) -> None:
        """Record that the run ends with groups of later rollouts, or held ones: they are saved, or else dropped."""
        self._add(f'{{"e":"ended","saved":{json.dumps(is_saved)}}}\n')

    def data_changed(self) -> None:
        """Record that the run resumed with other data, whose rows have other numbers."""
        self._add('{"e":"data_changed"}\n')

    def mark(self) -> dict[str, Any]:
        """Sync all events to disk and return the position, for a checkpoint."""
        self.begin()
        self._flush()
        os.fsync(self._open_file.fileno())
        digest = self._digest.hexdigest()
        return {"events": self._num_events, "bytes": self._num_bytes, "id": self._id, "xxh3_128": digest}

    def close(self) -> None:
        """Flush and close the file."""
        if self._file is not None and not self._file.closed:
            try:
                self._flush()
            finally:
                self._file.close()

    @property
    def _open_file(self) -> FileIO:
        assert self._file is not None  # `begin` opens it
        return self._file

    def _add(self, line: str) -> None:
        self.begin()
        self._lines.append(line)
        self._num_events += 1
        self._num_bytes += len(line)  # lines are ASCII
        if len(self._lines) >= FLUSH_EVENTS:
            self._flush()

    def _flush(self) -> None:
        if os.fstat(self._open_file.fileno()).st_nlink == 0:
            raise DataError(
                f"{self.path} was deleted while the run writes to it, so its records would be lost; keep the run "
                "directory until the run ends. The same command with --load resumes from the last checkpoint"
            )
        data = memoryview("".join(self._lines).encode("ascii"))
        self._lines.clear()
        self._digest.update(data)
        while data:
            try:
                data = data[self._open_file.write(data) :]
            except OSError as error:
                raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> DataError:
        return DataError(
            f"cannot write {self.path}: {error.strerror}; the run cannot continue without its ledger. "
            "Free disk space; the same command with --load resumes from the last checkpoint"
        )


def _waits(may_wait: bool) -> str:
    return ',"waits":true' if may_wait else ""


def parse_event(line: bytes) -> dict[str, Any] | None:
    """Return the event on a line; None for an incomplete or damaged line, which callers count."""
    try:
        event = orjson.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "e" in event else None


def _count(path: Path) -> tuple[int, int, xxhash.xxh3_128, bool]:
    """Return lines, bytes and checksum of the file, and whether the last line, which counts, is incomplete."""
    digest = xxhash.xxh3_128()
    if not path.exists():
        return 0, 0, digest, False
    lines = size = 0
    last = b"\n"
    with path.open("rb") as file:
        while chunk := file.read(COUNT_BYTES):
            lines += chunk.count(b"\n")
            size += len(chunk)
            digest.update(chunk)
            last = chunk[-1:]
    torn = last != b"\n"
    return lines + torn, size, digest, torn


def check_mark(path: Path, mark: dict[str, Any]) -> None:
    """Raise CheckpointError if the file is not the ledger that a checkpoint with this mark continues."""
    if not path.is_file():
        raise CheckpointError(
            f"the checkpoint continues the ledger {path}, which is missing; copy the run's ledger.jsonl there, "
            "resume in the original run folder, or start a partial ledger"
        )
    ledger_id, lines, rest = None, 0, int(mark["bytes"])
    last, digest = b"\n", xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while rest and (line := file.readline(rest)):
                rest -= len(line)
                lines += 1
                last = line[-1:]
                digest.update(line)
                if line.startswith(b'{"e":"start"') and (event := parse_event(line)) is not None:
                    ledger_id = event.get("id")
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint continues the ledger {path}, which cannot be read: {error.strerror or error}; fix its "
            "permissions, or restore it from an intact copy"
        ) from error
    if rest or last != b"\n" or lines != mark["events"] or ledger_id != mark["id"]:
        raise CheckpointError(
            f"{path} is not the ledger that the checkpoint continues: the mark is {mark}, the file has {lines} events "
            f"in {mark['bytes'] - rest} bytes of ledger {ledger_id}; use the ledger.jsonl of the checkpoint"
        )
    if mark["xxh3_128"] != digest.hexdigest():
        raise CheckpointError(
            f"{path}: the first {mark['bytes']} bytes were changed after the checkpoint was saved (checksum "
            f"{digest.hexdigest()}, expected {mark['xxh3_128']}); use the ledger.jsonl of the checkpoint, or resume "
            "in a new folder, which begins a partial ledger"
        )
