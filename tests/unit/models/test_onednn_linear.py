"""Linear layers with oneDNN in training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from furlong.models import onednn_linear
from furlong.models.onednn_linear import OneDnnLinear, use_onednn


def pair(*, bias: bool) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    plain = nn.Linear(48, 72, bias=bias)
    fast = copy.deepcopy(plain)
    use_onednn(fast)
    if type(fast) is nn.Linear:
        pytest.skip("no oneDNN products here")
    return plain, fast


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(1,), (37,), (1, 37)], ids=str)
def test_output_and_gradients_are_those_of_a_plain_layer(rows, bias):
    plain, fast = pair(bias=bias)
    grad = torch.randn(*rows, 72)
    results = []
    for layer in (plain, fast):
        x = torch.linspace(-1, 1, 37 * 48).view(37, 48)[: rows[-1]].reshape(*rows, 48).clone().requires_grad_()
        out = layer(x)
        out.backward(grad)
        results.append([out, x.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_an_output_may_be_written_into():
    plain, fast = pair(bias=True)
    x = torch.linspace(-1, 1, 3 * 48).view(1, 3, 48)
    for layer in (plain, fast):
        out = layer(x)
        out += 1
        out.square().sum().backward()
    torch.testing.assert_close(fast.weight.grad, plain.weight.grad, rtol=1e-5, atol=1e-5)


def test_a_frozen_layer_passes_gradients_on():
    _, fast = pair(bias=True)
    fast.requires_grad_(requires_grad=False)
    x = torch.randn(5, 48, requires_grad=True)
    fast(x).sum().backward()
    torch.testing.assert_close(x.grad, fast.weight.sum(0).expand(5, 48))
    assert fast.weight.grad is None


def test_other_dtypes_keep_their_layers():
    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8, dtype=torch.bfloat16))
    use_onednn(model)
    assert not any(isinstance(layer, OneDnnLinear) for layer in model)


def test_the_compiler_traces_a_plain_linear_layer(monkeypatch):
    layer, x = OneDnnLinear(8, 4), torch.randn(3, 8)
    monkeypatch.setattr(onednn_linear, "_onednn", None)  # calling oneDNN would fail
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
