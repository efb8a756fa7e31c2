"""Faults that single-purpose commands find: each is injected, found, fixed, and gone."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_zoo import write_jsonl
from faults_marker import fault
from furlong.cli import main
from furlong.models.tokenizer import build_tokenizer
from runs import write_model, write_prompts

FORGETFUL = (
    "{% for m in messages[-2:] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def look(capsys):
    """Run a command with --json; return its exit code and the ids of its findings."""

    def run(*words: object) -> tuple[int, list[str]]:
        code = main([*map(str, words), "--json"])
        return code, [finding["id"] for finding in json.loads(capsys.readouterr().out)["findings"]]

    return run


@pytest.fixture
def folder(tmp_path):
    build_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": None}))
    return tmp_path


@fault("TPL01", "TPL02", "STOP01")
def test_template_and_prompts(folder, look):
    check = ("template", "check", "--hf-checkpoint", folder)
    (folder / "chat_template.jinja").write_text(FORGETFUL.replace("<|im_end|>", "<|unk|>"))
    data = write_jsonl(folder / "prompts.jsonl", [{"input": "<|im_start|>user\nhi"}])
    assert look(*check, "--prompt-data", data) == (1, ["TPL02", "STOP01", "TPL01"])
    (folder / "chat_template.jinja").write_text(build_tokenizer().chat_template)
    write_jsonl(folder / "prompts.jsonl", [{"input": "hi"}])
    assert look(*check, "--prompt-data", data) == (0, [])


@fault("DET01")
def test_runs_that_part(tmp_path, look):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"config": {"optim": {"lr": 1}}}')
        (tmp_path / name / "metrics.jsonl").write_text('{"step":1,"train/loss":0.5}\n')
    row = {"step": 1, "stage": "loss", "at": 0, "values": {"train/loss": 0.5}}
    (tmp_path / "a" / "determinism.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "b" / "determinism.jsonl").write_text(json.dumps(row | {"values": {"train/loss": 0.25}}) + "\n")
    assert look("diff", tmp_path / "a", tmp_path / "b") == (1, ["DET01"])
    (tmp_path / "b" / "determinism.jsonl").write_text(json.dumps(row) + "\n")
    assert look("diff", tmp_path / "a", tmp_path / "b") == (0, [])


@pytest.mark.parametrize("value", [math.nan, 0.0])
def test_weights_that_are_not_finite_or_all_zero(value, tmp_path, look):
    path = write_model(tmp_path / "model") / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: torch.full_like(tensors[name], value)}, path)
    assert look("check", path.parent) == (1, ["CKPT04"])
    save_file(tensors, path)
    assert look("check", path.parent) == (0, [])


@fault("REW01")
def test_reward_that_raises(tmp_path, look):
    data = write_prompts(tmp_path / "prompts.jsonl", 2)
    own = tmp_path / "own.py"
    test = ("reward", "test", "--custom-rm-path", f"{own}:reward", "--prompt-data", data, "--label-key", "label")
    own.write_text("def reward(args, sample, **kwargs):\n    return sample.missing\n")
    assert look(*test) == (1, ["REW01"])
    own.write_text("def reward(args, sample, **kwargs):\n    return float(sample.response == sample.label)\n")
    assert look(*test) == (0, [])


@fault("DATA01", "DATA02", "DATA04")
def test_rows_that_cannot_be_used(folder, look):
    (folder / "prompts.jsonl").write_text(
        '{"input": "", "label": "1"}\n{"inputs": "a"}\n{"inputs": "b"}\n{"input": "abc", "label": "1"}\n'
    )
    check = (
        "data",
        "check",
        "--hf-checkpoint",
        folder,
        "--prompt-data",
        folder / "prompts.jsonl",
        "--label-key",
        "label",
    )
    code, found = look(*check, "--rollout-max-prompt-len", 2)
    assert (code, sorted(found)) == (1, ["DATA01", "DATA02", "DATA04"])
    write_prompts(folder / "prompts.jsonl", 2)
    assert look(*check, "--rollout-max-prompt-len", 9) == (0, [])
