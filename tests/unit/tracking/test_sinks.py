from __future__ import annotations

import dataclasses
import io
import itertools
import json
import logging
import math
import os
import re
import subprocess
import sys
import time
import types

import pytest

from furlong.config.sections import TrackFlags
from furlong.core.progress import Progress, progress
from furlong.core.tracing import heartbeat
from furlong.errors import ConfigError
from furlong.machine import LOG_FORMAT
from furlong.run.records import _terminal_handler
from furlong.tracking.console import ConsoleTracker, Terminal, duration, format_header, format_line, show_progress
from furlong.tracking.run_files import EventLog, StepFile
from furlong.tracking.trackers import JsonlTracker, TensorBoardTracker, Trackers, WandbTracker

STEP = {
    "rollout/raw_reward": 0.51234,
    "rollout/response_len/mean": 100.0,
    "rollout/truncated_ratio": 0.25,
    "train/loss": -0.01,
    "train/grad_norm": 1.5,
    "train/ppo_kl": 1e-4,
    "perf/tokens_per_gpu_per_sec": 12345.6,
    "perf/step_time": 3.21,
}


def rows(path):
    return [json.loads(each) for each in path.read_text().splitlines()]


def write_steps(path, *steps, value=0.0):
    tracker = JsonlTracker(path)
    for step in steps:
        tracker.log(step, {"train/loss": value})
    tracker.close()


def test_metrics_jsonl_has_one_object_per_step_at_once(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, {"train/loss": 0.5, "train/grad_norm": math.nan})
    assert rows(path) == [{"step": 1, "train/loss": 0.5, "train/grad_norm": None}]
    tracker.log(2, {"train/loss": 0.25})
    tracker.close()
    assert [row["step"] for row in rows(path)] == [1, 2]


def test_a_resumed_run_moves_repeated_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 0, 1, 2, 3, 4)
    write_steps(path, 3, 4, 5, value=1.0)
    assert [(row["step"], row["train/loss"]) for row in rows(path)] == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1)]
    assert [row["step"] for row in rows(tmp_path / "metrics.rolled_back.jsonl")] == [3, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.rolled_back.jsonl"]


@pytest.mark.parametrize("crash_at", range(1, 7))
def test_a_crash_while_rows_are_moved_loses_none_and_repeats_none(tmp_path, monkeypatch, crash_at):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 2, 3)
    write_steps(path, 3, 4)  # something is rolled back already
    calls = itertools.count(1)

    def crashing(function):
        def call(*args):
            if next(calls) == crash_at:
                raise OSError(28, "No space left on device")
            return function(*args)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", crashing(os.fsync))
        patch.setattr(os, "replace", crashing(os.replace))
        with pytest.raises(OSError, match="No space"):
            write_steps(path, 2)
    write_steps(path, 2)
    assert [row["step"] for row in rows(path)] == [1, 2]
    assert [row["step"] for row in rows(tmp_path / "metrics.rolled_back.jsonl")] == [3, 2, 3, 4]


def test_opening_without_writing_changes_nothing_and_continuing_moves_nothing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 2)
    JsonlTracker(path).close()
    write_steps(path, 3)
    assert [row["step"] for row in rows(path)] == [1, 2, 3]
    assert not (tmp_path / "metrics.rolled_back.jsonl").exists()


def test_an_incomplete_row_after_a_crash_is_moved(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1)
    with path.open("a") as file:
        file.write('{"step":2,"train/lo')
    write_steps(path, 2)
    assert [row["step"] for row in rows(path)] == [1, 2]


def test_a_failed_write_leaves_complete_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = StepFile(path)
    file.append(1, {"a": 1.0})
    real = file._file
    assert real is not None

    class Full:
        def write(self, data):
            if real.write(data[:5]):
                raise OSError(28, "No space left on device")

        def fileno(self):
            return real.fileno()

    file._file = Full()  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space"):
        file.append(2, {"a": 2.0})
    file._file = real
    file.append(3, {"a": 3.0})
    file.close()
    assert [row["step"] for row in rows(path)] == [1, 3]


