"""Megatron-core on GPUs matches FSDP: the checks of `tests/property/test_megatron_layouts.py` over NCCL."""

from __future__ import annotations

import pytest

from furlong.models import hf_model as hf
from megatron_checks import assert_trains_as, changed_config
from ranks_zoo import ranks_possible, run_cases

pytest.importorskip("megatron", reason="megatron-core is not installed")
if not ranks_possible():
    pytest.skip("needs a CUDA device", allow_module_level=True)

GPU = {"device": "cuda", "offloads": False}
BF16 = {**GPU, "dtype": "bfloat16"}
MODELS = {"qwen3": ("qwen3", {}), "tied": ("qwen3", {"tie_word_embeddings": True}), "moe": ("qwen3_moe", {})}
# name: model, number of ranks, layout
ONE = {
    "fsdp-qwen3": ("qwen3", 1, {"backend": "fsdp", **GPU}),
    "fsdp-tied": ("tied", 1, {"backend": "fsdp", **GPU}),
    "fsdp-moe": ("moe", 1, {"backend": "fsdp", **GPU}),
    "half-fsdp": ("qwen3", 1, {"backend": "fsdp", **BF16}),
    "one": ("qwen3", 1, {**GPU, "offloads": True}),
    "one-moe": ("moe", 1, GPU),
    "half": ("qwen3", 1, BF16),
    "half-compiled": ("qwen3", 1, {**BF16, "compile_layers": "on"}),
}
TWO = {
    "tensor": ("qwen3", 2, {"tensor": 2, "sequence_parallel": True, **GPU}),
    "pipeline": ("tied", 2, {"pipeline": 2, **GPU}),
    "experts": ("moe", 2, {"expert": 2, **GPU}),
    "half-tensor": ("qwen3", 2, {"tensor": 2, "sequence_parallel": True, "compile_layers": "on", **BF16}),
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
# Widths that variable-length kernels support: multiples of 8 in bfloat16.
MLA = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "qk_head_dim": 32, "v_head_dim": 16, "head_dim": 16,
          "rope_parameters": YARN}  # fmt: skip
FAMILIES = {
    "llama": ("llama", {}),
    "windows": ("qwen2-sliding", {}),
    "glm": ("glm4_moe", {}),
    "mla": ("deepseek_v3", MLA),
    "sinks": ("gpt_oss", {}),
}
PRECISIONS = {"float32": 2e-4, "bfloat16": 0.05}
CASES = ONE | (TWO if ranks_possible() > 1 else {})


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron")
    for name, (family, changes) in (MODELS | FAMILIES).items():
        hf.save_model(hf.build_model(changed_config(family, changes), seed=0), folder / name)
    cases = [
        {
            "name": name,
            "function": "two_steps",
            "world": world,
            "args": {"backend": "megatron", "family": family, "save_as": name, **args},
        }
        for name, (family, world, args) in CASES.items()
    ]
    cases += [
        {
            "name": f"both-{name}",
            "function": "each_family",
            "world": 1,
            "args": {"families": [name], "dtypes": list(PRECISIONS), "device": "cuda"},
        }
        for name in FAMILIES
    ]
    return run_cases("megatron_cases", folder, cases, deadline_s=170)


@pytest.mark.parametrize("name", ["one", "one-moe", *TWO])
def test_losses_and_gradient_norms_are_those_of_fsdp(found, name):
    if name not in CASES:
        pytest.skip("two ranks are needed, one is possible")
    family, _, args = CASES[name]
    dtype = args.get("dtype", "float32")
    reference, rel = "half-fsdp" if dtype == "bfloat16" else f"fsdp-{family}", PRECISIONS[dtype]
    assert_trains_as(found, name, reference, rel=rel, loss_abs=rel)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_as_fsdp_does(found, family, dtype):
    (both,) = found[f"both-{family}"]
    cases = {backend: [{"data_rank": 0, **both[f"{backend} {family} {dtype}"]}] for backend in ("megatron", "fsdp")}
    assert_trains_as(cases, "megatron", "fsdp", rel=PRECISIONS[dtype], loss_abs=PRECISIONS[dtype])


def test_compiled_layers_in_bfloat16_differ_only_by_rounding(found):
    assert_trains_as(found, "half", "half-fsdp", rel=0.05, loss_abs=0.05)
    assert_trains_as(found, "half-compiled", "half", rel=0.05, loss_abs=0.05)


def test_weights_are_exported_as_loaded_and_checkpoints_are_restored(found):
    for name in (name for name in CASES if "fsdp" not in name):
        for rank in found[name]:
            assert rank["is_exported_as_loaded"] or "half" in name, name  # "half" rounds the loaded weights
            assert rank["is_restored"], name
