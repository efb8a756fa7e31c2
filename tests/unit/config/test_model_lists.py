"""The lists of flags by which slime's guides describe a model, at tiny size, for every family of Megatron-core's."""

from __future__ import annotations

import json
import shlex

import pytest

from furlong.config import parse, validate
from models_zoo import family_config

# Of every list: normalization and rotary embeddings; of those with experts: how guides have them routed.
COMMON = """--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --normalization RMSNorm
    --vocab-size 40 --norm-epsilon 1e-6"""
GROUPED = "--group-query-attention --num-query-groups 2"
EXPERTS = """--moe-ffn-hidden-size 24 --moe-grouped-gemm --moe-token-drop-policy probs --moe-router-dtype fp32
    --moe-permute-fusion --moe-aux-loss-coeff 0 --moe-token-dispatcher-type alltoall"""
SIGMOID = """--moe-router-score-function sigmoid --moe-router-pre-softmax --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0 --moe-router-load-balancing-type seq_aux_loss --moe-layer-freq [0]*1+[1]*1"""
UNTIED = "--untie-embeddings-and-output-weights"
LISTS = {
    "qwen2": f"{COMMON} {GROUPED} --swiglu --use-rotary-position-embeddings --disable-bias-linear --add-qkv-bias "
    "--rotary-base 10000",
    "qwen3": f"{COMMON} {GROUPED} {UNTIED} --swiglu --use-rotary-position-embeddings --disable-bias-linear "
    "--rotary-base 10000 --kv-channels 8 --qk-layernorm",
    "qwen3_moe": f"{COMMON} {GROUPED} {UNTIED} {EXPERTS} --swiglu --disable-bias-linear --qk-layernorm --kv-channels 8 "
    "--position-embedding-type rope --rotary-percent 1 --rotary-base 10000 --moe-router-score-function softmax "
    "--moe-router-topk 2 --moe-layer-freq [1]*2 --num-experts 4",
    "llama": f"{COMMON} {GROUPED} {UNTIED} --swiglu --disable-bias-linear --use-rotary-position-embeddings "
    "--use-rope-scaling --rope-scaling-factor 8 --rotary-base 500000 --max-position-embeddings 128",
    "glm4": f"{COMMON.replace('1e-6', '1e-5')} {GROUPED} {UNTIED} --swiglu --use-rotary-position-embeddings "
    "--disable-bias-linear --add-qkv-bias --rotary-base 10000 --rotary-percent 0.5 --no-rope-fusion",
    "glm4_moe": f"{COMMON.replace('1e-6', '1e-5')} {GROUPED} {UNTIED} {EXPERTS} {SIGMOID} --swiglu "
    "--disable-bias-linear --qk-layernorm --add-qkv-bias --kv-channels 8 --position-embedding-type rope "
    "--no-position-embedding --rotary-percent 0.5 --rotary-base 1000000 --num-experts 4 "
    "--moe-shared-expert-intermediate-size 24 --moe-router-topk 2 --moe-router-topk-scaling-factor 1.0",
    "deepseek_v3": f"{COMMON} {UNTIED} {EXPERTS} {SIGMOID} --swiglu --disable-bias-linear --position-embedding-type "
    "rope --rotary-percent 1 --no-masked-softmax-fusion --multi-latent-attention --q-lora-rank 12 --kv-lora-rank 16 "
    "--qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 --kv-channels 6 --qk-layernorm --rotary-scaling-factor 40 "
    "--rotary-base 10000 --mscale 1.0 --mscale-all-dim 1.0 --attention-softmax-in-fp32 --no-rope-fusion "
    "--num-experts 8 --moe-router-topk 3 --moe-shared-expert-intermediate-size 24 --moe-router-group-topk 2 "
    "--moe-router-num-groups 4 --moe-router-topk-scaling-factor 2.5",
    "kimi_k2": f"{COMMON} {UNTIED} {EXPERTS} {SIGMOID} --swiglu --disable-bias-linear --position-embedding-type rope "
    "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 6 --kv-channels 8 --qk-layernorm --rotary-base 10000 --num-experts 8 --moe-router-topk 3 "
    "--moe-shared-expert-intermediate-size 24 --moe-router-topk-scaling-factor 2.5",
    "glm4_moe_lite": f"{COMMON.replace('1e-6', '1e-5')} {UNTIED} {EXPERTS} {SIGMOID} --swiglu --disable-bias-linear "
    "--position-embedding-type rope --no-position-embedding --multi-latent-attention --q-lora-rank 12 "
    "--kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 --kv-channels 8 --qk-layernorm "
    "--num-experts 8 --moe-router-topk 3 --moe-shared-expert-intermediate-size 24 "
    "--moe-router-topk-scaling-factor 1.8",
    "minimax_m2": f"{COMMON.replace('1e-6', '1e-5')} {GROUPED} {UNTIED} {EXPERTS.replace('24', '48')} --swiglu "
    "--disable-bias-linear --position-embedding-type rope --kv-channels 8 --rotary-percent 0.5 --rotary-base 10000 "
    "--qk-layernorm --no-rope-fusion --num-experts 4 --moe-router-topk 2 --moe-layer-freq [1]*2 "
    "--moe-router-pre-softmax --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type none",
    "mimo": f"{COMMON} {GROUPED} {UNTIED} --swiglu --use-rotary-position-embeddings --disable-bias-linear "
    "--add-qkv-bias --rotary-base 10000",
    "gpt_oss": f"{COMMON.replace('1e-6', '1e-5')} {GROUPED} {UNTIED} {EXPERTS.replace('24', '48')} --kv-channels 8 "
    "--position-embedding-type rope --rotary-percent 1.0 --rotary-base 150000 --max-position-embeddings 128 "
    "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0 --softmax-type learnable "
    "--window-size 6,0 --window-attn-skip-freq 2 --enable-gpt-oss --no-rope-fusion --no-bias-gelu-fusion "
    "--no-bias-dropout-fusion --no-masked-softmax-fusion --num-experts 4 --moe-router-topk 2 --moe-layer-freq [1]*2 "
    "--moe-router-score-function softmax --moe-router-load-balancing-type none",
}
# What guides add to each of them for memory and numerics.
RUN = """--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --bf16
    --use-dynamic-batch-size --max-tokens-per-gpu 1024 --optimizer adam --lr 1e-6 --lr-decay-style constant
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98"""
CHANGES = {
    "llama": {
        "attention_bias": False,
        "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 500000.0},
    },
    "deepseek_v3": {
        "rope_parameters": {"rope_type": "yarn", "factor": 40, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0}
    },
    "glm4_moe": {"attention_bias": True, "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
}


@pytest.fixture
def problems_of(tmp_path):
    """What is said of a list of flags with the model of a family."""

    def check(family: str, backend: str, flags: str) -> list[str]:
        config = family_config(family).to_dict() | CHANGES.get(family, {})
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").touch()
        data = tmp_path / "train.jsonl"
        data.write_text('{"prompt": "1+1=", "label": "2"}\n')
        words = ["--hf-checkpoint", str(tmp_path), "--prompt-data", str(data), "--input-key", "prompt"]
        words += shlex.split(
            "--label-key label --rm-type math --num-rollout 1 --rollout-batch-size 8 --n-samples-per-prompt 8"
        )
        return validate(parse([*words, "--train-backend", backend, *shlex.split(flags)]).config)

    return check


@pytest.mark.parametrize("family", LISTS)
def test_a_list_of_the_guides_passes_unchanged(problems_of, family):
    assert problems_of(family, "megatron", f"{LISTS[family]} {RUN}") == []


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_with_fsdp_each_flag_without_effect_is_named_with_the_fix(problems_of, family):
    found = problems_of(family, "fsdp", LISTS[family])
    named = {"--moe-grouped-gemm", "--moe-permute-fusion"}
    if family == "glm4_moe":
        named |= {"--moe-router-load-balancing-type", "--moe-router-enable-expert-bias"}
    assert {problem.split()[0] for problem in found} == named
    for problem in found:
        assert "--train-backend is fsdp" in problem
        assert "set --train-backend megatron" in problem
    rest = LISTS[family]
    for flag in ("--moe-grouped-gemm", "--moe-permute-fusion", "--moe-router-enable-expert-bias",
                 "--moe-router-bias-update-rate 0", "--moe-router-load-balancing-type seq_aux_loss"):  # fmt: skip
        rest = rest.replace(flag, "")
    assert problems_of(family, "fsdp", rest) == []


@pytest.mark.parametrize(
    ("family", "flags", "said"),
    [
        ("qwen3", "--quick-geglu", 'model_type "qwen3"'),
        ("qwen3", "--enable-gpt-oss", 'model_type "qwen3"'),
        ("qwen3", "--softmax-type learnable", "that is vanilla"),
        ("qwen3", "--glu-linear-offset 1", "that is 0"),
        ("qwen3", "--activation-func-clamp-value 7", 'model_type "qwen3"'),
        ("gpt_oss", "--window-size 4,0", "sliding_window 6"),
        ("gpt_oss", "--window-size 6,6", "sliding_window 6"),
        ("gpt_oss", "--window-attn-skip-freq 3", "that is 2"),
    ],
)
def test_a_folder_of_another_model_is_refused(problems_of, family, flags, said):
    (problem,) = problems_of(family, "megatron", flags)
    assert problem.startswith(f"{flags} does not match the model: ")
    assert said in problem
