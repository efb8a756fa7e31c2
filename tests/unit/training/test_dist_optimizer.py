"""Which optimizer states of Megatron-LM's checkpoints a run goes on with, and what is said of the others."""

from __future__ import annotations

import pytest
import torch

from furlong.errors import CheckpointError
from furlong.training.checkpoint.dist_files import DistFiles, DistWriter
from furlong.training.checkpoint.dist_optimizer import DistOptimizer, optimizer_to_continue

WEIGHTS = ("decoder.layers.mlp.linear_fc1.weight", "embedding.word_embeddings.weight")
STATES = {"param": 1.0, "exp_avg": 2.0, "exp_avg_sq": 3.0}
ONE, TWO = ({"optimizer": {"param_groups": [{"step": step}, {"step": step}]}} for step in (7, 8.0))


def write(folder, *, states=None, prefix="", noted=ONE, dtype=torch.bfloat16, shape=(4, 5)):
    folder.mkdir(parents=True)
    writer = DistWriter(folder)
    for number, name in enumerate(WEIGHTS):
        writer.add(name, torch.zeros(4, 5, dtype=dtype), offset=(0, 0), shape=(4, 5))
        for kind, value in (STATES if states is None else states).items():
            state = f"{prefix.format(number)}optimizer.state.{kind}.{name}"
            writer.add(state, torch.full(shape, value + number), offset=(0,) * len(shape), shape=shape)
    writer.close({"iteration": 5, "optimizer": noted})
    return folder


@pytest.mark.parametrize(
    ("how", "step"),
    [
        ({}, 7),
        ({"prefix": "chained_{}.", "noted": {0: ONE, 1: ONE}}, 7),
        ({"states": {"fp32_param": 1.0, "exp_avg": 2.0, "exp_avg_sq": 3.0}, "noted": TWO}, 8),
    ],
)
def test_masters_and_moments_are_read_by_the_name_of_their_weight(tmp_path, how, step):
    states = DistOptimizer(DistFiles(write(tmp_path / "release", **how)))
    assert (states.keys, states.step) == (frozenset(WEIGHTS), step)
    for number, name in enumerate(WEIGHTS):
        read = [states.read(kind, name, (1, 2), (2, 3)) for kind in ("master", "exp_avg", "exp_avg_sq")]
        assert [tuple(box.unique().tolist()) for box in read] == [(1.0 + number,), (2.0 + number,), (3.0 + number,)]
        assert all(box.shape == (2, 3) for box in read)


def test_weights_in_float32_are_their_own_masters(tmp_path):
    moments = {"exp_avg": 2.0, "exp_avg_sq": 3.0}
    states = DistOptimizer(DistFiles(write(tmp_path / "release", states=moments, dtype=torch.float32)))
    assert not states.read("master", WEIGHTS[0], (0, 0), (4, 5)).any()
    with pytest.raises(
        CheckpointError, match=r"kept in torch\.bfloat16, without a float32 master; take another, or start"
    ):
        DistOptimizer(DistFiles(write(tmp_path / "half", states=moments)))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"shape": (2, 10)}, r"is \(2, 10\), and the weight \(4, 5\): an older form \(fully_sharded_model_space\)"),
        ({"states": {"param": 1.0, "exp_avg": 2.0}}, "decoder.layers.mlp.linear_fc1.weight has no exp_avg_sq"),
        ({"states": {"momentum_buffer": 2.0}}, "it has momentum_buffer of its optimizer, not Adam's"),
        ({"states": {}}, r"kept neither by parameter nor as buffers \(dp_reshardable\)"),
        ({"noted": {0: ONE, 1: TWO}}, "notes several numbers of steps, 7, 8 for its optimizer"),
        ({"noted": {}}, "notes no number of steps"),
    ],
)
def test_what_cannot_be_gone_on_with_is_said_with_the_way_out(tmp_path, how, reason):
    with pytest.raises(CheckpointError, match=rf"{reason}.*--no-load-optim$"):
        DistOptimizer(DistFiles(write(tmp_path / "release", **how)))


def test_a_run_says_where_its_rollouts_begin_before_it_goes_on_from_an_iteration(tmp_path):
    folder = write(tmp_path / "iter_0000005")
    with pytest.raises(CheckpointError, match=r"at iteration 5,.*add --start-rollout-id 5 .*slime: 6.*or --finetune"):
        optimizer_to_continue(folder, wanted=False, start=None)
    assert optimizer_to_continue(folder, wanted=True, start=0) == folder
    assert optimizer_to_continue(folder, wanted=False, start=5) is None
    released = write(tmp_path / "release", states={})
    assert optimizer_to_continue(released, wanted=True, start=None) is None
