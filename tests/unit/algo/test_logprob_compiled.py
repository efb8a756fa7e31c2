"""The GPU output layer, run uncompiled on a CPU, equals the plain one in every chunk."""

from __future__ import annotations

import pytest
import torch

from furlong.algo import logprob_compiled
from furlong.algo.logprob import token_stats

R, V, D = 7, 9, 4


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    shapes = [(R, D), (V, D), (V,)]
    tensors = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]
    return tensors, torch.randint(0, V, (R,), generator=generator)


@pytest.mark.parametrize("with_grad", [True, False])
def test_values_equal_those_of_the_plain_output_layer(with_grad, monkeypatch):
    (hidden, weight, bias), targets = inputs(torch.float32)
    args = {"temperature": 1.3, "chunk_size": 3, "entropy": True, "entropy_grad": False, "bias_V": bias}
    with torch.set_grad_enabled(with_grad):
        plain = token_stats(hidden, weight, targets, **args)
        monkeypatch.setattr(logprob_compiled, "is_large", lambda *_: True)
        stats = token_stats(hidden, weight, targets, **args)
    torch.testing.assert_close(stats.log_probs_R, plain.log_probs_R)
    torch.testing.assert_close(stats.entropy_R, plain.entropy_R)
    assert stats.log_probs_R.requires_grad == with_grad
    assert not stats.entropy_R.requires_grad


def test_a_cpu_never_uses_the_compiled_head():
    assert not logprob_compiled.is_large(torch.zeros(2**14, 1), torch.zeros(2**14, 1))
