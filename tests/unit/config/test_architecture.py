"""The flags of slime's scripts/models/*.sh pass with the model that they describe, and say where they differ."""

from __future__ import annotations

import json
import shlex

import pytest

from furlong.catalogue import Problem
from furlong.config.checks.model_rules import FACTS, layers_with_experts, model_problems
from furlong.config.command_line import parse
from furlong.config.flag_spec import flag_specs
from furlong.config.sections import Config
from furlong.diagnosis.preflight.flag_checks import from_problem

QWEN3 = """--swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --use-rotary-position-embeddings --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 151936 --kv-channels 128
    --qk-layernorm --max-position-embeddings 40960 --padded-vocab-size 151936 --make-vocab-size-divisible-by 128
    --attention-dropout 0.0 --hidden-dropout 0.0 --attention-softmax-in-fp32"""
QWEN3_HF = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 40960,
}
QWEN3_MOE = """--disable-bias-linear --qk-layernorm --group-query-attention --num-attention-heads 32
    --num-query-groups 4 --kv-channels 128 --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144
    --normalization RMSNorm --position-embedding-type rope --norm-epsilon 1e-6 --rotary-percent 1 --swiglu
    --untie-embeddings-and-output-weights --vocab-size 151936 --rotary-base 1000000 --moe-ffn-hidden-size 768
    --moe-router-score-function softmax --moe-token-dispatcher-type alltoall --moe-router-topk 8
    --moe-layer-freq [1]*48 --num-experts 128 --moe-token-drop-policy probs --moe-router-dtype fp32
    --moe-aux-loss-coeff 0"""
QWEN3_MOE_HF = QWEN3_HF | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
DEEPSEEK = """--disable-bias-linear --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432
    --num-attention-heads 128 --kv-channels 128 --normalization RMSNorm --position-embedding-type rope
    --norm-epsilon 1e-6 --rotary-percent 1 --swiglu --untie-embeddings-and-output-weights --no-masked-softmax-fusion
    --vocab-size 129280 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128
    --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm --rotary-scaling-factor 40 --rotary-base 10000
    --mscale 1.0 --mscale-all-dim 1.0 --attention-softmax-in-fp32 --no-rope-fusion --num-experts 256
    --moe-layer-freq [0]*3+[1]*58 --moe-ffn-hidden-size 2048 --moe-router-topk 8
    --moe-shared-expert-intermediate-size 2048 --moe-router-pre-softmax --moe-router-score-function sigmoid
    --moe-router-group-topk 4 --moe-router-num-groups 8 --moe-router-topk-scaling-factor 2.5"""
DEEPSEEK_HF = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
    "vocab_size": 129280,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 2048,
    "scoring_func": "sigmoid",
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
# Kimi-K2, GLM-4.7-Flash, MiMo-7B and MiniMax-M2: the lists of scripts/models/*.sh, and the released config.json.
KIMI = DEEPSEEK
for _old, _new in (
    ("--num-attention-heads 128 --kv-channels 128", "--num-attention-heads 64 --kv-channels 64"),
    ("129280", "163840"),
    ("--rotary-scaling-factor 40 --rotary-base 10000", "--rotary-scaling-factor 32.0 --rotary-base 50000"),
    ("--num-experts 256", "--num-experts 384"),
    ("[0]*3+[1]*58", "[0]*1+[1]*60"),
    ("--moe-router-group-topk 4 --moe-router-num-groups 8", "--moe-router-group-topk 1 --moe-router-num-groups 1"),
    ("--moe-router-topk-scaling-factor 2.5", "--moe-router-topk-scaling-factor 2.827"),
):
    KIMI = KIMI.replace(_old, _new)
