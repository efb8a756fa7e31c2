"""Buffers that decode steps reuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes_engine import tiny_model
from furlong.inference.embedded import decode_model as decode
from furlong.inference.embedded.decode_model import FusedDenseModel
from furlong.inference.embedded.decode_steps import RowNorms, SlotCache, StepShape
from furlong.inference.embedded.model_loading import build_model

CPU = torch.device("cpu")
SLOTS = 4
SHAPES = {
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 4},
    "llama": {"num_key_value_heads": 1},  # four query heads a group: two products
}
MODELS = {family: tiny_model(family, head_dim=32, **changes) for family, changes in SHAPES.items()}


def build(family, dtype):
    config, model = MODELS[family]
    return build_model(config, model.state_dict(), dtype=dtype, device=CPU, max_length=128)


def filled_cache():
    cache = SlotCache()
    cache.resize(SLOTS + 4, 64)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", SHAPES)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_continued_steps_equal_freshly_prepared_steps(family, dtype, data):
    kept, anew = build(family, dtype), build(family, dtype)
    caches = filled_cache(), filled_cache()
    prompts = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]]
    with torch.inference_mode():
        for model, cache in zip((kept, anew), caches, strict=True):
            model.prefill(prompts, cache, range(SLOTS), [0] * SLOTS)
        positions = np.array([len(prompt) for prompt in prompts])
        for _ in range(8):
            change = data.draw(st.sampled_from(["none", "none", "another slot", "longer", "fewer", "weights"]))
            n, length = SLOTS, caches[0].length
            if change == "another slot":  # a request left, and one with another length has its place
                positions[data.draw(st.integers(0, SLOTS - 1))] = data.draw(st.integers(0, 20))
            elif change == "longer" and length < 128:
                length += 32
                slots = data.draw(st.sampled_from([SLOTS, SLOTS + 4]))
                for cache in caches:
                    cache.resize(slots, length)
            elif change == "fewer":
                length = 32
            elif change == "weights":
                for model in (kept, anew):
                    model.table.view("model.layers.0.input_layernorm.weight").mul_(1.5)
                    model.table.num_writes += 1
            length = length if positions.max() < length else caches[0].length
            tokens = torch.from_numpy(positions % 40)
            caches[1].prepared = None
            logits = [
                model.decode(tokens[:n], positions, cache, length)
                for model, cache in zip((kept, anew), caches, strict=True)
            ]
            assert torch.equal(*logits)
            positions += 1
    for pair, other in zip(caches[0].layers, caches[1].layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pair, other, strict=True))


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])
def test_row_norms_equal_rms_norm(size):
    torch.manual_seed(0)
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 8e-3)):
        shape = StepShape(
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            width=40,
            inner=64,
            eps=1e-6,
            scale=1.0,
            dtype=dtype,
            wide=torch.float32,
            device=CPU,
        )
        x, gain = (torch.randn(12, 40) * size).to(dtype), torch.rand(40)
        want = torch.nn.functional.rms_norm(x.float(), (40,), gain, shape.eps)
        got = RowNorms(shape, 12)(x, gain)
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance * 1e-2)


@pytest.mark.parametrize("family", SHAPES)
def test_weights_without_blocks_give_the_same_logits(family, monkeypatch):
    """As on CPUs other than x86, and with weights that are too large for a second copy."""
    models = [build(family, torch.float32)]
    monkeypatch.setattr(decode, "supports_blocks", lambda _weights: False)
    models.append(build(family, torch.float32))
    logits = []
    with torch.inference_mode():
        for model in models:
            cache = filled_cache()
            model.prefill([[5, 6, 7], [8]], cache, [0, 1], [0, 0])
            logits.append(model.decode(torch.tensor([1, 2, 0, 0]), np.array([3, 1, 0, 0]), cache, 64)[:2])
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", SHAPES)
def test_steps_on_another_device_have_consistent_shapes(family, dtype):
    """Shapes, dtypes and strides on other devices, without running on one."""
    model = FusedDenseModel(MODELS[family][0], dtype=dtype, device=torch.device("meta"), max_length=128)
    cache, positions = filled_cache(), np.array([3, 1, 0, 0])
    tokens = torch.zeros(4, dtype=torch.int64, device="meta")
    with torch.inference_mode():
        model.prefill([[5, 6, 7], [8]], cache, [0, 1], [0, 0])
        for length in (64, 64, 32):
            logits = model.decode(tokens, positions, cache, length)
            positions[:2] += 1
    assert (logits.shape, logits.dtype, logits.device.type) == ((4, model.vocab_size), torch.float32, "meta")


def test_resizing_the_cache_drops_its_prepared_steps():
    model, cache = build("qwen2", torch.float32), filled_cache()
    with torch.inference_mode():
        model.prefill([[5, 6]], cache, [0], [0])
        model.decode(torch.zeros(4, dtype=torch.int64), np.array([2, 0, 0, 0]), cache, 32)
        assert cache.prepared is not None
        cache.resize(8, 96)
    assert cache.prepared is None
