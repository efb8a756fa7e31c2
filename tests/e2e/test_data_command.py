"""`furlong data`: every row of the data, and prompts that are tokenized once."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from furlong.cli import main
from furlong.commands.data_and_reward import _histogram
from furlong.errors import ConfigError
from runs import flags, reproducible, rows, train, write_prompts


@pytest.fixture
def words(model, tmp_path):
    data = write_prompts(tmp_path / "prompts.jsonl")
    return ["--hf-checkpoint", str(model), "--prompt-data", str(data), "--label-key", "label"]


def test_valid_data_has_no_problem(words, capsys):
    assert main(["data", "check", *words]) == 0
    out = capsys.readouterr().out
    assert "24 rows, 24 prompts, 0 bad" in out
    assert "[DATA" not in out


def test_bad_rows_are_listed_by_line_and_lengths_are_counted(words, tmp_path, capsys):
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write(
            '{"input": " ", "label": "1"}\n{"inputs": "1", "label": "1"}\n{"input": "12345678901234", "label": "1"}\n'
        )
    assert main(["data", "check", *words, "--rollout-max-prompt-len", "8", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [f["id"] for f in found["findings"]] == ["DATA01", "DATA02", "DATA04"]
    (file,) = found["files"]
    assert [(r["where"].rsplit(" ", 1)[-1], r["kind"]) for r in file["refused"]] == [
        ("25", "empty"), ("26", "form"), ("27", "long"),
    ]  # fmt: skip
    assert sum(row["count"] for row in file["lengths"]) == 25
    assert file["lengths"][-1]["to"] >= 14


def test_training_on_tokenized_prompts_gives_the_same_numbers(words, model, tmp_path, capsys):
    tokens = tmp_path / "tokens.parquet"
    assert main(["data", "tokenize", *words, "-o", str(tokens)]) == 0
    assert "24 prompts" in capsys.readouterr().out
    for name, data in (("a", tmp_path / "prompts.jsonl"), ("b", tokens)):
        train(flags(model, data, tmp_path / name, num_rollout=2))
    a, b = ([reproducible(row) for row in rows(tmp_path / name)] for name in "ab")
    assert a == b
    assert main(["data", "check", *words, "--prompt-data", str(tokens)]) == 0
    with pytest.raises(ConfigError, match=r"--prompt-data .*tokens\.parquet"):
        train(flags(model, tokens, tmp_path / "c", num_rollout=1, apply_chat_template=True))


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["-o", "x.jsonl"], "--output x.jsonl"),
        ([], "-o/--output"),
        (["-o", "x.parquet", "--lr", "fast"], "--lr: got 'fast'"),
    ],
)
def test_invalid_usage_of_tokenize_is_reported(more, problem, words, capsys):
    try:
        code = main(["data", "tokenize", *words, *more])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert problem in capsys.readouterr().err


def test_check_without_a_model_or_data_is_wrong_usage(capsys):
    assert main(["data", "check"]) == 2
    err = capsys.readouterr().err
    assert "1. --hf-checkpoint " in err
    assert "2. --prompt-data " in err


def test_a_missing_file_has_no_valid_rows(model, tmp_path, capsys):
    assert main(["data", "check", "--hf-checkpoint", str(model), "--prompt-data", "none.jsonl"]) == 2
    assert "--prompt-data none.jsonl" in capsys.readouterr().err
    (tmp_path / "p.jsonl").write_text('{"input": "a"}\n')
    assert main(["data", "check", "--hf-checkpoint", str(tmp_path), "--prompt-data", str(tmp_path / "p.jsonl")]) == 1
    assert "[CKPT07]" in capsys.readouterr().out


def test_a_file_without_its_flag_and_a_command_that_is_left_out_are_reported_with_the_fix(capsys):
    assert main(["data", "check", "mine.jsonl"]) == 2
    assert "--prompt-data mine.jsonl" in capsys.readouterr().err
    assert main(["data"]) == 2
    assert "{check,tokenize}" in capsys.readouterr().err


def test_histogram_counts_every_length_once():
    def histogram(*lengths):
        prompts = [SimpleNamespace(tokens=[0] * length) for length in lengths]
        file: Any = SimpleNamespace(rows=SimpleNamespace(prompts=prompts, refused=[]))
        return _histogram(file)

    bins = histogram(1, 1, 5, 40, 41)
    assert sum(row["count"] for row in bins) == 5
    assert bins[0] == {"from": 1, "to": 5, "count": 3}
    assert histogram(7, 7) == [{"from": 7, "to": 7, "count": 2}]
    assert histogram() == []
