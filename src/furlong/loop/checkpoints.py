"""Checkpoints: slime's folder names, written so that a kill at any moment leaves the last good one.

    SAVE/latest_checkpointed_iteration.txt     the number of rollouts trained, e.g. 10
    SAVE/iter_0000010/manifest.json            written last: every file with its size; a folder without is none
    SAVE/iter_0000010/state.json               data source, ledger position
    SAVE/iter_0000010/rollout_0000010.safetensors ...   rollouts that were generated ahead
    SAVE/iter_0000010/trainer/                 weights, optimizer, schedule, RNG (the trainer's own files)

A checkpoint is written into `iter_0000010.partial`, completed by its manifest, renamed, and only then named by the
tracker file. In the background all of that is done by a thread, from copies, while the run goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import json
import logging
import shutil
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from furlong.core.batch import RolloutBatch
from furlong.core.batch_file import load_batch, save_batch
from furlong.core.checkpoint_folder import (
    FORMAT,
    MANIFEST,
    STATE,
    TRACKER,
    find_checkpoint,
    find_complete_folders,
    folder_name,
    step_from_folder,
)
from furlong.core.files import PARTIAL, atomic_folder, sync_files, sync_to_disk, write_atomically
from furlong.core.pending_files import PendingFiles
from furlong.errors import CheckpointError, FurlongError
from furlong.interfaces import Parts
from furlong.loop.background import Background
from furlong.rollout.rollout_stream import RolloutStream

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoints:
    """Where a run loads from and saves to.

    `load_dir` without a checkpoint is an error, unless it is also `save_dir`: then the run starts from the beginning.
    `hf_folder` makes the path of a Hugging Face export for a step; `finish_export` is called with the folder before it
    gets that name. `start` numbers the first rollout of a run that continues no checkpoint. `flag` is what named
    `load_dir`, for messages. With `in_background` files are written while the run goes on.
    """

    save_dir: Path | None = None
    load_dir: Path | None = None
    load_step: int | None = None
    keep: int | None = None
    start: int | None = None
    hf_folder: Callable[[int], Path] | None = None
    finish_export: Callable[[Path], None] | None = None
    flag: str = "--load"
    in_background: bool = False
    _writing: Background = field(default_factory=Background, init=False, compare=False)

    def peek(self) -> tuple[int, dict[str, Any]] | None:
        """The step that `restore` will continue from and the ledger's mark at it; None where there is no checkpoint."""
        folder = self.find()
        return (
            None if folder is None else (step_from_folder(folder), json.loads((folder / STATE).read_text())["ledger"])
        )

    async def restore(self, parts: Parts) -> tuple[int, list[RolloutBatch]]:
        """Restore everything from the chosen checkpoint; returns the step and the rollouts that were ahead.

        Without one: (`start` or 0, []). Raises CheckpointError for one that is named but missing or incomplete.
        """
        folder = self.find()
        if folder is None:
            if self.load_dir is not None:
                logger.info(
                    "no checkpoint yet in %s (--load and --save name it): starting from the beginning", self.load_dir
                )
            return self.start or 0, []
        step = step_from_folder(folder)
        if self.start is not None and self.start != step:
            raise CheckpointError(
                f"--start-rollout-id {self.start} contradicts {folder}, which continues at {step}; drop it"
            )
        state = json.loads((folder / STATE).read_text())
        async with parts.device_sharing.updating_weights():
            await parts.trainer.load(folder / "trainer")
        parts.source.restore(state["source"])
        loaded = [load_batch(folder / name) for name in state["ahead"]]
        # Numbered from here on, as new ones are: of rollouts that shared the last data an earlier one may be missing.
        ahead = [dataclasses.replace(batch, rollout_id=step + place) for place, batch in enumerate(loaded)]
        logger.info("loaded checkpoint from %s at iteration %d, with %d rollouts ahead", folder, step, len(ahead))
        return step, ahead

    def find(self) -> Path | None:
        """The checkpoint folder to load; None where there is nothing to resume. Raises CheckpointError."""
        if self.load_dir is None:
            return None
        return find_checkpoint(self.load_dir, step=self.load_step, save_dir=self.save_dir, flag=self.flag)

    @staticmethod
    def position(parts: Parts) -> dict[str, Any]:
        """Where data and ledger are now, between two rollouts; for `save` when the next one does not come back."""
        return {"source": parts.source.state(), "ledger": parts.ledger.mark()}

    def check(self) -> None:
        """Raise what a write in the background failed with, if one did."""
        self._writing.check()

    @contextlib.asynccontextmanager
    async def settled(self) -> AsyncGenerator[None]:
        """Wait at the end for a checkpoint that is still being written. Raises what that failed with.

        Where the run ends by an error, or is cancelled, that is what is raised, and the other is logged.
        """
        try:
            yield
        except BaseException:
            try:
                await self._writing.settle()
            except FurlongError as error:
                logger.error("the last checkpoint was not written; the one before it stands: %s", error)
            except Exception:
                logger.exception("the last checkpoint was not written; the one before it stands")
            raise
        await self._writing.settle()

    async def save(
        self, parts: Parts, stream: RolloutStream, step: int, *, position: dict[str, Any] | None = None
    ) -> None:
        """Write the checkpoint of `step`. Rollouts that are ahead are waited for and saved too.

        With a `position` taken earlier what was begun since is left out: a run that goes on begins it anew. A save that
        is in the background is waited for first. Raises CheckpointError if this one, or that, cannot be written.
        """
        await self._writing.settle()
        if self.hf_folder is not None:
            await self._export(parts, self.hf_folder(step))
        if self.save_dir is None:
            return
        started = time.perf_counter()
        batches = await stream.finished() if position is None else []
        folder = _begun(self.save_dir, step)
        async with parts.device_sharing.updating_weights():
            if self.in_background:
                pending = await parts.trainer.snapshot(folder / "trainer")
                batches = copy.deepcopy(batches)  # hooks may change in place what they train on
            else:
                pending = PendingFiles()
                await parts.trainer.save(folder / "trainer")
        names = [f"rollout_{batch.rollout_id:07d}.safetensors" for batch in batches]
        state = {
            "format": FORMAT,
            "step": step,
            "ahead": names,
            "num_threads": torch.get_num_threads(),  # another number sums in another order
            **(position or self.position(parts)),
        }
        pending.add_text(folder / STATE, json.dumps(state))
        final = self.save_dir / folder_name(step)

        async def write() -> None:
            await asyncio.to_thread(self._write, folder, step, pending, dict(zip(names, batches, strict=True)))
            seconds = time.perf_counter() - started
            logger.info("saved checkpoint %s in %.2f s", final, seconds)
            parts.observer.notify("save", step=step, folder=str(final), seconds=seconds)

        self._writing.begin(write())
        if self.in_background:
            logger.info(
                "copied the state of step %d in %.2f s; it is being written", step, time.perf_counter() - started
            )
        else:
            await self._writing.settle()

    async def _export(self, parts: Parts, folder: Path) -> None:
        """Write the model as a Hugging Face folder, which replaces one that is there.

        Raises CheckpointError if it cannot be written, or if what the trainer wrote is not there.
        """
        try:
            with atomic_folder(folder) as draft:
                async with parts.device_sharing.updating_weights():
                    await parts.trainer.save_hf(draft)
                if not any(draft.iterdir()):
                    raise CheckpointError(
                        f"{draft} is empty: what the trainer wrote there is not seen here; name a folder that all "
                        "machines see with --save-hf"
                    )
                if self.finish_export is not None:
                    self.finish_export(draft)
                await asyncio.to_thread(sync_files, draft)  # which may take long, and then nothing is left to do
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"cannot write {folder}: {error}; make room there, or give another folder with --save-hf"
            ) from error

    def _write(self, partial: Path, step: int, pending: PendingFiles, batches: Mapping[str, RolloutBatch]) -> None:
        """Write what is left to write, and commit."""
        try:
            pending.write()
            for name, batch in batches.items():
                save_batch(partial / name, batch)
            self._commit(partial, step)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"cannot write into {partial}: {error}; make room there, or give another folder"
            ) from error

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
        before = [p for p in find_complete_folders(self.save_dir) if step_from_folder(p) < step]
        if final.exists():  # of a run that went on from here before; the tracker must not name it while it is replaced
            if before:
                write_atomically(self.save_dir / TRACKER, f"{step_from_folder(before[-1])}\n")
            else:
                (self.save_dir / TRACKER).unlink(missing_ok=True)
            remove(final)
        partial.rename(final)
        sync_to_disk(self.save_dir)
        write_atomically(self.save_dir / TRACKER, f"{step}\n")
        if self.keep is not None:
            for old in [*before, final][: -self.keep]:
                remove(old)


def _begun(save_dir: Path, step: int) -> Path:
    """Make the folder that a checkpoint is written into; what saves that were killed left goes.

    Raises CheckpointError if it cannot be made.
    """
    folder = save_dir / (folder_name(step) + PARTIAL)
    try:
        for leftover in save_dir.glob(f"iter_*{PARTIAL}"):
            shutil.rmtree(leftover)
        (folder / "trainer").mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"cannot make {folder}: {error}; make room there, or give another folder") from error
    return folder


def remove(folder: Path) -> None:
    """Delete a checkpoint, which stops being one before the first of its files goes."""
    shutil.rmtree(folder.rename(folder.with_name(f"{folder.name}.old{PARTIAL}")))
