"""Checkpoints in slime's folder layout, written so that a kill at any time leaves the last complete one.

    SAVE/latest_checkpointed_iteration.txt     the number of rollouts trained, e.g. 10
    SAVE/iter_0000010/manifest.json            every file with size and checksum; written last, incomplete without it
    SAVE/iter_0000010/state.json               data source, ledger position
    SAVE/iter_0000010/inputs.json              the run's inputs: data, tokenizer, weights, by content
    SAVE/iter_0000010/rollout_0000010.safetensors ...   rollouts generated ahead
    SAVE/iter_0000010/groups.safetensors   prompt groups in flight, if rollouts share them
    SAVE/iter_0000010/trainer/                 weights, optimizer, schedule, RNG (the trainer's own files)

A checkpoint is written to `iter_0000010.partial`, completed with its manifest, renamed, and only then named in the
tracker file. In the background, a thread does all of that from copies while training continues.
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
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from furlong.core.algorithms import Role
from furlong.core.batch import RolloutBatch
from furlong.core.progress import progress
from furlong.core.sample import Group
from furlong.errors import CheckpointError, DataError, FurlongError
from furlong.files.atomic import PARTIAL, PendingFiles, atomic_folder, sync_files, sync_to_disk, write_atomically
from furlong.files.batch_file import load_batch, save_batch
from furlong.files.checkpoint_folder import (
    STATE,
    STATE_FORMAT,
    TRACKER,
    find_checkpoint,
    find_complete_folders,
    folder_name,
    read_state,
    start_problem,
    step_from_folder,
)
from furlong.files.manifest import MANIFEST, files_checked, write_manifest
from furlong.files.run_inputs import INPUTS, Change, InputKind, RunInputs, read_inputs
from furlong.files.sample_file import load_samples, save_samples
from furlong.interfaces import Parts

logger = logging.getLogger(__name__)

GROUPS = "groups.safetensors"
WEIGHTS: tuple[InputKind, ...] = ("weights", "reference", "teacher")
SMALL_INPUTS: tuple[InputKind, ...] = ("data", "tokenizer", "chat-template", "config")


class BackgroundWrite:
    """At most one write that runs while training continues. Its error is raised once, to the first caller that asks."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Start `work`. The previous write must have been waited for."""
        assert self._task is None
        self._task = asyncio.create_task(work)

    def check(self) -> None:
        """Raise the error of a write that has failed."""
        if self._task is not None and self._task.done():
            task, self._task = self._task, None
            task.result()

    async def wait(self) -> None:
        """Wait for the write. Raises its error. If the caller is cancelled, the write continues."""
        if self._task is not None:
            await asyncio.wait([self._task])
            self.check()


