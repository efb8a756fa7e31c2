"""Routing replay, router losses and expert biases are the same with every backend and layout."""

from __future__ import annotations

import pytest

from furlong.models import hf_model as hf
from megatron_checks import losses_of, often, wanted, with_sources
from models_zoo import family_config
from ranks_zoo import run_cases

pytestmark = pytest.mark.nightly

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
KNOWN = {"reference": (1, {}), **FSDP, **LAYOUTS}
CASES = [
    *(f"{name}-rollout" for name in ("recomputed", "context", "experts", "tensor-pipeline", "fsdp-context")),
    *(f"{name}-policy" for name in ("recomputed", "sequence", "pipeline", "fsdp-context")),
]
# aux_loss is per micro-batch, so only layouts with equal micro-batches.
BALANCED = [
    *(f"{name}-aux_loss" for name in ("one", "tensor-pipeline")),
    *(f"{name}-seq_aux_loss" for name in ("one", "experts", "context-experts", "tensor-pipeline")),
]
BIASED = [f"{name}-bias" for name in ("one", "experts", "context-experts", "tensor-pipeline")]
SOURCES = {
    **{case: [f"reference-{case.rpartition('-')[2]}"] for case in CASES},
    **{case: [f"by-hand-{case.rpartition('-')[2]}", f"one-{case.rpartition('-')[2]}"] for case in BALANCED},
    **{case: ["one-bias"] for case in BIASED},
}


def layout_of(case):
    return KNOWN[case.rpartition("-")[0]]


def on_two_ranks(cases):
    """Layouts of four ranks run in `make nightly`."""
    return often(cases, [case for case in cases if layout_of(case)[0] < 4])


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("routing")
    names = with_sources(wanted(request, {}), SOURCES)
    for family, name in (("qwen3_moe", "moe"), ("glm4_moe", "glm")):
        hf.save_model(hf.build_model(family_config(family), seed=0), folder / name)
    cases = []
    for case in ("reference-rollout", "reference-policy", *CASES):
        name, _, replay = case.rpartition("-")
        args = {"family": "moe", "backend": "megatron" if name in LAYOUTS else "fsdp", "replay": replay}
        cases.append({"name": case, "function": "replayed", "args": args | layout_of(case)[1]})
    for kind in ("aux_loss", "seq_aux_loss"):
        args = {"family": "moe", "losses": {"kind": kind, "coeff": 0.3, "z_coeff": 0.01}}
        cases.append({"name": f"by-hand-{kind}", "function": "balanced_by_hand", "world": 1, "args": args})
        of_kind = [case for case in BALANCED if case.endswith(f"-{kind}")]
        cases += [{"name": case, "function": "balanced", "args": args | layout_of(case)[1]} for case in of_kind]
    args = {"family": "glm", "losses": {"bias_rate": 0.01}}
    cases += [{"name": case, "function": "balanced", "args": args | layout_of(case)[1]} for case in BIASED]
    wide = [{"world": case.get("world") or layout_of(case["name"])[0], **case} for case in cases]
    wide.sort(key=lambda case: case["world"])
    chosen = [case | {"at_once": 2, "together": 4} for case in wide if case["name"] in names]
    return run_cases("megatron_routing_cases", folder, chosen, deadline_s=240)


@pytest.mark.parametrize("case", on_two_ranks(CASES))
def test_losses_norms_and_log_probs_are_those_of_one_rank(outcomes, case):
    ranks, (reference,) = outcomes[case], outcomes[SOURCES[case][0]]
    assert losses_of(ranks) == pytest.approx(losses_of([reference]), rel=2e-5, abs=2e-6)
    expected = dict(reference["log_probs"])
    for rank in ranks:
        assert rank["norms"] == pytest.approx(reference["norms"], rel=2e-5)
        for sample, value in rank["log_probs"]:
            assert value == pytest.approx(expected[sample], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("case", on_two_ranks([case for case in CASES if case.endswith("-rollout")]))
def test_agreement_is_counted_once_over_all_ranks(outcomes, case):
    ranks, (reference,) = outcomes[case], outcomes["reference-rollout"]
    parts = {rank["data_rank"]: rank["agreed"] for rank in ranks}
    for step, expected in enumerate(reference["agreed"]):
        assert 0.2 * expected[1] < expected[0] < 0.8 * expected[1]
        summed = [sum(part[step][i] for part in parts.values()) for i in (0, 1)]
        assert summed == pytest.approx(expected, rel=1e-3)
    for rank in ranks:  # ranks with the same micro-batches agree
        assert rank["agreed"] == parts[rank["data_rank"]]


@pytest.mark.parametrize("case", on_two_ranks(BALANCED))
def test_router_losses_are_those_of_the_papers(outcomes, case):
    (by_hand,), (one,) = (outcomes[name] for name in SOURCES[case])
    parts = {rank["data_rank"]: rank["losses"] for rank in outcomes[case]}
    for step, alone in enumerate(one["losses"]):
        assert {key: sum(part[step][key] for part in parts.values()) for key in alone} == pytest.approx(alone, rel=1e-5)
    first = [sum(part[0][key] for part in parts.values()) for key in ("load_balancing_loss", "z_loss")]
    assert first == pytest.approx(by_hand["losses"], rel=1e-5)
    for rank in outcomes[case]:
        assert rank["norms"] == pytest.approx(one["norms"], rel=1e-4)
        assert rank["norms"][0] == pytest.approx(by_hand["norm"], rel=1e-4)


@pytest.mark.parametrize("case", on_two_ranks(BIASED))
def test_an_expert_bias_moves_by_the_choices_of_all_ranks_and_is_exported(outcomes, case):
    steps = outcomes["one-bias"][0]["biases"]
    (name,) = steps[0]  # one layer; the first has no experts
    assert name == "model.layers.1.mlp.gate.e_score_correction_bias"
    assert {round(abs(value), 6) for value in steps[0][name]} <= {0.0, 0.01}
    assert min(steps[0][name]) < 0 < max(steps[0][name])
    assert all(rank["biases"] == steps for rank in outcomes[case])
