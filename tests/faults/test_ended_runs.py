"""Runs that failed or were killed: what they print, and what `furlong doctor --run` says of their folder."""

from __future__ import annotations

import json

from diagnosed_runs import arithmetic, run
from faults_marker import fault, typed
from furlong import cli
from furlong.trainers.fsdp import FsdpBackend
from runs import Child


def examine(folder, capsys):
    capsys.readouterr()
    typed("furlong doctor --run", folder)
    code = cli.main(["doctor", "--run", str(folder), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_healthy_run_is_said_to_be(tmp_path, capsys):
    assert run(tmp_path / "run", num_rollout=1) == (0, {})
    code, result = examine(tmp_path / "run", capsys)
    assert (code, result["ok"], result["status"], result["findings"]) == (0, True, "finished", [])
    assert cli.main(["doctor", "--run", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.endswith("run: finished after 1 of 1 steps\nnothing found\n")


@fault("MEM02")
def test_out_of_memory_is_explained_after_the_error_and_from_the_folder(tmp_path, capsys, monkeypatch):
    stats = FsdpBackend._stats

    def full(self, *parts, **wanted):
        if wanted["entropy"]:
            raise MemoryError("Cannot allocate memory")
        return stats(self, *parts, **wanted)

    monkeypatch.setattr(FsdpBackend, "_stats", full)
    try:
        run(tmp_path / "run", max_tokens_per_gpu=512, use_dynamic_batch_size=True)
    except MemoryError as error:
        [note] = error.__notes__
    assert note.startswith("[MEM02] the machine's own memory ran out in forward and backward of training")
    assert "--max-tokens-per-gpu 256 (it is 512)" in note
    assert "[MEM02]" in (tmp_path / "run" / "run.log").read_text()
    code, result = examine(tmp_path / "run", capsys)
    assert (code, result["status"], [f["id"] for f in result["findings"]]) == (1, "failed", ["MEM02"])
    assert result["error"] == "MemoryError: Cannot allocate memory"
    monkeypatch.undo()
    assert run(tmp_path / "mended", max_tokens_per_gpu=256, use_dynamic_batch_size=True) == (0, {})


@fault("NUM04")
def test_an_error_of_the_engine_is_explained_on_the_terminal(tmp_path, capsys):
    code, _ = run(tmp_path / "run", lr=1e30, clip_grad=0)
    printed = capsys.readouterr().err.split("furlong: EngineError: ")[1]
    assert code == 1
    assert "[NUM04] the engine got weights that are not finite" in printed
    code, result = examine(tmp_path / "run", capsys)
    assert (code, result["status"]) == (1, "failed")
    assert "NUM04" in [f["id"] for f in result["findings"]]


@fault("KILL01")
def test_a_killed_run_is_recognised_and_goes_on(tmp_path, capsys, forked):
    argv = arithmetic(tmp_path / "run", num_rollout=200, save=tmp_path / "save", save_interval=1)
    child = Child(forked, argv, tmp_path)
    child.wait_for_step(60)
    code, result = examine(tmp_path / "run", capsys)
    assert (code, result["status"]) == (0, "running")
    child.wait_for_step(60)
    child.kill()
    code, result = examine(tmp_path / "run", capsys)
    assert (code, result["status"], [f["id"] for f in result["findings"]]) == (1, "killed", ["KILL01"])
    assert result["last_words"]
    goes_on = {"num_rollout": result["step"] + 1, "save": tmp_path / "save", "load": tmp_path / "save"}
    assert run(tmp_path / "run", **goes_on)[0] == 0
    code, result = examine(tmp_path / "run", capsys)
    assert (code, result["status"]) == (0, "finished")


def test_a_folder_that_is_no_run_is_named(tmp_path, capsys):
    assert cli.main(["doctor", "--run", str(tmp_path)]) == 2
    assert "no config.json" in capsys.readouterr().err
