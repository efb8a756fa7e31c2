"""Optimizer states of Megatron-LM checkpoints: which are resumed from, and the errors for the others."""

from __future__ import annotations

import pytest
import torch

from furlong.errors import CheckpointError
from furlong.training.megatron_lm.dist_files import DistReader, DistWriter
from furlong.training.megatron_lm.dist_optimizer import DistOptimizer, optimizer_to_continue

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
    ("options", "step"),
    [
        ({}, 7),
        ({"prefix": "chained_{}.", "noted": {0: ONE, 1: ONE}}, 7),
        ({"states": {"fp32_param": 1.0, "exp_avg": 2.0, "exp_avg_sq": 3.0}, "noted": TWO}, 8),
    ],
)
def test_master_weights_and_moments_are_read_by_the_name_of_their_weight(tmp_path, options, step):
    states = DistOptimizer(DistReader(write(tmp_path / "release", **options)))
    assert (states.keys, states.step) == (frozenset(WEIGHTS), step)
    for number, name in enumerate(WEIGHTS):
        read = [states.read(kind, name, (1, 2), (2, 3)) for kind in ("master", "exp_avg", "exp_avg_sq")]
        assert [tuple(box.unique().tolist()) for box in read] == [(1.0 + number,), (2.0 + number,), (3.0 + number,)]
        assert all(box.shape == (2, 3) for box in read)


def test_float32_weights_are_their_own_master_weights(tmp_path):
    moments = {"exp_avg": 2.0, "exp_avg_sq": 3.0}
    states = DistOptimizer(DistReader(write(tmp_path / "release", states=moments, dtype=torch.float32)))
    assert not states.read("master", WEIGHTS[0], (0, 0), (4, 5)).any()
    with pytest.raises(CheckpointError, match=r"torch\.bfloat16.*--no-load-optim"):
        DistOptimizer(DistReader(write(tmp_path / "half", states=moments)))


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({"shape": (2, 10)}, r"\(2, 10\).*\(4, 5\).*fully_sharded_model_space.*--dist-ckpt-optim-fully-reshardable"),
        ({"states": {"param": 1.0, "exp_avg": 2.0}}, r"decoder\.layers\.mlp\.linear_fc1\.weight.*exp_avg_sq"),
        ({"states": {"momentum_buffer": 2.0}}, r"momentum_buffer.*Adam"),
        ({"states": {}}, r"fully_reshardable.*--dist-ckpt-optim-fully-reshardable"),
        ({"noted": {0: ONE, 1: TWO}}, r"common\.pt.*\b7, 8\b"),
        ({"noted": {}}, r"common\.pt"),
    ],
)
def test_states_that_cannot_be_resumed_from_are_an_error_with_the_fix(tmp_path, options, values):
    with pytest.raises(CheckpointError, match=rf"release: .*{values}.*--no-load-optim$"):
        DistOptimizer(DistReader(write(tmp_path / "release", **options)))


def test_flat_buffers_are_refused_unless_only_weights_are_loaded(tmp_path):
    folder = tmp_path / "iter_0000005"
    folder.mkdir()
    writer = DistWriter(folder)
    writer.add(WEIGHTS[0], torch.zeros(4, 5), offset=(0, 0), shape=(4, 5))
    buffer = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0"
    for prefix in ("", "chained_1."):
        writer.add(f"{prefix}{buffer}.exp_avg", torch.zeros(64), offset=(0,), shape=(64,))
    writer.close({"iteration": 5, "optimizer": ONE})
    fix = r"iter_0000005.*dp_reshardable.*--dist-ckpt-optim-fully-reshardable.*--no-load-optim.*--finetune"
    with pytest.raises(CheckpointError, match=fix):
        optimizer_to_continue(folder, loads_states=True, start=5)
    with pytest.raises(CheckpointError, match=fix):
        DistOptimizer(DistReader(folder))
    assert optimizer_to_continue(folder, loads_states=False, start=5) is None
    assert not DistReader(folder).read(WEIGHTS[0], (0, 0), (4, 5)).any()


def test_a_later_iteration_needs_the_rollout_to_start_at(tmp_path):
    folder = write(tmp_path / "iter_0000005")
    with pytest.raises(CheckpointError, match=r"iteration 5\b.*--start-rollout-id 5 .*slime: 6.*--finetune"):
        optimizer_to_continue(folder, loads_states=False, start=None)
    assert optimizer_to_continue(folder, loads_states=True, start=0) == folder
    assert optimizer_to_continue(folder, loads_states=False, start=5) is None
    released = write(tmp_path / "release", states={})
    assert optimizer_to_continue(released, loads_states=True, start=None) is None
