"""PPO gives the same values, losses, gradients and weights on any number of ranks, in any layout, on both backends."""

from __future__ import annotations

from typing import Any

import pytest

from furlong.core.metric import Metric, merge
from furlong.models import hf_model as hf
from models_zoo import family_config
from ranks_zoo import run_cases

pytest.importorskip("megatron", reason="megatron-core is not installed")

LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one": (1, "tied", {"save_as": "one-checkpoint"}),
    "shared": (1, "tied", {"shares": True, "save_as": "shared-checkpoint"}),
    "data": (2, "tied", {"save_as": "data-checkpoint"}),
    "context": (2, "tied", {"context": 2}),
    "megatron": (1, "tied", {"backend": "megatron", "save_as": "megatron-checkpoint"}),
    "megatron-shared": (1, "tied", {"backend": "megatron", "shares": True}),
    "sequence": (2, "tied", {"backend": "megatron", "tensor": 2, "sequence_parallel": True}),
    "tensor": (2, "tied", {"backend": "megatron", "tensor": 2}),
    "pipeline": (2, "tied", {"backend": "megatron", "pipeline": 2, "save_as": "pipeline-checkpoint"}),
    "megatron-context": (2, "tied", {"backend": "megatron", "context": 2, "attention_backend": "unfused"}),
    "megatron-data": (2, "tied", {"backend": "megatron"}),
    "data-shared": (2, "tied", {"shares": True, "save_as": "data-shared-checkpoint"}),
    "megatron-data-shared": (2, "tied", {"backend": "megatron", "shares": True}),
    "one-untied": (1, "untied", {}),
    "sequence-untied": (2, "untied", {"backend": "megatron", "tensor": 2, "sequence_parallel": True}),
}
ON_EACH_COMMIT = ("one", "data", "sequence", "pipeline")


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    is_nightly = any(item.get_closest_marker("nightly") for item in request.session.items)
    chosen = {name: case for name, case in LAYOUTS.items() if is_nightly or name in ON_EACH_COMMIT}
    folder = tmp_path_factory.mktemp("critic")
    for name, is_tied in (("tied", True), ("untied", False)):
        config = family_config("qwen3")
        config.tie_word_embeddings = is_tied
        hf.save_model(hf.build_model(config, seed=0), folder / name)
    cases = [
        {"name": name, "function": "two_rounds", "world": world, "args": {"model": model, **how}, "at_once": 2}
        for name, (world, model, how) in chosen.items()
    ]
    return run_cases("critic_cases", folder, cases, deadline_s=240)


def metrics_of(found: list[Any], number: int) -> dict[str, float]:
    parts = [{name: Metric(*m) for name, m in rank["rounds"][number].items()} for rank in found]
    return {name: metric.value for name, metric in merge(parts).items()}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ON_EACH_COMMIT else pytest.mark.nightly) for n in LAYOUTS]
)
def test_policy_and_critic_train_as_on_one_rank(results, name):
    found, reference = results[name], results["one-untied" if "untied" in name else "one"]
    data_ranks = found if LAYOUTS[name][0] == 1 or "data" in name else found[:1]
    assert all(rank["actor_is_untouched"] for rank in found)
    assert {rank["restored"] for rank in found} <= {"", "bitwise"}
    for number in (0, 1):
        have, want = metrics_of(data_ranks, number), metrics_of(reference, number)
        assert "train/loss" not in have or number == 1
        for key in ("train/critic-value_loss", "train/critic-value_clipfrac", "train/critic-grad_norm",
                    "train/critic-explained_variance", "rollout/values", "rollout/returns", "rollout/advantages",
                    *(("train/loss", "train/grad_norm") if number else ())):  # fmt: skip
            assert have[key] == pytest.approx(want[key], rel=2e-4, abs=2e-6), (number, key)
    for role in ("actor", "critic"):
        for tensor, values in reference[0]["weights"][role].items():
            for rank in found:
                assert rank["weights"][role][tensor] == pytest.approx(values, rel=2e-4, abs=2e-5), (role, tensor)
