"""Routing replay, router losses and expert biases are the same with every backend and layout."""

from __future__ import annotations

import pytest

from furlong.models import hf_model as hf
from models_zoo import family_config
from ranks_zoo import run_cases

pytestmark = pytest.mark.slow

pytest.importorskip("megatron", reason="megatron-core is not installed")

# name: number of ranks, layout
LAYOUTS = {
    "one": (1, {}),
    "recomputed": (1, {"recompute": True}),
    "sequence": (2, {"tensor": 2, "sequence_parallel": True}),
    "pipeline": (2, {"pipeline": 2, "recompute": True}),
    "context": (2, {"context": 2}),
    "experts": (2, {"expert": 2}),
    "context-experts": (4, {"context": 2, "expert": 4}),  # two of them data-parallel
    "tensor-pipeline": (4, {"tensor": 2, "sequence_parallel": True, "pipeline": 2}),
}
FSDP = {"fsdp-context": (2, {"context": 2})}
CASES = [
    *((name, "rollout") for name in ("recomputed", "context", "experts", "tensor-pipeline", "fsdp-context")),
    *((name, "policy") for name in ("recomputed", "sequence", "pipeline", "fsdp-context")),
]
# Layouts by kind of loss; aux_loss is per micro-batch, so only layouts with equal micro-batches.
BALANCED = {
    "aux_loss": ("one", "tensor-pipeline"),
    "seq_aux_loss": ("one", "context-experts", "tensor-pipeline"),
}
BIASED = ("one", "context-experts", "tensor-pipeline")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
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
    hf.save_model(hf.build_model(family_config("glm4_moe"), seed=0), folder / "glm")
    for name in BIASED:
        world, sizes = LAYOUTS[name]
        args = {"family": "glm", "losses": {"bias_rate": 0.01}, **sizes}
        cases.append({"name": f"{name}-bias", "function": "balanced", "world": world, "args": args})
    for kind, names in BALANCED.items():
        losses = {"kind": kind, "coeff": 0.3, "z_coeff": 0.01}
        args = {"family": "moe", "losses": losses}
        cases.append({"name": f"by-hand-{kind}", "function": "balanced_by_hand", "world": 1, "args": args})
        for name in names:
            world, sizes = LAYOUTS[name]
            case = {"name": f"{name}-{kind}", "function": "balanced", "world": world, "args": args | sizes}
            cases.append(case)
    cases = [case | {"at_once": 2, "together": 4} for case in sorted(cases, key=lambda case: case["world"])]
    return run_cases("megatron_routing_cases", folder, cases, deadline_s=240)


@pytest.mark.parametrize(("name", "replay"), CASES)
def test_losses_norms_and_log_probs_are_those_of_one_rank(outcomes, name, replay):
    ranks, (reference,) = outcomes[f"{name}-{replay}"], outcomes[f"reference-{replay}"]
    parts = {rank["data_rank"]: rank["losses"] for rank in ranks}
    losses = [sum(loss for loss, _ in step) for step in zip(*parts.values(), strict=True)]
    assert losses == pytest.approx([loss for loss, _ in reference["losses"]], rel=2e-5, abs=2e-6)
    expected = dict(reference["log_probs"])
    for rank in ranks:
        assert rank["norms"] == pytest.approx(reference["norms"], rel=2e-5)
        for sample, value in rank["log_probs"]:
            assert value == pytest.approx(expected[sample], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", [name for name, replay in CASES if replay == "rollout"])
def test_agreement_is_counted_once_over_all_ranks(outcomes, name):
    ranks, (reference,) = outcomes[f"{name}-rollout"], outcomes["reference-rollout"]
    parts = {rank["data_rank"]: rank["agreed"] for rank in ranks}
    for step, expected in enumerate(reference["agreed"]):
        assert 0.2 * expected[1] < expected[0] < 0.8 * expected[1]
        summed = [sum(part[step][i] for part in parts.values()) for i in (0, 1)]
        assert summed == pytest.approx(expected, rel=1e-3)
    for rank in ranks:  # ranks with the same micro-batches agree
        assert rank["agreed"] == parts[rank["data_rank"]]


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in BALANCED.items() for name in names])
def test_router_losses_are_those_of_the_papers(outcomes, kind, name):
    by_hand = outcomes[f"by-hand-{kind}"][0]
    ranks, (one,) = outcomes[f"{name}-{kind}"], outcomes[f"one-{kind}"]
    parts = {rank["data_rank"]: rank["losses"] for rank in ranks}
    for step, alone in enumerate(one["losses"]):
        assert {key: sum(part[step][key] for part in parts.values()) for key in alone} == pytest.approx(alone, rel=1e-5)
    first = [sum(part[0][key] for part in parts.values()) for key in ("load_balancing_loss", "z_loss")]
    assert first == pytest.approx(by_hand["losses"], rel=1e-5)
    for rank in ranks:
        assert rank["norms"] == pytest.approx(one["norms"], rel=1e-4)
        assert rank["norms"][0] == pytest.approx(by_hand["norm"], rel=1e-4)


def test_an_expert_bias_moves_by_the_choices_of_all_ranks_and_is_exported(outcomes):
    steps = outcomes["one-bias"][0]["biases"]
    (name,) = steps[0]  # one layer; the first has no experts
    assert name == "model.layers.1.mlp.gate.e_score_correction_bias"
    assert {round(abs(value), 6) for value in steps[0][name]} <= {0.0, 0.01}
    assert min(steps[0][name]) < 0 < max(steps[0][name])
    for layout in BIASED:
        assert all(rank["biases"] == steps for rank in outcomes[f"{layout}-bias"])
