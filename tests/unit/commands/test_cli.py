from __future__ import annotations

import contextlib
import json
import shlex
import subprocess

import pytest

from furlong import __version__
from furlong.catalogue import CATALOGUE
from furlong.cli import COMMANDS, main, main_async, main_train
from furlong.commands.output import show
from furlong.config.command_line import load
from furlong.data.ledger import FileLedger
from furlong.errors import EngineError
from furlong.quickstart.quickstart import quickstart_flags
from runs import flags, rows, write_prompts, write_prompts_bad_beyond_the_preflight


@pytest.fixture
def argv(model, tmp_path):
    data = write_prompts(tmp_path / "prompts.jsonl", 8)

    def make(**changes):
        return flags(model, data, tmp_path / "run", **{"num_rollout": 1} | changes)

    return make


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"]])
def test_help_names_every_command(words, capsys):
    assert main(words) == 0
    out = capsys.readouterr().out
    assert all(f"furlong {name}" in out for name in COMMANDS)


@pytest.mark.parametrize("name", ["", "train", "doctor", "plan", "convert", "quickstart"])
def test_help_fits_a_terminal_of_80_columns(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):  # of argparse
        main([*([name] if name else []), "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5
    assert max(map(len, lines)) <= 80


def test_help_of_training_shows_a_section_or_the_flags_with_a_word(capsys):
    assert main_train(["--help", "learnin-rate"]) == 2
    assert "did you mean learning?" in capsys.readouterr().err
    for word, flag in (("optim", "--lr "), ("learning-rate", "--lr "), ("sft", "--loss-type ")):
        assert main_train(["--help", word]) == 0
        assert f"\n  {flag}" in capsys.readouterr().out


def test_bash_completes_commands_flags_and_values(capsys):
    assert main(["completion", "bash"]) == 0
    words = 'COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); _furlong; echo "${COMPREPLY[@]}"'
    script = f"{capsys.readouterr().out}\ncomplete_line() {{ {words}; }}\n"
    lines = ("furlong qu", "furlong train --rollout-ba", "furlong doctor --engine s", "furlong train --load x")
    lines += ("furlong data c", "furlong train --rm-type = ma")  # as bash splits --rm-type=ma
    script += "\n".join(f"complete_line {line}" for line in lines)
    shown = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines() == ["quickstart", "--rollout-batch-size", "sglang", "", "check", "math"]
    assert main(["completion", "zsh"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("autoload")
    assert "\ncompdef _furlong_zsh furlong\n" in shown  # which completes files after `--flag=`, one word in zsh


def test_no_command_is_wrong_usage(capsys):
    assert main([]) == 2
    assert "furlong quickstart" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"furlong {__version__}\n"


def test_misspelt_command_gets_the_right_one(capsys):
    assert main(["trian"]) == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert "trian" in first
    assert "train?" in first


def test_what_other_programs_call_their_command_gets_furlongs(capsys):
    for words, fix in (
        (["run"], "did you mean furlong train?"),
        (["chat"], "did you mean furlong serve?"),
        (["--lr", "1e-5"], "did you mean furlong train --lr ...?"),
        (["frobnicate"], "no command frobnicate; `furlong --help` lists all"),
    ):
        assert main(words) == 2
        assert fix in capsys.readouterr().err
    assert main(["help", "report"]) == 0
    assert "usage: furlong report" in capsys.readouterr().out


def test_misspelt_flag_is_wrong_usage_with_the_right_one_and_no_traceback(argv, tmp_path, capsys):
    assert main_train([*argv(), "--rollout-batchsize", "4"]) == 2
    err = capsys.readouterr().err
    assert "  1. " in err
    assert "  2. " not in err
    assert "--rollout-batch-size?" in err
    assert not (tmp_path / "run").exists()


def test_all_problems_are_shown_at_once(argv, capsys):
    assert main(["train", *argv(lr="fast", rm_type="mth", rollout_batch_size=None)]) == 2
    err = capsys.readouterr().err
    assert all(f"  {i}. " in err for i in (1, 2, 3))
    assert "  4. " not in err


def test_train_async_runs_one_rollout_ahead_by_default(argv, tmp_path):
    assert main_async(argv(num_rollout=2)) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["config"]["rollout"]["async_buffer_size"] == 1
    assert config["sources"]["async_buffer_size"] == "entry point"
    assert rows(tmp_path / "run")[1]["rollout/staleness/max"] == 1
    assert main_async(argv(async_buffer_size=0, output_dir=tmp_path / "other")) == 0
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    assert config["config"]["rollout"]["async_buffer_size"] == 0


def test_failing_run_exits_with_1_and_one_message(argv, tmp_path, capfd):
    words = argv()
    write_prompts_bad_beyond_the_preflight(tmp_path / "prompts.jsonl")
    assert main(["train", *words]) == 1
    err = capfd.readouterr().err
    assert err.count("furlong train: DataError: ") == 1
    assert "Traceback" not in err
    assert "Traceback" in (tmp_path / "run" / "run.log").read_text()


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [(EngineError("no engine"), 1, "furlong train: EngineError: no engine"), (KeyboardInterrupt(), 130, "interrupted")],
)
def test_errors_of_a_command_become_exit_codes(error, code, message, monkeypatch, capsys):
    def fail(words):
        raise error

    monkeypatch.setattr("furlong.cli.train", fail)
    assert main(["train"]) == code
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


def test_unexpected_errors_are_not_hidden(monkeypatch):
    def fail(words):
        raise ZeroDivisionError

    monkeypatch.setattr("furlong.cli.train", fail)
    with pytest.raises(ZeroDivisionError):
        main(["train"])


def test_doctor_finds_nothing_wrong_with_a_good_command(argv, tmp_path, capsys):
    assert main(["doctor", *argv()]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_doctor_lists_problems_as_text_and_as_json(argv, capsys):
    words = ["doctor", *argv(lr="fast", over_sampling_batch_size=2)]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert out.count("error   [CFG05]") == 2
    assert out.endswith("2 errors\n")
    assert main([*words, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert [finding["id"] for finding in found["findings"]] == ["CFG05", "CFG05"]


def test_doctor_lists_and_explains_its_rows(capsys):
    assert main(["doctor", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(f"{id} " in out for id in CATALOGUE)
    assert main(["doctor", "--list", "--json"]) == 0
    assert [row["id"] for row in json.loads(capsys.readouterr().out)] == list(CATALOGUE)
    assert main(["doctor", "--explain", "ckpt01"]) == 0
    assert CATALOGUE["CKPT01"].remedy in " ".join(capsys.readouterr().out.split())
    assert main(["doctor", "--explain", "STOP01", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == "STOP01"
    assert main(["doctor", "--explain", "CKPT011"]) == 2
    assert "did you mean CKPT0" in capsys.readouterr().err
    assert main(["doctor"]) == 2


def test_report_audits_a_run(argv, tmp_path, capsys):
    assert main_train(argv()) == 0
    capsys.readouterr()
    assert main(["report", "--ledger", str(tmp_path / "run"), "--finished"]) == 0
    capsys.readouterr()
    ledger = tmp_path / "run" / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(line for line in lines if '"trained","g":2' not in line))
    assert main(["report", str(ledger), "--finished", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert "group 2" in found["problems"][0]


def write_empty_ledger(folder):
    ledger = FileLedger(folder / "ledger.jsonl")
    ledger.begin()
    ledger.close()


def test_report_puts_runs_below_each_other(tmp_path, capsys):
    for name, rewards in {
        "short": [0.25],
        "a-run-whose-name-is-longer-than-its-column": [0.5] * 10 + [1.0] * 10,
    }.items():
        write_empty_ledger(tmp_path / name)
        rows = [{"step": 0, "eval/set": 0.1}, *({"step": n, "rollout/raw_reward": r} for n, r in enumerate(rewards, 1))]
        rows.append({"step": len(rewards), "eval/set": 0.3, "eval/set-pass@1": 0.9})
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = dict.fromkeys(("finding", "cause", "remedy"), "")
    event = {"event": "diagnosis", "id": "REW02", "severity": "warning", "evidence": {}, **texts}
    (tmp_path / "short" / "events.jsonl").write_text(json.dumps(event) + "\n")
    folders = sorted(map(str, tmp_path.iterdir()))
    assert main(["report", *folders]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[1:5] for line in lines if " to " in line and "(" not in line] == [
        ["20", "0.500", "to", "1.000"],
        ["1", "0.250", "to", "0.250"],
    ]
    assert lines.count("  eval set: 0.100 at first, best 0.300 at step 1") == 1
    assert "  diagnoses: REW02" in lines
    assert lines[-1] == "every group of every run is accounted for"


def test_report_names_every_folder_that_is_not_a_run(tmp_path, capsys):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    write_empty_ledger(tmp_path / "runs" / "a")
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "runs"), str(tmp_path / "empty"), str(tmp_path / "none")]) == 2
    err = capsys.readouterr().err
    assert f"1. {tmp_path}/empty: " in err
    assert f"2. {tmp_path}/none: " in err
    (tmp_path / "runs" / "model").mkdir()
    assert main(["report", str(tmp_path / "runs")]) == 0
    assert main(["doctor", str(tmp_path / "runs")]) == 2
    assert "--run" in capsys.readouterr().err
    (tmp_path / "empty" / "config.json").touch()  # of a run that ended while it started
    assert main(["report", str(tmp_path / "runs" / "a"), str(tmp_path / "empty")]) == 0
    assert f"{tmp_path}/empty: " in capsys.readouterr().err


def test_report_without_a_ledger_is_wrong_usage(tmp_path, capsys):
    assert main(["report", "--ledger", str(tmp_path)]) == 2
    assert f"1. {tmp_path}: " in capsys.readouterr().err
    assert main(["report"]) == 2


@pytest.mark.nightly
def test_command_that_the_quickstart_prints_can_be_run(tmp_path, capsys):
    assert main(["quickstart", "--num-rollout", "1", "--output-dir", str(tmp_path / "first")]) == 0
    program, command, *words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert (program, command) == ("furlong", "train")
    assert main(["train", *words, "--output-dir", str(tmp_path / "again"), "--num-rollout", "1"]) == 0
    assert [len(rows(tmp_path / name)) for name in ("first", "again")] == [2, 2]


def test_quickstart_may_lie_in_a_folder_with_spaces(tmp_path):
    folder = tmp_path / "my [first] run"
    folder.mkdir()
    config = load(quickstart_flags(folder, seed=1, num_rollout=1, is_async=False)).config
    assert config.track.output_dir == str(folder)
    assert config.eval.eval_prompt_data == ("held_out", str(folder / "held_out.jsonl"))


def test_credentials_in_urls_are_not_printed(capsys):
    show("--rm-url http://me:secret@host/score?api_key=hidden cannot connect")
    assert capsys.readouterr().out == "--rm-url http://***@host/score?api_key=*** cannot connect\n"
