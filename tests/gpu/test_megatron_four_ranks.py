"""Training with Megatron-core on four GPUs equals FSDP on one, with every layout of dense and MoE models."""

from __future__ import annotations

import pytest

from furlong.models import hf_model as hf
from megatron_checks import assert_exports_as, assert_trains_as, changed_config
from ranks_zoo import ranks_possible, run_cases

pytest.importorskip("megatron", reason="megatron-core is not installed")
if ranks_possible() < 4:
    pytest.skip(f"four ranks are needed, {ranks_possible()} are possible", allow_module_level=True)

GPU = {"device": "cuda", "offloads": False}
HEADS = {"num_key_value_heads": 4}
DEEP = {**HEADS, "num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}  # one layer per stage
MODELS = {
    "dense": ("qwen3", HEADS),
    "deep": ("qwen3", DEEP),
    "moe": ("qwen3_moe", HEADS),
    "deep-moe": ("qwen3_moe", DEEP),
}
TWO = {"tensor": 2, "sequence_parallel": True}
# name: model, layout of four ranks
DENSE = {
    "tensor": ("dense", {"tensor": 4}),
    "pipeline": ("deep", {"pipeline": 4}),
    "context": ("dense", {"context": 4}),
    "data": ("dense", {}),
    "tensor-pipeline": ("dense", {**TWO, "pipeline": 2}),
}
MOE = {
    "moe-tensor": ("moe", {"tensor": 4, "sequence_parallel": True}),
    "moe-pipeline": ("deep-moe", {"pipeline": 4}),
    "moe-experts": ("moe", {"expert": 4}),
    "moe-context": ("moe", {"context": 4}),
    "moe-data": ("moe", {}),
    "moe-tensor-pipeline": ("moe", {**TWO, "pipeline": 2}),
    "moe-tensor-experts": ("moe", {**TWO, "expert": 2}),
}
RUNS = {"fsdp": (1, {name: (name, {"backend": "fsdp"}) for name in MODELS}), "four": (4, DENSE), "four-moe": (4, MOE)}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron")
    for name, (family, changes) in MODELS.items():
        hf.save_model(hf.build_model(changed_config(family, changes), seed=0), folder / name)
    cases = [
        {
            "name": run,
            "function": "each_layout",
            "world": world,
            "args": {**GPU, "layouts": {name: {"family": model, **how} for name, (model, how) in layouts.items()}},
        }
        for run, (world, layouts) in RUNS.items()
    ]
    results = run_cases("megatron_cases", folder, cases, deadline_s=280)
    return {name: [rank[name] for rank in results[run]] for run, (_, layouts) in RUNS.items() for name in layouts}


@pytest.mark.parametrize("name", [*DENSE, *MOE])
def test_four_ranks_train_as_one(found, name):
    model, _ = (DENSE | MOE)[name]
    assert_trains_as(found, name, model, rel=2e-4, loss_abs=2e-4)
    assert_exports_as(found, name, model, rel=2e-4, near=2e-5)
