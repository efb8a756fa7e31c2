"""A black-box agent learns, and exactly as the same agent written with `policy()`: the calculator example, cut short.

Sums have one digit, so that a short SFT is enough to teach the model how to ask the calculator. It asks in six of ten
demonstrations, and answers 0 in the others; RL teaches it to ask always.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from furlong.cli import main_train
from furlong.quickstart.addition import write_prompts
from furlong.quickstart.quickstart import model_folder
from runs import REPOSITORY, rows

pytestmark = pytest.mark.nightly
EXAMPLE = REPOSITORY / "examples" / "calculator"
PLAIN = REPOSITORY / "examples" / "code" / "plain.jinja"  # shows the model nothing but the task
AGENTS = {
    "policy": ["--custom-generate-function-path", f"{EXAMPLE}/agent.py:generate"],
    "client": ["--agent-function-path", f"{EXAMPLE}/agent.py:solve"],
}
SFT_STEPS, SFT_BATCH, STEPS, SHORT = 250, 16, 20, 3
SEED = 1  # seeds 2 and 3 learn, too
PROBLEMS = [(a, b) for a in range(10) for b in range(10)]
COMMON = ["--input-key", "prompt", "--chat-template-path", str(PLAIN), "--use-dynamic-batch-size",
          "--max-tokens-per-gpu", "8192"]  # fmt: skip


def conversation(a: int, b: int, *, asks: bool) -> dict[str, object]:
    """Return a demonstration: ask the calculator and copy its answer, or answer 0."""
    total = str(a + b)
    turns = [f"{a}+{b}=", *([f"[{a}+{b}]", total, total] if asks else ["0"])]
    roles = ["user", "assistant", "user", "assistant"]
    return {"prompt": [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]}


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the model after the demonstrations."""
    folder = tmp_path_factory.mktemp("taught")
    draw = random.Random(0)
    shown = [conversation(*draw.choice(PROBLEMS), asks=draw.random() < 0.6) for _ in range(SFT_STEPS * SFT_BATCH)]
    (folder / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shown))
    words = ["--hf-checkpoint", str(model_folder()), "--prompt-data", str(folder / "shown.jsonl"), *COMMON]
    words += ["--loss-type", "sft_loss", "--rollout-batch-size", str(SFT_BATCH), "--num-rollout", str(SFT_STEPS)]
    words += ["--lr", "3e-3", "--lr-warmup-fraction", "0.05", "--lr-decay-style", "linear"]
    words += ["--save-hf", f"{folder}/hf_{{rollout_id}}", "--save", f"{folder}/save", "--save-interval", str(SFT_STEPS)]
    assert main_train([*words, "--output-dir", f"{folder}/run"]) == 0
    return folder / f"hf_{SFT_STEPS}"


def curve(model: Path, folder: Path, agent: str, seed: int, steps: int) -> list[float]:
    """Return the mean shaped reward of each step."""
    data = folder / "problems.jsonl"
    write_prompts(data, PROBLEMS)
    words = ["--hf-checkpoint", str(model), "--prompt-data", str(data), "--label-key", "label", *COMMON, *AGENTS[agent]]
    words += ["--custom-rm-path", f"{EXAMPLE}/reward.py:shaped", "--max-turns", "3", "--rollout-max-response-len", "8"]
    words += ["--rollout-batch-size", "8", "--n-samples-per-prompt", "8", "--num-rollout", str(steps), "--lr", "2e-4"]
    words += ["--lr-decay-style", "constant"]  # train.py decays as Megatron, to 0 in 20 steps
    words += ["--seed", str(seed), "--rollout-seed", str(seed), "--output-dir", f"{folder}/{agent}"]
    assert main_train(words) == 0
    return [row["rollout/raw_reward"] for row in rows(folder / agent)]


def test_an_agent_of_two_flags_learns_as_the_one_with_policy(taught: Path, tmp_path: Path):
    client = curve(taught, tmp_path, "client", SEED, STEPS)
    assert sum(client[:2]) / 2 <= 0.45
    assert max(sum(client[i : i + 4]) / 4 for i in range(STEPS - 3)) >= 0.70
    assert curve(taught, tmp_path, "policy", SEED, SHORT) == client[:SHORT]
