"""Which models and sizes --train-backend megatron takes, and which rank has which part; without Megatron-core."""

from __future__ import annotations

import pytest

from furlong.config.sections import MegatronFlags, TrainFlags
from furlong.training.megatron.parallel_layout import Layout, described, given_problems, model_problems
from furlong.training.ranks import Ranks

QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "hidden_act": "silu",
    "layer_types": ["full_attention"] * 4,
}
MOE = QWEN3 | {"model_type": "qwen3_moe", "num_experts": 8}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096}
GPT_OSS = MOE | {"model_type": "gpt_oss", "layer_types": ["sliding_attention", "full_attention"] * 2}


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (QWEN3, Layout()),
        (QWEN3, Layout(tensor=2, pipeline=4, context=3, sequence_parallel=True)),
        (MOE, Layout(tensor=2, expert=8, sequence_parallel=True)),
        (QWEN3 | {"model_type": "llama", "rope_parameters": LLAMA3}, Layout()),
        (QWEN3 | {"rope_scaling": LLAMA3 | {"low_freq_factor": 2.0}, "attention_bias": True}, Layout()),
        (GPT_OSS | {"rope_parameters": YARN, "attention_bias": True, "swiglu_alpha": 1.702}, Layout(expert=4)),
        (QWEN3, Layout(pipeline=2, first_layers=1, last_layers=3)),
        (QWEN3 | {"num_hidden_layers": 10}, Layout(pipeline=3, virtual=2, first_layers=2)),
    ],
)
def test_what_fits_has_no_problem(config, layout):
    assert list(model_problems(config, layout)) == []


@pytest.mark.parametrize(
    ("config", "layout", "said"),
    [
        ({"model_type": "gemma2"}, Layout(), "not gemma2"),
        (QWEN3 | {"mlp_bias": True}, Layout(), "mlp_bias True"),
        (QWEN3 | {"layer_types": ["full_attention", "chunked_attention"]}, Layout(), "chunked_attention layers"),
        (QWEN3 | {"hidden_act": "gelu"}, Layout(), "hidden_act gelu"),
        (QWEN3 | {"rope_parameters": {"rope_type": "longrope"}}, Layout(), "type longrope"),
        (QWEN3 | {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}, Layout(), "YaRN over 0.5"),
        (QWEN3 | {"quantization_config": {"quant_method": "fp8"}}, Layout(), "quantized (fp8)"),
        (GPT_OSS | {"attention_bias": False}, Layout(), "attention_bias False"),
        (GPT_OSS | {"swiglu_alpha": 1.5}, Layout(), "swiglu_alpha 1.5"),
        (GPT_OSS, Layout(expert_tensor=2), "has biases in its experts"),
        (QWEN3, Layout(tensor=4), "does not divide the 2 key/value heads"),
        (QWEN3 | {"vocab_size": 63}, Layout(tensor=2), "does not divide the 63 words"),
        (QWEN3 | {"intermediate_size": 63}, Layout(tensor=2), "does not divide the 63 channels"),
        (QWEN3, Layout(pipeline=3), "does not divide the 4 layers"),
        (QWEN3, Layout(pipeline=4, first_layers=2), "2: 2 of the 4 layers are left for the 3 other stages"),
        (QWEN3, Layout(pipeline=2, first_layers=1, last_layers=2), "1 of the 4 layers are left for the 0 other stages"),
        (QWEN3, Layout(pipeline=2, virtual=3), "3 does not divide a stage with 4 / 2 = 2 layers"),
        (QWEN3, Layout(pipeline=2, virtual=3, last_layers=1), "3 does not divide --decoder-last-pipeline-num-layers 1"),
        (MOE | {"moe_intermediate_size": 6}, Layout(expert_tensor=4), "does not divide the 6 channels of an expert"),
        (QWEN3, Layout(expert=2), "the model has no experts"),
        (MOE, Layout(expert=3), "does not divide the 8 experts"),
        (MOE, Layout(tensor=2), "needs --sequence-parallel"),
    ],
)
def test_what_does_not_fit_is_said_with_its_values(config, layout, said):
    (problem,) = model_problems(config, layout)
    assert said in problem


@pytest.mark.parametrize(
    ("own", "config", "said"),
    [
        ({"num_layers_per_virtual_pipeline_stage": 3}, QWEN3, "3 does not divide the 4 / 2 = 2 layers"),
        ({"expert_tensor_parallel_size": 2}, QWEN3, "has no effect: the model has no experts"),
    ],
)
def test_flags_that_do_not_fit_the_model_are_said(own, config, said):
    (problem,) = given_problems(TrainFlags(pipeline_model_parallel_size=2), MegatronFlags(**own), config)
    assert said in problem


def test_layers_of_a_virtual_stage_give_their_number_and_experts_are_cut_as_layers_unless_told_otherwise():
    train = TrainFlags(pipeline_model_parallel_size=2, tensor_model_parallel_size=4)
    layout = Layout.of(train, MegatronFlags(num_layers_per_virtual_pipeline_stage=2), 12)
    assert (layout.virtual, layout.expert_tensor) == (3, 4)
    assert Layout.of(train, MegatronFlags(expert_tensor_parallel_size=1), 12).expert_tensor == 1


def test_neighbours_share_a_layer_then_a_sequence_then_come_other_samples_then_other_layers():
    all_ranks = [Ranks(rank, 16, tensor=2, context=2, pipeline=2) for rank in range(16)]
    assert [r.data_rank for r in all_ranks] == [0, 0, 0, 0, 1, 1, 1, 1] * 2
    assert [r.context_rank for r in all_ranks] == [0, 0, 1, 1] * 4
    assert {r.num_data for r in all_ranks} == {2}


def test_a_layout_is_described_by_what_is_not_one():
    assert described({"tensor": 2, "pipeline": 1, "sequence_parallel": False}).endswith("megatron (tensor 2)")
    assert described({"tensor": 1}).endswith("megatron (data-parallel)")
