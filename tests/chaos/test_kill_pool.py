"""Runs whose rollouts share their groups, killed with episodes in flight."""

from __future__ import annotations

import time

import pytest

from furlong.data.audit import audit
from furlong.data.ledger import parse_event
from furlong.files.checkpoint_folder import read_state
from furlong.files.sample_file import load_samples
from furlong.loop.checkpoints import GROUPS
from runs import Child, flags, num_rows, write_prompts

pytestmark = pytest.mark.slow

NUM = 10
AGENT = """
import asyncio

from furlong import policy


async def generate(args, sample, sampling_params):
    for turn in range(2 + sample.index % 5):
        answer = await policy().generate(sample.tokens, **{**sampling_params, "max_new_tokens": 2})
        sample.append_response_tokens(
            tokens=answer.tokens, log_probs=answer.log_probs, text=answer.text, version=answer.versions
        )
        await asyncio.sleep(0.03 * (1 + sample.index % 7))
    sample.reward = float(sample.index % 2)
    return sample
"""


def test_run_killed_with_twenty_episodes_in_flight_has_a_clean_ledger(model, tmp_path, forked):
    data = write_prompts(tmp_path / "prompts.jsonl", 60)
    (tmp_path / "agent.py").write_text(AGENT)
    argv = flags(
        model, data, tmp_path / "run", num_rollout=NUM, load=tmp_path / "save", save=tmp_path / "save", save_interval=1,
        custom_generate_function_path=f"{tmp_path}/agent.py:generate", rollout_batch_size=5,
        n_samples_per_prompt=2, async_buffer_size=4, max_concurrent_episodes=20, max_token_staleness=6, use_tis=True,
        rollout_max_response_len=40, global_batch_size=10,
    )  # fmt: skip
    for attempt in range(3):
        run = Child(forked, argv, tmp_path, attempt)
        before, deadline = num_rows(tmp_path), time.monotonic() + 120
        while run.process.is_alive() and num_rows(tmp_path) < before + 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        assert run.process.is_alive(), run.log.read_text()
        run.kill()
        newest = max((tmp_path / "save").glob("iter_*[0-9]"))
        saved = load_samples(newest / GROUPS)
        assert read_state(newest)["groups"] == len(saved.groups)
        assert sum(name == "running" for name in saved.names) * 2 >= 10, "episodes were in flight"
    last = Child(forked, argv, tmp_path, "last")
    last.process.join(180)
    assert last.process.exitcode == 0, last.log.read_text()
    last.kill()

    result = audit(tmp_path / "run" / "ledger.jsonl", finished=True)
    assert result.ok, result.summary()
    assert result.num_trained == NUM * 5
    events = [parse_event(line) for line in (tmp_path / "run" / "ledger.jsonl").read_bytes().splitlines()]
    issued = [event["g"] for event in events if event and event["e"] == "issued"]
    assert len(issued) > len(set(issued)), "what was in flight is issued again"