KIMI_HF = DEEPSEEK_HF | {
    "model_type": "kimi_k2",
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "rope_theta": 50000.0,
    "rope_scaling": {"type": "yarn", "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "vocab_size": 163840,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
}
GLM_LITE = """--moe-layer-freq [0]*1+[1]*46 --num-experts 64 --moe-shared-expert-intermediate-size 1536
    --moe-router-topk 4 --moe-ffn-hidden-size 1536 --moe-router-score-function sigmoid --moe-router-pre-softmax
    --moe-router-topk-scaling-factor 1.8 --moe-router-dtype fp32 --make-vocab-size-divisible-by 64 --num-layers 47
    --hidden-size 2048 --ffn-hidden-size 10240 --num-attention-heads 20 --disable-bias-linear --swiglu
    --untie-embeddings-and-output-weights --position-embedding-type rope --no-position-embedding
    --normalization RMSNorm --qk-layernorm --multi-latent-attention --q-lora-rank 768 --kv-lora-rank 512
    --qk-head-dim 192 --v-head-dim 256 --kv-channels 192 --qk-pos-emb-head-dim 64 --vocab-size 154880
    --rotary-base 1000000 --no-rope-fusion"""
GLM_LITE_HF = {
    "model_type": "glm4_moe_lite",
    "num_hidden_layers": 47,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000,
    "vocab_size": 154880,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}
MIMO = """--swiglu --num-layers 36 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --use-rotary-position-embeddings --disable-bias-linear --add-qkv-bias
    --normalization RMSNorm --norm-epsilon 1e-05 --rotary-base 640000 --vocab-size 151680
    --untie-embeddings-and-output-weights --max-position-embeddings 32768"""
MIMO_HF = {
    "model_type": "mimo",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 640000,
    "vocab_size": 151680,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "max_position_embeddings": 32768,
    "num_nextn_predict_layers": 1,
}
MINIMAX = """--disable-bias-linear --num-layers 62 --hidden-size 3072 --ffn-hidden-size 1536 --num-attention-heads 48
    --kv-channels 128 --num-query-groups 8 --normalization RMSNorm --position-embedding-type rope --norm-epsilon 1e-6
    --swiglu --untie-embeddings-and-output-weights --vocab-size 200064 --group-query-attention --rotary-percent 0.5
    --rotary-base 5000000 --qk-layernorm --no-rope-fusion --attention-softmax-in-fp32 --num-experts 256
    --moe-ffn-hidden-size 1536 --moe-router-topk 8 --moe-layer-freq [1]*62 --moe-router-pre-softmax
    --moe-router-score-function sigmoid"""
MINIMAX_HF = {
    "model_type": "minimax_m2",
    "num_hidden_layers": 62,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "vocab_size": 200064,
    "tie_word_embeddings": False,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "scoring_func": "sigmoid",
}
LLAMA_HF = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "hidden_act": "gelu",
    "mlp_bias": True,
    "rope_parameters": {"rope_type": "llama3", "factor": 32.0, "rope_theta": 500000.0},
    "rms_norm_eps": 1e-05,
    "vocab_size": 1000,
}


@pytest.fixture
def problems_of(tmp_path):
    """What is said of flags with a config.json."""

    def check(flags: str, hf: dict, *more: str) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps(hf))
        words = [*shlex.split(flags), "--hf-checkpoint", str(tmp_path), *more]
        return list(model_problems(parse(words).config))

    return check


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
@pytest.mark.parametrize(
    ("flags", "hf"),
    [
        (QWEN3, QWEN3_HF),
        (QWEN3_MOE, QWEN3_MOE_HF),
        (DEEPSEEK, DEEPSEEK_HF),
        (KIMI, KIMI_HF),
        (GLM_LITE, GLM_LITE_HF),
        (MIMO, MIMO_HF),
        (MINIMAX, MINIMAX_HF),
    ],
    ids=["4B", "30B", "V3", "Kimi-K2", "GLM-4.7-Flash", "MiMo-7B", "MiniMax-M2"],
)
def test_the_flags_of_a_model_pass_with_its_config(problems_of, flags, hf, backend):
    assert problems_of(flags, hf, "--train-backend", backend) == []
    assert problems_of(flags, {"model_type": "of-several", "text_config": hf}) == []


