"""The check of slime's launch scripts: commands are read without running anything, and verdicts have their reasons."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"

MODEL = """MODEL_ARGS=(
   --swiglu --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
   --group-query-attention --num-query-groups $((1 + 1)) --kv-channels 16 --qk-layernorm --disable-bias-linear
   --normalization "RMSNorm" --norm-epsilon 1e-6 --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
   --vocab-size 512 # a comment
)
"""
SCRIPT = """#!/bin/bash
pkill -9 python
sleep 1000
rm -rf "$PRECIOUS_DIR"
set -ex
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/tiny.sh"
CKPT_ARGS=(
   --hf-checkpoint $BASE_DIR/Qwen3-tiny
   #--hf-checkpoint /root/other
   --save /root/out/ --load /root/out/ --save-interval 20
)
ROLLOUT_ARGS=(--prompt-data /root/rows.jsonl --input-key prompt --label-key label --apply-chat-template
   --rm-type math --num-rollout 3 --rollout-batch-size 4 --n-samples-per-prompt 2 --rollout-max-response-len 8
   --global-batch-size 8)
EXTRA=(%s)
ray start --head
touch "%s"
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json="{}" -- python3 -u train_async.py \\
   --actor-num-nodes 1 --actor-num-gpus-per-node 1 --rollout-num-gpus 1 \\
   ${MODEL_ARGS[@]} "${CKPT_ARGS[@]}" ${ROLLOUT_ARGS[@]} ${EXTRA[@]} 2>&1 | tee /root/log
"""


@pytest.fixture
def checker(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("check_launch_scripts")


@pytest.fixture
def checkout(tmp_path):
    """Return a function that writes a checkout with one launch script."""

    def write(extra: str = "", *, text: str = SCRIPT) -> Path:
        root = tmp_path / "slime"
        (root / "scripts" / "models").mkdir(parents=True)
        (root / "scripts" / "models" / "tiny.sh").write_text(MODEL)
        (root / "scripts" / "run-tiny.sh").write_text(text % (extra, tmp_path / "touched"))
        (root / "scripts" / "build.sh").write_text("# train.py is not called here\n")
        (root / "tests").mkdir()
        (root / "tests" / "test.sh").write_text("python train.py\n")
        return root

    return write


def command_of(checker, root: Path, scratch: Path):
    (script,), _ = checker.launch_scripts(root)
    (command,) = checker.training_commands(script, root, scratch)
    return command


def test_launch_scripts_call_training_below_scripts_and_examples(checker, checkout):
    root = checkout()
    launched, others = checker.launch_scripts(root)
    assert [path.name for path in launched] == ["run-tiny.sh"]
    assert [path.name for path in others] == ["test.sh"]


def test_bash_evaluates_the_command_and_nothing_else_runs(checker, checkout, tmp_path):
    command = command_of(checker, checkout("--lr 1e-6"), tmp_path / "scratch")
    words = list(command.words)
    assert command.entry_point == "train_async.py"
    assert words[words.index("--num-query-groups") + 1] == "2"
    assert words[words.index("--rotary-base") + 1] == "1000000"
    assert words[words.index("--hf-checkpoint") + 1] == "/root/Qwen3-tiny"
    assert words[-2:] == ["--lr", "1e-6"]
    assert not (tmp_path / "touched").exists()


def test_a_lost_backslash_is_noticed(checker, checkout, tmp_path):
    text = SCRIPT.replace("--rollout-num-gpus 1 \\", "--rollout-num-gpus 1").replace(" 2>&1 | tee /root/log", "")
    command = command_of(checker, checkout(text=text), tmp_path / "scratch")
    assert command.lacks_backslash
    assert "--hf-checkpoint" in command.words


def test_a_script_that_does_not_end_is_stopped(checker, checkout, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.import_module("launch_commands"), "TIME_LIMIT_S", 1)
    root = checkout(text=SCRIPT + "\nwhile true; do :; done\n")
    assert command_of(checker, root, tmp_path / "scratch").words


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("Qwen3-4B-Instruct-2507", "qwen3"),
        ("Qwen3-30B-A3B", "qwen3_moe"),
        ("Qwen3.6-35B-A3B", "qwen3_5_moe"),
        ("GLM-Z1-9B-0414", "glm4"),
        ("GLM-4.7-355B-A32B", "glm4_moe"),
        ("Moonlight-16B-A3B", "deepseek_v3"),
    ],
)
def test_the_family_follows_from_the_name(checker, name, family):
    found = importlib.import_module("launch_standins").family_of(name)
    assert found is not None
    assert found[0] == family


def test_a_stand_in_has_the_architecture_of_the_flags_and_takes_no_space(checker, tmp_path):
    standins = importlib.import_module("launch_standins")
    shape = {"layers": 36, "attention-heads": 32, "query-groups": 8}
    words = [word for name, count in shape.items() for word in (f"--num-{name}", str(count))]
    words += ["--hidden-size", "2560", "--ffn-hidden-size", "9728", "--vocab-size", "151936", "--kv-channels", "128"]
    flags = checker.by_flag(words)
    config = standins.model_config("Qwen3-4B-FP8", flags)
    assert config["quantization_config"]["quant_method"] == "fp8"
    folder = standins.write_model(tmp_path / "model", config)
    assert json.loads((folder / "config.json").read_text())["intermediate_size"] == 9728
    stored = (folder / "model.safetensors").stat()
    assert stored.st_size > 3_000_000_000
    assert stored.st_blocks * 512 < 10_000_000


def test_verdicts_name_the_category(checker):
    def decide(*texts: str):
        return checker.decide(
            "run.sh", [{"id": "CFG05", "severity": "error", "text": text} for text in texts], [], "model"
        )

    assert decide().status == "pass"
    info = {"id": "CFG02", "severity": "info", "text": "--moe-enable-deepep has no effect: it is not used; no action"}
    verdict = checker.decide("scripts/run.sh", [info], [], "model")
    assert verdict.ignored == ("--moe-enable-deepep",)
    assert (
        checker.page([verdict], "slime")[-1]
        == "| [run.sh](" + checker.REPOSITORIES["slime"] + "/scripts/run.sh) | model | passes | `--moe-enable-deepep` |"
    )
    lora = decide("--lora-rank is not supported yet: adapters (LoRA) are not implemented; remove it")
    assert (lora.status, lora.category) == ("on purpose", "LoRA")
    assert decide("unknown flag --x; remove it").category == "flags"
    note = decide(
        "--custom-rm-path a.b: importing a needs the module tau_bench.envs, which is not installed; install it"
    )
    assert (note.status, note.notes) == ("pass", ("needs the package tau_bench",))


def test_the_check_of_a_checkout_prints_a_verdict_per_script(checker, checkout, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SCRIPTS.parent / "src")]))
    root = checkout()
    assert checker.main([str(root)]) == 0
    assert "1 scripts: 1 pass" in capsys.readouterr().out
    script = root / "scripts" / "run-tiny.sh"
    script.write_text(script.read_text().replace("EXTRA=()", "EXTRA=(--no-such-flag 1)"))
    assert checker.main([str(root), "--json"]) == 1
    (verdict,) = json.loads(capsys.readouterr().out)
    assert verdict["status"] == "refused"
    assert "--no-such-flag" in verdict["problems"][0]
