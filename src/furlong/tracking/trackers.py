"""Trackers of a run: metrics.jsonl, TensorBoard, W&B, MLflow, SwanLab and Trackio, whose failures do not end it."""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import re
import socket
import struct
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

from furlong.config.sections import TrackFlags
from furlong.core.sample import Sample
from furlong.errors import ConfigError
from furlong.interfaces import Tracker
from furlong.tracking.run_files import StepFile

logger = logging.getLogger(__name__)

MAX_CHARS = 10_000  # of a text in a table
TRAINED = "rollout"  # the table of training samples; the others have the names of evaluation sets
COLUMNS = ("step", "group", "sample", "reward", "status", "tokens", "prompt", "response", "label")
TEXTS = COLUMNS[-3:]
_WANDB_AXES = {
    "train": "train/step",
    "rollout": "rollout/step",
    "multi_turn": "rollout/step",
    "passrate": "rollout/step",
    "perf": "rollout/step",
    "eval": "eval/step",
}
_MLFLOW_PARAM_CHARS = 6000  # MLflow's limit of a value
_MLFLOW_PARAMS_PER_CALL = 100
_MLFLOW_METRICS_PER_CALL = 1000
_MLFLOW_STEPS_PER_TABLE = 200
_MLFLOW_NOT_ALLOWED = re.compile(r"[^\w\-./ :]")  # in names of metrics: `eval/x-pass@2` becomes `eval/x-pass_2`


@dataclass(frozen=True)
class SampleTable:
    """Samples of one step: rows of `COLUMNS`."""

    name: str
    step: int
    rows: list[list[Any]]

    @property
    def key(self) -> str:
        """The name in a tracker."""
        return f"samples/{self.name}"

    def columns(self) -> dict[str, list[Any]]:
        """Return the values by column."""
        return {name: [row[i] for row in self.rows] for i, name in enumerate(COLUMNS)}


@runtime_checkable
class SampleTracker(Protocol):
    """A tracker that also shows samples."""

    def log_samples(self, table: SampleTable) -> None:
        """Record a table."""
        ...


class SampleTables:
    """Collects the first `most` samples of rollouts and evaluations until trackers take them. Thread-safe."""

    def __init__(self, most: int | None) -> None:
        self._most = most or 0
        self._tables: list[SampleTable] = []
        self._lock = threading.Lock()

    def add(self, step: int, name: str, samples: Sequence[Sample]) -> None:
        """Add a table for `step`, as in metrics.jsonl."""
        if self._most and samples:
            table = SampleTable(name, step, [_table_row(step, sample) for sample in samples[: self._most]])
            with self._lock:
                self._tables.append(table)

    def take(self, step: int) -> list[SampleTable]:
        """Remove and return the tables up to `step`: with asynchronous rollouts there may be later ones."""
        with self._lock:
            due = [table for table in self._tables if table.step <= step]
            self._tables = [table for table in self._tables if table.step > step]
        return due


def _table_row(step: int, sample: Sample) -> list[Any]:
    reward = sample.reward
    if not (reward is None or isinstance(reward, int | float)):
        reward = _cell_text(reward)
    return [
        step, sample.group_index, sample.index, reward, sample.status.value, sample.response_length,
        _cell_text(sample.prompt), _cell_text(sample.response), _cell_text(sample.label),
    ]  # fmt: skip


def _cell_text(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)
    return text[:MAX_CHARS]


