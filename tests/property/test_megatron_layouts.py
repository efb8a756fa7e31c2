"""Training with Megatron-core matches FSDP, with every layout."""

from __future__ import annotations

import pytest
import torch

from furlong.core.weights import checksum
from furlong.models import hf_model as hf
from furlong.models.stored_tensors import open_tensors
from megatron_checks import (
    assert_converted,
    assert_exports_as,
    assert_trains_as,
    changed_config,
    often,
    wanted,
    with_sources,
)
from ranks_zoo import run_cases

pytest.importorskip("megatron", reason="megatron-core is not installed")

LM = {"module": "megatron_lm_cases"}  # cases of Megatron-LM checkpoints

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS = {
    "llama": ("llama", {"attention_bias": False, "rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 4}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"pad_token_id": 7}),  # occurs in the samples
    "tied": ("qwen3", {"tie_word_embeddings": True, "pad_token_id": 7}),
    "moe": ("qwen3_moe", {}),
    "moe-normed": ("qwen3_moe", {"norm_topk_prob": True}),
    "deep": (
        "qwen3",
        {"tie_word_embeddings": True, "num_hidden_layers": 6, "layer_types": ["full_attention"] * 6},
    ),
}
# name: model, settings for both backends
VARIANTS = {
    "tied-sgd": ("tied", {"optimizer": "sgd", "freeze": [r"\.layers\.1\."]}),
    "qwen3-last": (
        "qwen3",
        {"train_only": ["norm", "lm_head", r"^model\.layers\.1\.mlp\."], "freeze": [r"layers\.0\."]},
    ),
    "qwen3-logits": ("qwen3", {"looks_at_logits": True}),
}
# name: model or variant, number of ranks, layout
LAYOUTS = {
    "one-llama": ("llama", 1, {}),
    "one-qwen2": ("qwen2", 1, {}),
    "one-moe": ("moe", 1, {}),
    "tensor": ("tied", 2, {"tensor": 2}),
    "sequence": ("qwen3", 2, {"tensor": 2, "sequence_parallel": True}),
    "sequence-moe": ("moe", 2, {"tensor": 2, "sequence_parallel": True}),
    "pipeline": ("tied", 2, {"pipeline": 2}),
    "context": ("qwen3", 2, {"context": 2, "flags": {"attention_backend": "unfused"}}),
    "data": ("qwen3", 2, {}),
    "experts": (
        "moe-normed",
        2,
        {"expert": 2, "flags": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}},
    ),
    "experts-shared": ("moe", 2, {"tensor": 2, "sequence_parallel": True, "expert_tensor": 2}),
    "interleaved": ("deep", 2, {"pipeline": 2, "virtual": 3}),
    "interleaved-uneven": ("deep", 2, {"pipeline": 2, "virtual": 2, "first_layers": 2}),
    "sgd": ("tied-sgd", 2, {"tensor": 2, "freeze": [r"^decoder\.layers\.1\."]}),
    "pipeline-last": ("qwen3-last", 2, {"pipeline": 2}),
    "four-tensor": ("llama", 4, {"tensor": 4, "sequence_parallel": True}),
    "four-pipeline": ("deep", 4, {"pipeline": 4, "first_layers": 1, "last_layers": 1}),
    "four-context": ("qwen3", 4, {"context": 4}),
    "four-experts": ("moe", 4, {"expert": 4}),
    "four-data": ("qwen3", 4, {}),
    "tensor-pipeline": ("qwen3", 4, {"tensor": 2, "pipeline": 2}),
    "tensor-data": ("qwen3", 4, {"tensor": 2, "sequence_parallel": True, "flags": {"overlap_grad_reduce": True}}),
    "tensor-context": ("qwen3-logits", 4, {"tensor": 2, "sequence_parallel": True, "context": 2}),
    "tensor-pipeline-experts": ("moe", 4, {"tensor": 2, "sequence_parallel": True, "pipeline": 2, "expert": 2}),
    "context-experts": ("moe-normed", 4, {"context": 2, "expert": 4}),
    "interleaved-context": ("deep", 4, {"pipeline": 2, "virtual": 3, "context": 2}),
}
OTHERS = {
    "staying": ("moe", 2, {"tensor": 2, "sequence_parallel": True, "offloads": False}),
    "bfloat16-sequence": ("qwen3", 2, {"tensor": 2, "sequence_parallel": True, "dtype": "bfloat16"}),
    "bfloat16-offloaded": (
        "qwen3",
        2,
        {"tensor": 2, "sequence_parallel": True, "dtype": "bfloat16", "is_offloaded": True},
    ),
    "bfloat16-data": ("qwen3", 2, {"dtype": "bfloat16"}),
    "bfloat16-moe": ("moe", 1, {"dtype": "bfloat16", "flags": {"grad_reduce_in_bf16": True}}),
}
COMPUTE = {
    "plain": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "by-two": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "first": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "unfused": {"attention_backend": "unfused"},
}
SHARED = {"tensor": 2, "sequence_parallel": True, "expert_tensor": 2}
# name: model, the case that saved after its first step; number of ranks and layout of the second step
RESUMED = {
    "tensor-to-pipeline": ("tied", "tensor", 2, {"pipeline": 2}),
    "pipeline-to-fsdp": ("tied", "pipeline", 1, {"backend": "fsdp"}),
    "fsdp-to-interleaved": ("deep", "fsdp-deep", 2, {"pipeline": 2, "virtual": 3}),
    "interleaved-to-data": ("deep", "interleaved", 2, {}),
    "tensor-pipeline-to-context": ("qwen3", "tensor-pipeline", 2, {"context": 2}),
    "fsdp-to-experts": ("moe-normed", "fsdp-moe-normed", 2, {"expert": 2}),
    "experts-to-shared": ("moe-normed", "experts", 2, SHARED),
    "experts-to-fsdp": ("moe-normed", "experts", 2, {"backend": "fsdp"}),
    "sgd-to-pipeline": ("tied-sgd", "sgd", 2, {"pipeline": 2}),
    "fsdp-to-sgd": ("tied-sgd", "fsdp-tied-sgd", 1, {}),
    "sgd-to-fsdp": ("tied-sgd", "sgd", 1, {"backend": "fsdp"}),
    "bfloat16-to-fsdp": ("qwen3", "bfloat16-sequence", 1, {"backend": "fsdp", "dtype": "bfloat16"}),
}


# Checkpoints that Megatron-core saves after a step: by layout, the models and how they are trained.
SAVED_BY_CORE = {
    "tensor": {
        "moe": {"sequence_parallel": True},
        "tied": {"sequence_parallel": True, "dtype": "bfloat16"},
    },
    "stages": {"moe-normed": {"expert": 2}, "deep": {"virtual": 3}},
}
# name: model, one of these checkpoints, layout of two ranks that resume from it
FROM_CORE = {
    "core-to-experts": ("moe", "tensor-fully", {"expert": 2}),
    "core-to-itself": ("moe", "tensor-fully", {"tensor": 2, "sequence_parallel": True}),
    "core-to-pipeline-bfloat16": ("tied", "tensor-fully", {"pipeline": 2, "dtype": "bfloat16"}),
    "core-to-pipeline": ("moe", "tensor-fully", {"pipeline": 2}),
    "core-to-itself-bfloat16": ("tied", "tensor-fully", {"tensor": 2, "sequence_parallel": True, "dtype": "bfloat16"}),
    "core-experts-in-stages-to-shared": ("moe-normed", "stages-fully", SHARED),
    "core-interleaved-to-stages": ("deep", "stages-fully", {"pipeline": 2}),
}
CORE_READERS = ("read-from-core", "refused-buffers", "without-padding", "damaged-for-one")
# Pairs of dimensions that meet in each commit; `make nightly` runs all.
DAILY = ("one-moe", "pipeline", "experts-shared", "sgd", "tensor-data", "tensor-context", "tensor-pipeline-experts",
         "context-experts", "interleaved-context")  # fmt: skip
DAILY_RESUMED = ("pipeline-to-fsdp", "fsdp-to-interleaved", "fsdp-to-experts", "sgd-to-fsdp", "core-to-experts")
# What tests read that is not one of their parameters.
NEEDS = {
    "test_a_megatron_core_checkpoint_of_two_ranks_is_checked_and_read": ["read-from-core"],
    "test_states_of_a_padded_vocabulary_are_cut_to_the_model": ["without-padding"],
    "test_optimizer_states_in_flat_buffers_are_refused_with_the_fix": ["refused-buffers"],
    "test_a_part_that_one_rank_cannot_read_is_an_error_of_all_with_its_reason": ["damaged-for-one"],
    "test_a_gradient_that_is_not_finite_is_named_on_all_ranks_and_changes_nothing": ["not-finite", "fsdp-qwen3"],
    "test_recomputed_activations_are_not_kept_and_change_nothing": ["ways-qwen3", "ways-moe"],
    "test_transformers_loads_a_saved_folder": ["pipeline", "tensor-pipeline-experts"],
}
# What cases read of others.
SOURCES = {
    **{name: [f"fsdp-{variant}"] for name, (variant, _, _) in (LAYOUTS | OTHERS).items()},
    **{name: [f"fsdp-{model}", saved] for name, (model, saved, _, _) in RESUMED.items()},
    **{
        name: [f"fsdp-{model}", f"saved-by-core-{saved.partition('-')[0]}"]
        for name, (model, saved, _) in FROM_CORE.items()
    },
    **{name: ["saved-by-core-tensor"] for name in CORE_READERS},
    **{name: [f"converted-{name}", f"loaded-{name}"] for name in ("tied", "moe")},  # a test's parameter
}
# Layouts that update an engine over HTTP; the skipped ones repeat the layouts "tensor" and "pipeline".
WITH_ENGINE = [name for name, (_, world, _) in LAYOUTS.items() if world > 1 and name not in ("sgd", "pipeline-last")]


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron")
    for name, (family, changes) in MODELS.items():
        hf.save_model(hf.build_model(changed_config(family, changes), seed=0), folder / name)
    runs = {f"fsdp-{name}": (name, 1, {"backend": "fsdp"}) for name in (*MODELS, *VARIANTS)} | LAYOUTS | OTHERS
    for name in WITH_ENGINE:
        model, world, how = LAYOUTS[name]
        runs[name] = (model, world, {**how, "updates_engine": True})
    runs = dict(sorted(runs.items(), key=lambda run: run[1][1]))  # those with equal numbers of ranks share processes
    runs |= {name: (model, world, {"resume": saved, **how}) for name, (model, saved, world, how) in RESUMED.items()}
    cases = [
        {"name": name, "function": "two_steps", "world": world, "args": {"save_as": name, **arguments(variant), **args}}
        for name, (variant, world, args) in runs.items()
    ] + [
        {"name": f"ways-{name}", "function": "saved_bytes", "world": 1, "args": {"family": name, "ways": COMPUTE}}
        for name in ("qwen3", "moe")
    ]
    for family in ("tied", "moe"):
        args = {"family": family}
        cases.append({"name": f"converted-{family}", "function": "converted", **LM, "world": 1, "args": args})
        cases.append(
            {"name": f"loaded-{family}", "function": "exchanged", **LM, "world": 2, "args": {**args, "tensor": 2}}
        )
    args = {"family": "qwen3", "pipeline": 2}
    cases.append({"name": "not-finite", "function": "not_finite", "world": 2, "args": args})
    for name, models in SAVED_BY_CORE.items():
        world, sizes = {"tensor": (2, {"tensor": 2}), "stages": (4, {"pipeline": 2})}[name]
        args = {"models": models, "name": name, **sizes}
        cases.append({"name": f"saved-by-core-{name}", "function": "saved_by_core", **LM, "world": world, "args": args})
    for name, model in (("read-from-core", "moe"), ("refused-buffers", "moe"), ("without-padding", "tied")):
        function, args = name.replace("-", "_"), {"family": model}
        cases.append({"name": name, "function": function, **LM, "world": 1, "args": args})
    args = {"family": "tied", "pipeline": 2}
    cases.append({"name": "damaged-for-one", "function": "damaged_for_one", **LM, "world": 2, "args": args})
    for name, (model, saved, how) in FROM_CORE.items():
        args = {**arguments(model), "core": f"{model}-{saved}_reshardable/iter_0000005", "offloads": False, **how}
        cases.append({"name": name, "function": "two_steps", "world": 2, "args": args})
    # Ranks wait for each other half of the time, so two cases run at once; those that read others' files wait for them.
    names, readers, chosen = with_sources(wanted(request, NEEDS), SOURCES), set[str](), []
    for case in cases:
        if (name := case["name"]) not in names:
            continue
        reader = "resumed" if name in RESUMED else name if name.startswith("loaded-") else ""
        reader = "core" if name in FROM_CORE or name in CORE_READERS else reader
        is_after = bool(reader) and reader not in readers
        readers.add(reader)
        together = 6 if case["function"] == "two_steps" else 1
        chosen.append({**case, "at_once": 2, "together": together, "is_after": is_after})
    return folder, run_cases("megatron_cases", folder, chosen, deadline_s=240)


def arguments(variant):
    model, args = VARIANTS.get(variant, (variant, {}))
    return {"family": model, "backend": "megatron", **args}


@pytest.mark.parametrize("name", often(LAYOUTS, DAILY))
@pytest.mark.nightly
def test_losses_and_gradient_norms_are_those_of_fsdp(outcomes, name):
    assert_trains_as(outcomes[1], name, f"fsdp-{LAYOUTS[name][0]}", rel=1e-5, loss_abs=1e-6)


@pytest.mark.parametrize("name", often(LAYOUTS, DAILY))
def test_log_probs_and_entropies_are_those_of_fsdp(outcomes, name):
    ranks, (reference,) = outcomes[1][name], outcomes[1][f"fsdp-{LAYOUTS[name][0]}"]
    expected = {sample: values for sample, *values in reference["log_probs"]}
    seen = {sample: values for rank in ranks for sample, *values in rank["log_probs"]}
    assert seen.keys() == expected.keys()
    for sample, values in seen.items():
        assert values == pytest.approx(expected[sample], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", often(LAYOUTS, DAILY))
def test_weights_are_exported_under_their_names(outcomes, name):
    assert_exports_as(outcomes[1], name, f"fsdp-{LAYOUTS[name][0]}", rel=1e-5, near=1e-6)


@pytest.mark.parametrize("name", often(LAYOUTS, DAILY))
def test_a_checkpoint_restores_all_states(outcomes, name):
    assert all(rank["is_restored"] and rank["has_ref"] for rank in outcomes[1][name])


@pytest.mark.parametrize("name", often([*RESUMED, *FROM_CORE], DAILY_RESUMED))
def test_a_run_resumes_with_another_layout_or_backend_as_if_uninterrupted(outcomes, name):
    ranks, (whole,) = outcomes[1][name], outcomes[1][f"fsdp-{(RESUMED | FROM_CORE)[name][0]}"]
    close = {"rel": 3e-2, "abs": 2e-2} if "bfloat16" in name else {"rel": 1e-5, "abs": 1e-6}
    losses = {rank["data_rank"]: rank["losses"][0][0] for rank in ranks}
    assert sum(losses.values()) == pytest.approx(whole["losses"][1][0], **close)
    for rank in ranks:
        assert rank["norms"] == pytest.approx(whole["norms"][1:], rel=close["rel"])
        for tensor, values in rank["weights"].items():
            assert values[1] == pytest.approx(whole["weights"][tensor][1], **close)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["core-to-itself", "core-to-itself-bfloat16"])
def test_a_megatron_core_checkpoint_resumes_bitwise_in_its_layout(outcomes, name):
    for rank, unbroken in zip(outcomes[1][name], outcomes[1]["saved-by-core-tensor"], strict=True):
        expected = unbroken[FROM_CORE[name][0]]
        assert {key: rank[key] for key in expected} == expected


@pytest.mark.parametrize("family", often(["tied", "moe"], ["moe"]))
def test_megatron_core_loads_what_was_converted_into_another_layout(outcomes, family):
    assert outcomes[1][f"loaded-{family}"] == [{"by_core": True, "here": True}] * 2


@pytest.mark.parametrize("family", often(["tied", "moe"], ["moe"]))
def test_converting_there_and_back_gives_the_same_tensors(outcomes, family):
    (case,) = outcomes[1][f"converted-{family}"]
    assert_converted(case)


def test_a_megatron_core_checkpoint_of_two_ranks_is_checked_and_read(outcomes):
    (case,) = outcomes[1]["read-from-core"]
    assert case["codes"] == [0, 0], case["output"]
    assert case["is_same"]
    assert "moe-tensor-dp_reshardable: " in case["output"]


def test_states_of_a_padded_vocabulary_are_cut_to_the_model(outcomes):
    (is_same,) = outcomes[1]["without-padding"]
    assert is_same == [True] * len(is_same)


def test_optimizer_states_in_flat_buffers_are_refused_with_the_fix(outcomes):
    (error,) = outcomes[1]["refused-buffers"]
    for part in (
        "moe-tensor-dp_reshardable",
        "(dp_reshardable",
        "--dist-ckpt-optim-fully-reshardable",
        "--no-load-optim",
    ):
        assert part in error


def test_a_part_that_one_rank_cannot_read_is_an_error_of_all_with_its_reason(outcomes):
    first, last = outcomes[1]["damaged-for-one"]
    assert len(first) == 3
    for name, reason in last.items():
        assert first[name] == f"rank 1: {reason}"
        assert f"damaged-{name}" in reason


def test_a_gradient_that_is_not_finite_is_named_on_all_ranks_and_changes_nothing(outcomes):
    for rank in outcomes[1]["not-finite"]:
        where = "first in rank 1: model.layers.1.mlp.down_proj.weight"
        assert rank["errors"] == [f"optimizer step 0: gradient norm inf, {where}"]
        assert rank["norms"] == pytest.approx(outcomes[1]["fsdp-qwen3"][0]["norms"][:1], rel=1e-5)


@pytest.mark.parametrize("name", often(WITH_ENGINE, DAILY))
def test_an_engine_receives_every_tensor_of_every_rank(outcomes, name):
    folder, results = outcomes
    with open_tensors(folder / arguments(LAYOUTS[name][0])["family"]) as stored:
        expected = {tensor: checksum(stored.read(tensor)) for tensor in stored.names}
        assert results[name][0]["engine_checksums"] == expected


def test_transformers_loads_a_saved_folder(outcomes):
    folder, _ = outcomes
    saved = sorted(folder.glob("whole/*/hf"))
    assert len(saved) >= 2
    for path in saved:
        assert isinstance(hf.load_model(path), torch.nn.Module)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("sequence-moe", "staying"),
        pytest.param("bfloat16-sequence", "bfloat16-offloaded", marks=pytest.mark.nightly),
    ],
)
def test_offloading_between_steps_is_bitwise_neutral(outcomes, one, other):
    for left, stayed in zip(outcomes[1][one], outcomes[1][other], strict=True):
        assert all(left[name] == stayed[name] for name in ("losses", "norms", "log_probs", "weights"))


