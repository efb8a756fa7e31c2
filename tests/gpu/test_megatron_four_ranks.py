"""Four ranks of Megatron-core on GPUs train what FSDP trains on one, however they share a dense model or experts."""

from __future__ import annotations

import pytest
from tests.megatron_checks import assert_exports_as, assert_trains_as, changed_config
from tests.ranks_zoo import ranks_possible, run_cases

from furlong.models import hf

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
if ranks_possible() < 4:
    pytest.skip(f"four ranks are needed, {ranks_possible()} are possible", allow_module_level=True)

GPU = {"device": "cuda", "is_parked": False}
SHAPE = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4, "num_key_value_heads": 4}
FAMILIES = {"dense": "qwen3", "moe": "qwen3_moe"}
TWO = {"tensor": 2, "sequence_parallel": True}
LAYOUTS = {
    "dense": {
        "dense-tensor": {"tensor": 4},
        "dense-pipeline": {"pipeline": 4},
        "dense-context": {"context": 4},
        "dense-data": {},
        "dense-tensor-pipeline": {**TWO, "pipeline": 2},
    },
    "moe": {
        "moe-tensor": {"tensor": 4, "sequence_parallel": True},
        "moe-pipeline": {"pipeline": 4},
        "moe-experts": {"expert": 4},
        "moe-context": {"context": 4},
        "moe-data": {},
        "moe-tensor-pipeline": {**TWO, "pipeline": 2},
        "moe-tensor-experts": {**TWO, "expert": 2},
    },
}
NAMES = [name for layouts in LAYOUTS.values() for name in layouts]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron")
    cases = []
    for family, kind in FAMILIES.items():
        hf.save_model(hf.build_model(changed_config(kind, SHAPE), seed=0), folder / family)
        args = {"family": family, **GPU}
        cases.append({"name": family, "function": "two_steps", "world": 1, "args": {**args, "backend": "fsdp"}})
        args["layouts"] = LAYOUTS[family]
        cases.append({"name": f"four-{family}", "function": "each_layout", "world": 4, "args": args})
    results = run_cases("tests.megatron_cases", folder, cases, deadline_s=280)
    layouts = {name: [rank[name] for rank in results[f"four-{name.partition('-')[0]}"]] for name in NAMES}
    return layouts | {family: results[family] for family in FAMILIES}


@pytest.mark.parametrize("name", NAMES)
def test_four_ranks_train_as_one_and_their_checkpoints_come_back(found, name):
    reference = name.partition("-")[0]
    assert_trains_as(found, name, reference, rel=2e-4, loss_abs=2e-4)
    assert_exports_as(found, name, reference, rel=2e-4, near=2e-5)
    assert all(rank["is_restored"] for rank in found[name])
