"""`furlong diff`: flags, hashes of stages and metrics of two run folders."""

from __future__ import annotations

import json

import pytest

from furlong.cli import main
from furlong.errors import ConfigError
from furlong.tools.run_diff import compare_runs, findings


def column(*samples: int, norm: float = 1.0) -> dict:
    return {"hash": f"{sum(samples):016x}", "norm": norm, "samples": "".join(f"{s:08x}" for s in samples)}


def stages(*, tokens=(1, 2), loss=0.5, weight="aa", steps=2) -> list[dict]:
    rows: list[dict] = []
    for step in range(1, steps + 1):
        rows += [
            {"step": step, "stage": "data", "values": {"group_ids": [0, 0], "sample_ids": [40, 41]}},
            {"step": step, "stage": "rollout", "values": {"tokens": column(*(tokens if step == 2 else (1, 2)))}},
            {"step": step, "stage": "loss", "at": 0, "values": {"train/loss": loss}},
            {"step": step, "stage": "parameters", "values": {"w": {"hash": weight, "norm": 1.5}}},
        ]
    return rows


def run_folder(path, *, digests=None, metrics=(), **flags):
    path.mkdir()
    config = {"config": {"optim": {"lr": 0.1, **flags}, "track": {"output_dir": str(path)}}, "sources": {}}
    (path / "config.json").write_text(json.dumps(config))
    if digests is not None:
        (path / "determinism.jsonl").write_text("".join(json.dumps(row) + "\n" for row in digests))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    return path


def test_equal_runs_have_no_difference(tmp_path):
    metrics = [{"step": 1, "train/loss": 0.5, "perf/step_time": 1.0}]
    other = [{"step": 1, "train/loss": 0.5, "perf/step_time": 9.0, "diagnosis/DATA03": 1.0}]
    a = run_folder(tmp_path / "a", digests=stages(), metrics=metrics)
    b = run_folder(tmp_path / "b", digests=stages(), metrics=other)
    found = compare_runs(a, b)
    assert found.is_same
    assert found.num_stages == 8
    assert found.flags == {}  # folders of the runs' own are no difference
    assert findings(found) == []


def test_first_step_stage_tensor_and_sample_are_named_with_both_values(tmp_path):
    a = run_folder(tmp_path / "a", digests=stages())
    b = run_folder(tmp_path / "b", digests=stages(tokens=(1, 3), loss=0.25), lr=0.2)
    # The loss of step 1 differs before the tokens of step 2 do.
    found = compare_runs(a, b)
    assert (found.difference.step, found.difference.stage, found.difference.at) == (1, "loss", 0)
    assert (found.difference.a, found.difference.b) == (0.5, 0.25)
    assert found.flags == {"--lr": (0.1, 0.2)}
    (finding,) = findings(found)
    assert finding.id == "DET01"
    assert all(value in finding.finding for value in ("step 1", "stage loss", "train/loss", "0.5", "0.25"))
    assert "--lr 0.1 / 0.2" in finding.cause

    c = run_folder(tmp_path / "c", digests=stages(tokens=(1, 3)))
    only_tokens = compare_runs(a, c)
    assert only_tokens.difference.samples == [41]
    assert "41" in only_tokens.difference.text()
    assert "--async-buffer-size 0" in findings(only_tokens)[0].remedy


def test_line_that_a_crash_cut_off_is_not_read(tmp_path):
    a = run_folder(tmp_path / "a", digests=stages())
    b = run_folder(tmp_path / "b", digests=stages(steps=1))
    with (b / "determinism.jsonl").open("a") as file:
        file.write('{"step":2,"stage":"da')
    found = compare_runs(a, b)
    assert found.num_stages == 4
    assert found.difference is None


def test_metrics_differ_from_a_step_on_by_at_most_so_much(tmp_path):
    def rows(*losses):
        return [{"step": i, "train/loss": loss, "same": 1, "selftest/ref_kl": loss} for i, loss in enumerate(losses, 1)]

    a = run_folder(tmp_path / "a", metrics=rows(1.0, 2.0, 4.0))
    b = run_folder(tmp_path / "b", metrics=rows(1.0, 2.2, 8.0))
    (loss,) = compare_runs(a, b).metrics
    assert (loss.step, loss.name, loss.a, loss.b, loss.largest) == (2, "train/loss", 2.0, 2.2, 0.5)
    assert compare_runs(a, b, rtol=0.5).metrics == []
    (finding,) = findings(compare_runs(a, b))
    assert "--debug-determinism" in finding.remedy


def test_run_with_fewer_steps_is_a_warning(tmp_path):
    a = run_folder(tmp_path / "a", metrics=[{"step": 1, "x": 1.0}, {"step": 2, "x": 1.0}])
    b = run_folder(tmp_path / "b", metrics=[{"step": 1, "x": 1.0}])
    (finding,) = findings(compare_runs(a, b))
    assert finding.severity == "warning"
    assert finding.evidence["steps"] == (2, 1)


def test_command_prints_and_exits_with_what_it_found(tmp_path, capsys):
    a = run_folder(tmp_path / "a", digests=stages(), metrics=[{"step": 1, "x": None}])
    b = run_folder(tmp_path / "b", digests=stages(weight="bb"), metrics=[{"step": 1, "x": 1.0}])
    assert main(["diff", str(a), str(a), "--json"]) == 0
    same = json.loads(capsys.readouterr().out)["comparison"]
    assert (same["is_same"], same["num_stages"], same["steps"]) == (True, 8, [1, 1])
    assert main(["diff", str(a), str(b)]) == 1
    out = capsys.readouterr().out
    assert all(value in out for value in ("[DET01] step 1", "aa (norm 1.5)", "bb (norm 1.5)"))
    assert main(["diff", str(a), str(b), "--json"]) == 1
    other = json.loads(capsys.readouterr().out)["comparison"]
    assert (other["difference"]["stage"], other["metrics"][0]["largest"]) == ("parameters", None)


def test_a_folder_that_is_not_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        compare_runs(tmp_path, tmp_path)
    assert main(["diff", str(tmp_path), str(tmp_path)]) == 2
