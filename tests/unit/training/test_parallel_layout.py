"""Models and layouts that --train-backend megatron supports, and the ranks of a layout; without Megatron-core."""

from __future__ import annotations

import pytest

from furlong.config.sections import MegatronFlags, TrainFlags
from furlong.training.megatron.parallel_layout import (
    Layout,
    described,
    layout_flag_problems,
    model_problems,
    uneven_notice,
)
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

DELTA = {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2}
QWEN35 = QWEN3 | DELTA | {"model_type": "qwen3_5_text"}


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
        (QWEN35, Layout(tensor=2)),
        (QWEN35, Layout(context=2)),
    ],
)
def test_a_model_that_fits_has_no_problem(config, layout):
    assert list(model_problems(config, layout)) == []


@pytest.mark.parametrize(
    ("config", "layout", "values"),
    [
        ({"model_type": "gemma2"}, Layout(), "gemma2"),
        (QWEN3 | {"mlp_bias": True}, Layout(), "mlp_bias True"),
        (QWEN3 | {"layer_types": ["full_attention", "chunked_attention"]}, Layout(), "chunked_attention"),
        (QWEN3 | {"hidden_act": "gelu"}, Layout(), "hidden_act gelu"),
        (QWEN3 | {"rope_parameters": {"rope_type": "longrope"}}, Layout(), "longrope"),
        (QWEN3 | {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}, Layout(), "0.5"),
        (GPT_OSS | {"attention_bias": False}, Layout(), "attention_bias False"),
        (GPT_OSS | {"swiglu_alpha": 1.5}, Layout(), "swiglu_alpha 1.5"),
        (GPT_OSS, Layout(expert_tensor=2), "--expert-tensor-parallel-size 1"),
        (QWEN3, Layout(tensor=4), "--tensor-model-parallel-size 4 does not divide the 2 "),
        (QWEN3 | {"vocab_size": 63}, Layout(tensor=2), "vocabulary"),
        (QWEN3 | {"intermediate_size": 63}, Layout(tensor=2), "intermediate_size"),
        (QWEN3, Layout(pipeline=3), "--pipeline-model-parallel-size 3"),
        (QWEN3, Layout(pipeline=4, first_layers=2), "--decoder-first-pipeline-num-layers 2: 2 of the 4 "),
        (QWEN3, Layout(pipeline=2, first_layers=1, last_layers=2), "--decoder-last-pipeline-num-layers 2: 1 of the 4 "),
        (QWEN3, Layout(pipeline=2, virtual=3), "4 / 2 = 2"),
        (QWEN3, Layout(pipeline=2, virtual=3, last_layers=1), "--decoder-last-pipeline-num-layers 1"),
        (MOE | {"moe_intermediate_size": 6}, Layout(expert_tensor=4), "moe_intermediate_size"),
        (QWEN3, Layout(expert=2), "--expert-model-parallel-size 2"),
        (MOE, Layout(expert=3), "--expert-model-parallel-size 3 does not divide the 8 "),
        (MOE, Layout(tensor=2), "--sequence-parallel"),
        (QWEN35, Layout(tensor=2, context=2), "the 2 key heads of the gated delta nets"),
    ],
)
def test_a_model_that_does_not_fit_is_an_error_with_its_values(config, layout, values):
    (problem,) = model_problems(config, layout)
    assert values in problem


@pytest.mark.parametrize(
    ("flags", "config", "values"),
    [
        (
            {"num_layers_per_virtual_pipeline_stage": 3},
            QWEN3,
            "--num-layers-per-virtual-pipeline-stage 3 does not divide the 4 / 2 = 2",
        ),
        ({"expert_tensor_parallel_size": 2}, QWEN3, "--expert-tensor-parallel-size 2"),
    ],
)
def test_flags_that_do_not_fit_the_model_are_an_error_with_their_values(flags, config, values):
    (problem,) = layout_flag_problems(TrainFlags(pipeline_model_parallel_size=2), MegatronFlags(**flags), config)
    assert values in problem


def test_layers_per_virtual_stage_give_the_chunks_and_expert_tensor_parallelism_defaults_to_tensor():
    train = TrainFlags(pipeline_model_parallel_size=2, tensor_model_parallel_size=4)
    layout = Layout.of(train, MegatronFlags(num_layers_per_virtual_pipeline_stage=2), 12)
    assert (layout.virtual, layout.expert_tensor) == (3, 4)
    assert Layout.of(train, MegatronFlags(expert_tensor_parallel_size=1), 12).expert_tensor == 1


def test_ranks_are_ordered_by_tensor_context_data_pipeline():
    all_ranks = [Ranks(rank, 16, tensor=2, context=2, pipeline=2) for rank in range(16)]
    assert [r.data_rank for r in all_ranks] == [0, 0, 0, 0, 1, 1, 1, 1] * 2
    assert [r.context_rank for r in all_ranks] == [0, 0, 1, 1] * 4
    assert {r.num_data for r in all_ranks} == {2}


def test_a_layout_is_described_by_its_sizes_above_one():
    assert described({"tensor": 2, "pipeline": 1, "sequence_parallel": False}).endswith("megatron (tensor 2)")
    assert described({"tensor": 1}).endswith("megatron (data-parallel)")


@pytest.mark.parametrize(
    ("layers", "stages", "last", "others"),
    [(47, 2, 23, 24), (5, 2, 2, 3), (94, 4, 22, 24), (61, 4, 16, 15), (7, 3, 3, 2), (48, 4, None, 12), (5, 5, None, 1)],
)
def test_stages_are_nearly_equal_if_they_cannot_be_equal(layers, stages, last, others):
    flags = TrainFlags(train_backend="megatron", pipeline_model_parallel_size=stages)
    layout = Layout.of(flags, MegatronFlags(), layers)
    assert layout.last_layers == last
    assert others * (stages - (last is not None)) + (last or 0) == layers
    assert list(model_problems(QWEN3 | {"num_hidden_layers": layers}, layout)) == []
    notice = uneven_notice(flags, MegatronFlags(), layers)
    assert (notice is None) == (last is None)
    if notice is not None:
        assert f"the last stage has {last}, each other {others}" in notice


def test_stages_that_flags_size_are_not_changed():
    flags = TrainFlags(train_backend="megatron", pipeline_model_parallel_size=2)
    sized = MegatronFlags(decoder_first_pipeline_num_layers=1)
    assert (Layout.of(flags, sized, 5).last_layers, uneven_notice(flags, sized, 5)) == (None, None)
    interleaved = MegatronFlags(num_virtual_stages_per_pipeline_rank=2)
    assert "does not divide the 5 layers" in str(
        list(model_problems(QWEN3 | {"num_hidden_layers": 5}, Layout.of(flags, interleaved, 5)))
    )
