"""The commands as a user types them: real processes in another folder, with an empty home and no network."""

from __future__ import annotations

import json
import subprocess
import sys

from runs import finish, flags, rows, start, write_prompts


def test_script_trains_from_another_folder_with_an_empty_home(model, tmp_path):
    data = write_prompts(tmp_path / "prompts.jsonl", 8)
    work = tmp_path / "work"
    argv = flags(model, data, "here", no_use_tensorboard=None, num_threads=None, output_dir=None, num_rollout=1)
    code, out, err = finish(start(argv, work, script="train.py"))
    assert code == 0, err
    assert out == ""
    folder = work / "outputs" / "grpo-tiny"
    assert [row["step"] for row in rows(folder)] == [1]
    assert {"config.json", "ledger.jsonl", "metrics.jsonl", "run.log"} <= {p.name for p in folder.iterdir()}
    assert list(folder.glob("events.out.tfevents.*"))
    assert [p.name for p in (work / "home").iterdir()] == []
    assert "Warning" not in err


def test_module_reports_and_diagnoses(model, tmp_path):
    data = write_prompts(tmp_path / "prompts.jsonl", 8)
    work = tmp_path / "work"
    code, out, err = finish(start(["doctor", "--json", *flags(model, data, "run", lr="fast")], work))
    assert (code, err) == (1, "")
    findings = json.loads(out)["findings"]
    assert [(f["id"], f["finding"]) for f in findings] == [("CFG05", "--lr: got 'fast', expected a number")]
    head = subprocess.run(
        f"{sys.executable} -m furlong train --help | head -n 1", cwd=work, shell=True, executable="/bin/bash",
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert head.stderr == ""
