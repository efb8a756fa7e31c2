from __future__ import annotations

import ast
import dataclasses
import errno
import fcntl
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import furlong
from furlong.cli import _exit_code
from furlong.config.command_line import Resolved, load
from furlong.config.evaluation import KEYS
from furlong.config.flag_spec import flag_specs
from furlong.config.hooks import HOOKS, Hooks
from furlong.config.sections import CheckpointFlags, Config
from furlong.errors import CheckpointError, ConfigError, DataError
from furlong.files.atomic import is_locked
from furlong.files.checkpoint_folder import MANIFEST, TRACKER
from furlong.machine import Threads
from furlong.run.folder import (
    IN_USE,
    LOCK,
    RUN_FILES,
    folder_problems,
    lock_save_folder,
    log_changed_flags,
    run_folder,
)
from furlong.run.launch import _resume_hint, _resume_thread_count, run
from furlong.run.records import log_run
from furlong.tracking.run_files import EventLog
from furlong.tracking.trackers import JsonlTracker
from runs import flags, write_model, write_prompts, write_prompts_bad_beyond_the_preflight

SOURCE = Path(furlong.__file__).parent

JUDGING = {"Problems", "Iterator[str]"}  # what functions of config/ return that find what is wrong
# What is done in any case, beside the shape of the model: such a flag is only judged.
CLAIMS = {
    "accumulate_allreduce_grads_in_fp32",
    "critic_num_gpus_per_node",
    "critic_num_nodes",
    "moe_permute_fusion",
    "moe_token_dispatcher_type",
    "overlap_cpu_optimizer_d2h_h2d",
    "use_distributed_optimizer",
    "use_precision_aware_optimizer",
}


def attributes_read(folder: Path = SOURCE) -> set[str]:
    """Names after a dot that are read anywhere under `folder`.

    Functions that only say what is wrong with a configuration do not count: a flag that nothing else reads has no
    effect. Those of config/ that derive values from it do.
    """
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef) and node.returns is not None and ast.unparse(node.returns) in JUDGING:
            return
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        for child in ast.iter_child_nodes(node):
            visit(child)

    for path in folder.rglob("*.py"):
        visit(ast.parse(path.read_text()))
    return found


@pytest.mark.nightly
def test_every_flag_is_read_by_something():
    specs = flag_specs(Config)
    with_one_value = {name for name, spec in specs.items() if spec.choices and len(spec.choices) == 1}
    of_the_model = {name for name, spec in specs.items() if spec.section == "architecture"}
    without_effect = {name for name, spec in specs.items() if spec.instead}  # which a notice says
    hooks = {f"{name}_path" for name in HOOKS}
    read = attributes_read()
    of_evaluations = {f"eval_{key}" for key in KEYS}
    of_functions = {name for name, spec in specs.items() if spec.help.endswith((" such functions.", "in `args`."))}
    known = read | hooks | with_one_value | of_the_model | of_evaluations | without_effect | of_functions | CLAIMS
    assert set(specs) - known == set()


def test_every_hook_is_given_to_something():
    read = attributes_read(SOURCE / "wiring") | attributes_read(SOURCE / "rollout")
    assert {f.name for f in dataclasses.fields(Hooks) if not {f.name, f"{f.name}_path"} & read} == set()


@pytest.fixture
def resolve(model, tmp_path):
    data = write_prompts(tmp_path / "prompts.jsonl", 8)

    def make(**changes) -> Resolved:
        return load(flags(model, data, tmp_path / "run", **changes))

    return make


def test_named_folder_with_recorded_steps_is_only_resumed(resolve, tmp_path):
    save = tmp_path / "save"
    assert run(resolve(num_rollout=1, save=save)) == 1
    [problem] = folder_problems(resolve())
    assert all(part in problem for part in (f"--output-dir {tmp_path}/run", f"--load {save}", f"{tmp_path}/run-2"))
    with pytest.raises(ConfigError, match=r"\[CFG05\]") as refused:
        run(resolve())
    assert all(part in str(refused.value) for part in (f"--output-dir {tmp_path}/run", f"--load {save}"))
    other = tmp_path / "other"
    [problem] = folder_problems(resolve(load=other, save=other))  # the first start of another run
    assert f"--load {save}" in problem
    assert folder_problems(resolve(load=save, save=save)) == []
    (save / TRACKER).unlink()  # as if it had been killed before its first checkpoint
    assert folder_problems(resolve(load=save, save=save)) == []


