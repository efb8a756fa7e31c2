"""The same seed and data give the same losses, gradient norms and weights on any number of ranks."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from ranks_cases import write_models
from ranks_checks import assert_equal_runs
from ranks_zoo import run_together

pytestmark = pytest.mark.nightly

# Numbers of ranks by family; embeddings are tied in Qwen2, but not in Qwen3.
FAMILIES = {"qwen2": (1, 4), "qwen3": (1, 2), "qwen3_moe": (1, 2, 4)}
PART = {
    "only_train_params_name_list": ["mlp", "norm"],
    "freeze_params_name_list": ["layers.0."],
    "recompute_activations": True,
}
BF16 = {"family": "gpt_oss", "dtype": "bfloat16", "optim": {"optimizer": "adam", "lr": 1e-3}}
MOE = {"family": "qwen3_moe", "optim": {"optimizer": "adam", "lr": 1e-3}}
BF16_ADAM = {"family": "qwen2", "dtype": "bfloat16", "optim": {"optimizer": "adam", "lr": 1e-3}}
# Saved runs: ranks, bytes per file, options. RESUMES: numbers of ranks that resume each.
SAVES = {"moe": (2, 12_000, MOE), "one": (1, 2**30, MOE), "bf16": (3, 2**30, BF16_ADAM)}
RESUMES = {"moe": (1, 3), "one": (2,), "bf16": (3,)}

Case = tuple[int, dict[str, Any]]


def case(world: int, function: str = "train", **args: Any) -> Case:
    return world, {"function": function, **args}


CASES: dict[str, Case] = {
    **{f"{family}-{world}": case(world, family=family) for family, worlds in FAMILIES.items() for world in worlds},
    "context-2": case(2, family="qwen3", context=2),
    "context-4": case(4, family="qwen2", context=4),  # more ranks than key/value heads
    "context-data": case(4, family="qwen3_moe", context=2, replicate=2),
    **{f"sinks-{world}": case(world, family="gpt_oss", rollouts=1, context=world) for world in (1, 2)},
    "heads": case(2, "wrong_context", family="qwen3_moe"),
    "copies": case(4, family="qwen3", replicate=2),
    **{f"part-{world}": case(world, family="qwen3", **PART) for world in (1, 2)},
    **{f"bf16-{world}": case(world, **BF16, rollouts=1) for world in (1, 2)},
    **{
        f"save-{name}": case(world, "save_half", to=f"saved-{name}", file_bytes=size, **how)
        for name, (world, size, how) in SAVES.items()
    },
    "sleep": case(2, "sleep_between", family="qwen3"),
    "bad-loss": case(2, "one_bad_rank", family="qwen3"),
    "bad-gradient": case(2, "one_bad_gradient", family="qwen3"),
    "frozen": case(2, "frozen_models", family="qwen2"),
    "missing": case(2, "missing_weights", family="incomplete"),
}
LATER: dict[str, Case] = {
    f"resume-{name}-{world}": case(world, "resume_half", of=f"saved-{name}", **SAVES[name][2])
    for name, worlds in RESUMES.items()
    for world in worlds
} | {
    "damaged": case(2, "damaged_half", of="saved-moe", **MOE),
    "leave": case(2, "leave_together", family="qwen3"),  # last: it destroys the process group
}


def by_world(cases: dict[str, Case]) -> list[tuple[int, dict[str, dict[str, Any]]]]:
    worlds = sorted({world for world, _ in cases.values()})
    return [(world, {name: how for name, (own, how) in cases.items() if own == world}) for world in worlds]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    write_models(folder, *FAMILIES, "gpt_oss")
    shutil.copytree(folder / "qwen3", folder / "incomplete")
    weights = load_file(folder / "incomplete" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "incomplete" / "model.safetensors", metadata={"format": "pt"})
    first, later = by_world(CASES), by_world(LATER)
    return run_together("ranks_cases", folder, [*first, *later], deadline_s=300, first_later=len(first))


@pytest.mark.parametrize(
    ("name", "want"),
    [("context-2", "qwen3-1"), ("context-4", "qwen2-1"), ("context-data", "qwen3_moe-1"), ("sinks-2", "sinks-1")],
)
def test_ranks_that_share_sequences_train_like_one(results, name, want):
    of_each_part = [rank["metrics"] for rank in results[name]]
    size = CASES[name][1].get("context", 1)
    assert all(of_each_part[i] == of_each_part[i - i % size] for i in range(len(of_each_part)))
    assert_equal_runs(results[name][::size], results[want])


def test_a_context_that_does_not_fit_the_heads_is_an_error(results):
    for rank in results["heads"]:
        assert "does not fit 3 attention heads and 1 key/value heads" in rank["error"]


@pytest.mark.parametrize(("family", "world"), [(f, world) for f, worlds in FAMILIES.items() for world in worlds[1:]])
def test_ranks_train_like_one(results, family, world):
    assert_equal_runs(results[f"{family}-{world}"], results[f"{family}-1"])


def test_copies_of_a_sharded_model_train_like_one(results):
    assert_equal_runs(results["copies"], results["qwen3-1"])


def test_frozen_parameters_and_recomputation_change_nothing(results):
    assert_equal_runs(results["part-2"], results["part-1"])


def test_bfloat16_differs_by_its_rounding_only_and_norms_that_stay_in_float32_do(results):
    assert_equal_runs(results["bf16-2"], results["bf16-1"], rel=0.05, abs=0.02)


@pytest.mark.parametrize(("name", "world"), [(name, world) for name, worlds in RESUMES.items() for world in worlds])
def test_run_resumes_from_a_checkpoint_with_any_number_of_ranks(results, name, world):
    want, got = results[f"save-{name}"], results[f"resume-{name}-{world}"]
    is_same = SAVES[name][0] == world
    for index, rank in enumerate(got):
        assert rank["same"]
        assert rank["old"] == 0.0
        if is_same:
            assert rank["weights"] == want[0]["weights"]
        for tensor, values in want[0]["weights"].items():
            np.testing.assert_allclose(rank["weights"][tensor], values, rtol=2e-4, atol=2e-5, err_msg=tensor)
        if index < SAVES[name][0]:
            assert rank["drawn"] == want[index]["drawn"]


def test_a_checkpoint_of_several_ranks_is_several_files_none_of_them_a_pickle(results):
    first = results["save-moe"][0]["files"]
    # checksums (xxh3) are files until the manifest of the checkpoint has them
    assert {name.rpartition(".")[2] for name in first} == {"json", "safetensors", "xxh3"}
    assert {"trainer_weights.safetensors", "trainer_weights-1.safetensors", "trainer_optimizer-1.safetensors"} < {
        *first
    }
    assert "trainer_rng_1.safetensors" in first
    assert not any("-1." in name or "_1." in name for name in results["save-one"][0]["files"])


def test_trainer_continues_bit_for_bit_after_offload_and_reload(results):
    for slept, straight in zip(results["sleep"], results["qwen3-2"], strict=True):
        assert slept["empty"]
        assert slept["bytes"] > 40 * 32 * 4  # more than half of the embedding
        assert slept["weights"] == straight["weights"]
        assert slept["metrics"] == straight["metrics"][1:]


def test_a_loss_that_is_nan_on_one_rank_stops_or_skips_all(results):
    first, last = results["bad-loss"]
    assert first["message"].startswith("rank 1: loss nan")
    assert last["message"].startswith("loss nan")
    for rank in (first, last):
        assert "loss nan" in rank["skipped"]
        assert rank["unchanged"]
    assert first["next"] == last["next"] > 0


def test_a_gradient_that_is_infinite_on_one_rank_is_named_by_all(results):
    first, last = results["bad-gradient"]
    assert first == last
    assert "gradient norm inf, first in rank 0: model.layers.0." in first["message"]


def test_a_file_that_one_rank_cannot_read_is_an_error_of_all_with_its_reason(results):
    first, last = results["damaged"]
    assert last["error"].startswith("CheckpointError: cannot read ")
    assert "trainer_rng_1.safetensors" in last["error"]
    assert first["error"] == f"CheckpointError: rank 1: {last['error'].partition(': ')[2]}"


def test_ranks_that_leave_have_no_thread_that_the_end_of_the_interpreter_can_meet(results):
    for threads in results["leave"]:
        assert threads["before"].count("gloo_tcp_loop") == 1  # groups share it
        assert threads["after"] == []


def test_frozen_models_stay_and_are_refreshed(results):
    for rank in results["frozen"]:
        assert rank == {"kept": [True, True, True], "refreshed": True}


def test_weights_that_the_first_rank_cannot_load_are_an_error_of_all(results):
    first, last = results["missing"]
    assert first["error"].startswith("CheckpointError: the weights in")
    assert last["error"].startswith("TrainerError: rank 0: the weights in")
