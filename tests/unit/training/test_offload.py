"""Host memory of offloaded tensors: placement, reservation, and errors when there is too little."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.errors import TrainerError
from furlong.training import offload
from furlong.training.offload import HostMemory, HostOffload, packed

CPU = torch.device("cpu")
KIB = 1024
Sizes = st.lists(st.sampled_from([1, 400, 512, 513, 3 * KIB, 40 * KIB, 70 * KIB]), max_size=40)


@settings(deadline=None)
@given(Sizes, Sizes)
def test_nothing_overlaps_and_the_same_sizes_get_the_same_places_again(sizes, others):
    places, blocks = packed(sizes, [])
    taken: dict[int, list[tuple[int, int]]] = {}
    for size, (block, start) in zip(sizes, places, strict=True):
        taken.setdefault(block, []).append((start, start + size))
        assert start % offload.ALIGN_BYTES == 0
        assert start + size <= blocks[block]
    for spans in taken.values():
        assert all(end <= start for (_, end), (start, _) in zip(sorted(spans), sorted(spans)[1:], strict=False))
    assert packed(sizes, blocks) == (places, blocks)
    more = packed([*sizes, *others], blocks)[1]
    assert more[: len(blocks)] == blocks


def test_blocks_have_a_size_that_threads_can_share_and_waste_little(monkeypatch):
    monkeypatch.setattr(offload, "BLOCK_BYTES", 100 * KIB)
    sizes = [70 * KIB, 130 * KIB, *([9 * KIB] * 40)]
    _, blocks = packed(sizes, [])
    assert max(blocks) == 130 * KIB
    assert len(blocks) == 6
    assert sum(blocks) < 1.05 * sum(sizes)


def test_reserved_memory_is_allocated_at_once_and_used_later():
    memory = HostMemory(CPU)
    first = memory.place([100, 5000], reserve=[100, 5000])
    whole = memory.num_bytes
    both = memory.place([100, 5000, 100, 5000])
    assert [each.numel() for each in (*first, *both)] == [100, 5000] * 3
    assert memory.num_bytes == whole
    assert len({each.data_ptr() for each in both}) == 4


def test_too_little_host_memory_is_an_error_with_the_bytes_and_allocates_nothing():
    memory = HostMemory(CPU, free_bytes=lambda: 3 << 30)
    with pytest.raises(TrainerError, match=r"5\.0 GiB.* 0\.0 GiB.* 3\.0 GiB.*--no-offload-train"):
        memory.place([1 << 30], reserve=[4 << 30])
    assert memory.num_bytes == 0


def test_offloaded_tensors_are_restored_in_place_and_keep_sharing_storage():
    tensors = [torch.randn(7, 5), torch.randn(3).double(), torch.arange(9)]
    last, gone = torch.randn(11), torch.ones(4)
    view, before = tensors[0][2:4], [each.clone() for each in (*tensors, last)]
    offload = HostOffload()
    for _ in range(2):
        moved = offload.offload([*tensors, view], deferred=[last], discarded=[gone, tensors[1]], reserve=[64])
        assert moved.num_bytes == sum(each.nbytes for each in before)
        assert not any(each.untyped_storage().size() for each in (*tensors, last, gone, view))
        offload.reload()
        offload.wait_for_deferred()
        assert all(torch.equal(a, b) for a, b in zip(before, (*tensors, last), strict=True))
        assert torch.equal(view, before[0][2:4])
        assert not gone.any()
        gone += 1


def test_blocks_are_registered_with_cuda_once_and_unregistered_with_their_owner(monkeypatch):
    known = {}

    class Cuda:
        def cudaHostRegister(self, address, size, flags):  # noqa: N802  CUDA's names
            assert known.setdefault(address, size) == size + flags
            return 0

        def cudaHostUnregister(self, address):  # noqa: N802
            del known[address]

    monkeypatch.setattr(offload, "_cudart", Cuda)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(offload, "BLOCK_BYTES", 1 << 20)
    memory = HostMemory(torch.device("cuda"), free_bytes=lambda: None)
    found = memory.place([3 << 20, 1 << 20, 1 << 20, 5])
    assert sum(known.values()) == memory.num_bytes
    assert len(known) == 4
    assert not any(each.any() for each in found)
    memory.place([3 << 20, 1 << 20])
    assert len(known) == 4
    del memory
    assert known == {}
