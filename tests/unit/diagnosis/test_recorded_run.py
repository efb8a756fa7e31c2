"""Reports read any content of a run's folder: what is damaged is counted with its line, and the rest is read."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import orjson
import pytest

from furlong.config import parse
from furlong.config.sections import Config
from furlong.diagnosis.monitors import MONITORS
from furlong.diagnosis.monitors.monitor import EventMonitor
from furlong.diagnosis.postmortem.recorded_run import config_from_sections
from furlong.diagnosis.postmortem.run_examination import examine
from furlong.tools.run_diff import summarize

TIMED = {"stages": 1, "layers_s": [0.2, 0.6], "per_cost_s": [0.2, 0.6], "slowest": 1, "place": "rank 1"}
FAILURE = {"id": "NUM04", "severity": "error", "finding": "f", "cause": "c", "remedy": "r", "evidence": {}}
EVENTS: list[dict[str, Any]] = [
    {"event": "start", "version": "0.0.1", "process": 1, "machine": "a"},
    {"event": "weights_compared", "version": 1, "tensors": 2, "changed": 1, "unchanged": ["a"]},
    {"event": "ranks_timed", "rollout": 1, "seconds": 1.0, **TIMED},
    {"event": "engines_connected", "num": 1, "kv_cache_dtypes": ["auto"]},
    {"event": "engine_lost", "engine": 0, "url": "u", "reason": "r", "why": "w", "code": ""},
    {"event": "engine_silent", "url": "u", "running": 1, "asked": "/", "seconds": 40.0, "health": "h"},
    {"event": "weight_update_timeout", "version": 1, "seconds": 3, "bucket": 0, "missing": ["u"], "transport": "ipc"},
    {"event": "hang", "seconds": 9.0, "doing": "d", "updates_weights": True, "report": "r", "last": {"step": 1.0}},
    {"event": "blocked", "seconds": 6.0, "where": "a.py:3 generate"},
    {"event": "placement_waiting", "seconds": 40.0, "asked": "8 GPUs", "free": 0, "lacking": ""},
    {"event": "worker_died", "worker": "w", "error": "E", "message": "m"},
    {"event": "step", "step": 1, "seconds": 1.0},
    {"event": "save", "step": 1, "folder": "f", "seconds": 1.0},
    {"event": "failed", "error": "TrainerError", "message": "m", "code": ""},
    {"event": "diagnosis", **FAILURE},
]


def folder_of(path: Path, events: list[dict[str, Any]], rows: int = 2) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(parse(["--hf-checkpoint", "none", "--num-rollout", "9"]).to_json())
    (path / "events.jsonl").write_bytes(b"".join(orjson.dumps({"time": 1.0} | e) + b"\n" for e in events))
    (path / "metrics.jsonl").write_text("".join(f'{{"step":{i + 1},"train/grad_norm":1.0}}\n' for i in range(rows)))
    return path


def read_all(folder: Path) -> list[str]:
    """The ids that all readers of the folder report; none of them may raise."""
    summarize(folder)
    result = examine(folder)
    assert json.dumps(result.record())
    return [each.id for each in result.diagnoses]


def problems(folder: Path) -> str:
    return next((each.finding for each in examine(folder).diagnoses if each.id == "CHECK01"), "")


def test_the_healthy_events_of_this_test_are_read(tmp_path: Path) -> None:
    assert {e["event"] for e in EVENTS} >= {m.event for m in MONITORS if isinstance(m, EventMonitor)}
    assert "CHECK01" not in read_all(folder_of(tmp_path / "run", EVENTS))


@pytest.mark.parametrize("value", [0.0, -1.0, 1e308, -1e308, 5e-324])
def test_extreme_metrics_are_read(tmp_path: Path, value: float) -> None:
    names = [
        "perf/step_time", "perf/update_weights_time", "perf/data_time", "perf/wait_time_ratio", "perf/rollout_time",
        "perf/reward_wait_time", "perf/generate_held_time", "perf/host_memory_frac", "engine/requests/max",
        "engine/requests/mean", "rollout/raw_reward", "rollout/zero_std_frac", "train/grad_norm",
        "rollout/staleness/max", "rollout/staleness/mean", "memory/engine_kept_frac", "memory/trainer_kept_frac",
    ]  # fmt: skip
    folder = folder_of(tmp_path / "run", [EVENTS[0], {"event": "end"}])
    rng = random.Random(0)
    rows = [{name: rng.choice((value, 1.0, 20.0)) for name in names} for _ in range(40)]
    (folder / "metrics.jsonl").write_bytes(
        b"".join(orjson.dumps({"step": i + 1, **row}) + b"\n" for i, row in enumerate(rows))
    )
    read_all(folder)


def test_flags_of_another_type_are_named_and_have_their_default(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run", [EVENTS[0], {"event": "end"}])
    content = json.loads((folder / "config.json").read_text())
    del content["config"]["data"]["num_rollout"]  # another version may lack flags
    (folder / "config.json").write_text(json.dumps(content))
    assert read_all(folder) == []
    content["config"]["data"]["rollout_batch_size"] = "many"
    (folder / "config.json").write_text(json.dumps(content))
    assert read_all(folder) == ["CHECK01"]
    assert "data.rollout_batch_size got" in problems(folder)


def test_every_flag_survives_another_type(tmp_path: Path) -> None:
    sections = json.loads(json.dumps(dataclasses.asdict(Config())))
    assert config_from_sections(sections)[1] == []
    for section, flags in sections.items():
        for wrong in (None, -1, "x", [], {}, [None], 1e300):
            config, _ = config_from_sections({**sections, section: dict.fromkeys(flags, wrong)})
            assert isinstance(config, Config)


def test_a_last_line_that_a_kill_left_is_no_damage_and_a_changed_byte_is(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run", [EVENTS[0], {"event": "step", "step": 1}, {"event": "end"}])
    whole = (folder / "events.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "events.jsonl").write_bytes(whole[0] + whole[1][:9] + b"\n" + whole[2])
    assert "events.jsonl" not in problems(folder)
    (folder / "events.jsonl").write_bytes(whole[0] + b"\x00" + whole[1][1:] + whole[2])
    assert "line 2 of events.jsonl" in problems(folder)
