"""What happens when a file of a checkpoint or run folder, or one that a run stands on, is damaged.

`python tests/helpers/changed_bytes.py 2600` prints the table in docs/internals/evidence.md: one changed byte at a time.
`python tests/helpers/changed_bytes.py 364 damage` does the same with the other forms of `DAMAGE`. Further words are the
seed, the files (`checkpoint` or `other`; default all) and the trainer backend.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import io
import logging
import os
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from furlong.cli import main
from furlong.config.command_line import load
from furlong.errors import CheckpointError, FurlongError
from furlong.files.model_manifest import MODEL_MANIFEST, SUFFIXES
from furlong.tools.run_bundle import read_bundle, unpack, write_bundle
from furlong.tools.weight_values import check_weights
from furlong.tracking.rollout_dump import load_samples
from furlong.wiring.build import Built, build
from privileges import modes_apply
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
    """A finished run with a checkpoint that contains a rollout ahead, dumps of its rollouts, and an exported model."""

    def __init__(self, folder: Path, *, backend: str = "fsdp") -> None:
        self.folder = folder
        self._kept: tuple[asyncio.Runner, Built] | None = None
        model, data = write_model(folder / "model"), write_prompts(folder / "prompts.jsonl")
        dump = folder / "dumps" / "{rollout_id}.safetensors"
        self._argv = flags(
            model, data, folder / "run", num_rollout=4, save=folder / "save", save_interval=2, async_buffer_size=1,
            save_hf=folder / "hf_{rollout_id}", train_backend=backend,
        )  # fmt: skip
        train([*self._argv, "--save-debug-rollout-data", str(dump)])
        write_bundle(folder / "run", 2, folder / "bundle.zip")
        shutil.rmtree(folder / "save" / "iter_0000004")
        (folder / "save" / "latest_checkpointed_iteration.txt").write_text("2\n")
        self.checkpoint = folder / "save" / "iter_0000002"
        self.exported = folder / "hf_2"
        self._resumed = load([*self._argv, "--load", str(folder / "save")])

    def files(self) -> dict[Path, Callable[[], str]]:
        """Return each file with the function that reads it and returns a digest of what it read."""
        run = self.folder / "run"
        readers: dict[Path, Callable[[], str]] = {
            path: self.restore_again for path in self.checkpoint.rglob("*") if path.is_file()
        }
        readers[self.checkpoint.parent / "latest_checkpointed_iteration.txt"] = self.resume
        readers[run / "ledger.jsonl"] = self.resume
        readers |= dict.fromkeys(sorted((self.folder / "model").iterdir()), self.resume)
        readers[self.folder / "prompts.jsonl"] = self.resume
        for path in sorted((self.folder / "dumps").iterdir()):
            readers[path] = lambda path=path: repr(load_samples(path, int(path.stem)))
        readers |= dict.fromkeys(sorted(self.exported.iterdir()), self.check)
        readers[self.folder / "bundle.zip"] = self.unpack
        for name in ("config.json", "metrics.jsonl", "events.jsonl", "run.log"):
            readers[run / name] = self.report
        return readers

    def part_of(self, path: Path) -> str:
        """Return "checkpoint" for what a run saves and reads back, with the ledger and dumps, else "other"."""
        places = (self.checkpoint, self.folder / "dumps")
        is_saved = path.name == "ledger.jsonl" or any(place in path.parents for place in places)
        return "checkpoint" if is_saved else "other"

    def unpack(self) -> str:
        """Read the bundle as `furlong replay` does."""
        path = self.folder / "bundle.zip"
        with tempfile.TemporaryDirectory() as folder:
            words = unpack(path, read_bundle(path), Path(folder))
            written = [each.read_bytes() for each in sorted(Path(folder).rglob("*")) if each.is_file()]
            return repr([word.replace(folder, "") for word in words]) + repr(written)

    def check(self) -> str:
        """Read the exported model as `furlong check` does."""
        errors = [each.text() for each in check_weights(self.exported) if each.severity == "error"]
        if errors:
            raise CheckpointError("\n".join(errors))
        read = {path for path in self.exported.iterdir() if path.suffix in SUFFIXES}
        loaded = sorted(read - {self.exported / MODEL_MANIFEST})
        return repr([path.read_bytes() if path.is_file() else "no file" for path in loaded])

    def resume(self) -> str:
        """Restore everything as a resumed run does; return a digest of the restored state."""
        ledger = self.folder / "run" / "ledger.jsonl"
        content = None
        with contextlib.suppress(OSError):
            content = ledger.read_bytes() if ledger.is_file() else None
        try:
            return asyncio.run(self._restored())
        finally:
            if content is not None:
                ledger.write_bytes(content)

    async def _restored(self) -> str:
        built = build(self._resumed, self.folder / "run")
        try:
            return await _restored_state(built)
        finally:
            await built.close()
            built.close_files()

    def restore_again(self) -> str:
        """Do what `resume` does with a checkpoint, in parts that are built once: ten times as fast."""
        if self._kept is None:
            runner = asyncio.Runner()
            self._kept = runner, runner.run(_built(self._resumed, self.folder / "run"))
        runner, built = self._kept
        return runner.run(_restored_state(built))

    def close(self) -> None:
        """Close what `restore_again` has built."""
        if self._kept is not None:
            runner, built = self._kept
            self._kept = None
            runner.run(built.close())
            built.close_files()
            runner.close()

    def report(self) -> str:
        """Run the commands that read a run folder; what they print may change with the file."""
        for words in (["report", str(self.folder / "run")], ["doctor", "--run", str(self.folder / "run")]):
            text = io.StringIO()
            with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
                main(words)
            if "Traceback" in text.getvalue():
                raise AssertionError(text.getvalue())
        return ""


async def _built(config: Any, folder: Path) -> Built:
    return build(config, folder)


async def _restored_state(built: Built) -> str:
    """Restore the checkpoint; return a digest of everything that was restored."""
    step, ahead = await built.checkpoints.restore(built.parts)
    with tempfile.TemporaryDirectory() as folder:
        await built.parts.trainer.save(Path(folder))
        saved = [path.read_bytes() for path in sorted(Path(folder).iterdir())]
    state: list[Any] = [step, ahead, built.parts.source.state(), *saved]
    return hashlib.sha256(repr(state).encode()).hexdigest()


Damage = Callable[[Path, list[Path], random.Random], None]


def _change_byte(path: Path, _: list[Path], draw: random.Random) -> None:
    changed = bytearray(path.read_bytes())
    if changed:
        changed[draw.randrange(len(changed))] ^= draw.randrange(1, 256)
    path.write_bytes(changed)


def _exchange_bytes(path: Path, _: list[Path], draw: random.Random) -> None:
    changed = bytearray(path.read_bytes())
    if len(changed) > 1:
        one, other = draw.sample(range(len(changed)), 2)
        changed[one], changed[other] = changed[other], changed[one]
    path.write_bytes(changed)


def _exchange_with_file(path: Path, others: list[Path], draw: random.Random) -> None:
    one, other = bytearray(path.read_bytes()), draw.choice([each for each in others if each != path])
    content = other.read_bytes()
    if one and content:
        place = draw.randrange(min(len(one), len(content)))
        one[place] = content[place]
    path.write_bytes(one)


def _noise(path: Path, _: list[Path], draw: random.Random) -> None:
    changed = bytearray(path.read_bytes())
    start = draw.randrange(max(1, len(changed) - 4096))
    end = min(len(changed), start + 4096)
    changed[start:end] = draw.randbytes(end - start)
    path.write_bytes(changed)


def _cut(path: Path, _: list[Path], draw: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(max(1, len(content)))])


def _replace_by_folder(path: Path, _: list[Path], __: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _replace_by_pipe(path: Path, _: list[Path], __: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _replace_by_link(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


# Each damages the file; the second argument is the list of all files.
DAMAGE: dict[str, Damage] = {
    "two bytes exchanged": _exchange_bytes,
    "a byte of another file": _exchange_with_file,
    "4 KiB of noise": _noise,
    "cut": _cut,
    "extended": lambda path, _, draw: path.write_bytes(path.read_bytes() + draw.randbytes(9)) and None,
    "empty": lambda path, _, __: path.write_bytes(b"") and None,
    "zeros": lambda path, _, __: path.write_bytes(bytes(len(path.read_bytes()))) and None,
    "another file": lambda path, others, draw: path.write_bytes(draw.choice(others).read_bytes()) and None,
    "deleted": lambda path, _, __: path.unlink(),
    "a folder": _replace_by_folder,
    "a named pipe": _replace_by_pipe,
    "a link to itself": lambda path, _, __: _replace_by_link(path, path.name),
    "not readable": lambda path, _, __: path.chmod(0),
    "a disk error": lambda path, _, __: _replace_by_link(path, "/proc/self/mem"),  # EIO at the first byte
}


def outcomes(
    saved: SavedRun,
    changes: int,
    seed: int = 0,
    kinds: Mapping[str, Damage] = MappingProxyType({"": _change_byte}),
    files: str = "all",
) -> Iterator[tuple[Path, str, str]]:
    """Damage one file at a time, spread evenly over kinds and then over files; yield file, outcome and details.

    files: "checkpoint" (with the ledger and dumps), "other" or "all". Closes `saved`.
    """
    try:
        yield from _outcomes(saved, changes, seed, kinds, files)
    finally:
        saved.close()


def _outcomes(
    saved: SavedRun, changes: int, seed: int, kinds: Mapping[str, Damage], files: str
) -> Iterator[tuple[Path, str, str]]:
    draw = random.Random(seed)
    readers = {path: read for path, read in saved.files().items() if files in ("all", saved.part_of(path))}
    expected = {read: read() for read in set(readers.values())}
    order = {kind: draw.sample(list(readers), len(readers)) for kind in kinds}
    cases = [(order[kind][place], kind) for place in range(len(readers)) for kind in kinds]
    for number in range(changes):
        path, kind = cases[number % len(cases)]
        content, mode = path.read_bytes(), path.stat().st_mode
        kinds[kind](path, list(readers), draw)
        try:
            with modes_apply():
                outcome, details = _outcome(readers[path], expected[readers[path]], path.name)
        finally:
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            path.unlink(missing_ok=True)
            path.write_bytes(content)
            path.chmod(mode)
        yield path, outcome, f"{kind} {details}".strip()
    assert {read: read() for read in expected} == expected, "restoring again gives another state"


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
    number, form, seed, files, backend = [*sys.argv[1:], *("2600", "byte", "0", "all", "fsdp")[len(sys.argv) - 1 :]]
    chosen = DAMAGE if form == "damage" else {"": _change_byte}
    with tempfile.TemporaryDirectory() as temporary:
        run = SavedRun(Path(temporary), backend=backend)
        measured = list(outcomes(run, int(number), int(seed), kinds=chosen, files=files))
    print("\n".join(table(measured)))  # noqa: T201
    for path, outcome, details in measured:
        if outcome in (SILENT, NO_NAME, TRACEBACK):
            print(path.name, outcome, details)  # noqa: T201