def test_recomputed_activations_are_not_kept_and_change_nothing(outcomes):
    (dense,), (moe,) = outcomes[1]["ways-qwen3"], outcomes[1]["ways-moe"]
    for way, (_, norm) in dense.items():
        assert norm == pytest.approx(dense["plain"][1], rel=1e-5), way
        assert moe[way][1] == pytest.approx(moe["plain"][1], rel=1e-5), way
    kept = {way: num_bytes for way, (num_bytes, _) in dense.items()}
    assert kept["by-two"] < kept["full"] < kept["first"] < kept["plain"] < kept["unfused"]
    assert kept["mlp"] < kept["plain"] == kept["moe"]
    assert moe["moe"][0] < moe["plain"][0] == moe["mlp"][0]


@pytest.mark.parametrize("name", often([name for name in OTHERS if name.startswith("bfloat16")], ["bfloat16-moe"]))
def test_bfloat16_differs_from_float32_by_rounding(outcomes, name):
    ranks, (reference,) = outcomes[1][name], outcomes[1][f"fsdp-{OTHERS[name][0]}"]
    parts = {rank["data_rank"]: [loss for loss, _ in rank["losses"]] for rank in ranks}
    losses = [sum(step) for step in zip(*parts.values(), strict=True)]
    assert losses == pytest.approx([loss for loss, _ in reference["losses"]], abs=2e-2)
    for rank in ranks:
        assert rank["is_restored"]
        assert rank["norms"][0] == pytest.approx(reference["norms"][0], rel=3e-2)
