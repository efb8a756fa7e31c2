"""`furlong reproduce` as its user runs it, at a reduced budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from furlong.cli import main

pytestmark = pytest.mark.nightly  # two training runs in processes


def test_a_row_runs_over_seeds_and_is_not_run_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["reproduce", "grpo", "--steps", "1", "--seeds", "1", "2", "--parallel", "2", "--out", str(tmp_path)]
    assert main(words) == 0
    assert capsys.readouterr().out.count("furlong train ") == 2
    result = json.loads((tmp_path / "grpo" / "result.json").read_text())
    assert (result["steps"], result["seeds"], result["num_problems"]) == (1, [1, 2], 300)
    assert result["before"]["low"] < 0.35 < result["before"]["high"]
    assert [step for step, _ in result["curves"]["eval/held_out"]["1"]] == [0, 1]
    assert "<polyline" in (tmp_path / "grpo" / "curve.svg").read_text()

    assert main([*words, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)["grpo"]
    assert (again["after"], again["agrees"]) == (result["after"], None)

    assert main([*words, "--steps", "2"]) == 2
    assert "choose another --out" in capsys.readouterr().err


def test_a_row_that_fails_is_recorded_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.exit(7)\n")
    assert main(["reproduce", "grpo", "--steps", "1", "--seeds", "1", "--out", str(tmp_path / "out")]) == 1
    result = json.loads((tmp_path / "out" / "grpo" / "result.json").read_text())
    assert result["status"] == "failed"
    assert result["reason"].endswith("SystemExit: 7")


def test_a_row_is_stopped_at_its_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(60)\n")
    words = ["reproduce", "grpo", "--seeds", "1", "2", "--row-limit", "0.3", "--out", str(tmp_path / "out")]
    assert main(words) == 1
    result = json.loads((tmp_path / "out" / "grpo" / "result.json").read_text())
    assert result["status"] == "failed"
    assert result["reason"].startswith("stopped at the time limit after 0 s, see ")
    assert not (tmp_path / "out" / "grpo" / "seed-2").exists()


@pytest.mark.parametrize(("flag", "value"), [("--parallel", "0"), ("--row-limit", "0"), ("--row-limit", "nan")])
def test_limits_that_no_row_can_keep_are_refused(
    flag: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["reproduce", "grpo", flag, value, "--out", str(tmp_path)]) == 2
    assert f"{flag} {value}" in capsys.readouterr().err
