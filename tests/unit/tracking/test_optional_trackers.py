"""Trackio, MLflow and SwanLab: what they are told, and with the real packages, where installed, what they write."""

import json
import math
import sqlite3
import sys
import types
from contextlib import closing

import pytest

from furlong.config.sections import TrackFlags
from furlong.core.sample import Sample, Status
from furlong.errors import ConfigError
from furlong.tracking.trackers import (
    COLUMNS,
    MlflowTracker,
    SampleTable,
    SampleTables,
    SwanlabTracker,
    TrackioTracker,
    WandbTracker,
)

METRICS = {"train/loss": 0.5, "eval/x-pass@2": 0.25, "train/kl_loss": math.nan}
FLAGS = TrackFlags(run_name="first", tracker_project="sums")
HOSTILE = "| a |\n# b\n\n<script>c</script> \N{SNOWMAN}"


def table(step: int = 1) -> SampleTable:
    """A table of two samples, one of which has no reward."""
    samples = [Sample(group_index=0, index=i, prompt="1+1=", tokens=[1], response=HOSTILE) for i in range(3)]
    samples[0].reward, samples[0].status = 1.0, Status.COMPLETED
    samples[1].reward = {"right": 1}
    tables = SampleTables(2)
    tables.add(step, "rollout", samples)
    (taken,) = tables.take(step)
    return taken


class Recorder:
    """A run of Trackio or SwanLab."""

    def __init__(self):
        self.options, self.records, self.num_finished = {}, [], 0

    def init(self, **options):
        self.options = options
        return self

    def log(self, metrics, step):
        self.records.append((step, metrics))

    def finish(self):
        self.num_finished += 1


def installed(monkeypatch, name):
    recorder = Recorder()
    module = types.SimpleNamespace(init=recorder.init, Table=dict, Text=lambda text, caption: (text, caption))
    monkeypatch.setitem(sys.modules, name, module)
    return recorder


@pytest.mark.parametrize("is_resumed", [False, True])
def test_trackio_gets_project_name_and_finite_metrics(monkeypatch, is_resumed):
    run = installed(monkeypatch, "trackio")
    tracker = TrackioTracker(FLAGS, {"lr": 1}, is_resumed=is_resumed)
    tracker.log(3, METRICS)
    tracker.close()
    assert (run.options["project"], run.options["name"], run.options["config"]) == ("sums", "first", {"lr": 1})
    assert run.options["resume"] == ("allow" if is_resumed else "never")
    assert run.records == [(3, {"train/loss": 0.5, "eval/x-pass@2": 0.25})]
    assert run.num_finished == 1


def test_swanlab_writes_to_the_run_directory(monkeypatch, tmp_path):
    run = installed(monkeypatch, "swanlab")
    tracker = SwanlabTracker(FLAGS, {"lr": 1}, tmp_path)
    tracker.log(3, METRICS)
    tracker.close()
    assert (run.options["mode"], run.options["log_dir"]) == ("local", str(tmp_path / "swanlog"))
    assert run.records == [(3, {"train/loss": 0.5, "eval/x-pass@2": 0.25})]
    assert run.num_finished == 1


@pytest.mark.parametrize(
    ("package", "build"),
    [
        ("trackio", lambda folder: TrackioTracker(FLAGS, {})),
        ("mlflow", lambda folder: MlflowTracker(FLAGS, {})),
        ("swanlab", lambda folder: SwanlabTracker(FLAGS, {}, folder)),
    ],
)
def test_a_package_that_is_not_installed_is_a_configuration_error(monkeypatch, tmp_path, package, build):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"--use-{package}.*pip install 'furlong-rl\[{package}\]'"):
        build(tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what MLflow calls in newer SQLAlchemy and pandas
def test_mlflow_itself_stores_metrics_flags_and_samples(tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    flags = TrackFlags(run_name="first", tracker_project=f"sums-{tmp_path.name}", mlflow_tracking_uri=uri)
    client = mlflow.MlflowClient(tracking_uri=uri)
    client.create_experiment(flags.tracker_project, artifact_location=f"file://{tmp_path}/artifacts")
    tracker = MlflowTracker(flags, {"lr": 1e-4, "text": "x" * 10_000} | {f"flag_{i}": i for i in range(150)})
    for step in (1, 2):
        tracker.log(step, METRICS | {"train/loss": 1.0 / step})
        tracker.log_samples(table(step))
    tracker.close()
    (run,) = client.search_runs([client.get_experiment_by_name(flags.tracker_project).experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["lr"] == "0.0001"
    assert len(run.data.params) == 152
    assert run.data.metrics == {"train/loss": 0.5, "eval/x-pass_2": 0.25}
    assert [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")] == [1, 2]
    stored = json.loads(next(tmp_path.glob("artifacts/**/samples/rollout-000000.json")).read_text())
    assert stored["columns"] == list(COLUMNS)
    assert [(row[0], row[3], row[7]) for row in stored["data"]] == [
        (step, reward, HOSTILE) for step in (1, 2) for reward in (1.0, '{"right": 1}')
    ]


def test_trackio_itself_stores_metrics_and_samples(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    pytest.importorskip("trackio", reason="the extra trackio is not installed")
    tracker = TrackioTracker(FLAGS, {"lr": 1e-4})
    tracker.log(1, METRICS)
    tracker.log_samples(table())
    tracker.close()
    with closing(sqlite3.connect(tmp_path / "sums.db")) as db:
        rows = [json.loads(row[0]) for row in db.execute("select metrics from metrics order by id")]
    assert rows[0]["train/loss"] == 0.5
    (shown,) = [row["samples/rollout"] for row in rows if "samples/rollout" in row]
    assert [(row["reward"], row["response"]) for row in shown["_value"]] == [(1.0, HOSTILE), ('{"right": 1}', HOSTILE)]


def test_swanlab_itself_writes_its_log_and_samples(tmp_path):
    pytest.importorskip("swanlab", reason="the extra swanlab is not installed")
    tracker = SwanlabTracker(FLAGS, {"lr": 1e-4}, tmp_path)
    tracker.log(1, METRICS)
    tracker.log_samples(table())
    tracker.close()
    assert list(tmp_path.glob("swanlog/run-*/*.swanlab"))
    texts = [path.read_text() for path in tmp_path.glob("swanlog/run-*/**/*.txt")]
    assert f"1+1=\n---\n{HOSTILE}" in texts


def test_wandb_itself_stores_metrics_and_samples(tmp_path):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    tracker = WandbTracker(
        TrackFlags(wandb_project="sums", wandb_mode="offline", wandb_dir=str(tmp_path)), {"lr": 1e-4}
    )
    tracker.log(1, METRICS)
    tracker.log_samples(table())
    tracker.close()
    (path,) = tmp_path.glob("wandb/offline-run-*/files/media/table/samples/rollout_*.table.json")
    stored = json.loads(path.read_text())
    assert stored["columns"] == list(COLUMNS)
    assert [row[7] for row in stored["data"]] == [HOSTILE, HOSTILE]
