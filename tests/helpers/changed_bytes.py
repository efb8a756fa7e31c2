"""A finished run whose files tests damage, and the ways in which they do."""

from __future__ import annotations

import asyncio
import hashlib
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from furlong.config.command_line import load
from furlong.files.sample_file import load_samples
from furlong.tools.run_bundle import read_bundle, unpack, write_bundle
from furlong.wiring.build import Built, build
from runs import flags, train, write_model, write_prompts


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

    def readers(self) -> dict[Path, Callable[[], str]]:
        """Return each file with the function that reads it, as a resumed run, and returns a digest of what it read."""
        readers: dict[Path, Callable[[], str]] = {
            path: self.restore for path in sorted(self.checkpoint.rglob("*")) if path.is_file()
        }
        readers[self.folder / "model" / "model.safetensors"] = self.resume
        readers[self.folder / "prompts.jsonl"] = self.resume
        readers[self.folder / "run" / "ledger.jsonl"] = self.resume
        dump = self.folder / "dumps" / "1.safetensors"
        readers[dump] = lambda: repr(load_samples(dump, 1))
        readers[self.folder / "bundle.zip"] = self.unpack
        return readers

    def unpack(self) -> str:
        """Read the bundle as `furlong replay` does."""
        path = self.folder / "bundle.zip"
        with tempfile.TemporaryDirectory() as folder:
            words = unpack(path, read_bundle(path), Path(folder))
            written = [each.read_bytes() for each in sorted(Path(folder).rglob("*")) if each.is_file()]
            return repr([word.replace(folder, "") for word in words]) + repr(written)

    def resume(self) -> str:
        """Build and restore everything as a resumed run does; return a digest of the restored state."""
        ledger = self.folder / "run" / "ledger.jsonl"
        content = ledger.read_bytes() if ledger.is_file() else None
        try:
            return asyncio.run(self._resume())
        finally:
            if content is not None:
                ledger.write_bytes(content)

    async def _resume(self) -> str:
        built = build(self._resumed, self.folder / "run")
        try:
            return await _restored_state(built)
        finally:
            await built.close()
            built.close_files()

    def restore(self) -> str:
        """Restore a checkpoint in parts that are built once: ten times as fast as `resume`."""
        if self._kept is None:
            runner = asyncio.Runner()
            self._kept = runner, runner.run(_built(self._resumed, self.folder / "run"))
        runner, built = self._kept
        return runner.run(_restored_state(built))

    def close(self) -> None:
        """Close what `restore` has built."""
        if self._kept is not None:
            runner, built = self._kept
            self._kept = None
            runner.run(built.close())
            built.close_files()
            runner.close()


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


def _flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    at = draw.randrange(len(content))
    if path.name == "ledger.jsonl":  # a resumed run reads its beginning, up to the checkpoint
        at //= 3
    content[at] ^= draw.randrange(1, 256)
    path.write_bytes(content)


def _noise(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    start = draw.randrange(max(1, len(content) - 4096))
    content[start : start + 4096] = draw.randbytes(len(content[start : start + 4096]))
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path, random.Random], object]] = {
    "a byte": _flip,
    "noise": _noise,
    "cut": lambda path, draw: path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)]),
    "foreign": lambda path, _: path.write_text(f"another {path.suffix} file\n"),
    "deleted": lambda path, _: path.unlink(),
}
