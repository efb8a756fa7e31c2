"""What a trainer sends for quantized weights, many of which are quantized at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.core.weights import WeightSource
from furlong.errors import SyncError
from furlong.quantization import scheme as schemes
from furlong.quantization.fp8 import Fp8Blocks, Fp8Scaled
from furlong.quantization.int4 import Int4Groups
from furlong.quantization.scheme import QuantizationScheme

FORMS = [
    Int4Groups(32), Int4Groups(32, observer="mse"), Fp8Blocks((16, 32)), Fp8Blocks((16, 32), is_power_of_two=True),
    Fp8Scaled("channel", torch.bfloat16), Fp8Scaled("tensor"),
]  # fmt: skip


def weights(shapes):
    generator = torch.Generator().manual_seed(len(shapes))
    found = {f"layers.{i}.proj.weight": torch.randn(*shape, generator=generator) for i, shape in enumerate(shapes)}
    return found | {"norm.weight": torch.ones(8)}


def sent(form, state):
    scheme = QuantizationScheme(form, frozenset(state) - {"norm.weight"}, torch.bfloat16)
    return scheme, list(scheme.quantized(WeightSource(state.items)).open())


@settings(max_examples=25, deadline=None)
@given(
    form=st.sampled_from(FORMS),
    shapes=st.lists(st.tuples(st.integers(1, 40), st.sampled_from([32, 64])), min_size=1, max_size=12),
    limit=st.sampled_from([1, 3000, 1 << 20]),
)
def test_weights_quantized_together_are_those_quantized_alone(form, shapes, limit):
    state = weights(shapes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schemes, "STACK_BYTES", limit)
        scheme, tensors = sent(form, state)
    right = {"norm.weight": state["norm.weight"]}
    for name in scheme.names:
        right |= dict(scheme.quantize(name, state[name]))
    assert sorted(name for name, _ in tensors) == sorted(right)
    for name, tensor in tensors:
        assert (tensor.shape, tensor.dtype) == (right[name].shape, right[name].dtype)
        assert torch.equal(tensor.contiguous().view(torch.uint8), right[name].contiguous().view(torch.uint8)), name
    without = {name for name, _ in scheme.quantized(WeightSource(state.items), with_shapes=False).open()}
    assert without == {name for name, _ in tensors if not name.endswith("weight_shape")}


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("number", [0, 2, 5])
def test_the_weight_without_a_number_is_named(form, number):
    state = weights([(16, 32), (32, 32), (20, 32), (16, 64), (16, 32), (7, 32)])
    state[f"layers.{number}.proj.weight"][-1, 3] = float("nan")
    with pytest.raises(SyncError, match=rf"layers\.{number}\.proj\.weight cannot be stored as"):
        sent(form, state)


def test_a_weight_of_an_impossible_shape_is_named_before_others_are_sent():
    state = weights([(16, 32), (16, 40)])
    with pytest.raises(SyncError, match=r"layers\.1\.proj\.weight .* 40 columns are not a multiple"):
        sent(Int4Groups(32), state)