class Trackers:
    """Passes every record to each tracker, and calls a tracker that failed again at the next step.

    Trackers that show samples also get the tables of `samples`.
    The first failure of a tracker is logged as a warning with its traceback; the total is logged at `close` and is in
    `failures`.

    >>> trackers = Trackers.open({"jsonl": lambda: JsonlTracker(Path("outputs/x/metrics.jsonl"))})
    """

    def __init__(self, trackers: Mapping[str, Tracker], samples: SampleTables | None = None) -> None:
        self._trackers, self._samples = dict(trackers), samples
        self.failures: Counter[str] = Counter()

    @staticmethod
    def open(builders: Mapping[str, Callable[[], Tracker]], samples: SampleTables | None = None) -> Trackers:
        """Build each tracker. One that cannot be opened counts as failed and is left out; ConfigError propagates."""
        trackers = Trackers({}, samples)
        for name, build in builders.items():
            try:
                trackers._trackers[name] = build()
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001  tracker boundary: a missing sink must not end the run
                trackers._report(name, "open", error)
        return trackers

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record one step in every tracker, with the tables of samples up to it."""
        tables = [] if self._samples is None else self._samples.take(step)
        for name, tracker in self._trackers.items():
            try:
                tracker.log(step, metrics)
                if isinstance(tracker, SampleTracker):
                    for table in tables:
                        tracker.log_samples(table)
            except Exception as error:  # noqa: BLE001  tracker boundary
                self._report(name, f"record step {step}", error)

    def close(self) -> None:
        """Close all trackers and log their failures."""
        for name, tracker in self._trackers.items():
            try:
                tracker.close()
            except Exception as error:  # noqa: BLE001  tracker boundary
                self._report(name, "close", error)
        for name, count in self.failures.items():
            logger.warning("tracker %s failed %d times in this run", name, count)

    def _report(self, name: str, action: str, error: Exception) -> None:
        self.failures[name] += 1
        if self.failures[name] == 1:
            logger.warning(
                "tracker %s could not %s (%s: %s); the run continues, and its later failures are only counted",
                name,
                action,
                type(error).__name__,
                error,
                exc_info=None if isinstance(error, OSError) else error,  # the file system's errors need no place
            )


class JsonlTracker:
    """Appends one object per step (see `StepFile`). Non-finite values are null, because JSON has no NaN."""

    def __init__(self, path: Path) -> None:
        self._file = StepFile(path)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Append one row. Raises OSError if it cannot be written."""
        self._file.append(
            step, {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()


OPTIONAL = {
    "use_wandb": "wandb",
    "use_trackio": "trackio",
    "use_mlflow": "mlflow",
    "use_swanlab": "swanlab",
}  # by field


def import_optional(package: str, flag: str) -> Any:
    """Import a package that `flag` needs; it is also the name of the extra that installs it.

    Raises ConfigError if it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ConfigError(not_installed(package, flag)) from error


def not_installed(package: str, flag: str) -> str:
    """Return the message for a package that `flag` needs."""
    return f"{flag} needs the package {package}, which is not installed; pip install 'furlong-rl[{package}]'"


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """Return the finite values: trackers cannot plot others."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


class TensorBoardTracker:
    """Writes scalars to one event file in `folder`, flushed at every step.

    If the folder already has event files, the first record makes TensorBoard discard their steps from that step on, so
    that a resumed run shows one curve.
    """

    def __init__(self, folder: Path) -> None:
        # Imported here to keep the start-up of other runs fast; Any, because protobuf creates its classes at run time.
        event: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        tensor: Any = importlib.import_module("tensorboard.compat.proto.tensor_pb2")
        types: Any = importlib.import_module("tensorboard.compat.proto.types_pb2")
        self._event, self._session, self._summary = event.Event, event.SessionLog, summary.Summary
        self._metadata, self._tensor, self._string = summary.SummaryMetadata, tensor.TensorProto, types.DT_STRING
        folder.mkdir(parents=True, exist_ok=True)
        self._is_resumed = any(folder.glob("events.out.tfevents.*"))
        name = f"events.out.tfevents.{time.time_ns() // 1000}.{socket.gethostname()}.{os.getpid()}"
        # of its record writer, whose package takes 0.2 s to import
        checksums: Any = importlib.import_module("tensorboard.compat.tensorflow_stub.pywrap_tensorflow")
        self._masked_crc32c: Callable[[bytes], int] = checksums.masked_crc32c
        self._file: BinaryIO = (folder / name).open("xb", buffering=0)
        self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write one event with all values."""
        if self._is_resumed:
            start = self._session(status=self._session.START)
            self._write(self._event(wall_time=time.time(), step=step, session_log=start))
            self._is_resumed = False
        values = [self._summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._write(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def log_samples(self, table: SampleTable) -> None:
        """Write a table of samples, which TensorBoard shows among the texts."""
        cells = [[name.encode() for name in COLUMNS], *([_markdown(value) for value in row] for row in table.rows)]
        tensor = self._tensor(dtype=self._string, string_val=[cell for row in cells for cell in row])
        for size in (len(cells), len(COLUMNS)):
            tensor.tensor_shape.dim.add(size=size)
        shown_as = self._metadata(plugin_data=self._metadata.PluginData(plugin_name="text"))
        value = self._summary.Value(tag=table.key, tensor=tensor, metadata=shown_as)
        self._write(self._event(wall_time=time.time(), step=table.step, summary=self._summary(value=[value])))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: Any) -> None:
        data: bytes = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        checks = [struct.pack("<I", self._masked_crc32c(part)) for part in (length, data)]
        self._file.write(length + checks[0] + data + checks[1])


def _markdown(value: Any) -> bytes:
    """Return a value in Markdown: texts as code, so that nothing in them is markup."""
    if isinstance(value, str):
        value = "\n".join(f"    {line}" for line in value.splitlines())
    return ("" if value is None else str(value)).encode()


class WandbTracker:
    """Reports to one W&B run, with slime's x-axes: `train/step`, `rollout/step` and `eval/step`.

    The group gets a random suffix unless --wandb-run-id continues a run. The key is only passed to W&B's login. Raises
    ConfigError if wandb is not installed or rejects the settings.
    """

    def __init__(self, flags: TrackFlags, config: Mapping[str, Any] | None = None) -> None:
        wandb = import_optional("wandb", "--use-wandb")
        if flags.wandb_dir is not None:
            Path(flags.wandb_dir).mkdir(parents=True, exist_ok=True)
        group, run_id = flags.wandb_group, flags.wandb_run_id
        suffix = f"_{uuid.uuid4().hex[:8]}" if group and flags.wandb_random_suffix and run_id is None else ""
        name = f"{group}{suffix}" if group else None
        try:
            if flags.wandb_key is not None and flags.wandb_mode not in ("offline", "disabled"):
                wandb.login(key=flags.wandb_key, host=flags.wandb_host)
            self._run = wandb.init(
                project=flags.wandb_project,
                entity=flags.wandb_team,
                group=name,
                name=name,
                mode=flags.wandb_mode,
                dir=flags.wandb_dir,
                id=run_id,
                resume="allow" if run_id else None,
                config=dict(config or {}),
            )
        except wandb.errors.UsageError as error:
            raise ConfigError(f"--use-wandb: {error}; or pass --wandb-mode offline") from error
        axes = dict.fromkeys(_WANDB_AXES, "train/step") if flags.wandb_always_use_train_step else _WANDB_AXES
        self._axes, self._table = axes, wandb.Table
        for section, axis in axes.items():
            self._run.define_metric(axis)
            self._run.define_metric(f"{section}/*", step_metric=axis)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Report one step, without non-finite values, which W&B cannot plot."""
        record: dict[str, float] = finite(metrics)
        sections = {name.split("/", 1)[0] for name in record}
        for axis in {_WANDB_AXES[section] for section in sections if section in _WANDB_AXES} | {"train/step"}:
            record.setdefault(axis, step)
        self._run.log(record)

    def log_samples(self, table: SampleTable) -> None:
        """Report a table of samples at its step."""
        shown = self._table(columns=list(COLUMNS), data=table.rows, allow_mixed_types=True)
        axis = self._axes["rollout" if table.name == TRAINED else "eval"]
        self._run.log({table.key: shown, axis: table.step})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MlflowTracker:
    """Writes one run of an experiment to --mlflow-tracking-uri, by default $MLFLOW_TRACKING_URI or `mlflow.db`.

    Raises ConfigError if mlflow is not installed.
    """

    def __init__(self, flags: TrackFlags, config: Mapping[str, Any]) -> None:
        mlflow = import_optional("mlflow", "--use-mlflow")
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # it would be in the run's log
        self._entities: Any = mlflow.entities
        self._client: Any = mlflow.MlflowClient(tracking_uri=flags.mlflow_tracking_uri)
        experiment = self._client.get_experiment_by_name(flags.tracker_project)
        if experiment is None:
            number = self._client.create_experiment(flags.tracker_project)
        else:
            number = experiment.experiment_id
        self._run_id: str = self._client.create_run(number, run_name=flags.run_name).info.run_id
        params = [self._entities.Param(name, str(value)[:_MLFLOW_PARAM_CHARS]) for name, value in config.items()]
        for start in range(0, len(params), _MLFLOW_PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=params[start : start + _MLFLOW_PARAMS_PER_CALL])

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record one step, without non-finite values."""
        now = int(time.time() * 1000)
        records = [
            self._entities.Metric(_MLFLOW_NOT_ALLOWED.sub("_", name), value, now, step)
            for name, value in finite(metrics).items()
        ]
        for start in range(0, len(records), _MLFLOW_METRICS_PER_CALL):
            self._client.log_batch(self._run_id, metrics=records[start : start + _MLFLOW_METRICS_PER_CALL])

    def log_samples(self, table: SampleTable) -> None:
        """Append a table of samples to an artifact, which MLflow shows as a table."""
        first = table.step // _MLFLOW_STEPS_PER_TABLE * _MLFLOW_STEPS_PER_TABLE
        name = f"{table.key}-{first:06d}.json"  # MLflow reads and writes the whole file for each step
        self._client.log_table(self._run_id, data=table.columns(), artifact_file=name)

    def close(self) -> None:
        """Finish the run."""
        self._client.set_terminated(self._run_id)


class SwanlabTracker:
    """Writes one run to `swanlog/` in the run directory, or to SwanLab's servers with --swanlab-mode online.

    Raises ConfigError if swanlab is not installed.
    """

    def __init__(self, flags: TrackFlags, config: Mapping[str, Any], folder: Path) -> None:
        swanlab = import_optional("swanlab", "--use-swanlab")
        self._text: Any = swanlab.Text
        self._run: Any = swanlab.init(
            project=flags.tracker_project,
            name=flags.run_name,
            mode=flags.swanlab_mode,
            log_dir=str(folder / "swanlog"),
            config=dict(config),
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record one step, without non-finite values."""
        self._run.log(finite(metrics), step=step)

    def log_samples(self, table: SampleTable) -> None:
        """Record samples as texts: SwanLab has no tables."""
        texts = [
            self._text(
                f"{prompt}\n---\n{response}", caption=f"sample {sample}, reward {reward}, {status}, label {label}"
            )
            for _, _, sample, reward, status, _, prompt, response, label in table.rows
        ]
        self._run.log({table.key: texts}, step=table.step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class TrackioTracker:
    """Writes one run to Trackio's database on this machine, in $TRACKIO_DIR; `trackio show` displays it.

    With `is_resumed`, the last run with that name continues. Raises ConfigError if trackio is not installed.
    """

    def __init__(self, flags: TrackFlags, config: Mapping[str, Any], *, is_resumed: bool = False) -> None:
        trackio = import_optional("trackio", "--use-trackio")
        self._trackio: Any = trackio
        self._run: Any = trackio.init(
            project=flags.tracker_project,
            name=flags.run_name,
            config=dict(config),
            resume="allow" if is_resumed else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record one step, without non-finite values."""
        self._run.log(finite(metrics), step=step)

    def log_samples(self, table: SampleTable) -> None:
        """Record a table of samples."""
        self._run.log({table.key: self._trackio.Table(columns=list(COLUMNS), data=table.rows)}, step=table.step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
