"""Experts that are replayed make the same numbers with every backend and layout."""

from __future__ import annotations

import pytest
from tests.models_zoo import family_config
from tests.ranks_zoo import run_cases

from furlong.models import hf

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

# name: number of ranks, how they share the model
LAYOUTS = {
    "one": (1, {}),
    "recomputed": (1, {"recompute": True}),
    "sequence": (2, {"tensor": 2, "sequence_parallel": True}),
    "pipeline": (2, {"pipeline": 2, "recompute": True}),
    "context": (2, {"context": 2}),
    "experts": (2, {"expert": 2}),
    "tensor-pipeline": (4, {"tensor": 2, "sequence_parallel": True, "pipeline": 2}),
}
FSDP = {"fsdp-context": (2, {"context": 2})}
CASES = [
    *((name, "rollout") for name in (*LAYOUTS, *FSDP)),
    *((name, "policy") for name in ("recomputed", "sequence", "pipeline", "fsdp-context")),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("routing")
    hf.save_model(hf.build_model(family_config("qwen3_moe"), seed=0), folder / "moe")
    known = {"reference": (1, {}), **FSDP, **LAYOUTS}
    cases = [
        {
            "name": f"{name}-{replay}",
            "function": "replayed",
            "world": known[name][0],
            "args": {
                "family": "moe",
                "backend": "megatron" if name in LAYOUTS else "fsdp",
                "replay": replay,
                **known[name][1],
            },
        }
        for name, replay in (("reference", "rollout"), ("reference", "policy"), *CASES)
    ]
    return run_cases("tests.megatron_routing_cases", folder, cases, deadline_s=240)


@pytest.mark.parametrize(("name", "replay"), CASES)
def test_losses_norms_and_log_probs_are_those_of_one_rank(found, name, replay):
    ranks, (reference,) = found[f"{name}-{replay}"], found[f"reference-{replay}"]
    parts = {rank["data_rank"]: rank["losses"] for rank in ranks}
    losses = [sum(loss for loss, _ in step) for step in zip(*parts.values(), strict=True)]
    assert losses == pytest.approx([loss for loss, _ in reference["losses"]], rel=2e-5, abs=2e-6)
    wanted = dict(reference["log_probs"])
    for rank in ranks:
        assert rank["norms"] == pytest.approx(reference["norms"], rel=2e-5)
        for sample, value in rank["log_probs"]:
            assert value == pytest.approx(wanted[sample], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", [*LAYOUTS, *FSDP])
def test_agreement_is_counted_once_over_all_ranks(found, name):
    ranks, (reference,) = found[f"{name}-rollout"], found["reference-rollout"]
    parts = {rank["data_rank"]: rank["agreed"] for rank in ranks}
    for step, wanted in enumerate(reference["agreed"]):
        assert 0.2 * wanted[1] < wanted[0] < 0.8 * wanted[1]
        summed = [sum(part[step][i] for part in parts.values()) for i in (0, 1)]
        assert summed == pytest.approx(wanted, rel=1e-3)
    for rank in ranks:  # those that share micro-batches say the same
        assert rank["agreed"] == parts[rank["data_rank"]]