@dataclass(frozen=True)
class Checkpoints:
    """Folders that a run loads from and saves to.

    load_dir: an error if it has no checkpoint, unless it is also `save_dir`; then the run starts from the beginning.
    load_step: the step to load, by default the latest. keep: number of checkpoints to keep. start: id of the first
    rollout without a checkpoint. hf_folder, critic_folder: return the path of the Hugging Face export of a step, of
    policy and critic. model_folder: the path of the policy's export at the end of the run, which the run may end
    without if it is not `needs_model`. finish_export: called with the policy's folder before it is renamed to its
    path. flag: the flag that set `load_dir`, for messages. in_background: whether to write files while training
    continues. inputs: recorded in each checkpoint, and compared with those in the one that is loaded.
    hub: commits of names on the Hub, which a run that resumes reads (`config.hub`).
    """

    save_dir: Path | None = None
    load_dir: Path | None = None
    load_step: int | None = None
    keep: int | None = None
    retain_interval: int | None = None
    start: int | None = None
    hf_folder: Callable[[int], Path] | None = None
    critic_folder: Callable[[int], Path] | None = None
    model_folder: Path | None = None
    needs_model: bool = False
    finish_export: Callable[[Path], None] | None = None
    flag: str = "--load"
    in_background: bool = False
    inputs: RunInputs | None = None
    hub: Mapping[str, str] = field(default_factory=dict[str, str])
    _writing: BackgroundWrite = field(default_factory=BackgroundWrite, init=False, compare=False)
    _changes: list[Change] = field(default_factory=list[Change], init=False, compare=False)  # accepted by `restore`

    def peek(self) -> tuple[int, dict[str, Any]] | None:
        """Return the step that `restore` will continue from and the ledger's mark; None if there is no checkpoint."""
        folder = self.find()
        return None if folder is None else (step_from_folder(folder), read_state(folder)["ledger"])

    async def restore(self, parts: Parts) -> tuple[int, list[RolloutBatch]]:
        """Restore everything from the selected checkpoint; return the step and the rollouts generated ahead.

        Writes nothing; `record_changes` records changed inputs. Returns (`start` or 0, []) if there is none. Raises
        CheckpointError if it is missing or incomplete, or was saved with inputs that differ from those of this run.
        """
        folder = self.find()
        if folder is None:
            if self.load_dir is not None:
                logger.info(
                    "no checkpoint yet in %s (both --load and --save): starting from the beginning", self.load_dir
                )
            return self.start or 0, []
        step = step_from_folder(folder)
        if problem := start_problem(self.start, folder):
            raise CheckpointError(problem)
        state = read_state(folder)
        self._changes.clear()
        await self._compare_inputs(folder, SMALL_INPUTS)  # refused before weights are loaded
        async with parts.device_sharing.updating_weights():
            await parts.trainer.load(folder / "trainer")
        await self._compare_inputs(folder, WEIGHTS)  # read meanwhile
        parts.source.restore(state["source"], data_changed=self._has_other_data)
        with files_checked(folder, state["ahead"]):
            loaded = [load_batch(folder / name) for name in state["ahead"]]
        num_groups = _restore_groups(parts, folder, state)
        # Renumber from this step: of rollouts that shared the last data, an earlier one may be missing.
        ahead = [dataclasses.replace(batch, rollout_id=step + place) for place, batch in enumerate(loaded)]
        logger.info(
            "loaded checkpoint from %s at iteration %d, with %d rollouts ahead and %d groups in flight",
            folder, step, len(ahead), num_groups,
        )  # fmt: skip
        return step, ahead

    def record_changes(self, parts: Parts) -> None:
        """Record the changed inputs that `restore` accepted, in the log, the events and the ledger."""
        if not self._changes:
            return
        text = "; ".join(map(str, self._changes))
        logger.warning("inputs changed since the checkpoint, as --allow-changed-inputs accepts: %s", text)
        facts = [{"kind": change.kind, "change": change.text} for change in self._changes]
        parts.observer.notify("inputs_changed", checkpoint=str(self.find()), changes=facts)
        if self._has_other_data:
            parts.ledger.data_changed()
        self._changes.clear()

    @property
    def _has_other_data(self) -> bool:
        return any(change.kind == "data" for change in self._changes)

    async def _compare_inputs(self, folder: Path, kinds: Sequence[InputKind]) -> None:
        """Compare inputs with those in a checkpoint; keep accepted changes. Raises CheckpointError for others."""
        if self.inputs is None:
            return
        changes = await self.inputs.changes(read_inputs(folder) or {}, kinds)
        self.inputs.check_accepted(folder, changes)
        self._changes.extend(changes)

    def find(self) -> Path | None:
        """Return the checkpoint folder to load; None if there is nothing to resume. Raises CheckpointError."""
        if self.load_dir is None:
            return None
        return find_checkpoint(self.load_dir, step=self.load_step, save_dir=self.save_dir, flag=self.flag)

    @staticmethod
    def position(parts: Parts) -> dict[str, Any]:
        """Return the current position of data and ledger between two rollouts, for `save` if the next one hangs."""
        return {"source": parts.source.state(), "ledger": parts.ledger.mark()}

    def check(self) -> None:
        """Raise the error of a background write that has failed."""
        self._writing.check()

    @contextlib.asynccontextmanager
    async def settled(self) -> AsyncGenerator[None]:
        """On exit, wait for a checkpoint that is still being written, and raise its error.

        If the run fails or is cancelled, that error is raised and the checkpoint's is logged.
        """
        try:
            yield
        except BaseException:
            try:
                await self._writing.wait()
            except FurlongError as error:
                logger.error("the last checkpoint was not written; the previous one remains valid: %s", error)
            except Exception:
                logger.exception("the last checkpoint was not written; the previous one remains valid")
            raise
        await self._writing.wait()

    async def save(
        self,
        parts: Parts,
        finished: Callable[[], Awaitable[list[RolloutBatch]]],
        step: int,
        *,
        position: dict[str, Any] | None = None,
    ) -> None:
        """Write the checkpoint of `step`, including the rollouts generated ahead, which `finished` waits for.

        With an earlier `position`, work started since then is left out; a resumed run starts it again. Waits for a
        background write first. Raises CheckpointError if either cannot be written.
        """
        await self._writing.wait()
        if self.hf_folder is not None:
            await self._export(parts, self.hf_folder(step), "actor")
        if self.critic_folder is not None:
            await self._export(parts, self.critic_folder(step), "critic")
        if self.save_dir is None:
            return
        started = time.perf_counter()
        batches = await finished() if position is None else []
        position = position or self.position(parts)  # together with the rollouts and groups: no event is in between
        groups = [] if parts.pool is None else parts.pool.snapshot()
        folder = _make_partial(self.save_dir, step)
        async with parts.device_sharing.updating_weights():
            with progress.phase("saving the checkpoint"):
                if self.in_background:
                    pending = await parts.trainer.snapshot(folder / "trainer")
                    batches = copy.deepcopy(batches)  # hooks may modify batches in place
                else:
                    pending = PendingFiles()
                    await parts.trainer.save(folder / "trainer")
        names = [f"rollout_{batch.rollout_id:07d}.safetensors" for batch in batches]
        state = {
            "format": STATE_FORMAT,
            "step": step,
            "ahead": names,
            "num_threads": torch.get_num_threads(),  # the order of sums depends on it
            **({"groups": len(groups)} if groups else {}),
            **({"hub": dict(self.hub)} if self.hub else {}),
            **position,
        }
        pending.add_text(folder / STATE, json.dumps(state))
        if self.inputs is not None:
            pending.add_text(folder / INPUTS, json.dumps(await self.inputs.record()))
        final = self.save_dir / folder_name(step)

        async def write() -> None:
            batches_by_name = dict(zip(names, batches, strict=True))
            await asyncio.to_thread(self._write, folder, step, pending, batches_by_name, groups)
            seconds = time.perf_counter() - started
            logger.info("saved checkpoint %s in %.2f s", final, seconds)
            parts.observer.notify("save", step=step, folder=str(final), seconds=seconds)

        self._writing.begin(write())
        if self.in_background:
            logger.info(
                "copied the state of step %d in %.2f s; writing it in the background",
                step,
                time.perf_counter() - started,
            )
        else:
            await self._writing.wait()

    def lacks_model(self) -> bool:
        """Whether the model of the loaded checkpoint is missing, or older: a run was ended before it had written it."""
        folder = None if self.model_folder is None else self.find()
        if self.model_folder is None or folder is None:
            return False
        is_written = (self.model_folder / "config.json").is_file()
        return not is_written or self.model_folder.stat().st_mtime < (folder / MANIFEST).stat().st_mtime

    async def save_model(self, parts: Parts, step: int) -> None:
        """Write the model of the last step to `model_folder`. Raises CheckpointError as the class describes."""
        if self.model_folder is None:
            return
        try:
            await self._export(parts, self.model_folder, "actor")
        except CheckpointError as error:
            if self.needs_model:
                raise
            logger.error("the trained model was not kept: %s", error)
        else:
            logger.info("trained model of step %d: %s", step, self.model_folder)

    async def _export(self, parts: Parts, folder: Path, role: Role) -> None:
        """Write a model as a Hugging Face folder, replacing an existing one.

        Raises CheckpointError if it cannot be written, or if the trainer's files are not visible here.
        """
        flag = "--save-hf" if role == "actor" else "--critic-save"
        try:
            with atomic_folder(folder) as draft:
                async with parts.device_sharing.updating_weights():
                    with progress.phase("saving the model"):
                        await parts.trainer.save_hf(draft, model=role)
                if not any(draft.iterdir()):
                    raise CheckpointError(
                        f"{folder} is empty: the trainer's files are not visible on this machine; set {flag} to a "
                        "folder that all machines share"
                    )
                if self.finish_export is not None and role == "actor":
                    self.finish_export(draft)
                await asyncio.to_thread(sync_files, draft)  # may take long; only the rename is left after it
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"cannot write {folder}: {error}; free some space, or use another folder with {flag}"
            ) from error

    def _write(
        self,
        partial: Path,
        step: int,
        pending: PendingFiles,
        batches: Mapping[str, RolloutBatch],
        groups: Sequence[tuple[str, Group]],
    ) -> None:
        """Write the pending files, the rollouts and the groups in flight, then commit."""
        try:
            pending.write()
            for name, batch in batches.items():
                save_batch(partial / name, batch)
            if groups:
                names, members = zip(*groups, strict=True)
                save_samples(partial / GROUPS, step, members, names=names)
            self._commit(partial, step)
        except DataError as error:
            raise CheckpointError(f"the groups in flight cannot be saved: {error}") from error
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"cannot write into {partial}: {error}; free some space, or use another folder"
            ) from error

    def _commit(self, partial: Path, step: int) -> None:
        assert self.save_dir is not None
        write_manifest(partial, step)
        sync_files(partial)
        final = self.save_dir / folder_name(step)
        before = [p for p in find_complete_folders(self.save_dir) if step_from_folder(p) < step]
        if final.exists():  # from an earlier continuation; the tracker must not name it while it is replaced
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
        if self.retain_interval is not None:
            for old in before:
                if step_from_folder(old) % self.retain_interval:
                    remove(old)


