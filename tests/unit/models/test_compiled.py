from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from backends import fsdp_backend
from furlong.algo.policy_loss import PolicyLoss
from furlong.config.sections import AlgoFlags
from furlong.core.batch import pack_micro_batch
from furlong.models import hf_model as hf
from furlong.models.compiled_layers import LayerStack, dense_layers
from furlong.models.packed_model import PackedModel
from furlong.training.ranks import Ranks
from models_zoo import family_config, random_batch

BATCH = random_batch(prompts=[9, 4], responses=[[5, 12], [40, 3]])


def model(family="qwen3"):
    return hf.build_model(family_config(family), seed=0)


def micro():
    count = len(BATCH.loss_masks)
    part = pack_micro_batch(BATCH, range(len(BATCH)), np.full(count, 1 / count, np.float32))
    return part.with_columns(advantages=torch.linspace(-1, 1, count))


def gradients(packed):
    (hidden_RD,) = packed(micro(), lambda hidden_RD, *_: (hidden_RD,))
    hidden_RD.square().sum().backward()
    return [p.grad.clone() for p in packed.model.parameters() if p.grad is not None]


@pytest.mark.parametrize("num_recomputed", [1, 2])
def test_recomputing_mlps_is_bitwise_neutral(num_recomputed):
    packed = PackedModel(model())
    calls = []
    for mlp in packed.layers.mlps[:num_recomputed]:
        mlp.is_recomputed = True
    for mlp in packed.layers.mlps:
        mlp.gate_proj.register_forward_hook(lambda *_: calls.append(1))
    recomputed = gradients(packed)
    assert len(calls) == 2 + num_recomputed
    for got, want in zip(recomputed, gradients(PackedModel(model())), strict=True):
        assert torch.equal(got, want)


def test_moe_layers_are_not_dense():
    assert len(dense_layers(model("qwen3"))) == 2
    assert dense_layers(model("qwen3_moe")) == []
    assert not LayerStack(model("qwen3_moe"), compiled=True).is_compiled


def test_wrapping_a_model_keeps_parameter_and_class_names():
    plain, wrapped = model(), model()
    LayerStack(wrapped, compiled=False)
    LayerStack(wrapped, compiled=False)
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    assert [type(m).__name__ for m in wrapped.modules()] == [type(m).__name__ for m in plain.modules()]
    assert len(type(wrapped.model.layers[0].mlp).__mro__) == len(type(plain.model.layers[0].mlp).__mro__) + 1


def test_as_many_layers_recompute_as_memory_requires():
    layers = LayerStack(model(), compiled=False)
    assert layers._choose(100, 10**9, 0) == 2  # nothing is known yet
    layers.kept_per_token = 3 * layers.saved_by_recomputing
    head_bytes = 10**6  # more than a layer's backward pass works with
    needed = 100 * 3 * layers.saved_by_recomputing + head_bytes
    assert layers._choose(100, needed, head_bytes) == 0
    assert layers._choose(100, needed - 1, head_bytes) == 1
    assert layers._choose(100, needed - 100 * layers.saved_by_recomputing - 1, head_bytes) == 2
    assert layers._choose(100, -(10**9), head_bytes) == 2


def test_a_pass_that_frees_older_memory_keeps_the_measured_bytes_per_token(monkeypatch):
    layers = LayerStack(model(), compiled=False)
    allocated = iter([0, 1000, 5000, 3000, 0, 2000])  # before and after each pass
    monkeypatch.setattr("furlong.models.compiled_layers._free_bytes", lambda device, headroom: 10**12)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(allocated))
    chosen = []
    for _ in range(3):
        with layers.choose(torch.device("cuda"), 100):
            chosen.append((layers.num_recomputed, layers.kept_per_token))
    measured = 10 + 2 * layers.saved_by_recomputing
    assert chosen == [(2, 0), (0, measured), (0, measured)]
    assert layers.kept_per_token == 20


class FailsOnce(PolicyLoss):
    def __call__(self, part, stats):
        loss, metrics = super().__call__(part, stats)
        if not hasattr(self, "failed"):
            self.failed = True
            loss.backward(retain_graph=True)  # gradients of half a pass are there
            raise torch.OutOfMemoryError("no memory")
        return loss, metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    hf.save_model(model(), path)
    return path


def test_running_out_of_memory_repeats_the_micro_batch_and_counts_it_once(folder, caplog):
    grads = []
    for loss in (PolicyLoss(AlgoFlags()), FailsOnce(AlgoFlags())):
        backend = fsdp_backend(folder, dtype=torch.bfloat16)
        backend.forward_backward(micro(), PolicyLoss(AlgoFlags()))
        backend.forward_backward(micro(), loss)
        grads.append([m.grad for m in backend.optimizer.master_weights])
    assert "more recomputation" in caplog.text
    for want, got in zip(*grads, strict=True):
        assert torch.equal(got, want)


def test_running_out_of_memory_is_an_error_where_a_pass_cannot_be_undone(folder):
    backend = fsdp_backend(folder, dtype=torch.float32)
    with pytest.raises(torch.OutOfMemoryError):
        backend.forward_backward(micro(), FailsOnce(AlgoFlags()))


def test_running_out_of_memory_is_an_error_once_everything_is_recomputed(folder):
    backend = fsdp_backend(folder, dtype=torch.bfloat16)
    backend.actor.layers.num_recomputed = 2
    with pytest.raises(torch.OutOfMemoryError):
        backend.forward_backward(micro(), FailsOnce(AlgoFlags()))


def test_running_out_of_memory_before_the_layers_is_an_error_after_a_few_times(folder, monkeypatch):
    backend, tried = fsdp_backend(folder, dtype=torch.bfloat16), []

    def fail(*_):
        tried.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(backend, "_forward_backward", fail)
    with pytest.raises(torch.OutOfMemoryError):
        backend.forward_backward(micro(), PolicyLoss(AlgoFlags()))
    assert 1 < len(tried) < 10


class SizedLayer(nn.Module):
    """A layer that reads an integer attribute, as attention reads the width of its heads."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Module()
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(self.mlp, name, nn.Linear(8, 8))
        self.head_dim = 4

    def forward(self, x):
        return self.mlp.gate_proj(x).unflatten(1, (-1, self.head_dim)).sum(1)


def test_sizes_of_a_compiled_layer_are_constants_in_a_sharded_model(monkeypatch):
    sizes = []
    monkeypatch.setattr(torch._dynamo.config, "disable", False)  # as tests of Megatron-core set it on a CPU

    def record(graph, inputs):
        sizes.extend(int(x) for x in inputs if not isinstance(x, torch.Tensor))
        return graph

    compile_function = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **options: compile_function(call, backend=record, **options))
    if dist.is_initialized():  # by tests of another file
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layer = fully_shard(SizedLayer(), mesh=init_device_mesh("cpu", (1,)))
    layers = LayerStack(SimpleNamespace(base_model=SimpleNamespace(layers=nn.ModuleList([layer]))), compiled=True)
    layer(torch.randn(6, 8))
    assert layers.is_compiled
    assert sizes == [6]  # the number of tokens
    del layer, layers
    Ranks().leave()
