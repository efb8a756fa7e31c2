"""Healthy runs with many settings have no diagnosis.

tests/e2e/test_ray*.py do the same for ranks on Ray, colocated with engines, and for Megatron ranks with TP and PP.
"""

from __future__ import annotations

from typing import Any

import pytest

import faulty_hooks
from diagnosed_runs import events, run
from runs import rows

HEALTHY: dict[str, dict[str, Any]] = {
    "plain": {"num_rollout": 10},
    "asynchronous": {"async_buffer_size": 1, "num_rollout": 6},
    "two-ahead": {"async_buffer_size": 2, "update_weights_interval": 2, "num_rollout": 6},
    "held-requests": {"async_buffer_size": 1, "pause_mode": "hold", "num_rollout": 5},
    "four-steps": {"global_batch_size": 8, "num_rollout": 4},
    "kl-loss": {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "k3"},
    "kl-in-reward": {
        "kl_coef": 0.01, "advantage_estimator": "reinforce_plus_plus_baseline", "normalize_advantages": True
    },
    "gspo": {"advantage_estimator": "gspo"},
    "dapo": {"advantage_estimator": "dapo", "global_batch_size": 16},
    "engine-log-probs": {"use_rollout_logprobs": True, "global_batch_size": 16},
    "bfloat16": {"bf16": True},
    "bfloat16-engine": {"embedded_dtype": "bfloat16", "use_tis": True},
    "warm": {"rollout_temperature": 1.2},
    "partial": {"partial_rollout": True, "over_sampling_batch_size": 12, "rollout_max_response_len": 12},
    "old-actor": {"async_buffer_size": 1, "keep_old_actor": True, "global_batch_size": 16},
    "frozen": {"freeze_params_name_list": ["embed", "layers.0"], "num_rollout": 6},
    "demonstrations": {"loss_type": "sft_loss", "n_samples_per_prompt": 1, "rm_type": None, "num_rollout": 5},
    "by-tokens": {
        "use_dynamic_batch_size": True, "max_tokens_per_gpu": 64, "recompute_activations": True, "num_rollout": 1
    },
    "sgd": {"optimizer": "sgd", "lr": 1e-2, "async_buffer_size": 1, "num_rollout": 2},
    "deterministic": {"deterministic_mode": True, "debug_determinism": True, "num_rollout": 1},
    "megatron": {"train_backend": "megatron", "num_rollout": 2},
    "agent": {"custom_generate_function_path": f"{faulty_hooks.__file__}:generate_with_tool", "num_rollout": 2},
    "saved-beside": {"async_save": True, "save": "saved", "save_interval": 1, "num_rollout": 2},
    "evaluated": {"eval_prompt_data": None, "save_interval": 1, "num_rollout": 2},
}  # fmt: skip


OLD = pytest.mark.filterwarnings("ignore")  # megatron-core calls what PyTorch has deprecated


@pytest.mark.parametrize("name", [n if n != "megatron" else pytest.param(n, marks=OLD) for n in HEALTHY])
@pytest.mark.nightly
def test_a_healthy_run_has_no_diagnosis(name, tmp_path):
    changes = dict(HEALTHY[name])
    if name == "megatron":
        pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    if "save" in changes:
        changes["save"] = tmp_path / "save"
    if name == "evaluated":
        data = tmp_path / "problems.jsonl"
        changes |= {"eval_prompt_data": ["held", data], "eval_interval": 1, "save": tmp_path / "save"}
    code, found = run(tmp_path / "run", **changes)
    assert (code, found) == (0, {})
    assert not [key for row in rows(tmp_path / "run") for key in row if key.startswith("diagnosis/")]
    story = [event["event"] for event in events(tmp_path / "run")]
    assert (story[0], story[-1]) == ("start", "end")
    assert story.count("step") >= changes.get("num_rollout", 3)
