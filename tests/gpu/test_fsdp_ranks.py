"""Several GPUs train like one: the checks of `tests/property/test_ranks_agree.py` over NCCL."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.property.test_ranks_agree import assert_equal_runs
from tests.ranks_cases import write_models
from tests.ranks_zoo import ranks_possible, run_cases

if ranks_possible() < 2:
    pytest.skip(f"two GPUs are needed, there are {torch.cuda.device_count()}", allow_module_level=True)

WORLDS = (1, 2, 4) if ranks_possible() >= 4 else (1, 2)
GPU = {"device": "cuda"}
BF16 = {**GPU, "dtype": "bfloat16", "optim": {"optimizer": "adam", "lr": 1e-3}, "rollouts": 1}


def case(name, world, function="train", **args):
    return {"name": name, "function": function, "world": world, "args": args}


CASES = [
    *(case(f"{family}-{world}", world, family=family, **GPU) for family in ("qwen2", "qwen3_moe") for world in WORLDS),
    *(case(f"bf16-{world}", world, family="qwen3", **BF16) for world in (1, 2)),
    *(case(f"compiled-{world}", world, family="qwen3", compile_layers=True, **BF16) for world in (1, 2)),
    case("context", 2, family="qwen2", context=2, **GPU),
    case("compiled-context", 2, family="qwen3", context=2, compile_layers=True, **BF16),
    case("sleep", 2, "sleep_between", family="qwen2", **GPU),
    *([case("copies-4", 4, family="qwen2", replicate=2, **GPU)] if 4 in WORLDS else []),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    write_models(folder, "qwen2", "qwen3", "qwen3_moe")
    return run_cases("tests.ranks_cases", folder, CASES, deadline_s=500)


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
    assert_equal_runs(results["context"][:1], results["qwen2-1"], rel=2e-4, abs=2e-5)
    assert_equal_runs(results["compiled-context"][:1], results["bf16-1"], rel=0.05, abs=0.02)


def test_a_trainer_that_slept_goes_on(results):
    for slept, straight in zip(results["sleep"], results["qwen2-2"], strict=True):
        assert slept["empty"]
        for name, values in straight["weights"].items():
            np.testing.assert_allclose(slept["weights"][name], values, rtol=2e-4, atol=2e-5, err_msg=name)
