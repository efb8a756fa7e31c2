"""Every model family matches transformers and --train-backend fsdp, with every layout of Megatron-core."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from furlong.models import hf_model as hf
from megatron_checks import (
    assert_converted,
    assert_exports_as,
    assert_trains_as,
    changed_config,
    often,
    wanted,
    with_sources,
)
from models_zoo import add_vision, plain_log_probs
from ranks_cases import batch
from ranks_zoo import run_cases

pytest.importorskip("megatron", reason="megatron-core is not installed")

LM = {"module": "megatron_lm_cases"}  # cases of Megatron-LM checkpoints

FORMAT = {"format": "pt"}  # metadata of weight files
TEMPERATURE = 0.9  # as in the cases
WHOLE = "whole/{}-tensor-pipeline/hf/model.safetensors"
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
# name: family, changes to its tiny config
MODELS = {
    "mistral": ("mistral", {}),
    "qwen2-windows": ("qwen2-sliding", {"rope_parameters": YARN}),
    "llama-biases": ("llama", {}),
    "qwen3-moe-mixed": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "glm4": ("glm4", {}),
    "glm": (
        "glm4_moe",
        {
            "num_nextn_predict_layers": 1,
            "attention_bias": True,
            "routed_scaling_factor": 1.8,
            "n_group": 2,
            "norm_topk_prob": False,
        },
    ),
    "glm-no-norm": ("glm4_moe", {"use_qk_norm": False}),
    "gpt-oss": ("gpt_oss", {}),
    "glm-lite": ("glm4_moe_lite", {"routed_scaling_factor": 1.8}),
    "kimi": ("kimi_k2", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "mimo": ("mimo", {}),
    "minimax": ("minimax_m2", {}),
    "deepseek": ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}),
    "deepseek-plain": ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False}),
    "moonlight": ("deepseek_v3", {"q_lora_rank": None}),
    "qwen-next": ("qwen3_next", {"mlp_only_layers": [1]}),
    "qwen35": ("qwen3_5_text", {"linear_num_key_heads": 4, "linear_num_value_heads": 8}),
    "qwen35-moe": ("qwen3_5_moe_text", {}),
}
TP2, PP2, CP2, EP2 = {"tensor": 2, "sequence_parallel": True}, {"pipeline": 2}, {"context": 2}, {"expert": 2}
DENSE = ("glm4", "mimo")
SPLITS = ("glm4", "glm", "gpt-oss", "deepseek", "glm-lite", "minimax", "mimo", "qwen-next")  # models with every layout
# Models that are loaded from converted float32 checkpoints.
LOADED = ("glm4", "glm", "gpt-oss", "deepseek", "minimax", "mimo", "qwen-next", "qwen35")
# name: model, number of ranks, layout
LAYOUTS = {
    "mistral": ("mistral", 1, {}),
    "mistral-context": ("mistral", 2, CP2),
    "qwen2-tensor": ("qwen2-windows", 2, {"tensor": 2}),
    "llama-sequence": ("llama-biases", 2, TP2),
    "qwen3-moe": ("qwen3-moe-mixed", 2, PP2),
    **{
        f"{model}-{name}": (model, world, sizes)
        for model in SPLITS
        for name, world, sizes in (
            ("one", 1, {}),
            ("tensor", 2, TP2),
            ("pipeline", 2, PP2),
            ("context", 2, CP2),
            ("experts", 2, EP2),
            ("tensor-experts", 4, TP2 | EP2),
            ("tensor-pipeline", 4, TP2 | PP2),
        )
        if model not in DENSE or "expert" not in sizes
    },
    "glm-no-norm": ("glm-no-norm", 1, {}),
    "deepseek-plain": ("deepseek-plain", 1, {}),
    "moonlight": ("moonlight", 1, {}),
    "moonlight-pipeline": ("moonlight", 2, PP2),
    "moonlight-context": ("moonlight", 2, CP2),
    "moonlight-tensor-experts": ("moonlight", 4, TP2 | EP2),
    "kimi": ("kimi", 4, TP2 | EP2),
    "kimi-pipeline": ("kimi", 2, PP2),
    "kimi-context": ("kimi", 2, CP2),
    "kimi-tensor-pipeline": ("kimi", 4, TP2 | PP2),
    "qwen35-one": ("qwen35", 1, {}),
    "qwen35-tensor": ("qwen35", 2, {"tensor": 2}),
    "qwen35-tensor-context": ("qwen35", 4, TP2 | CP2),
    "qwen35-tensor-pipeline": ("qwen35", 4, TP2 | PP2),
    "qwen35-moe": ("qwen35-moe", 4, TP2 | EP2),
}
# Every kind of family with one layout in each commit; `make nightly` runs all.
DAILY = ("qwen2-tensor", "qwen3-moe", "glm4-tensor-pipeline", "glm-experts", "gpt-oss-tensor-experts",
         "deepseek-pipeline", "minimax-context", "qwen-next-tensor-pipeline", "qwen35-tensor-context")  # fmt: skip
DAILY_MODELS = ("gpt-oss", "deepseek", "qwen-next")
FOUR = [name for name, (_, world, _) in LAYOUTS.items() if world == 4]
# Tensors of layers for multi-token prediction and of vision, which stay in saved folders.
CARRIED = {"qwen35-moe": ("model.visual.merger.norm.weight",)}
MTP = {
    "glm": ("model.layers.2.eh_proj.weight", "model.layers.2.mlp.gate.weight"),
    "mimo": ("model.mtp_layers.0.input_proj.weight", "model.mtp_layers.0.self_attn.q_proj.bias"),
    "qwen-next": ("mtp.fc.weight", "mtp.layers.0.self_attn.q_norm.weight"),
}


# What cases read of others. Models stand for their conversion.
SOURCES = {
    **{name: [f"fsdp-{model}"] for name, (model, _, _) in LAYOUTS.items()},
    **{f"resumed-{name}": [name, f"fsdp-{LAYOUTS[name][0]}"] for name in FOUR},
    **{
        name: [
            f"converted-{name}",
            *([f"loaded-{name}"] if name in LOADED else []),
            *([f"fsdp-{name}"] if name in LAYOUTS else []),
        ]
        for name in MODELS
    },
    **{f"saved-{name}": [f"{name}-tensor-pipeline"] for name in MTP},
    **{f"saved-{name}": [name] for name in CARRIED},
}


def _write(config, folder, mtp):
    """Write a model with MTP tensors whose vectors (norms, biases, sinks) are random, so that none can be forgotten."""
    model = hf.build_model(config, seed=0)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.ndim == 1 and "inv_freq" not in name:
                tensor.add_(torch.randn_like(tensor) * 0.2)
    hf.save_model(model, folder)
    if mtp:
        file = folder / "model.safetensors"
        save_file(load_file(file) | {name: torch.randn(3, 2, dtype=torch.bfloat16) for name in mtp}, file, FORMAT)
    if config.model_type == "qwen3_5_moe_text":
        add_vision(folder)


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    plain = {}
    drawn = batch()
    names = with_sources(wanted(request, {}), SOURCES)
    models = {LAYOUTS[name][0] for name in names & LAYOUTS.keys()} | (names & MODELS.keys())
    for name, (family, changes) in MODELS.items():
        if name not in models:
            continue
        _write(changed_config(family, changes), folder / name, MTP.get(name, ()))
        model = AutoModelForCausalLM.from_pretrained(folder / name, dtype="float32", attn_implementation="eager")
        model.lm_head.register_forward_hook(lambda *args: args[-1] / TEMPERATURE)
        with torch.no_grad():
            plain[name] = dict(
                zip(
                    drawn.sample_ids.tolist(),
                    plain_log_probs(model, drawn).split(drawn.response_lengths.tolist()),
                    strict=True,
                )
            )
    fsdp = {f"fsdp-{name}": (1, {"family": name, "backend": "fsdp", "save_as": f"fsdp-{name}"}) for name in MODELS}
    megatron = {
        name: (world, {"family": family, "backend": "megatron", "save_as": name if world == 4 else "", **layout})
        for name, (family, world, layout) in sorted(LAYOUTS.items(), key=lambda layout: layout[1][1])
    }
    resumed = {
        f"resumed-{name}": (world, args | {"resume": f"fsdp-{LAYOUTS[name][0]}", "save_as": ""})
        for name, (world, args) in megatron.items()
        if world == 4
    }
    cases = (
        [
            {"name": name, "function": "two_steps", "world": world, "args": args}
            for name, (world, args) in {**fsdp, **megatron, **resumed}.items()
        ]
        + [
            {"name": f"converted-{name}", "function": "converted", **LM, "world": 1, "args": args}
            for name in MODELS
            for args in [{"family": name, "dtype": "" if name in LOADED or name in CARRIED else "bfloat16"}]
        ]
        + [
            {"name": f"loaded-{name}", "function": "exchanged", **LM, "world": 2, "args": {"family": name, "tensor": 2}}
            for name in LOADED
        ]
    )
    # Ranks wait for each other half of the time, so two cases run at once; the first that reads others' files waits.
    readers, chosen = set[str](), []
    for case in cases:
        if case["name"] in names:
            reader = case["name"].partition("-")[0] if case["name"].startswith(("resumed-", "loaded-")) else ""
            is_after = bool(reader) and reader not in readers
            readers.add(reader)
            chosen.append({**case, "at_once": 2, "together": 6, "is_after": is_after})
    return plain, run_cases("megatron_cases", folder, chosen, deadline_s=240), folder


@pytest.mark.parametrize("name", often(LAYOUTS, DAILY))
@pytest.mark.nightly
def test_log_probs_are_those_of_transformers(outcomes, name):
    plain, results = outcomes[0][LAYOUTS[name][0]], outcomes[1][name]
    seen = {sample: values for rank in results for sample, *values in rank["untrained"]}
    assert len(seen) >= len(plain) // 2
    for sample, values in seen.items():
        expected = plain[sample].tolist()
        assert values[: len(expected)] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", often(LAYOUTS, DAILY))
def test_losses_and_gradient_norms_are_those_of_fsdp(outcomes, name):
    assert_trains_as(outcomes[1], name, f"fsdp-{LAYOUTS[name][0]}", rel=1e-4, loss_abs=1e-5)


@pytest.mark.parametrize("name", often(LAYOUTS, DAILY))
def test_weights_are_exported_under_their_names_bitwise(outcomes, name):
    assert_exports_as(outcomes[1], name, f"fsdp-{LAYOUTS[name][0]}", rel=1e-4, near=1e-5)
    assert all(rank.get("is_restored", True) for rank in outcomes[1][name])


@pytest.mark.parametrize("saved", often([f"saved-{name}" for name in (*MTP, *CARRIED)], ["saved-qwen-next"]))
def test_saved_folders_keep_tensors_that_are_not_trained_bitwise(outcomes, saved):
    name = saved.removeprefix("saved-")
    stored = WHOLE.format(name) if name in MTP else f"whole/{name}/hf/model.safetensors"
    source, saved = (load_file(outcomes[2] / path) for path in (f"{name}/model.safetensors", stored))
    assert source.keys() == saved.keys()
    assert all(
        saved[tensor].dtype == torch.bfloat16 and torch.equal(saved[tensor], source[tensor])
        for tensor in (MTP | CARRIED)[name]
    )


@pytest.mark.parametrize("name", often(MODELS, DAILY_MODELS))
def test_converting_there_and_back_gives_the_same_tensors(outcomes, name):
    (case,) = outcomes[1][f"converted-{name}"]
    assert_converted(case)


@pytest.mark.parametrize("name", often(LOADED, DAILY_MODELS))
def test_megatron_core_loads_what_was_converted_into_another_layout(outcomes, name):
    assert outcomes[1][f"loaded-{name}"] == [{"by_core": True, "here": True}] * 2


@pytest.mark.parametrize("resumed", often([f"resumed-{name}" for name in FOUR], ["resumed-gpt-oss-tensor-experts"]))
def test_a_run_of_fsdp_resumes_with_megatron(outcomes, resumed):
    ranks, whole = outcomes[1][resumed], outcomes[1][resumed.removeprefix("resumed-")]
    for rank, unbroken in zip(ranks, whole, strict=True):
        assert rank["norms"] == pytest.approx(unbroken["norms"][1:], rel=1e-4)
