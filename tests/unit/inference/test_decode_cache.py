"""The slot cache of the engine's models, and attention over it."""

from __future__ import annotations

import pytest
import torch

from furlong.inference.embedded.decode_steps import SlotCache, attend_slots, decode_mask

SLOTS, KV_HEADS, WIDTH = 4, 2, 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [1, 2, 4, 7])
def test_attention_is_independent_of_cache_length_and_number_of_slots(group, dtype):
    torch.manual_seed(0)
    q = torch.randn(SLOTS * KV_HEADS, group, WIDTH).to(dtype)
    keys, values = (torch.randn(SLOTS, KV_HEADS, 512, WIDTH).to(dtype) for _ in range(2))
    positions = torch.tensor([3, 40, 90, 250])
    results = []
    for length in (256, 384, 512):
        mask = decode_mask(positions, length, dtype, KV_HEADS)
        cache = [t[:, :, :length].contiguous() for t in (keys, values)]
        results.append(attend_slots(q, *cache, mask, WIDTH**-0.5))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    doubled = [torch.cat([t, t]) for t in (q, *cache, mask)]
    assert torch.equal(attend_slots(*doubled, WIDTH**-0.5)[: len(q)], results[0])


@pytest.mark.parametrize("group", [1, 2, 3])
def test_attention_respects_the_mask(group):
    torch.manual_seed(0)
    q, keys, values = (torch.randn(SLOTS, KV_HEADS, n, WIDTH) for n in (group, 64, 64))
    for slot, position in enumerate(positions := [0, 5, 31, 60]):
        seen = slice(max(position - 20, 0), position + 1)
        want = torch.softmax(q[slot] @ keys[slot, :, seen].mT * 0.5, -1) @ values[slot, :, seen]
        mask = decode_mask(torch.tensor(positions), 64, torch.float32, KV_HEADS, window=21)
        got = attend_slots(q.flatten(0, 1), keys, values, mask, 0.5).unflatten(0, (SLOTS, KV_HEADS))
        torch.testing.assert_close(got[slot], want)


def test_a_resized_cache_keeps_what_fits_and_zeroes_the_rest():
    cache = SlotCache()
    cache.num_slots, cache.length = 4, 32
    for index in range(2):
        keys, values = cache.layer(index, torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 16))
        keys.fill_(index + 1.0)
        values.fill_(index + 3.0)
    for slots, length in ((4, 64), (8, 96), (4, 32), (2, 64), (16, 128), (4, 32), (64, 256)):
        before = [(keys.clone(), values.clone()) for keys, values in cache.layers]
        cache.resize(slots, length)
        for old, new in zip(before, cache.layers, strict=True):
            for was, is_now in zip(old, new, strict=True):
                want = torch.zeros(slots, 2, length, was.shape[3])
                kept = (slice(min(slots, len(was))), slice(None), slice(min(length, was.shape[2])))
                want[kept] = was[kept]
                assert is_now.is_contiguous()
                assert torch.equal(is_now, want)
                is_now.clamp_(min=0.5)  # so that memory that is used again is not zero


def test_a_cache_of_captured_steps_is_resized_rarely_and_keeps_its_contents():
    cache = SlotCache()
    cache.resize(4, 32)
    cache.allocate_block(2, 2, 8, torch.zeros(1))
    cache.layers[1][0][3, :, :32] = 7.0
    cache.grow(4, 40, final_length=900, max_tokens=4 * 1000)
    assert (cache.num_slots, cache.length) == (4, 900)
    cache.grow(4, 800, final_length=900, max_tokens=4 * 1000)
    assert cache.length == 900
    assert bool((cache.layers[1][0][3, :, :32] == 7.0).all())
    assert not cache.layers[1][0][3, :, 32:].any()
    cache.grow(8, 300, final_length=900, max_tokens=4 * 1000)
    assert (cache.num_slots, cache.length) == (8, 500)
    cache.copy(3, slice(5, 7), 32)
    assert bool((cache.layers[1][0][5:7, :, :32] == 7.0).all())
    content = cache.export(5, 32)
    cache.insert(content, slice(0, 1))
    assert bool((cache.layers[1][0][0, :, :32] == 7.0).all())
    assert cache.num_bytes() == 2 * 2 * 8 * 2 * 500 * 8 * 4
