"""The examples run as a user would run them, with one or two steps."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import warm_python
from furlong import Sample
from furlong.data.audit import audit
from furlong.interfaces import Completion
from furlong.models.tokenizer import build_tokenizer
from furlong.quickstart.quickstart import model_folder

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
SMALL = ["--num-rollout", "1", "--rollout-batch-size", "8", "--n-samples-per-prompt", "4"]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `python` and `furlong`, which have all imports done."""
    return warm_python.start(tmp_path_factory.mktemp("python"))


def run_script(commands: Path, name: str, folder: Path, *words: str, **env: str) -> str:
    """Run an example's script with these commands; returns its output."""
    path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(EXAMPLES / name / "run.sh"), *words],
        env=os.environ | {"OUT": str(folder), "PATH": path, "SFT_STEPS": "2"} | env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def last_record(folder: Path) -> dict[str, float]:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "run", "env"),
    [
        ("tools", "rl", {}),
        ("environment", ".", {}),
        ("sft_then_rl", "rl", {}),
        ("code", "run", {}),
        ("calculator", "rl", {"AGENT": "client"}),
        ("calculator", "rl", {"AGENT": "command"}),
        ("search", "rl", {}),
        ("solver_and_verifier", "rl", {}),
    ],
)
def test_example_trains(name, run, env, commands, tmp_path):
    run_script(commands, name, tmp_path / "out", *SMALL, **env)
    last = last_record(tmp_path / "out" / run)
    assert last["step"] == 1
    assert last["train/train_rollout_logprob_abs_diff"] < 1e-4
    assert audit(tmp_path / "out" / run / "ledger.jsonl", finished=True).ok


def test_math_example_trains_and_evaluates(commands, tmp_path):
    run_script(commands, "math", tmp_path / "run", *SMALL, "--eval-interval", "1")
    last = last_record(tmp_path / "run")
    assert audit(tmp_path / "run/ledger.jsonl", finished=True).ok
    assert last["train/grad_norm"] > 0
    assert 0.2 < last["eval/held_out"] < 0.6  # the shipped model answers about a third correctly


@pytest.mark.nightly
def test_gsm_example_trains_writes_its_curve_and_has_a_valid_command_for_a_gpu(commands, tmp_path):
    out = run_script(commands, "gsm", tmp_path / "cpu", "cpu", *SMALL)
    assert "held-out accuracy: " in out
    assert (tmp_path / "cpu/curve.csv").read_text().splitlines()[0] == "step,held_out"
    short = ["--rollout-max-response-len", "4", "--eval-prompt-data", str(tmp_path / "gpu/data/held_out.jsonl@[:4]")]
    run_script(commands, "gsm", tmp_path / "gpu", *SMALL, *short, MODEL=str(model_folder()))
    assert audit(tmp_path / "gpu/ledger.jsonl", finished=True).ok


@pytest.mark.nightly
def test_reward_example_assigns_every_answer_one_kind(commands, tmp_path):
    run_script(commands, "reward", tmp_path / "run", *SMALL)
    last = last_record(tmp_path / "run")
    kinds = {name: share for name, share in last.items() if name.startswith("rollout/error_cat/")}
    assert sum(kinds.values()) == pytest.approx(1.0)
    assert kinds["rollout/error_cat/forgot_carry"] > 0.2
    # digits give partial credit, so the score that is trained on is above the fraction of right answers
    assert last["rollout/raw_reward"] > kinds["rollout/error_cat/right"]


@pytest.mark.parametrize("layout", ["colocate", "split", "megatron"])
def test_layouts_of_several_gpus_are_valid_commands(layout, commands, tmp_path):
    shape = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "model_type": "qwen3"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "data.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    env = {"LAYOUT": layout, "MODEL": str(tmp_path), "DATA": str(tmp_path / "data.jsonl")}
    plan = json.loads(run_script(commands, "several_gpus", tmp_path, "plan", "--json", **env))
    assert plan["device"] == "h100"


def load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def play(file: str, turns: list[str], **fields: Any) -> Sample:
    """Run the generate function of an example against a policy that answers `turns`."""
    tokenizer, script = build_tokenizer(), iter(turns)
    encode = lambda text: list(tokenizer.encode(text, add_special_tokens=False))  # noqa: E731

    async def answer(prompt: object, **params: object) -> Completion:
        tokens = encode(text := next(script))
        return Completion(tokens, [-1.0] * len(tokens), [3] * len(tokens), "stop", text)

    sample = Sample(**fields)
    sample.tokens = encode(sample.prompt)
    module: Any = load_file(EXAMPLES / file)
    module.policy = lambda: SimpleNamespace(generate=answer, encode=encode)
    return asyncio.run(module.generate(None, sample, {}))


def trained_text(sample: Sample) -> str:
    """The characters of a response that are trained on; the tokenizer has one token per character."""
    assert sample.loss_mask is not None
    assert len(sample.loss_mask) == len(sample.response)
    characters: Iterator[tuple[str, int]] = zip(sample.response, sample.loss_mask, strict=True)
    return "".join(character for character, kept in characters if kept)


@pytest.mark.parametrize(
    ("turns", "response", "reward"),
    [
        (["132"], "132", 1.0),
        (["22"], "22", 0.0),
        (["[47+85]", "132"], "[47+85]=132;132", 0.9),
        (["[7+5]", "[47+85]", "132"], "[7+5]=12;[47+85]=132;132", 0.8),
        (["[1+1]"] * 3, "[1+1]=2;[1+1]=2;[1+1]", -0.2),
    ],
)
def test_tool_agent_trains_on_the_policys_turns_only(turns, response, reward):
    sample = play("tools/agent.py", turns, prompt="47+85=", label="132")
    assert sample.response == response
    assert trained_text(sample) == "".join(turns)
    assert sample.reward == pytest.approx(reward)
    assert sample.metadata["round_number"] == len(turns)


def test_environment_continues_from_the_actions_of_the_policy():
    sample = play("environment/cash_register.py", ["42", "50", "7"], prompt="12+30=", metadata={"seed": 1})
    first, second = sample.response.removeprefix("42").removesuffix("7").split("=50")
    assert first.startswith("42+")
    assert second.startswith("50+")
    assert trained_text(sample) == "42507"
    assert isinstance(sample.reward, float)
    assert 1 / 3 <= sample.reward < 1
    assert play("environment/cash_register.py", ["no"], prompt="12+30=", metadata={"seed": 1}).reward == 0