def _restore_groups(parts: Parts, folder: Path, state: Mapping[str, Any]) -> int:
    """Hand the groups in flight of a checkpoint to the pool; return their number.

    Raises CheckpointError if the file is damaged, or if this run generates nothing.
    """
    if not state.get("groups"):
        return 0
    if parts.pool is None:
        raise CheckpointError(
            f"{folder} contains {state['groups']} prompt groups in flight, but this run does not generate its rollouts "
            "from prompts; resume with the flags of the run that saved it, or start a new run from its weights "
            "(--finetune)"
        )
    with files_checked(folder, [GROUPS]):
        try:
            dump = load_samples(folder / GROUPS)
        except DataError as error:
            raise CheckpointError(f"{error}; use another --ckpt-step") from error
    parts.pool.restore(list(zip(dump.names, dump.groups, strict=True)))
    return len(dump.groups)


def _make_partial(save_dir: Path, step: int) -> Path:
    """Create the folder to write a checkpoint into, and delete leftovers of interrupted saves.

    Raises CheckpointError if it cannot be created.
    """
    folder = save_dir / (folder_name(step) + PARTIAL)
    try:
        for leftover in save_dir.glob(f"iter_*{PARTIAL}"):
            shutil.rmtree(leftover)
        (folder / "trainer").mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"cannot create {folder}: {error}; free some space, or use another folder") from error
    return folder


def remove(folder: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that no incomplete folder looks like a checkpoint."""
    shutil.rmtree(folder.rename(folder.with_name(f"{folder.name}.old{PARTIAL}")))