@pytest.mark.parametrize(
    ("flags", "hf", "key"),
    [
        ("--num-layers 28", QWEN3_HF, "num_hidden_layers 36"),
        ("--hidden-size 1024", QWEN3_HF, "hidden_size 2560"),
        ("--ffn-hidden-size 3072", QWEN3_HF, "intermediate_size 9728"),
        ("--num-attention-heads 16", QWEN3_HF, "num_attention_heads 32"),
        ("--num-query-groups 4", QWEN3_HF, "num_key_value_heads 8"),
        ("--num-query-groups 2", LLAMA_HF, "num_attention_heads 4"),
        ("--group-query-attention", LLAMA_HF, "num_attention_heads 4"),
        ("--kv-channels 64", QWEN3_HF, "head_dim 128"),
        ("--kv-channels 64", LLAMA_HF, "hidden_size 64, num_attention_heads 4, that is 16"),
        ("--qk-layernorm", LLAMA_HF, 'model_type "llama"'),
        ("--qk-layernorm", QWEN3_HF | {"model_type": "unheard-of"}, 'model_type "unheard-of"'),
        ("--add-qkv-bias", QWEN3_HF, "attention_bias false"),
        ("--disable-bias-linear", LLAMA_HF, "mlp_bias true"),
        ("--swiglu", LLAMA_HF, 'hidden_act "gelu"'),
        ("--normalization LayerNorm", QWEN3_HF, "rms_norm_eps 1e-06, that is RMSNorm"),
        ("--norm-epsilon 1e-05", QWEN3_HF, "rms_norm_eps 1e-06"),
        ("--attention-dropout 0.1", QWEN3_HF, "attention_dropout 0.0"),
        ("--hidden-dropout 0.1", QWEN3_HF, "no hidden_dropout"),
        ("--vocab-size 151680", QWEN3_HF, "vocab_size 151936"),
        ("--padded-vocab-size 152064", QWEN3_HF, "vocab_size 151936"),
        ("--make-vocab-size-divisible-by 256", QWEN3_HF, "vocab_size 151936"),
        ("--untie-embeddings-and-output-weights", QWEN3_HF, "tie_word_embeddings true"),
        ("--max-position-embeddings 32768", QWEN3_HF, "max_position_embeddings 40960"),
        ("--position-embedding-type none", QWEN3_HF, "rope_theta 1000000, model_type"),
        ("--use-rotary-position-embeddings", {"model_type": "gpt2"}, 'model_type "gpt2"'),
        ("--rotary-base 10000", QWEN3_HF, "rope_theta 1000000"),
        ("--rotary-base 10000", LLAMA_HF, "rope_parameters.rope_theta 500000.0"),
        ("--rotary-percent 0.5", QWEN3_HF, "that is 1"),
        ("--rotary-scaling-factor 1", DEEPSEEK_HF, "rope_scaling.factor 40"),
        ("--mscale 0.7", DEEPSEEK_HF, "rope_scaling.mscale 1.0"),
        ("--mscale-all-dim 0.7", DEEPSEEK_HF, "rope_scaling.mscale_all_dim 1.0"),
        ("--use-rope-scaling", QWEN3_HF, 'model_type "qwen3"'),
        ("--rope-scaling-factor 8", LLAMA_HF, "rope_parameters.factor 32.0"),
        ("--multi-latent-attention", QWEN3_HF, "no kv_lora_rank"),
        ("--q-lora-rank 768", DEEPSEEK_HF, "q_lora_rank 1536"),
        ("--q-lora-rank 768", DEEPSEEK_HF | {"q_lora_rank": None}, "no q_lora_rank"),
        ("--kv-lora-rank 256", DEEPSEEK_HF, "kv_lora_rank 512"),
        ("--qk-head-dim 64", DEEPSEEK_HF, "qk_nope_head_dim 128"),
        ("--qk-pos-emb-head-dim 32", DEEPSEEK_HF, "qk_rope_head_dim 64"),
        ("--v-head-dim 64", DEEPSEEK_HF, "v_head_dim 128"),
        ("--num-experts 8", QWEN3_HF, "no num_experts"),
        ("--num-experts 8", DEEPSEEK_HF, "n_routed_experts 256"),
        ("--moe-layer-freq [0]*1+[1]*60", DEEPSEEK_HF, "first_k_dense_replace 3, that is [0]*3+[1]*58"),
        ("--moe-layer-freq 2", QWEN3_MOE_HF, "that is [1]*48"),
        ("--moe-ffn-hidden-size 512", QWEN3_MOE_HF, "moe_intermediate_size 768"),
        ("--moe-shared-expert-intermediate-size 512", QWEN3_MOE_HF, "moe_intermediate_size 768"),
        ("--moe-router-topk 4", QWEN3_MOE_HF, "num_experts_per_tok 8"),
        ("--moe-router-score-function sigmoid", QWEN3_MOE_HF, 'model_type "qwen3_moe", that is softmax'),
        ("--moe-router-pre-softmax", QWEN3_MOE_HF, "norm_topk_prob true"),
        ("--moe-router-topk-scaling-factor 1", DEEPSEEK_HF, "routed_scaling_factor 2.5"),
        ("--moe-router-num-groups 4", QWEN3_MOE_HF, "num_experts 128, that is 1"),
        ("--moe-router-group-topk 8", DEEPSEEK_HF, "topk_group 4"),
    ],
)
def test_a_flag_that_differs_is_named_with_the_key_of_the_config(problems_of, flags, hf, key):
    (problem,) = problems_of(flags, hf)
    assert problem.startswith(f"{flags} does not match the model: ")
    assert key in problem
    found = from_problem(Problem(problem))
    assert found.id == "CFG05"
    assert found.remedy.startswith(f"remove {flags.split()[0]}, ")


