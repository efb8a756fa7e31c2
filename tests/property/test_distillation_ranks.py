"""Distillation gives the same losses, gradients and weights on any number of ranks, in any layout, on both backends."""

from __future__ import annotations

from typing import Any

import pytest

from furlong.core.metric import Metric, merge
from furlong.models import hf_model as hf
from models_zoo import family_config
from ranks_zoo import run_cases

pytest.importorskip("megatron", reason="megatron-core is not installed")

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"save": "one-checkpoint"}),
    "shared": (1, {"shares_device": True}),
    "chunks": (1, {"log_probs_chunk_size": 3}),
    "data": (2, {"save": "data-checkpoint"}),
    "context": (2, {"context": 2}),
    "megatron": (1, {"backend": "megatron"}),
    "sequence": (2, {"backend": "megatron", "tensor": 2, "sequence_parallel": True, "save": "tensor-checkpoint"}),
    "pipeline": (2, {"backend": "megatron", "pipeline": 2}),
    "megatron-shared": (1, {"backend": "megatron", "shares_device": True}),
    "megatron-context": (2, {"backend": "megatron", "context": 2, "attention_backend": "unfused"}),
    "megatron-data": (2, {"backend": "megatron"}),
}
ON_EACH_COMMIT = ("one", "data", "sequence", "pipeline")
KEYS = (
    *("train/loss", "train/grad_norm", "train/opd_reverse_kl", "rollout/teacher_log_probs", "rollout/advantages"),
    *("train/opd_topk_mass_student", "train/opd_topk_mass_teacher"),
)


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    is_nightly = any(item.get_closest_marker("nightly") for item in request.session.items)
    chosen = {name: case for name, case in LAYOUTS.items() if is_nightly or name in ON_EACH_COMMIT}
    folder = tmp_path_factory.mktemp("distillation")
    for seed, name in enumerate(("student", "teacher")):
        hf.save_model(hf.build_model(family_config("qwen3"), seed=seed), folder / name)
    cases: list[dict[str, Any]] = []
    for name, (world, how) in chosen.items():
        alike = {key: value for key, value in how.items() if key != "save"}
        cases.append({"name": name, "function": "rounds", "world": world, "args": how, "at_once": 2})
        cases.append({"name": f"{name}-same", "function": "same", "world": world, "args": alike, "at_once": 2})
    cases.append({"name": "ppo", "function": "ppo", "world": 1, "args": {}, "at_once": 2})
    return run_cases("distillation_cases", folder, cases, deadline_s=240)


def metrics_of(found: list[Any], loss: str) -> dict[str, float]:
    parts = [{name: Metric(*m) for name, m in rank["rounds"][loss].items()} for rank in found]
    return {name: metric.value for name, metric in merge(parts).items()}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ON_EACH_COMMIT else pytest.mark.nightly) for n in LAYOUTS]
)
def test_a_student_trains_as_on_one_rank(results, name):
    found, reference = results[name], results["one"]
    data_ranks = found if name in ("data", "megatron-data") else found[:1]
    assert {rank["restored"] for rank in found} <= {"", "bitwise"}
    for loss in ("sampled", "topk", "full"):
        have, want = metrics_of(data_ranks, loss), metrics_of(reference, loss)
        assert want["train/opd_reverse_kl"] != 0
        assert ("train/opd_topk_mass_student" in want) == (loss == "topk")
        for key in KEYS:
            if key in want:
                assert have[key] == pytest.approx(want[key], rel=2e-4, abs=2e-6), (loss, key)
    for tensor, values in reference[0]["weights"].items():
        for rank in found:
            assert rank["weights"][tensor] == pytest.approx(values, rel=2e-4, abs=2e-5), tensor
    for rank in results[f"{name}-same"]:  # a teacher that is the policy
        assert rank == {"norms": {"sampled": 0.0, "topk": 0.0, "full": 0.0}, "is_untouched": True}


def test_a_penalty_is_added_to_the_advantages_of_a_critic(results):
    metrics = {name: Metric(*m).value for name, m in results["ppo"][0].items()}
    assert metrics["train/opd_reverse_kl"] != 0
    assert {"train/critic-value_loss", "rollout/values", "rollout/teacher_log_probs"} <= set(metrics)
