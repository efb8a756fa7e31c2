"""Checkpoints: slime's folder names, written so that a kill at any moment leaves the last good one.

    SAVE/latest_checkpointed_iteration.txt     the number of rollouts trained, e.g. 10
    SAVE/iter_0000010/manifest.json            written last: every file with its size; a folder without is none
    SAVE/iter_0000010/state.json               data source, ledger position
    SAVE/iter_0000010/rollout_0000010.safetensors ...   rollouts that were generated ahead
    SAVE/iter_0000010/trainer/                 weights, optimizer, schedule, RNG (the trainer's own files)

A checkpoint is written into `iter_0000010.partial`, completed by its manifest, renamed, and only then named by the
tracker file.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from furlong.core.batch import RolloutBatch
from furlong.core.batch_file import load_batch, save_batch
from furlong.core.checkpoint_folder import (
    FORMAT,
    MANIFEST,
    PARTIAL,
    STATE,
    TRACKER,
    complete_folders,
    find_checkpoint,
    folder_name,
    step_of,
)
from furlong.errors import CheckpointError
from furlong.ports import Parts
from furlong.rollout.stream import RolloutStream

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoints:
    """Where a run loads from and saves to.

    `load_dir` without a checkpoint is an error, unless it is also `save_dir`: then the run starts from the beginning.
    `hf_folder` makes the path of a Hugging Face export for a step; `finish_export` is called with it. `start` numbers
    the first rollout of a run that continues no checkpoint. `flag` is what named `load_dir`, for messages.
    """

    save_dir: Path | None = None
    load_dir: Path | None = None
    load_step: int | None = None
    keep: int | None = None
    start: int | None = None
    hf_folder: Callable[[int], Path] | None = None
    finish_export: Callable[[Path], None] | None = None
    flag: str = "--load"

    def peek(self) -> tuple[int, dict[str, Any]] | None:
        """The step that `restore` will continue from and the ledger's mark at it; None where there is no checkpoint."""
        folder = self.find()
        return None if folder is None else (step_of(folder), json.loads((folder / STATE).read_text())["ledger"])

    async def restore(self, parts: Parts) -> tuple[int, list[RolloutBatch]]:
        """Restore everything from the chosen checkpoint; returns the step and the rollouts that were ahead.

        Without one: (`start` or 0, []). Raises CheckpointError for one that is named but missing or incomplete.
        """
        folder = self.find()
        if folder is None:
            return self.start or 0, []
        step = step_of(folder)
        if self.start is not None and self.start != step:
            raise CheckpointError(
                f"--start-rollout-id {self.start} contradicts {folder}, which continues at {step}; drop it"
            )
        state = json.loads((folder / STATE).read_text())
        async with parts.residency.publishing():
            await parts.trainer.load(folder / "trainer")
        parts.source.restore(state["source"])
        ahead = [load_batch(folder / name) for name in state["ahead"]]
        logger.info("loaded checkpoint from %s at iteration %d, with %d rollouts ahead", folder, step, len(ahead))
        return step, ahead

    def find(self) -> Path | None:
        """The checkpoint folder to load; None where there is nothing to resume. Raises CheckpointError."""
        if self.load_dir is None:
            return None
        folder = find_checkpoint(self.load_dir, step=self.load_step, save_dir=self.save_dir, flag=self.flag)
        if folder is None:
            logger.info(
                "no checkpoint yet in %s (--load and --save name it): starting from the beginning", self.load_dir
            )
        return folder

    @staticmethod
    def position(parts: Parts) -> dict[str, Any]:
        """Where data and ledger are now, between two rollouts; for `save` when the next one does not come back."""
        return {"source": parts.source.state(), "ledger": parts.ledger.mark()}

    async def save(
        self, parts: Parts, stream: RolloutStream, step: int, *, position: dict[str, Any] | None = None
    ) -> None:
        """Write the checkpoint of `step`. Rollouts that are ahead are waited for and saved too.

        With a `position` taken earlier what was begun since is left out: a run that goes on begins it anew.
        """
        if self.hf_folder is not None:
            async with parts.residency.publishing():
                await parts.trainer.save_hf(self.hf_folder(step))
            if self.finish_export is not None:
                self.finish_export(self.hf_folder(step))
        if self.save_dir is None:
            return
        started = time.perf_counter()
        batches = await stream.finished() if position is None else []
        for leftover in self.save_dir.glob(f"iter_*{PARTIAL}"):  # of a save that was killed
            shutil.rmtree(leftover)
        folder = self.save_dir / (folder_name(step) + PARTIAL)
        (folder / "trainer").mkdir(parents=True)
        async with parts.residency.publishing():
            await parts.trainer.save(folder / "trainer")
        names = [f"rollout_{batch.rollout_id:07d}.safetensors" for batch in batches]
        for name, batch in zip(names, batches, strict=True):
            await asyncio.to_thread(save_batch, folder / name, batch)
        state = {
            "format": FORMAT,
            "step": step,
            "ahead": names,
            "num_threads": torch.get_num_threads(),  # another number sums in another order
            **(position or self.position(parts)),
        }
        (folder / STATE).write_text(json.dumps(state))
        await asyncio.to_thread(self._commit, folder, step)
        seconds = time.perf_counter() - started
        logger.info("saved checkpoint %s in %.2f s", self.save_dir / folder_name(step), seconds)
        parts.observer.notify("save", step=step, folder=str(self.save_dir / folder_name(step)), seconds=seconds)

    def _commit(self, partial: Path, step: int) -> None:
        assert self.save_dir is not None
        files = sorted(p for p in partial.rglob("*") if p.is_file())
        for path in files:
            sync_to_disk(path)
        manifest = {
            "format": FORMAT,
            "step": step,
            "files": {str(p.relative_to(partial)): p.stat().st_size for p in files},
        }
        write_atomically(partial / MANIFEST, json.dumps(manifest, indent=1))
        final = self.save_dir / folder_name(step)
        before = [p for p in complete_folders(self.save_dir) if step_of(p) < step]
        if final.exists():  # of a run that went on from here before; the tracker must not name it while it is replaced
            if before:
                write_atomically(self.save_dir / TRACKER, f"{step_of(before[-1])}\n")
            else:
                (self.save_dir / TRACKER).unlink(missing_ok=True)
            remove(final)
        partial.rename(final)
        sync_to_disk(self.save_dir)
        write_atomically(self.save_dir / TRACKER, f"{step}\n")
        if self.keep is not None:
            for old in [*before, final][: -self.keep]:
                remove(old)


def remove(folder: Path) -> None:
    """Delete a checkpoint, which stops being one before the first of its files goes."""
    shutil.rmtree(folder.rename(folder.with_name(f"{folder.name}.old{PARTIAL}")))


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old or the new content, never a part."""
    draft = path.with_name(path.name + PARTIAL)
    draft.write_text(text)
    sync_to_disk(draft)
    os.replace(draft, path)
    sync_to_disk(path.parent)


def sync_to_disk(path: Path) -> None:
    """Force a file's or folder's content to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
