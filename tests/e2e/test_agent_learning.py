"""A black-box agent of 25 lines, trained by two flags, learns, and exactly as its version with `policy()` does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from furlong.quickstart.addition import problems, write_prompts
from furlong.quickstart.quickstart import model_folder
from runs import differences, flags, reproducible, rows, train

pytestmark = pytest.mark.slow  # SFT, and thirty steps of RL

EXAMPLE = Path(__file__).parents[2] / "examples" / "calculator"
AGENT = """
import re

import httpx


async def solve(base_url, prompt, request_kwargs):
    messages = [{"role": "user", "content": prompt}]
    async with httpx.AsyncClient(base_url=base_url, timeout=600) as client:
        for _ in range(3):
            reply = await client.post("/v1/chat/completions", json={"messages": messages, **request_kwargs})
            message = reply.raise_for_status().json()["choices"][0]["message"]
            call = re.fullmatch(r"\\[(\\d+)\\+(\\d+)\\]", message["content"])
            if call is None:
                return
            messages += [message, {"role": "user", "content": str(int(call[1]) + int(call[2]))}]
"""


def demonstrated_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the quickstart's model after SFT on conversations of which most call the calculator."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import demonstrations

    demonstrations.main(folder / "demonstrations.jsonl")
    words = flags(
        model_folder(), folder / "demonstrations.jsonl", folder / "sft",
        input_key="prompt", label_key=None, rm_type=None, n_samples_per_prompt=1, rollout_max_response_len=None,
        loss_type="sft_loss", rollout_batch_size=64, num_rollout=SFT_STEPS, lr=3e-3, lr_warmup_fraction=0.05,
        lr_decay_style="linear", use_dynamic_batch_size=True, max_tokens_per_gpu=8192,
        save_hf=folder / "hf_{rollout_id}", save=folder / "save", save_interval=SFT_STEPS,
    )  # fmt: skip
    assert train(words) == SFT_STEPS
    monkeypatch.delitem(sys.modules, "demonstrations")
    return folder / f"hf_{SFT_STEPS}"


SFT_STEPS, STEPS, COMPARED = 60, 24, 3


def curve(model: Path, folder: Path, name: str, num_rollout: int, **agent: Any) -> list[dict[str, Any]]:
    words = flags(
        model, folder / "problems.jsonl", folder / name,
        input_key="prompt", rm_type=None, custom_rm_path=f"{EXAMPLE}/reward.py:shaped", max_turns=3,
        rollout_batch_size=8, n_samples_per_prompt=8, num_rollout=num_rollout, lr=3e-4,
        use_dynamic_batch_size=True, max_tokens_per_gpu=8192, **agent,
    )  # fmt: skip
    assert train(words) == num_rollout
    return rows(folder / name)


def test_an_agent_of_25_lines_learns_what_its_version_with_policy_learns(tmp_path, monkeypatch):
    assert len(AGENT.strip().splitlines()) <= 25
    (tmp_path / "agent.py").write_text(AGENT)
    write_prompts(tmp_path / "problems.jsonl", problems(256, seed=5))
    model = demonstrated_model(tmp_path, monkeypatch)
    black_box = curve(model, tmp_path, "client", STEPS, agent_function_path=f"{tmp_path}/agent.py:solve")
    in_process = curve(
        model, tmp_path, "policy", COMPARED, custom_generate_function_path=f"{EXAMPLE}/agent.py:generate"
    )
    first = [reproducible(row) for row in black_box[:COMPARED]]
    assert differences(first, [reproducible(row) for row in in_process]) == []
    rewards = [row["rollout/raw_reward"] for row in black_box]
    begin, end = sum(rewards[:4]) / 4, sum(rewards[-4:]) / 4
    assert end > begin + 0.1, rewards
