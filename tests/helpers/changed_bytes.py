"""What happens when one byte of a file of a checkpoint or run folder changes.

`python tests/helpers/changed_bytes.py 2500` prints the table in docs/internals/evidence.md.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import io
import logging
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from furlong.cli import main
from furlong.config.command_line import load
from furlong.errors import FurlongError
from furlong.tracking.rollout_dump import load_samples
from furlong.wiring.build import build
from runs import flags, train, write_model, write_prompts

REFUSED, HARMLESS, SILENT, NO_NAME, TRACEBACK = (
    "refused with the file's name",
    "no effect",
    "other state, accepted",
    "refused without the name",
    "traceback",
)
COLUMNS = (REFUSED, HARMLESS, SILENT, NO_NAME, TRACEBACK)


class SavedRun:
    """A finished run with two checkpoints, of which the last contains a rollout ahead, and dumps of its rollouts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model, data = write_model(folder / "model"), write_prompts(folder / "prompts.jsonl")
        dump = folder / "dumps" / "{rollout_id}.safetensors"
        self._argv = flags(
            model, data, folder / "run", num_rollout=4, save=folder / "save", save_interval=2, async_buffer_size=1
        )
        train([*self._argv, "--save-debug-rollout-data", str(dump)])
        shutil.rmtree(folder / "save" / "iter_0000004")
        (folder / "save" / "latest_checkpointed_iteration.txt").write_text("2\n")
        self.checkpoint = folder / "save" / "iter_0000002"
        self._resumed = load([*self._argv, "--load", str(folder / "save")])

    def files(self) -> dict[Path, Callable[[], str]]:
        """Return each file with the function that reads it and returns a digest of what it read."""
        run = self.folder / "run"
        readers: dict[Path, Callable[[], str]] = {
            path: self.resume for path in self.checkpoint.rglob("*") if path.is_file()
        }
        readers[run / "ledger.jsonl"] = self.resume
        for path in sorted((self.folder / "dumps").iterdir()):
            readers[path] = lambda path=path: repr(load_samples(path))
        for name in ("config.json", "metrics.jsonl", "events.jsonl"):
            readers[run / name] = self.report
        return readers

    def resume(self) -> str:
        """Restore everything as a resumed run does; return a digest of the restored state."""
        ledger = self.folder / "run" / "ledger.jsonl"
        content = ledger.read_bytes()
        try:
            return asyncio.run(self._restored())
        finally:
            ledger.write_bytes(content)

    async def _restored(self) -> str:
        built = build(self._resumed, self.folder / "run")
        try:
            step, ahead = await built.checkpoints.restore(built.parts)
            with tempfile.TemporaryDirectory() as folder:
                await built.parts.trainer.save(Path(folder))
                saved = [path.read_bytes() for path in sorted(Path(folder).iterdir())]
            state: list[Any] = [step, ahead, built.parts.source.state(), *saved]
            return hashlib.sha256(repr(state).encode()).hexdigest()
        finally:
            await built.close()
            built.close_files()

    def report(self) -> str:
        """Run the commands that read a run folder; what they print may change with the file."""
        for words in (["report", str(self.folder / "run")], ["doctor", "--run", str(self.folder / "run")]):
            text = io.StringIO()
            with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
                main(words)
            if "Traceback" in text.getvalue():
                raise AssertionError(text.getvalue())
        return ""


def outcomes(saved: SavedRun, changes: int, seed: int = 0) -> Iterator[tuple[Path, str, str]]:
    """Change one byte at a time, spread evenly over all files; yield file, outcome and details."""
    draw = random.Random(seed)
    readers = saved.files()
    expected = {read: read() for read in set(readers.values())}
    for number in range(changes):
        path, read = list(readers.items())[number % len(readers)]
        content = path.read_bytes()
        changed = bytearray(content)
        changed[draw.randrange(len(content))] ^= draw.randrange(1, 256)
        path.write_bytes(changed)
        try:
            yield path, *_outcome(read, expected[read], path.name)
        finally:
            path.write_bytes(content)


def _outcome(read: Callable[[], str], expected: str, name: str) -> tuple[str, str]:
    try:
        return (HARMLESS, "") if read() == expected else (SILENT, "")
    except FurlongError as error:
        return (REFUSED if name in str(error) else NO_NAME), str(error)
    except Exception:  # noqa: BLE001  a traceback is one of the outcomes
        return TRACEBACK, traceback.format_exc()


def table(results: list[tuple[Path, str, str]]) -> list[str]:
    """Return the rows of a Markdown table: outcomes by file."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for path, outcome, _ in results:
        counts[path.name][outcome] += 1
        counts["all"][outcome] += 1
    lines = [f"| file | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    return lines + [f"| {name} | {' | '.join(str(c[column]) for column in COLUMNS)} |" for name, c in counts.items()]


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as temporary:
        measured = list(outcomes(SavedRun(Path(temporary)), int(sys.argv[1])))
    print("\n".join(table(measured)))  # noqa: T201
    for path, outcome, details in measured:
        if outcome in (SILENT, NO_NAME, TRACEBACK):
            print(path.name, outcome, details)  # noqa: T201
