"""Checksums of sent weights do not depend on buckets or memory layout, and match those of an SGLang server."""

from __future__ import annotations

import asyncio
import random
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes_sglang import engine_checksums as held
from furlong.core.weights import WeightSource
from furlong.errors import SyncError
from furlong.sglang_layout.layout_checksums import WHOLE
from furlong.transfer.device_checksum import Checksums
from furlong.weight_sync.transports.transport import buckets_of
from furlong.weight_sync.verification import compare_checksums
from furlong.weight_sync.weight_record import ROWS, SAMPLES, WeightRecord

LAYERS, WIDTH = 3, 10
SHAPES = {"model.embed_tokens.weight": (70, WIDTH), "model.norm.weight": (WIDTH,)} | {
    f"model.layers.{layer}.{name}.weight": shape
    for layer in range(LAYERS)
    for name, shape in {
        "self_attn.q_proj": (8, WIDTH), "self_attn.k_proj": (4, WIDTH), "self_attn.v_proj": (4, WIDTH),
        "self_attn.o_proj": (WIDTH, 8), "self_attn.q_norm": (3,), "mlp.gate_proj": (5, WIDTH),
        "mlp.up_proj": (5, WIDTH), "mlp.down_proj": (WIDTH, 5), "input_layernorm": (WIDTH,),
    }.items()
}  # fmt: skip
DTYPES = st.sampled_from([torch.bfloat16, torch.float32])


