"""Training on several GPUs equals training on one: the checks of `tests/property/test_ranks_agree.py` over NCCL."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ranks_cases import write_models
from ranks_checks import assert_equal_runs
from ranks_zoo import ranks_possible, run_together

if ranks_possible() < 2:
    pytest.skip(f"two GPUs are needed, there are {torch.cuda.device_count()}", allow_module_level=True)

BF16 = {"family": "qwen3", "dtype": "bfloat16", "optim": {"optimizer": "adam", "lr": 1e-3}, "rollouts": 1}
FAMILIES = ("qwen2", "qwen3_moe")
CASES = {
    1: {
        **{family: {"family": family} for family in FAMILIES},
        "bf16": BF16,
        "compiled": {**BF16, "compile_layers": "on"},
    },
    2: {
        **{family: {"family": family} for family in FAMILIES},
        "bf16": BF16,
        "compiled": {**BF16, "compile_layers": "on"},
        "context": {"family": "qwen2", "context": 2},
        "compiled-context": {**BF16, "context": 2, "compile_layers": "on"},
        "sleep": {"function": "sleep_between", "family": "qwen2"},
    },
    4: {
        **{family: {"family": family} for family in FAMILIES},
        "copies": {"family": "qwen2", "replicate": 2},
        "context": {"family": "qwen2", "context": 2},
    },
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the results of each rank by case; names contain the number of ranks, as in `qwen2-4`."""
    folder = tmp_path_factory.mktemp("ranks")
    write_models(folder, "qwen2", "qwen3", "qwen3_moe")
    groups = [
        (world, {f"{name}-{world}": case for name, case in cases.items()})
        for world, cases in CASES.items()
        if world <= ranks_possible()
    ]
    return run_together("ranks_cases", folder, groups, deadline_s=280, device="cuda")


@pytest.mark.parametrize("name", ["qwen2-2", "qwen3_moe-2", "qwen2-4", "qwen3_moe-4", "copies-4"])
def test_several_gpus_train_like_one(results, name):
    if name not in results:
        pytest.skip(f"four ranks are needed, {ranks_possible()} are possible")
    one = "qwen3_moe-1" if name.startswith("qwen3_moe") else "qwen2-1"
    assert_equal_runs(results[name], results[one], rel=2e-4, abs=2e-5)


@pytest.mark.parametrize("name", ["bf16-2", "compiled-1", "compiled-2"])
def test_bfloat16_and_compiled_layers_differ_by_rounding_only(results, name):
    assert_equal_runs(results[name], results["bf16-1"], rel=0.05, abs=0.02)


def test_gpus_that_share_sequences_train_like_one(results):
    for name in ("context-2", "context-4"):
        if name in results:
            assert_equal_runs(results[name][::2], results["qwen2-1"], rel=2e-4, abs=2e-5)  # first rank of each CP group
    assert_equal_runs(results["compiled-context-2"][:1], results["bf16-1"], rel=0.05, abs=0.02)


def test_an_offloaded_trainer_continues(results):
    for slept, straight in zip(results["sleep-2"], results["qwen2-2"], strict=True):
        assert slept["empty"]
        for name, values in straight["weights"].items():
            np.testing.assert_allclose(slept["weights"][name], values, rtol=2e-4, atol=2e-5, err_msg=name)
