"""Whole runs on SGLang itself, without a GPU: what furlong asks of it, it does, and has the weights that were sent."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config, Qwen3MoeConfig

from furlong.config.passthrough import LISTS
from furlong.data.audit import audit
from furlong.track.dump import load_samples
from killing_reward import VICTIM
from runs import REPOSITORY, flags, rows, train, write_model, write_prompts
from sglang_on_cpu import FLAGS, WIDE, skip_without_it, visible

ROLLOUTS = 3
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
    "tie_word_embeddings": False,
}  # fmt: skip
PAIR = {"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2}
WHOLE = "every checksum verified"


@pytest.fixture(autouse=True)
def sglang() -> Iterator[pytest.MonkeyPatch]:
    skip_without_it()
    with visible() as patch:
        yield patch


def run(folder: Path, *, has_experts: bool = False, **changes: Any) -> list[str]:
    """Train; returns what the log says of each publication, after what holds for every form was checked."""
    config, more = (Qwen3MoeConfig, EXPERTS) if has_experts else (Qwen3Config, {})
    model = write_model(folder / "model", config_class=config, **WIDE, **more)
    argv = flags(
        model, write_prompts(folder / "prompts.jsonl"), folder / "run", num_rollout=ROLLOUTS,
        save_debug_rollout_data=folder / "samples_{rollout_id}.safetensors", **FLAGS | changes,
    )  # fmt: skip
    assert train(argv) == ROLLOUTS
    assert audit(folder / "run" / "ledger.jsonl", finished=True).ok
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in rows(folder / "run")) < 1e-4
    for number in range(ROLLOUTS):
        dumped = load_samples(folder / f"samples_{number}.safetensors")
        samples = [sample for group in dumped.groups for sample in group.samples]
        assert {version for sample in samples for version in sample.token_versions} == {number}
    return re.findall(r"weight_sync done: version \d, (.*)", (folder / "run" / "run.log").read_text())


def test_a_server_of_two_processes_has_its_shares_of_every_tensor(sglang, tmp_path):
    sglang.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    published = run(tmp_path, **PAIR)
    assert [words.rpartition("s, ")[2] for words in published] == [WHOLE] * (ROLLOUTS + 1)


def test_a_killed_server_is_started_again_behind_the_router_and_has_the_weights(sglang, tmp_path):
    sglang.setenv(VICTIM, f"sglang.launch_server .*{tmp_path / 'model'} ")
    published = run(
        tmp_path, has_experts=True, rollout_num_gpus=1, update_weight_transport="disk", use_fault_tolerance=True,
        rm_type=None, custom_rm_path="killing_reward.reward_func",
        sglang_router_strategy="cache_aware" if importlib.util.find_spec("sglang_router") else "direct",
    )  # fmt: skip
    assert [words.rpartition("s, ")[2] for words in published] == [WHOLE] * (ROLLOUTS + 1)
    log = (tmp_path / "run" / "run.log").read_text()
    assert re.search(r"engine_lost: engine 0 at \S+: process \d+ was ended by signal 9", log)
    told = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["version"] for event in told if event["event"] == "engine_restarted"] == [1]


def test_requests_are_held_over_publications_and_aborted_and_go_on(sglang, tmp_path):
    del sglang
    model, folder = write_model(tmp_path / "model", **WIDE), tmp_path / "run"
    argv = flags(
        model, write_prompts(tmp_path / "prompts.jsonl"), folder, num_rollout=ROLLOUTS, rollout_num_gpus=1,
        rollout_max_response_len=96, rollout_stop_token_ids=[3], over_sampling_batch_size=6, partial_rollout=True,
        async_buffer_size=1, pause_mode="hold", save_debug_rollout_data=tmp_path / "samples_{rollout_id}.safetensors",
        **FLAGS,
    )  # fmt: skip
    assert train(argv) == ROLLOUTS
    assert audit(folder / "ledger.jsonl").ok
    assert rows(folder)[0]["train/train_rollout_logprob_abs_diff"] < 1e-4  # later ones have tokens of two versions
    dumped = [load_samples(tmp_path / f"samples_{number}.safetensors") for number in range(ROLLOUTS)]
    samples = [sample for dump in dumped for group in dump.groups for sample in group.samples]
    assert all(len(sample.rollout_log_probs) == sample.response_length for sample in samples)
    assert {len(set(sample.token_versions)) for sample in samples} >= {1, 2}


def test_the_options_that_furlong_knows_are_those_of_the_server(sglang):
    pytest.importorskip("sglang_router")
    sglang.setenv("SGLANG_USE_CPU_ENGINE", "1")
    command = [sys.executable, REPOSITORY / "scripts" / "make_engine_options.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert json.loads(done.stdout) == json.loads(LISTS.read_text())