def accumulated(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_reads_back_what_was_written(tmp_path):
    tracker = TensorBoardTracker(tmp_path)
    tracker.log(1, {"train/loss": 0.5, "eval/aime": 0.25})
    tracker.log(2, {"train/loss": 0.125})
    assert accumulated(tmp_path)["train/loss"] == [(1, 0.5), (2, 0.125)]
    tracker.close()
    assert accumulated(tmp_path)["eval/aime"] == [(1, 0.25)]


def test_tensorboard_forgets_the_steps_that_a_resumed_run_repeats(tmp_path):
    for steps, value in (((1, 2, 3, 4), 0.0), ((3, 4, 5), 1.0)):
        tracker = TensorBoardTracker(tmp_path)
        for step in steps:
            tracker.log(step, {"train/loss": value})
        tracker.close()
    assert accumulated(tmp_path)["train/loss"] == [(1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0), (5, 1.0)]


def test_the_tensorboard_tracker_does_not_import_tensorflow(tmp_path):
    program = (
        "import sys; from pathlib import Path; from furlong.tracking.trackers import TensorBoardTracker; "
        f"t = TensorBoardTracker(Path({str(tmp_path)!r})); t.log(1, {{'a': 1.0}}); t.close(); "
        "print([m for m in ('tensorflow', 'tensorboard.summary') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_columns_of_line_and_header_are_aligned():
    shown = format_line(12, STEP)
    assert shown.split() == ["12", "0.512", "100.0", "0.25", "-0.0100", "1.500", "1.0e-04", "12,346", "3.21"]
    assert len(shown) == len(format_header())
    for title, cell in (("reward", "0.512"), ("grad", "1.500"), ("time", "3.21")):
        assert format_header().index(title) + len(title) == shown.index(cell) + len(cell)


def test_unmeasured_metrics_are_dashes_and_nan_is_shown():
    assert format_line(1, {"train/loss": math.nan}).split() == ["1", "-", "-", "-", "nan", "-", "-", "-", "-"]


def test_evaluations_follow_the_columns():
    metrics = {
        "eval/aime": 0.5,
        "eval/aime-pass@2": 0.7,
        "eval/aime-truncated_ratio": 0,
        "eval/aime/response_len/mean": 3,
    }
    assert format_line(1, metrics).endswith("-  eval aime=0.500")
    assert format_line(1, {"eval/aime-2024": 0.5}).endswith(" eval aime-2024=0.500")


def test_without_a_terminal_lines_go_to_the_log(caplog):
    tracker = ConsoleTracker(num_steps=30, console=Terminal(file=io.StringIO()))
    with caplog.at_level(logging.INFO, logger="furlong"):
        for step in range(21):
            tracker.log(step, STEP)
    tracker.close()
    assert caplog.messages[0] == format_header()
    assert caplog.messages[1].split()[0] == "0"
    assert caplog.messages.count(format_header()) == 2
    assert len(caplog.messages) == 23


def test_log_lines_fit_into_100_columns(caplog):
    tracker = ConsoleTracker(console=Terminal(file=io.StringIO()))
    with caplog.at_level(logging.INFO, logger="furlong"):
        tracker.log(123_456, STEP | {f"eval/set_{number}": 0.5 for number in range(9)})
    form = logging.Formatter(LOG_FORMAT, datefmt="%H:%M:%S")
    lines = [line for record in caplog.records for line in form.format(record).splitlines()]
    assert len(lines) == 4
    assert max(map(len, lines)) <= 100
    assert lines[2].startswith("        eval set_0=0.500  eval set_1=0.500")
    assert "".join(lines).count("eval set_") == 9


def test_terminal_lines_are_above_the_progress_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    console = Terminal(file=out, force_terminal=True, width=120)
    with show_progress(console):
        tracker = ConsoleTracker(num_steps=4, console=console)
        with progress.phase("rollout", total=8, unit="samples"):
            progress.advance(3)
            tracker.log(1, STEP)
            tracker.log(2, STEP)
            while "rollout" not in out.getvalue():  # the bar is drawn four times a second
                time.sleep(0.005)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "0.512" in shown
    assert re.search(r"2/4 0:00:0\d .*rollout 3/8 samples", shown)


def test_without_a_terminal_what_the_run_does_is_a_line_each_time(caplog):
    with caplog.at_level(logging.INFO, logger="furlong"), show_progress(Terminal(file=io.StringIO()), every_s=0.01):
        ConsoleTracker(num_steps=3, console=Terminal(file=io.StringIO()))
        with progress.phase("training", unit="micro-batches", beat="micro-batch"):
            heartbeat.beat("micro-batch")
            while not caplog.messages or "training" not in caplog.messages[-1]:
                time.sleep(0.005)
    assert caplog.messages[-1].startswith("step 0 of 3; training 1/")  # of how many is known from earlier beats


def test_the_time_left_follows_from_recent_steps(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("furlong.core.progress.time.monotonic", lambda: now[0])
    run = Progress()
    run.start(10)
    for step in (1, 2, 3):
        run.step(step)
        now[0] += 4
    assert run.seconds_left() == 7 * 4 - 4  # step 4 has run for 4 s
    with run.phase("training"):
        now[0] += 65
    with run.phase("training"):
        now[0] += 2
        assert run.text() == "training, 2 s (65 s last time)"
    assert [duration(seconds) for seconds in (9.6, 250, 7500)] == ["10 s", "4:10 min", "2:05 h"]


def test_log_lines_of_a_terminal_are_above_the_bar_and_warnings_are_marked(monkeypatch):
    out = io.StringIO()
    console = Terminal(file=out, force_terminal=True, width=100)
    monkeypatch.setattr("furlong.run.records.terminal", lambda: console)
    monkeypatch.setattr(logging.getLogger("furlong"), "handlers", [_terminal_handler(is_verbose=False)])
    monkeypatch.setattr(logging.getLogger("furlong"), "level", logging.INFO)
    tracker = ConsoleTracker(num_steps=30, console=console)
    for step in range(1, 31):
        tracker.log(step, STEP)
        logging.getLogger("furlong.loop").warning("checkpoint %d", step)
        logging.getLogger("furlong.weight_sync.transports.disk").info("of every step")  # for the file
    tracker.close()
    shown = out.getvalue()
    assert shown.count("\x1b[33mwarning: checkpoint ") == shown.count("0.512") == 30
    assert "of every step" not in shown
    assert shown.count(format_header()) == 3  # it stays on the screen


def test_wide_evaluations_are_below_the_columns():
    out = io.StringIO()
    tracker = ConsoleTracker(num_steps=2, console=Terminal(file=out, force_terminal=True, width=80))
    tracker.log(1, STEP | {f"eval/set_{number}": 0.5 for number in range(4)})
    tracker.close()
    assert "\n        eval set_0=0.500  eval set_1=0.500" in out.getvalue()


def test_events_are_objects_with_a_time(tmp_path):
    events = EventLog(tmp_path / "run" / "events.jsonl")
    events.write("saved", step=3, folder=tmp_path, seconds=0.5)
    events.close()
    (event,) = rows(tmp_path / "run" / "events.jsonl")
    assert event.pop("time") > 1e9
    assert event == {"event": "saved", "step": 3, "folder": str(tmp_path), "seconds": 0.5}


def test_an_event_after_an_incomplete_line_is_complete(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event":"sta')
    for _ in range(2):
        events = EventLog(path)
        events.write("start")
        events.close()
    torn, *whole = path.read_bytes().splitlines()
    assert (torn, [json.loads(line)["event"] for line in whole]) == (b'{"event":"sta', ["start", "start"])


def test_an_event_that_cannot_be_written_is_logged_once_and_counted(tmp_path, caplog):
    events = EventLog(tmp_path / "events.jsonl")
    events._file.close()
    events._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    events.write("a")
    events.write("b")
    events.close()
    assert events.failures == 2
    assert len(caplog.messages) == 1


class Recorder:
    def __init__(self, fails=()):
        self.steps, self.fails, self.closed = [], fails, False

    def log(self, step, metrics):
        if step in self.fails:
            raise OSError(28, "No space left on device")
        self.steps.append(step)

    def close(self):
        self.closed = True


def test_a_failing_tracker_is_reported_once_and_does_not_affect_the_others(caplog):
    good, bad = Recorder(), Recorder(fails=(1, 2))
    trackers = Trackers({"bad": bad, "good": good})
    for step in (1, 2, 3):
        trackers.log(step, {})
    assert (good.steps, bad.steps) == ([1, 2, 3], [3])
    assert trackers.failures == {"bad": 2}
    assert [m for m in caplog.messages if "No space left" in m] == caplog.messages
    trackers.close()
    assert good.closed
    assert bad.closed
    assert caplog.messages[-1] == "tracker bad failed 2 times in this run"


def test_a_tracker_that_cannot_be_opened_is_left_out_but_a_wrong_flag_is_an_error(caplog):
    def unreachable():
        raise ConnectionError("no route to host")

    def wrong():
        raise ConfigError("--use-wandb needs the package wandb")

    trackers = Trackers.open({"wandb": unreachable, "good": Recorder})
    trackers.log(1, {})
    assert trackers.failures == {"wandb": 1}
    assert "no route to host" in caplog.messages[0]
    with pytest.raises(ConfigError, match="--use-wandb"):
        Trackers.open({"wandb": wrong})


@pytest.fixture
def fake_wandb(monkeypatch):
    module = types.ModuleType("wandb")
    calls = types.SimpleNamespace(login=[], init=[], metrics={}, records=[], finished=0)

    class Run:
        id = "run7"

        def define_metric(self, name, step_metric=None):
            calls.metrics[name] = step_metric

        def log(self, record):
            calls.records.append(record)

        def finish(self):
            calls.finished += 1

    def init(**options):
        calls.init.append(options)
        return Run()

    module.init = init
    module.Table = lambda **table: table
    module.login = lambda **options: calls.login.append(options)
    module.errors = types.SimpleNamespace(UsageError=type("UsageError", (Exception,), {}))
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def test_wandb_gets_slimes_settings_and_axes(fake_wandb, tmp_path):
    tracker = WandbTracker(
        TrackFlags(
            wandb_project="p", wandb_group="g", wandb_team="t", wandb_mode="online", wandb_host="https://w",
            wandb_key="secret", wandb_dir=str(tmp_path / "w"),
        ),
        {"lr": 1},
    )  # fmt: skip
    tracker.log(3, {"train/loss": 0.5, "eval/aime": 0.1, "train/kl_loss": math.nan})
    tracker.close()
    options = fake_wandb.init[0]
    assert fake_wandb.login == [{"key": "secret", "host": "https://w"}]
    assert options["entity"] == "t"
    assert options["group"].startswith("g_")
    assert options["group"] == options["name"]
    assert "secret" not in str(options)
    assert fake_wandb.metrics["perf/*"] == "rollout/step"
    assert fake_wandb.records == [{"train/loss": 0.5, "eval/aime": 0.1, "train/step": 3, "eval/step": 3}]
    assert fake_wandb.finished == 1


def test_wandb_continues_a_run_without_a_suffix_and_offline_without_login(fake_wandb):
    flags = TrackFlags(wandb_group="g", wandb_run_id="run7", wandb_mode="offline", wandb_key="secret")
    WandbTracker(dataclasses.replace(flags, wandb_always_use_train_step=True))
    options = fake_wandb.init[0]
    assert (options["id"], options["resume"], options["group"]) == ("run7", "allow", "g")
    assert fake_wandb.login == []
    assert fake_wandb.metrics["rollout/*"] == "train/step"
    WandbTracker(TrackFlags(wandb_group="g", wandb_random_suffix=False))
    assert fake_wandb.init[1]["group"] == "g"


def test_wandb_that_is_not_installed_is_a_configuration_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'furlong-rl\[wandb\]'"):
        WandbTracker(TrackFlags())
