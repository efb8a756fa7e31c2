"""The commands as a user types them: real processes in another folder, with an empty home and no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import psutil
import pytest

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


STARTS_PROCESSES = """
import asyncio, subprocess

started = []

async def generate(args, sample, sampling_params):
    if not started:
        started.append("once")
        started.append(await asyncio.create_subprocess_exec("sleep", "{seconds}"))
        started.append(subprocess.Popen(["sleep", "{seconds}"], start_new_session=True))
    sample.append_response_tokens(tokens=[5, 6], log_probs=[-1.0, -1.0], text="ab")
    return sample
"""


@pytest.mark.nightly
def test_processes_of_a_generate_function_end_with_the_run(model, tmp_path):
    data = write_prompts(tmp_path / "prompts.jsonl", 8)
    seconds = str(10**7 + os.getpid())
    module = tmp_path / "module.py"
    module.write_text(STARTS_PROCESSES.format(seconds=seconds))
    argv = flags(model, data, "run", num_rollout=1, custom_generate_function_path=f"{module}:generate")
    code, _, err = finish(start(["train", *argv], tmp_path / "work"))
    assert code == 0, err
    left = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", seconds]]
    for process in left:
        process.kill()
    assert not left
    (line,) = [line for line in err.splitlines() if f"sleep {seconds}" in line]
    assert "killed 2 processes" in line