def random_state(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def flushing(num_bytes):
    return mock.patch.object(Checksums.__init__, "__kwdefaults__", {"flush_bytes": num_bytes})


def recorded(items, *, flush_bytes=1 << 30, bucket_bytes=1 << 30, is_live=False):
    """Return the record of a source sent in buckets."""

    async def send():
        source = sent.recording(WeightSource(lambda: iter(items), is_live=is_live))
        async with buckets_of(source, bucket_bytes) as buckets:
            return [name async for bucket in buckets for name, _ in bucket.tensors]

    sent = WeightRecord(frozenset(), True, frozenset([torch.bfloat16]))
    with flushing(flush_bytes):
        assert asyncio.run(send()) == [name for name, _ in items]
        assert sent.is_read
    sent.finish()
    return sent


@settings(max_examples=10, deadline=None)
@given(
    st.integers(0, 99), DTYPES, st.randoms(use_true_random=False), st.sampled_from([1, 300, 1 << 30]),
    st.sampled_from([1, 700, 1 << 30]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_a_record_is_the_servers_in_any_order_with_any_buckets_and_at_any_addresses(
    seed, dtype, shuffled: random.Random, flush_bytes, bucket_bytes, is_moved, is_live
):
    state = random_state(seed, dtype)
    right = held(state)
    items = list(state.items())
    shuffled.shuffle(items)
    if is_moved:  # copies at unaligned addresses, views, or with gaps
        items = [
            (name, torch.cat([tensor.new_zeros(1), tensor.view(-1)])[1:].view_as(tensor)) for name, tensor in items
        ]
        items = [(name, tensor.t().contiguous().t() if tensor.dim() == 2 else tensor) for name, tensor in items]
    sent = recorded(items, flush_bytes=flush_bytes, bucket_bytes=bucket_bytes, is_live=is_live)
    assert sent.fused == {WHOLE: {name: [each] for name, each in right.items()}}
    assert sent.checksums.keys() == state.keys()
    for name, rows in sent.rows.items():
        assert torch.equal(rows, state[name][:ROWS])
    assert len(sent.rows) >= SAMPLES
    assert sent.rows.keys() >= {name for name in state if state[name].dim() == 1}  # smaller than SAMPLES


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(sorted(SHAPES)), st.integers(0, 1 << 20), st.sampled_from([1, 400]), st.booleans(), st.booleans()
)
def test_change_at_same_address_is_in_next_record_and_server_without_it_is_detected(
    name, place, flush_bytes, requires_grad, is_live
):
    state = random_state(0, torch.bfloat16)
    if requires_grad:
        state = {key: torch.nn.Parameter(tensor) for key, tensor in state.items()}
    before = recorded(list(state.items()), flush_bytes=flush_bytes, is_live=is_live)
    served = held(state)
    address = state[name].data_ptr()
    with torch.no_grad():
        state[name].view(torch.int16).view(-1)[place % state[name].numel()] ^= 1
    assert state[name].data_ptr() == address
    after = recorded(list(state.items()), flush_bytes=flush_bytes, is_live=is_live)
    right = {key: digests[0] for key, digests in after.fused[WHOLE].items()}
    compare_checksums({key: digests[0] for key, digests in before.fused[WHOLE].items()}, served, version=1)
    compare_checksums(right, held(state), version=2)
    assert sum(before.fused[WHOLE][key] != after.fused[WHOLE][key] for key in right) == 1
    with pytest.raises(SyncError, match="of 20 tensors, 1 differ"):
        compare_checksums(right, served, version=2)


@settings(max_examples=10, deadline=None)
@given(
    st.integers(0, 99), st.sampled_from([(1, 2, 1), (5, 6, 10), (3, 128, 90), (2, 256, 64)]),
    st.randoms(use_true_random=False), st.sampled_from([1, 30_000, 1 << 30]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_experts_that_come_one_by_one_have_the_checksums_of_the_servers_two_tensors_in_any_order_and_precision(
    seed, sizes, shuffled: random.Random, flush_bytes, is_moved, is_live
):
    num_experts, width, hidden = sizes  # some sizes have several tiles per piece, others one tile for all
    state, generator = random_state(seed, torch.bfloat16), torch.Generator().manual_seed(seed)
    for layer in range(2):
        for expert in range(num_experts):
            for name, shape in (
                ("gate_proj", (width, hidden)),
                ("up_proj", (width, hidden)),
                ("down_proj", (hidden, width)),
            ):
                values = torch.randn(shape, generator=generator).to(shuffled.choice([torch.bfloat16, torch.float32]))
                if is_moved:
                    values = torch.cat([values.new_zeros(1), values.view(-1)])[1:].view(shape).t().contiguous().t()
                state[f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"] = values
    items = list(state.items())
    shuffled.shuffle(items)
    sent = recorded(items, flush_bytes=flush_bytes, is_live=is_live)
    assert sent.fused == {WHOLE: {name: [each] for name, each in held(state).items()}}
    assert (sent.wrong, sent.unhashed) == ({}, {})


def test_a_record_of_temporary_tensors_equals_that_of_live_ones():
    state = random_state(3, torch.float32)
    made = ((name, tensor.clone()) for name, tensor in state.items())
    sent = WeightRecord(frozenset(), True, frozenset([torch.bfloat16]))
    with flushing(500):
        for _, tensor in sent.recording(WeightSource(lambda: made)).open():
            del tensor
    sent.finish()
    assert {name: digest for name, [digest] in sent.fused[WHOLE].items()} == held(state)


def test_source_that_was_not_read_completely_is_not_a_complete_record():
    sent = WeightRecord(frozenset(), True, frozenset([torch.bfloat16]))
    opened = iter(sent.recording(WeightSource(random_state(0, torch.bfloat16).items)).open())
    next(opened)
    assert not sent.is_read
    assert sent.num_tensors == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_live_weights_are_recorded_as_sent_and_may_change_before_the_record_is_finished(dtype):
    state = random_state(5, dtype)
    right, rows = held(state), {name: tensor[:ROWS].clone() for name, tensor in state.items()}
    sent = WeightRecord(frozenset(), True, frozenset([torch.bfloat16]))
    for _ in sent.recording(WeightSource(state.items, is_live=True)).open():
        pass
    assert not sent.fused
    for tensor in state.values():  # like the next optimizer step
        tensor.zero_()
    sent.finish()
    sent.finish()
    assert {name: digest for name, [digest] in sent.fused[WHOLE].items()} == right
    assert all(torch.equal(found, rows[name]) for name, found in sent.rows.items())
