"""`furlong check` finds damage of every kind of file without a model."""

from __future__ import annotations

import json
import random
import shutil

import pytest

from changed_bytes import DAMAGE, SavedRun
from furlong.cli import main


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return SavedRun(tmp_path_factory.mktemp("saved"))


def check(path, capsys):
    code = main(["check", str(path)])
    printed = capsys.readouterr()
    assert "Traceback" not in printed.out + printed.err
    return code, " ".join((printed.out + printed.err).split())


@pytest.mark.parametrize(
    "place", ["run", "dumps", "dumps/1.safetensors", "bundle.zip", "save", "save/iter_0000002", "model"]
)
def test_intact_files_have_no_problem(place, original, capsys):
    code, printed = check(original.folder / place, capsys)
    assert (code, "no problem" in printed or "intact" in printed or "complete" in printed) == (0, True), printed


@pytest.mark.parametrize(
    ("name", "checked"),
    [
        ("dumps/1.safetensors", "dumps"),
        ("dumps/1.safetensors", "dumps/1.safetensors"),
        ("bundle.zip", "bundle.zip"),
        ("run/ledger.jsonl", "run"),
        ("save/iter_0000002/state.json", "save"),
        ("save/iter_0000002/trainer/trainer_optimizer.safetensors", "save"),
        ("save/iter_0000002/rollout_0000002.safetensors", "save"),
    ],
)
def test_damage_is_found_and_named(name, checked, original, capsys):
    draw, path = random.Random(4), original.folder / name
    content = path.read_bytes()
    for kind in ("noise", "cut", "foreign"):
        if kind == "foreign" and checked in ("run", name):
            continue  # then it is another kind of file
        DAMAGE[kind](path, draw)
        code, printed = check(original.folder / checked, capsys)
        path.write_bytes(content)
        assert (code, path.name in printed) == (1, True), (kind, printed)


@pytest.mark.parametrize(
    ("name", "content", "row"),
    [
        ("tokenizer.json", '{"version": "1.0"', "CKPT07"),
        ("tokenizer.json", "{}", "CKPT07"),
        ("tokenizer_config.json", "[]", "CKPT07"),
        ("generation_config.json", '{"eos_token_id": "end"}', "CKPT07"),
        ("chat_template.jinja", "{% if %}", "TPL01"),
        ("chat_template.jinja", "{% if true %}" * 3000 + "{% endif %}" * 3000, "TPL01"),
        ("config.json", "{}", "CKPT07"),
        ("config.json", {"hidden_act": "none"}, "CKPT07"),
        ("config.json", {"hidden_size": 48}, "CKPT04"),
        ("config.json", {"vocab_size": None}, "CKPT04"),
    ],
)
def test_a_model_folder_that_no_run_can_load_is_not_called_complete(name, content, row, original, tmp_path, capsys):
    model = shutil.copytree(original.folder / "model", tmp_path / "model")
    if isinstance(content, dict):
        values = json.loads((model / name).read_text()) | content
        content = json.dumps({key: value for key, value in values.items() if value is not None})
    (model / name).write_text(content)
    code, printed = check(model, capsys)
    assert (code, f"[{row}]" in printed, str(model) in printed) == (1, True, True), printed


def test_a_model_folder_without_tokenizer_gets_a_note(original, tmp_path, capsys):
    model = shutil.copytree(original.folder / "model", tmp_path / "model")
    for path in model.glob("tokenizer*"):
        path.unlink()
    code, printed = check(model, capsys)
    assert (code, "info [CKPT07]" in printed, "no tokenizer" in printed) == (0, True, True)
