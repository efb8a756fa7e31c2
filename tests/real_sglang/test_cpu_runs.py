"""Whole runs on SGLang itself, without a GPU: what furlong asks of it, it does, and has the weights that were sent."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import Glm4Config, Qwen3Config

import forked_sglang
import killing_reward
import streaming_agents
from diagnosed_runs import events
from furlong.config.passthrough import LISTS
from furlong.files.batch_file import load_batch
from furlong.sessions.tree import TreeNode
from runs import REPOSITORY, rows
from sglang_on_cpu import FLAGS, skip_without_it, visible
from sglang_runs import ROLLOUTS, WHOLE, run, write_wide
from teachers_zoo import SPELLING, all_log_probs, own_log_probs

pytestmark = pytest.mark.nightly

WIDTH = 64  # SGLang pads what is narrower, for kernels that it has on CPUs
MAX_GAP = 1e-4


@pytest.fixture(autouse=True)
def sglang() -> Iterator[pytest.MonkeyPatch]:
    skip_without_it()
    with visible() as patch:
        yield patch


@pytest.mark.parametrize("config", [Qwen3Config, Glm4Config])
def test_a_server_of_two_processes_has_its_shares_of_every_tensor_and_streams_answers(sglang, tmp_path, config):
    sglang.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    pair = {"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2}
    streams = streaming_agents.flags(tmp_path) if config is Qwen3Config else {}
    model = write_wide(tmp_path / "model", WIDTH, config=config)
    trained = run(model, tmp_path, max_gap=MAX_GAP, **FLAGS, **pair, **streams)
    assert trained.proofs == [WHOLE] * (ROLLOUTS + 1)
    if streams:
        check_streams(streaming_agents.SEEN, streaming_agents.LEFT)


def check_streams(seen: list[streaming_agents.Streamed], left: list[TreeNode]) -> None:
    """Pieces arrived before their answer was complete, and SGLang aborted answers whose client left."""
    assert {each.path for each in seen} == {"chat/completions", "messages", "responses"}
    for each in seen:
        assert each.answer.reply is not None
        assert each.text == each.answer.reply["content"]
    early = {path: max(each.num_early for each in seen if each.path == path) for path in {each.path for each in seen}}
    assert min(early.values()) >= 2, early  # of up to 48; how many depends on the load of the machine
    cut = [node for node in left if node.is_cut]
    assert len(cut) >= ROLLOUTS * 4 // 2  # others were complete before SGLang saw that their client had left
    assert all(node.completion.finish_reason == "abort" for node in cut)
    assert sum(len(node.sampled) for node in cut) < len(cut) * streaming_agents.MAX_TOKENS / 2


def test_a_killed_server_is_started_again_behind_the_router_and_has_the_weights(sglang, tmp_path):
    model = write_wide(tmp_path / "model", WIDTH, has_experts=True)
    sglang.setenv(killing_reward.VICTIM, f"sglang.launch_server .*{model} ")
    trained = run(
        model, tmp_path, max_gap=MAX_GAP, rollout_num_gpus=1, update_weight_transport="disk", use_fault_tolerance=True,
        sglang_api_key="a-hidden-key",
        sglang_router_strategy="cache_aware" if importlib.util.find_spec("sglang_router") else "direct",
        **killing_reward.FLAGS, **FLAGS,
    )  # fmt: skip
    assert trained.proofs == [WHOLE] * (ROLLOUTS + 1)
    assert re.search(r"engine_lost: engine 0 at \S+: process \d+ was ended by signal 9", trained.log)
    assert [event["version"] for event in events(tmp_path / "run", "engine_restarted")] == [1]
    logs = [path.read_text() for path in (tmp_path / "run").rglob("*.log")]
    assert any("api_key='***'" in log for log in logs)  # SGLang tells its settings
    assert not any("a-hidden-key" in log for log in logs)


def test_a_suspended_server_that_still_accepts_connections_is_replaced_at_a_weight_update(tmp_path):
    trained = run(
        write_wide(tmp_path / "model", WIDTH), tmp_path, max_gap=MAX_GAP, rollout_num_gpus=1, use_fault_tolerance=True,
        update_weight_timeout=5, custom_generate_function_path="faulty_hooks.generate_and_stop_schedulers", **FLAGS,
    )  # fmt: skip
    assert trained.proofs == [WHOLE] * (ROLLOUTS + 1)
    assert [event["version"] for event in events(tmp_path / "run", "engine_restarted")] == [1]


def test_requests_pause_for_weight_updates_and_resume_after_abort(tmp_path):
    trained = run(
        write_wide(tmp_path / "model", WIDTH), tmp_path, max_gap=MAX_GAP, has_one_version=False, rollout_num_gpus=1,
        rollout_max_response_len=96, rollout_stop_token_ids=[3], over_sampling_batch_size=6, partial_rollout=True,
        async_buffer_size=1, pause_mode="hold", num_rollout=12, **FLAGS,
    )  # fmt: skip
    samples = [sample for rollout in trained.rollouts for sample in rollout]
    assert {len(set(sample.token_versions)) for sample in samples} >= {1, 2}


def test_log_probs_of_structured_output_are_those_of_the_policy_without_the_schema(tmp_path):
    model = write_wide(tmp_path / "model", WIDTH)
    generate = "faulty_hooks.generate_within_a_schema"
    trained = run(model, tmp_path, max_gap=MAX_GAP, rollout_num_gpus=1, custom_generate_function_path=generate, **FLAGS)
    samples = [sample for rollout in trained.rollouts for sample in rollout]
    assert {sample.response.removesuffix("<|im_end|>") for sample in samples} <= {"12", "345", "678"}
    assert {len(set(sample.token_versions)) for sample in samples} == {1}


MODELS = """
sglang:
- {{name: actor, server_groups: [{{worker_type: regular, num_gpus: 1}}]}}
- {{name: large, model_path: {teacher}, server_groups: [{{worker_type: regular, num_gpus: 1}}]}}
"""


def test_a_frozen_model_is_a_teacher_of_the_likeliest_tokens(tmp_path):
    """As the same teacher in the trainer, in a run of an agent of several turns; its engine gets no weights."""
    model, teacher = (write_wide(tmp_path / name, WIDTH, seed=seed) for name, seed in (("model", 0), ("teacher", 7)))
    (tmp_path / "models.yaml").write_text(MODELS.format(teacher=teacher))
    distilled = {
        "use_opd": True, "opd_loss": "topk", "opd_log_prob_top_k": 4, "opd_task_reward_coef": 0.0, "rm_type": None,
        "environment": SPELLING, "max_turns": 3,
        "save_debug_train_data": f"{tmp_path}/{{rollout_id}}.batch",
    }  # fmt: skip
    served = {"sglang_config": tmp_path / "models.yaml", "rollout_num_gpus": 2}
    trained = run(model, tmp_path, max_gap=MAX_GAP, has_one_version=False, **distilled, **served, **FLAGS)
    assert trained.proofs == [WHOLE] * (ROLLOUTS + 1)
    for number, samples in enumerate(trained.rollouts):
        batch = load_batch(tmp_path / f"{number}.batch")
        columns = [
            np.split(batch.columns[f"teacher_{name}"], batch.response_starts[1:-1])
            for name in ("log_probs", "top_ids", "top_log_probs")
        ]
        for sample, log_probs, ids, top in zip(samples, *columns, strict=True):
            assert set(sample.loss_mask or ()) == {0, 1}
            np.testing.assert_allclose(log_probs, own_log_probs(teacher, sample), atol=MAX_GAP)
            of_ids = all_log_probs(teacher, sample).gather(1, torch.from_numpy(ids).long())
            np.testing.assert_allclose(top, of_ids, atol=MAX_GAP)
    kl = [row["train/opd_reverse_kl"] for row in rows(tmp_path / "run") if row["step"]]
    assert len(kl) == ROLLOUTS
    assert min(kl) > 0


def test_the_options_that_furlong_knows_are_those_of_the_server(sglang):
    pytest.importorskip("sglang_router")
    sglang.setenv("SGLANG_USE_CPU_ENGINE", "1")
    command = [forked_sglang.python(os.environ), REPOSITORY / "scripts" / "make_engine_options.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert json.loads(done.stdout) == json.loads(LISTS.read_text())