def test_every_flag_of_the_section_has_a_row_in_the_table():
    assert set(FACTS) == {spec.field for spec in flag_specs(Config).values() if spec.section == "architecture"}


def test_a_flag_that_means_nothing_for_the_model_is_taken(problems_of):
    assert problems_of("--mscale 0.7 --mscale-all-dim 0.7", DEEPSEEK_HF | {"rope_scaling": None}) == []
    assert problems_of("--kv-channels 64 --add-qkv-bias --rotary-interleaved", DEEPSEEK_HF) == []


GATED = "--use-gated-attention --attention-output-gate --apply-layernorm-1p --qk-layernorm --rotary-percent 0.25"
GLM4 = "--post-self-attn-layernorm --post-mlp-layernorm --rotary-interleaved --rotary-percent 0.5 --add-qkv-bias"


@pytest.mark.parametrize(
    ("flags", "hf"),
    [
        (f"--spec slime_plugins.models.glm4 get_glm_spec {GLM4}", {"model_type": "glm4", "attention_bias": True}),
        (
            f"--spec slime_plugins.models.qwen3_5 get_qwen3_5_spec {GATED}",
            {"model_type": "qwen3_5_text", "partial_rotary_factor": 0.25},
        ),
        (
            "--spec slime_plugins.models.qwen3_next get_qwen3_next_spec --moe-shared-expert-gate",
            {"model_type": "qwen3_next", "num_experts": 8},
        ),
        (
            "--ffn-hidden-size 512 --moe-shared-expert-gate --swiglu",
            {"model_type": "qwen3_5_moe_text", "num_experts": 8, "hidden_act": "silu"},
        ),
        (
            "--spec slime_plugins.models.minimax_m2 get_layer_spec --rotary-percent 0.5 --moe-layer-freq [1]*2",
            {
                "model_type": "minimax_m2",
                "rotary_dim": 64,
                "head_dim": 128,
                "num_local_experts": 8,
                "num_hidden_layers": 2,
            },
        ),
        ("--mtp-num-layers 1", {"model_type": "mimo", "num_nextn_predict_layers": 1}),
        ("--add-qkv-bias --disable-bias-linear", {"model_type": "mimo", "attention_bias": True}),
    ],
)
def test_flags_of_slimes_model_plugins_pass_with_their_family(problems_of, flags, hf):
    assert problems_of(flags, hf) == []


@pytest.mark.parametrize(
    "flags",
    [
        "--spec slime_plugins.models.qwen3_next get_qwen3_next_spec",
        "--spec my.layers get_spec",
        "--use-gated-attention",
        "--attention-output-gate",
        "--apply-layernorm-1p",
        "--post-self-attn-layernorm",
        "--post-mlp-layernorm",
        "--rotary-interleaved",
        "--moe-shared-expert-gate",
        "--mtp-num-layers 1",
    ],
)
def test_flags_of_a_plugin_for_another_family_are_refused(problems_of, flags):
    (problem,) = problems_of(flags, QWEN3_HF)
    assert problem.startswith(f"{flags} does not match the model: ")


def test_kv_channels_mean_nothing_with_latent_attention(problems_of):
    """slime's lists give the width of values, of queries without RoPE, or another number."""
    assert problems_of("--kv-channels 64", DEEPSEEK_HF) == []


def test_layers_with_experts_may_be_listed_by_kind(problems_of):
    listed = GLM_LITE_HF | {"mlp_layer_types": ["sparse"] * 47}
    (problem,) = problems_of("--moe-layer-freq [0]*1+[1]*46", listed | {"first_k_dense_replace": None})
    assert "that is [1]*47" in problem


def test_patterns_of_layers_are_read_and_not_evaluated(problems_of):
    assert layers_with_experts("[0,1]*2 + ([1])", 5) == [False, True, False, True, True]
    assert layers_with_experts("__import__('os')", 1) is None
    (problem,) = problems_of("--moe-layer-freq [2]*48", QWEN3_MOE_HF)
    assert "--moe-layer-freq [2]*48" in problem


def test_nothing_is_compared_without_a_config(tmp_path):
    assert list(model_problems(parse(["--num-layers", "2", "--hf-checkpoint", str(tmp_path)]).config)) == []


def test_config_that_is_not_json_is_reported(tmp_path):
    (tmp_path / "config.json").write_text("{")
    (problem,) = model_problems(parse(["--num-layers", "2", "--hf-checkpoint", str(tmp_path)]).config)
    assert "is not JSON" in problem
