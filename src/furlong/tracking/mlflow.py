"""Tracker for MLflow, an optional dependency."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import Any

from furlong.config.sections import TrackFlags
from furlong.tracking.optional_package import finite, import_optional
from furlong.tracking.sample_tables import SampleTable

PARAM_CHARS = 6000  # MLflow's limit of a value
PARAMS_PER_CALL = 100
METRICS_PER_CALL = 1000
STEPS_PER_TABLE = 200
NOT_ALLOWED = re.compile(r"[^\w\-./ :]")  # in names of metrics: `eval/x-pass@2` becomes `eval/x-pass_2`


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
        params = [self._entities.Param(name, str(value)[:PARAM_CHARS]) for name, value in config.items()]
        for start in range(0, len(params), PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=params[start : start + PARAMS_PER_CALL])

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record one step, without non-finite values."""
        now = int(time.time() * 1000)
        records = [
            self._entities.Metric(NOT_ALLOWED.sub("_", name), value, now, step)
            for name, value in finite(metrics).items()
        ]
        for start in range(0, len(records), METRICS_PER_CALL):
            self._client.log_batch(self._run_id, metrics=records[start : start + METRICS_PER_CALL])

    def log_samples(self, table: SampleTable) -> None:
        """Append a table of samples to an artifact, which MLflow shows as a table of `STEPS_PER_TABLE` steps."""
        first = table.step // STEPS_PER_TABLE * STEPS_PER_TABLE
        name = f"{table.key}-{first:06d}.json"  # MLflow reads and writes the whole file for each step
        self._client.log_table(self._run_id, data=table.columns(), artifact_file=name)

    def close(self) -> None:
        """Finish the run."""
        self._client.set_terminated(self._run_id)
