"""Predicted memory against measured peaks, and proposals."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends import fsdp_backend
from furlong.algo.policy_loss import PolicyLoss
from furlong.algo.value_loss import ValueLoss
from furlong.config.sections import AlgoFlags, OpdFlags, OptimFlags
from furlong.errors import ConfigError
from furlong.tools.gpu_memory import device_bytes
from furlong.tools.memory_formulas import (
    GIB,
    ModelSize,
    PipelineStage,
    ServingSetup,
    TeacherSetup,
    TrainingSetup,
    least_fraction,
    most_tokens,
    resting,
    serving_phase,
    smallest_change,
    stages,
    training_phases,
    usable,
)
from furlong.training.megatron.parallel_layout import Layout
from furlong.training.packing import Packing
from furlong.training.settings import RoleSettings
from furlong.training.worker import RoleLoss, RoundHooks, RoundWorker
from models_zoo import random_batch
from runs import write_model

QWEN3 = {
    "0.6b": ModelSize(28, 1024, 3072, 16, 8, 128, 151936, is_tied=True),
    "1.7b": ModelSize(28, 2048, 6144, 16, 8, 128, 151936, is_tied=True),
    "4b": ModelSize(36, 2560, 9728, 32, 8, 128, 151936, is_tied=True),
}
H200 = device_bytes("h200")


@pytest.mark.parametrize(
    ("shape", "measured_gib", "note"),
    [
        ("0.6b", 37.1, "nothing recomputed"),
        ("1.7b", 70.8, "nothing recomputed"),
        ("4b", 131.4, "recomputed in 14 of 36 layers"),
    ],
)
def test_the_training_peak_is_within_five_percent_of_what_one_h200_measured(shape, measured_gib, note):
    """Measured 2026-11-21 by benchmarks/gpu/train_mfu.py: 32,768 tokens, bfloat16 (docs/internals/benchmarks.md)."""
    train = next(p for p in training_phases(QWEN3[shape], TrainingSetup(32768), usable(H200)) if p.name == "train")
    assert train.total / GIB == pytest.approx(measured_gib, rel=0.05)
    if "nothing" in note:
        assert train.note == note


def test_dimensions_are_read_from_a_config_and_missing_ones_are_named():
    config = {
        "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936, "tie_word_embeddings": True,
    }  # fmt: skip
    assert ModelSize.read(config) == QWEN3["0.6b"]
    assert ModelSize.read({"text_config": config}) == QWEN3["0.6b"]
    del config["num_hidden_layers"]
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        ModelSize.read(config)


@pytest.mark.parametrize(
    ("shape", "billions"),
    [("0.6b", 0.596), ("1.7b", 1.720), ("4b", 4.022)],  # of the published checkpoints
)
def test_parameters_are_counted(shape, billions):
    assert QWEN3[shape].parameters / 1e9 == pytest.approx(billions, rel=0.002)


def test_experts_count_as_parameters_but_only_the_chosen_ones_as_activations():
    moe = ModelSize(
        48, 2048, 6144, 32, 4, 128, 151936, is_tied=False, experts=128, experts_per_token=8, moe_intermediate=768
    )
    assert moe.parameters / 1e9 == pytest.approx(30.5, rel=0.01)  # Qwen3-30B-A3B
    assert moe.mlp_width == 8 * 768


@pytest.mark.parametrize(
    ("ranks", "layout", "measured_gib"),
    [(2, None, 71.7), (4, None, 50.3), (2, Layout(expert=2), 76.3), (4, Layout(expert=4), 52.5)],
)
def test_the_peak_of_experts_is_within_five_percent_of_what_h200s_measured(ranks, layout, measured_gib):
    """Measured 2026-11-22 by benchmarks/gpu/train_scaling.py: 8 layers of Qwen3-30B-A3B, 16,384 tokens."""
    moe = ModelSize(
        8, 2048, 6144, 32, 4, 128, 151936, is_tied=False, experts=128, experts_per_token=8, moe_intermediate=768
    )
    setup = TrainingSetup(16384, shards=ranks, layout=layout)
    peak = max(phase.total for phase in training_phases(moe, setup, usable(H200)))
    assert peak / GIB == pytest.approx(measured_gib, rel=0.05)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    shape=st.sampled_from(sorted(QWEN3)),
    gib=st.integers(24, 200),
    shards=st.sampled_from([1, 2, 8]),
    whole=st.booleans(),
    offloaded=st.booleans(),
)
def test_the_largest_micro_batch_fits_and_a_larger_one_does_not(shape, gib, shards, whole, offloaded):
    setup = TrainingSetup(0, shards=shards, whole_layers=whole, is_offloaded=offloaded)
    limit = usable(gib * GIB)
    best = most_tokens(QWEN3[shape], setup, limit)

    def peak(tokens):
        phases = training_phases(QWEN3[shape], TrainingSetup(tokens, shards, 0, whole, offloaded), limit)
        return max(phase.total for phase in phases)

    assert peak(best + 1024) > limit
    if best:
        assert peak(best) <= limit


@given(gib=st.integers(16, 80), tokens=st.sampled_from([4096, 32768, 131072]), longest=st.sampled_from([2048, 16384]))
def test_the_smallest_change_makes_it_fit(gib, tokens, longest):
    limit = usable(gib * GIB)
    words = smallest_change(QWEN3["4b"], TrainingSetup(tokens), limit, longest=longest).split()
    value = {name: int(next_word) for name, next_word in itertools.pairwise(words) if next_word.isdigit()}
    setup = TrainingSetup(
        value.get("--max-tokens-per-gpu", tokens),
        shards=value.get("--actor-num-gpus-per-node", 1),
        whole_layers="--recompute-activations" in words,
        is_offloaded="--offload-optimizer-states" in words,
    )
    sample = -(-longest // value.get("--context-parallel-size", 1))
    tallest = dataclasses.replace(setup, tokens=max(setup.tokens, sample))
    assert max(p.total for p in training_phases(QWEN3["4b"], tallest, limit)) <= limit


def test_ranks_divide_what_is_sharded_and_the_reference_adds_its_weights():
    limit = usable(H200)
    one, eight = (training_phases(QWEN3["4b"], TrainingSetup(1024, shards=n), limit)[2].total for n in (1, 8))
    assert eight == pytest.approx(one / 8 * 16 / 18, rel=0.01)  # no weights in bfloat16 beside the masters
    plain = training_phases(QWEN3["4b"], TrainingSetup(1024), limit)[2].total
    assert (
        training_phases(QWEN3["4b"], TrainingSetup(1024, frozen_models=1), limit)[2].total - plain
        == 2 * QWEN3["4b"].parameters
    )


@pytest.mark.parametrize("loss", ["full", "topk"])
def test_a_critic_and_a_teacher_take_what_is_predicted(loss, tmp_path):
    """By the tensors of this process after a round, in float32 on a CPU, where models do not take turns."""
    folders = {name: write_model(tmp_path / name, width=width) for name, width in (("student", 64), ("teacher", 96))}
    algo, optim = AlgoFlags(advantage_estimator="ppo"), OptimFlags(lr=1e-3)
    opd = OpdFlags(use_opd=True, opd_type="trainer", opd_loss=loss, opd_log_prob_top_k=4 if loss == "topk" else 0)
    drawn = random_batch(prompts=[5, 3], responses=[[6, 2], [4, 7]], vocab=16)
    before = live_bytes()
    trained = {"critic": RoleSettings(folders["student"], optim)}
    backend = fsdp_backend(
        folders["student"], optim=optim, role_folders={"teacher": folders["teacher"]}, trained=trained
    )
    losses = [RoleLoss("critic", ValueLoss(0.2), weights="value_weights"), RoleLoss("actor", PolicyLoss(algo, opd=opd))]
    dumped: list[Any] = []
    hooks = RoundHooks(dump=dumped.append)
    worker = RoundWorker(backend, algo=algo, losses=losses, opd=opd, packing=Packing(global_batch_size=4), hooks=hooks)
    worker.train(drawn)
    student, teacher = (ModelSize.read(json.loads((path / "config.json").read_text())) for path in folders.values())
    tokens = int(drawn.response_lengths.sum())
    given = TeacherSetup(teacher, tokens, is_full=loss == "full", top_k=opd.opd_log_prob_top_k)
    setup = TrainingSetup(64, is_half=False, on_cpu=True, teacher=given, critic=student)
    columns = [dumped[0].columns.get(f"teacher_top_{name}") for name in ("ids", "log_probs")]
    kept = sum(column.nbytes for column in columns if column is not None)
    dumped.clear()
    measured = live_bytes() - before + kept
    predicted = sum(resting(student, setup).values()) + setup.kept_of_teacher
    assert 0.98 * measured < predicted < measured  # without norms
    of_outputs = {"full": tokens * 96 * 4, "topk": tokens * 4 * 8}
    assert setup.kept_of_teacher == of_outputs[loss]
    assert kept == (of_outputs["topk"] if loss == "topk" else 0)
    del worker, backend


def live_bytes() -> int:
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    tensors = [each for each in tensors if not each.is_mkldnn]  # packed weights of engines, which have no storage
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_the_kv_cache_fills_what_the_fraction_leaves():
    setup = ServingSetup(0.5, requests=512, request_tokens=1536)
    phase = serving_phase(QWEN3["0.6b"], setup, H200)
    assert phase.total == int(H200 * 0.5)
    assert phase.parts["weights"] == 2 * QWEN3["0.6b"].parameters
    assert QWEN3["0.6b"].kv_per_token == 114_688
    fraction = least_fraction(QWEN3["0.6b"], setup, H200)
    held = int(H200 * fraction) - phase.parts["weights"]
    assert 0 <= held // 114_688 - 512 * 1536 < 0.011 * H200 // 114_688


def test_a_device_is_a_name_or_its_memory():
    assert [device_bytes(name) for name in ("H100", "80")] == [int(79.1 * GIB), 80 * GIB]
    for name, said in (("h20", "h200"), ("huge", "in GiB"), ("-1", "positive")):
        with pytest.raises(ConfigError, match=said):
            device_bytes(name)


@pytest.mark.parametrize("experts", [0, 8])
@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2), Layout(pipeline=3), Layout(tensor=4, pipeline=2)])
def test_stages_hold_each_parameter_once(layout, experts):
    model = ModelSize(
        36, 2560, 9728, 32, 8, 128, 151936, is_tied=False, experts=experts, moe_intermediate=512 if experts else 0
    )
    layout = dataclasses.replace(layout, expert=2 if experts else 1)
    setup = TrainingSetup(8192, shards=16, layout=layout)
    held = [PipelineStage(model, setup, stage) for stage in range(layout.pipeline)]
    routers = (layout.tensor - 1) * model.layers * model.hidden * experts  # these every rank has
    shared, of_experts = (sum(getattr(s, name) for s in held) for name in ("shared", "of_experts"))
    assert layout.tensor * shared + layout.expert * of_experts - routers == model.parameters


def test_uneven_and_interleaved_pipelines_are_counted():
    model = QWEN3["4b"]
    uneven = TrainingSetup(8192, shards=4, layout=Layout(pipeline=4, first_layers=6, last_layers=8))
    assert [PipelineStage(model, uneven, n).layers for n in range(4)] == [6, 11, 11, 8]
    assert [stage.number for stage in stages(model, uneven)] == [0, 1, 3]
    assert [PipelineStage(model, uneven, n).in_flight for n in (0, 3)] == [4, 1]
    interleaved = TrainingSetup(8192, shards=4, layout=Layout(pipeline=4, virtual=3))
    assert PipelineStage(model, interleaved, 0).in_flight == 15 / 3
