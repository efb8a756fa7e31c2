"""Megatron-LM's flags that describe a model: accepted as slime's scripts have them; six are compared with the model."""

from __future__ import annotations

import json
import shlex

import pytest

from furlong.config.checks.training_checks import COMPARED, model_problems
from furlong.config.checks.validate import notices, validate
from furlong.config.command_line import parse
from models_zoo import family_config

# The list of slime's scripts/models/deepseek-v3.sh at the size of the tests' models.
DEEPSEEK = """--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --normalization RMSNorm
    --norm-epsilon 1e-6 --vocab-size 40 --swiglu --disable-bias-linear --position-embedding-type rope
    --rotary-percent 1 --rotary-base 10000 --untie-embeddings-and-output-weights --multi-latent-attention
    --num-query-groups 1 --q-lora-rank 12 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6
    --qk-layernorm --no-masked-softmax-fusion --attention-softmax-in-fp32 --no-rope-fusion --num-experts 8
    --moe-layer-freq [0]*1+[1]*1 --moe-ffn-hidden-size 24 --moe-router-topk 3 --moe-router-pre-softmax
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-token-drop-policy probs
    --attention-dropout 0.0 --hidden-dropout 0.0 --bf16 --use-dynamic-batch-size --max-tokens-per-gpu 1024"""
QWEN3 = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --vocab-size 40 --swiglu"


@pytest.fixture
def config_of(tmp_path):
    def build(family: str, flags: str):
        config = family_config(family).to_dict() | {"rope_parameters": {"rope_theta": 10000.0}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        data = tmp_path / "train.jsonl"
        data.write_text('{"input": "1+1=", "label": "2"}\n')
        words = f"--hf-checkpoint {tmp_path} --prompt-data {data} --rm-type math --num-rollout 1 --rollout-batch-size 8"
        return parse(shlex.split(f"{words} --n-samples-per-prompt 8 --train-backend megatron {flags}")).config

    return build


def test_a_list_of_slimes_scripts_passes_with_one_line(config_of):
    for family, flags in (("deepseek_v3", DEEPSEEK), ("qwen3", QWEN3)):
        config = config_of(family, flags)
        assert validate(config) == []
        (line,) = notices(config)
        assert line.startswith("--num-layers, --hidden-size and ")
        assert line.endswith("built from config.json")


def test_six_numbers_are_compared_with_the_model(config_of):
    values = dict.fromkeys(COMPARED, "3") | {"rotary_base": "5e5"}
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in values.items())
    problems = list(model_problems(config_of("qwen3", flags)))
    assert len(problems) == len(COMPARED) == 6
    assert "config.json has num_hidden_layers 2; remove --num-layers" in problems[0]
    assert "has rope_parameters.rope_theta 10000" in problems[-1]


def test_a_config_that_is_not_json_is_reported_and_a_missing_one_is_not(config_of, tmp_path):
    config = config_of("qwen3", "--num-layers 3")
    (tmp_path / "config.json").write_text("{")
    (problem,) = model_problems(config)
    assert problem.startswith("--hf-checkpoint: ")
    (tmp_path / "config.json").unlink()
    assert list(model_problems(config)) == []