def test_checkpoint_in_the_folder_of_another_run_is_refused(resolve, tmp_path):
    run(resolve(num_rollout=1, save=tmp_path / "a", output_dir=tmp_path / "run_a"))
    run(resolve(num_rollout=1, save=tmp_path / "b", output_dir=tmp_path / "run_b"))
    before = (tmp_path / "run_b" / "ledger.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"\[CFG05\]") as refused:
        run(resolve(num_rollout=2, load=tmp_path / "a", output_dir=tmp_path / "run_b"))
    assert f"{tmp_path}/run_b" in str(refused.value)
    assert "ledger" in str(refused.value)
    assert (tmp_path / "run_b" / "ledger.jsonl").read_bytes() == before
    [problem] = folder_problems(resolve(num_rollout=2, load=tmp_path / "a", output_dir=tmp_path / "run_b"))
    assert f"{tmp_path}/run_b-2" in problem
    assert folder_problems(resolve(num_rollout=2, load=tmp_path / "a", output_dir=tmp_path / "run_a")) == []


def test_a_folder_that_cannot_be_looked_at_is_a_problem(resolve, tmp_path):
    [problem] = folder_problems(resolve(output_dir=tmp_path / ("x" * 300)))
    assert "File name too long" in problem
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    (tmp_path / "run" / "config.json").write_text("{")
    [problem] = folder_problems(resolve())
    assert "config.json is corrupt" in problem
    (tmp_path / "run" / "metrics.jsonl").unlink()
    (tmp_path / "run" / "config.json").write_text('{"model_type": "qwen3"}')  # of a model
    [problem] = folder_problems(resolve())
    assert f"choose another --output-dir, such as {tmp_path / 'run-2'}" in problem


def test_named_folder_in_which_nothing_was_trained_can_be_used_again(resolve, tmp_path):
    resolved = resolve()
    write_prompts_bad_beyond_the_preflight(tmp_path / "prompts.jsonl")
    with pytest.raises(DataError):
        run(resolved)
    assert (tmp_path / "run" / "config.json").exists()
    write_prompts(tmp_path / "prompts.jsonl", 8)
    assert run(resolve(num_rollout=1)) == 1


def test_derived_folder_is_the_runs_own_or_the_next_free_one(resolve, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def folder(**changes) -> str:
        resolved = resolve(output_dir=None, **changes)
        path = run_folder(resolved)
        (path / "config.json").write_text(resolved.to_json())
        return str(path)

    assert folder() == "outputs/grpo-tiny"
    assert folder(save="a", load="a") == "outputs/grpo-tiny-2"
    assert folder(save="b", load="b") == "outputs/grpo-tiny-3"
    assert folder(save="a", load="a") == "outputs/grpo-tiny-2"
    assert folder() == "outputs/grpo-tiny-4"


HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("name", RUN_FILES)
def test_folder_with_files_that_cannot_be_written_is_refused(name, resolve, tmp_path, monkeypatch):
    parts = (f"--output-dir {tmp_path}/run", name, f"{tmp_path}/run-2")
    (path := tmp_path / "run" / name).mkdir(parents=True)
    [problem] = folder_problems(resolve())
    assert all(part in problem for part in parts)
    path.rmdir()
    path.touch()
    monkeypatch.setattr(os, "access", lambda at, _: at != path)  # root may write anywhere
    [problem] = folder_problems(resolve())
    assert all(part in problem for part in parts)


def test_folder_of_a_live_run_is_refused(resolve, tmp_path):
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-S", "-c", HOLD, str(tmp_path / "run" / "run.log")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=IN_USE.split(";")[0]):
            run(resolve())
        assert folder_problems(resolve()) == [f"--output-dir {tmp_path}/run {IN_USE}"]
        holder.communicate()
    assert run(resolve(num_rollout=1)) == 1


def test_folder_into_which_another_run_saves_is_refused(resolve, tmp_path):
    save = tmp_path / "save"
    save.mkdir()
    command = [sys.executable, "-S", "-c", HOLD, str(save / LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=rf"--save {save} {IN_USE.split(';')[0]}"):
            run(resolve(num_rollout=1, save=save, load=save))
        with pytest.raises(ConfigError, match=rf"--save {save} {IN_USE}"), lock_save_folder(str(save)):
            pass
        holder.communicate()
    assert run(resolve(num_rollout=1, save=save, load=save)) == 1


def test_a_resume_that_is_refused_late_leaves_configuration_and_ledger_unchanged(resolve, tmp_path, monkeypatch):
    save, written = tmp_path / "save", tmp_path / "run" / "config.json"
    run(resolve(num_rollout=1, save=save))
    ledger = tmp_path / "run" / "ledger.jsonl"
    before, events = written.read_bytes(), ledger.read_bytes()
    again = {"save": save, "load": save, "lr": 0.5}
    prompts = (tmp_path / "prompts.jsonl").read_bytes()
    write_prompts_bad_beyond_the_preflight(tmp_path / "prompts.jsonl")
    with pytest.raises(DataError):  # while the run is built
        run(resolve(num_rollout=2, **again))
    assert written.read_bytes() == before
    (tmp_path / "prompts.jsonl").write_bytes(prompts)
    other = write_model(tmp_path / "other", intermediate_size=96)
    with pytest.raises(CheckpointError, match="other inputs"):
        run(resolve(num_rollout=2, hf_checkpoint=other, **again))
    with monkeypatch.context() as late:
        late.setattr("furlong.run.launch.findings_before_run", lambda *_: [])
        with pytest.raises(CheckpointError, match="other inputs"):  # before its checkpoint is read
            run(resolve(num_rollout=2, hf_checkpoint=other, **again))
        with pytest.raises(CheckpointError, match=r"has shape|mlp"):  # when its checkpoint is read
            run(resolve(num_rollout=2, hf_checkpoint=other, allow_changed_inputs=["config"], **again))
    assert written.read_bytes() == before
    assert run(resolve(num_rollout=1, **again)) == 1  # nothing is left to train
    assert written.read_bytes() == before
    assert ledger.read_bytes() == events
    seen = []
    monkeypatch.setattr(JsonlTracker, "log", lambda self, step, row: seen.append(json.loads(written.read_text())))
    assert run(resolve(num_rollout=2, **again)) == 2
    assert seen[0]["config"]["optim"]["lr"] == 0.5
    assert ledger.read_bytes().startswith(events + b'{"e":"resume"')
    assert not list((tmp_path / "run").glob("*.partial"))


def test_named_folder_of_a_run_that_kept_no_checkpoints_offers_a_free_one(resolve, tmp_path):
    run(resolve(num_rollout=1))
    [problem] = folder_problems(resolve())
    assert f"{tmp_path}/run-2" in problem
    assert "--load" not in problem


def test_resolved_flags_are_written_with_their_sources(resolve, tmp_path, caplog):
    before = list(logging.getLogger("furlong").handlers)
    run(resolve(num_rollout=1))
    assert logging.getLogger("furlong").handlers == before  # the next run of this process logs each line once
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["config"]["data"]["rollout_batch_size"] == 4
    assert written["sources"]["rollout_batch_size"] == "flag"
    assert written["sources"]["num_steps_per_rollout"].startswith("derived")
    with caplog.at_level("INFO", "furlong"):
        log_changed_flags(tmp_path / "run", resolve(num_rollout=1, clip_grad=0.5))
    assert "--clip-grad was 1.0, is 0.5" in caplog.messages[-1]


def test_traceback_of_an_error_is_in_the_log_file_alone(resolve, tmp_path, capfd):
    resolved = resolve()
    write_prompts_bad_beyond_the_preflight(tmp_path / "prompts.jsonl")
    with pytest.raises(DataError):
        run(resolved)
    assert "Traceback" not in capfd.readouterr().err
    log = (tmp_path / "run" / "run.log").read_text()
    assert "DataError" in log
    assert "Traceback" in log


def test_debug_variable_of_slime_raises_the_log_level(resolve, tmp_path, monkeypatch):
    monkeypatch.setenv("SLIME_DEBUG", "1")
    run(resolve(num_rollout=1))
    assert " D furlong" in (tmp_path / "run" / "run.log").read_text()


def test_stopped_run_reports_whether_a_checkpoint_can_be_resumed(resolve, tmp_path):
    config = resolve(save=tmp_path / "save", save_interval=5).config
    assert "--save-interval is 5" in _resume_hint(config)
    assert "--load" not in _resume_hint(config)
    (tmp_path / "save" / "iter_0000005").mkdir(parents=True)
    (tmp_path / "save" / "iter_0000005" / MANIFEST).touch()
    assert f"--load {tmp_path / 'save'}" in _resume_hint(config)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_file_system_without_locks_is_reported_and_used(number, tmp_path, monkeypatch, caplog):
    def refuse(file, how):
        raise OSError(number, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING), lock_save_folder(str(tmp_path / "save")):
        assert (tmp_path / "save" / LOCK).exists()
        assert not is_locked(tmp_path / "save" / LOCK)
    assert f"--save {tmp_path / 'save'}" in caplog.text
    assert "No locks available" in caplog.text
    monkeypatch.setattr(fcntl, "flock", lambda file, how: Path("/nowhere/at/all").read_text())
    with pytest.raises(ConfigError, match="cannot be written"), lock_save_folder(str(tmp_path / "save")):
        pass


def test_resumed_run_uses_thread_count_of_checkpoint_unless_overridden(tmp_path):
    folder = tmp_path / "iter_0000007"
    folder.mkdir()
    (folder / "state.json").write_text('{"num_threads": 3}')
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
    flags = CheckpointFlags(load=str(tmp_path))
    chosen, asked = Threads(2, "2 CPUs"), Threads(2, "--num-threads", is_given=True)
    resumed = _resume_thread_count(chosen, flags)
    assert (resumed.count, resumed.is_given) == (3, True)
    assert str(tmp_path) in resumed.reason
    assert _resume_thread_count(asked, flags) is asked
    assert _resume_thread_count(chosen, CheckpointFlags()) is chosen


def test_credentials_in_urls_are_written_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = "http://me:hunter2@127.0.0.1:9/score?api_key=tok3n&n=1"
    model, data = write_model(tmp_path / "model"), write_prompts(tmp_path / "data.jsonl")
    resolved = load(flags(model, data, tmp_path / "run", rm_type="remote_rm", rm_url=url))
    assert resolved.config.reward.rm_url == url
    (tmp_path / "run").mkdir()
    own = logging.StreamHandler(sys.stderr)  # of a program that calls logging.basicConfig
    logging.getLogger().addHandler(own)
    with log_run("INFO", tmp_path / "run" / "run.log"):
        logging.getLogger("furlong").error("cannot reach %s", url)
    logging.getLogger().removeHandler(own)
    events = EventLog(tmp_path / "run" / "events.jsonl")
    events.write("failed", message=f"POST {url}: refused")
    events.close()
    (tmp_path / "run" / "config.json").write_text(resolved.to_json())
    written = [path.read_text() for path in (tmp_path / "run").iterdir()] + [capsys.readouterr().err]
    assert len(written) == 4
    assert written[-1].count("cannot reach") == 1
    for text in written:
        assert "127.0.0.1:9/score?api_key=***&n=1" in text
        assert "hunter2" not in text
        assert "tok3n" not in text


def test_paths_beyond_ascii_in_a_file_need_a_utf8_locale(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def command() -> int:
        "run/dé".encode("ascii")
        return 0

    with pytest.raises(UnicodeEncodeError):
        _exit_code("furlong train", command)
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    assert _exit_code("furlong train", command) == 2
    assert r"as ascii, but 'run/d\xe9' is not ASCII; set PYTHONUTF8=1" in capsys.readouterr().err
