"""`furlong reward test`: a reward on rows of the data."""

from __future__ import annotations

import json

import pytest

from furlong.cli import main
from furlong.tools.reward_test import RewardCall, reward_findings
from runs import write_prompts

FUNCTIONS = """
import time

def exact(args, sample, **kwargs):
    return float(sample.response == sample.label)

def raises(args, sample, **kwargs):
    return sample.metadata["nope"]

def hangs(args, sample, **kwargs):
    time.sleep(60)

def entries(args, sample, **kwargs):
    return {"score": float(sample.response == sample.label), "form": 1.0}

def same(args, sample, **kwargs):
    return 1

def words(args, sample, **kwargs):
    return "good"

def eats(args, sample, **kwargs):
    return float(len(bytearray(4 << 30)) > 0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "own.py").write_text(FUNCTIONS)
    write_prompts(folder / "prompts.jsonl", 4)
    return folder


@pytest.fixture
def reward(folder, capsys):
    def test(*words: str, label: str | None = "label"):
        given = ["--prompt-data", str(folder / "prompts.jsonl"), *(["--label-key", label] if label else [])]
        code = main(["reward", "test", *[w.replace("own", f"{folder}/own.py") for w in words], *given, "--json"])
        out = capsys.readouterr().out
        return code, json.loads(out)

    return test


@pytest.mark.parametrize(
    "words", [("--rm-type", "math"), ("--rm-type", "boxed_f1"), ("--rm-type", "f1"), ("--custom-rm-path", "own:exact")]
)
def test_right_answers_score_and_wrong_ones_do_not(words, reward):
    code, found = reward(*words, "--rows", "2")
    assert code == 0
    calls = [(c["row"], c["kind"], c["value"] > 0) for c in found["calls"]]
    assert calls == [
        (0, "the label", True),
        (0, "a wrong answer", False),
        (1, "the label", True),
        (1, "a wrong answer", False),
    ]
    assert all(c["seconds"] >= 0 and c["type"] == "float" for c in found["calls"])


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raises", "KeyError: 'nope'"),
        ("words", "number"),
        ("hangs", "0.2 s"),
        ("same", "2 of 2 rows"),
        ("entries", "['form', 'score']"),
    ],
)
def test_broken_reward_is_found_with_its_reason(function, words, reward):
    limit = "0.2" if function == "hangs" else "20"
    code, found = reward("--custom-rm-path", f"own:{function}", "--rows", "2", "--reward-timeout", limit)
    assert code == 1
    (finding,) = found["findings"]
    assert finding["id"] == "REW01"
    assert words in finding["finding"]


def test_reward_process_has_a_memory_limit(reward):
    code, found = reward("--custom-rm-path", "own:eats", "--rows", "1", "--reward-memory-limit", "2")
    assert code == 1
    (finding,) = found["findings"]
    assert finding["id"] == "REW01"
    assert "MemoryError" in finding["finding"]
    assert "--reward-memory-limit" in finding["remedy"]


def test_entry_that_is_trained_on_is_named(reward):
    assert reward("--custom-rm-path", "own:entries", "--reward-key", "score")[0] == 0
    code, found = reward("--custom-rm-path", "own:entries", "--reward-key", "form")
    assert [finding["id"] for finding in found["findings"]] == ["REW01"]
    assert "--label-key" in found["findings"][0]["remedy"]
    assert code == 1


def test_response_of_the_user_is_tried_with_each_label(reward):
    code, found = reward("--rm-type", "math", "--response", "so \\boxed{{label}}", "--rows", "2")
    assert code == 0
    assert [(c["response"], c["value"]) for c in found["calls"]] == [("so \\boxed{0}", 1.0), ("so \\boxed{3}", 1.0)]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "give --rm-type or --custom-rm-path"),
        (["--rm-type", "math"], "--prompt-data is missing"),
        (["--rm-type", "math", "--prompt-data", "x.jsonl"], "--label-key is missing"),
        (["--rm-typo", "math"], "unknown flag --rm-typo"),
    ],
)
def test_wrong_usage_names_what_is_missing(words, problem, capsys):
    assert main(["reward", "test", *words]) == 2
    assert problem in capsys.readouterr().err


def test_labels_that_are_numbers_are_named():
    kinds = ("the label", "a wrong answer")
    calls = [RewardCall(0, kind, "5", 5, "scored", 0.0, "float", "", 0.0) for kind in kinds]
    (found,) = reward_findings(calls, name="f", reward_key=None)
    assert "int" in found.cause
