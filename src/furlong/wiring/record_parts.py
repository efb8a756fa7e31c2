"""Builds a run's schedule, checkpoints, ledger, trackers and monitors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from furlong.config.checks.value_checks import epoch_problem
from furlong.config.command_line import without_credentials
from furlong.config.sections import Config
from furlong.data.ledger import FileLedger
from furlong.diagnosis.monitors import MONITORS
from furlong.diagnosis.monitors.monitor import MonitorSuite, RunFacts, RunMonitor
from furlong.errors import ConfigError
from furlong.files.checkpoint_folder import find_resume_folder
from furlong.files.run_inputs import RunInputs
from furlong.interfaces import DataSource, Tracker
from furlong.loop.checkpoints import Checkpoints
from furlong.loop.schedule import RunSchedule
from furlong.machine import MemoryUse
from furlong.models.tokenizer import read_template, write_template
from furlong.tracking.console import ConsoleTracker
from furlong.tracking.mlflow import MlflowTracker
from furlong.tracking.run_files import EVENTS, EventLog, read_steps
from furlong.tracking.swanlab import SwanlabTracker
from furlong.tracking.tensorboard import TensorBoardTracker
from furlong.tracking.trackers import JsonlTracker, Trackers
from furlong.tracking.trackio import TrackioTracker
from furlong.tracking.wandb import WandbTracker
from furlong.wiring.run_context import RunContext

logger = logging.getLogger(__name__)


def build_schedule(context: RunContext, source: DataSource, *, has_eval: bool) -> RunSchedule:
    """Derive the loop's schedule. Raises ConfigError if the number of rollouts cannot be known."""
    config = context.config
    num_rollout = config.data.num_rollout
    if num_rollout is None:
        per_epoch = source.groups_per_epoch
        if per_epoch is None:
            raise ConfigError(
                "--num-epoch with --streaming-data: the number of rows is unknown until they are read; "
                "use --num-rollout"
            )
        num_epoch, batch_size = int(config.data.num_epoch or 1), config.data.rollout_batch_size
        if problem := epoch_problem(num_epoch, per_epoch, batch_size):
            raise ConfigError(problem)
        num_rollout = per_epoch * num_epoch // batch_size
        logger.info(
            "%d rollouts: %d prompts x %s epochs / %d prompts each",
            num_rollout,
            per_epoch,
            config.data.num_epoch,
            config.data.rollout_batch_size,
        )
    return RunSchedule(
        num_rollout=num_rollout,
        ahead=config.rollout.async_buffer_size or 0,
        staleness_bound=config.rollout.max_token_staleness,
        update_weights_interval=config.sync.update_weights_interval,
        pause_mode=config.sync.pause_mode,
        save_every=config.checkpoint.save_interval,
        eval_every=config.eval.eval_interval if has_eval else None,
        eval_before_train=not config.eval.skip_eval_before_train,
        saves_on_hang=config.fault.on_hang == "stop" and config.checkpoint.save is not None,
    )


def build_checkpoints(config: Config, inputs: RunInputs | None) -> Checkpoints:
    """Build the loader and saver of checkpoints, which compares and records `inputs`."""
    flags = config.checkpoint
    export, template = flags.save_hf, config.data.chat_template_path
    chat_template = None if template is None else read_template(template)
    return Checkpoints(
        save_dir=None if flags.save is None else Path(flags.save),
        load_dir=find_resume_folder(flags.load, step=flags.ckpt_step, finetune=flags.finetune),
        load_step=flags.ckpt_step,
        keep=flags.keep_checkpoints,
        start=config.data.start_rollout_id,
        in_background=flags.async_save,
        inputs=inputs,
        hf_folder=None if export is None else lambda step: Path(export.replace("{rollout_id}", str(step))),
        finish_export=None if chat_template is None else lambda folder: write_template(folder, chat_template),
    )


def build_ledger(context: RunContext, resumed: tuple[int, dict[str, Any]] | None) -> FileLedger:
    """Open the ledger, at the position (step, mark) of the checkpoint that the run resumes from, if any."""
    path = context.folder / "ledger.jsonl"
    may_wait = context.hooks.buffer_filter is not None or context.hooks.data_source is not None
    if resumed is None:
        return FileLedger(path, may_wait=may_wait)
    if not path.exists():
        logger.warning(
            "--load %s resumes a run whose ledger is not in %s; a new ledger starts at step %d, and the audit does "
            "not cover earlier steps",
            context.config.checkpoint.load,
            context.folder,
            resumed[0],
        )
        return FileLedger(path, is_partial=True, may_wait=may_wait)
    return FileLedger.resume(path, resumed[1], may_wait=may_wait)


def build_monitor(context: RunContext, num_steps: int) -> RunMonitor:
    """Build the trackers, the event log, and the monitors that check both."""
    return RunMonitor(
        MonitorSuite(MONITORS, RunFacts.of(context.config)),
        trackers=_trackers(context, num_steps),
        events=EventLog(context.folder / EVENTS),
        on_diagnosis=context.config.fault.on_diagnosis,
        earlier=lambda: read_steps(context.folder),
        measured=_host_memory,
    )


def _host_memory() -> dict[str, float]:
    memory = MemoryUse.of_machine()
    return {} if memory is None else {"perf/host_memory_frac": memory.share}


def _trackers(context: RunContext, num_steps: int) -> Trackers:
    """Open the trackers. One that cannot be opened is reported and left out."""
    track = context.config.track
    builders: dict[str, Callable[[], Tracker]] = {
        "metrics.jsonl": lambda: JsonlTracker(context.folder / "metrics.jsonl"),
        "console": lambda: ConsoleTracker(num_steps=num_steps),
    }
    if track.use_tensorboard:
        folder = context.folder.joinpath(*filter(None, (track.tb_project_name, track.tb_experiment_name)))
        builders["tensorboard"] = lambda: TensorBoardTracker(folder)
    values: dict[str, Any] = without_credentials(context.args.as_dict() | {"wandb_key": None})
    if track.use_wandb:
        builders["wandb"] = lambda: WandbTracker(track, values)
    if track.use_trackio:
        is_resumed = (context.folder / "metrics.jsonl").exists()
        builders["trackio"] = lambda: TrackioTracker(track, values, is_resumed=is_resumed)
    if track.use_mlflow:
        builders["mlflow"] = lambda: MlflowTracker(track, values)
    if track.use_swanlab:
        builders["swanlab"] = lambda: SwanlabTracker(track, values, context.folder)
    return Trackers.open(builders, context.tables)
