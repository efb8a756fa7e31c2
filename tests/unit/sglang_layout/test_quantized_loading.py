"""The loader of quantized weights in SGLang, without SGLang; tests/real_sglang runs it with SGLang's own models."""

from __future__ import annotations

import pytest
import torch

from furlong.sglang_layout.quantized_loading import LOADER, header_of, integer_sums, load


class Recorded(torch.nn.Module):
    """A model that notes what it loads."""

    def __init__(self):
        super().__init__()
        self.loaded = {}

    def load_weights(self, tensors):
        self.loaded |= {name: tensor.clone() for name, tensor in tensors}


def message(tensors, **kind):
    """The header and buffer of a bucket."""
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in tensors]
    begins = [sum(-(-len(part) // 16) * 16 for part in parts[:i]) for i in range(len(parts))]
    buffer = torch.zeros(begins[-1] + len(parts[-1]), dtype=torch.uint8)
    for part, begin in zip(parts, begins, strict=True):
        buffer[begin : begin + len(part)] = part
    return [(header_of(tensors, begins, **kind), buffer)]


TENSORS = [
    ("a", torch.arange(6, dtype=torch.int32).view(2, 3)),
    ("b", torch.randn(5, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)),
    ("c", torch.tensor(1.5)),
    ("d", torch.ones(3, 1, dtype=torch.bfloat16)),
]


def test_buckets_are_loaded_under_their_names():
    model = Recorded()
    load(model, message(TENSORS[:3], is_first=True, is_last=False))
    load(model, message(TENSORS[3:], is_first=False, is_last=True))
    for name, tensor in TENSORS:
        assert model.loaded[name].dtype == tensor.dtype
        assert torch.equal(model.loaded[name].float(), tensor.float())


def test_a_later_bucket_does_not_begin_an_update():
    model = Recorded()
    with pytest.raises(RuntimeError, match="before the first one"):
        load(model, message(TENSORS, is_first=False, is_last=True))
    load(model, message(TENSORS, is_first=True, is_last=True))
    with pytest.raises(RuntimeError, match="before the first one"):
        load(model, message(TENSORS, is_first=False, is_last=True))


def test_a_sum_ignores_order_and_notices_a_bit():
    def total(*tensors):
        return int(integer_sums([("x", each) for each in tensors])["x"])

    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int32):
        tensor = (torch.randn(64, 48) * 20).to(dtype)
        assert total(tensor) == total(tensor.t()) == total(tensor[:20], tensor[20:]) == total(*tensor.chunk(4))
        other = tensor.clone()
        other.view(torch.uint8)[5, 7] ^= 1
        assert total(other) != total(tensor)
    of_two = [
        ("x", torch.arange(5, dtype=torch.int32)),
        ("y", torch.tensor(3)),
        ("x", torch.arange(7, dtype=torch.int8)),
    ]
    assert {name: int(each) for name, each in integer_sums(of_two).items()} == {"x": 10 + 21, "y": 3}
    assert integer_sums([]) == {}


def test_sglang_imports_the_loader_by_its_name():
    module, _, name = LOADER.rpartition(".")
    assert (load.__module__, load.__name__) == (module, name)
