"""Settings of the CUDA caching allocator, in this process and in engine processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from furlong.inference.supervisor.launch import SglangLaunch
from furlong.inference.supervisor.process import HostGpus, LocalHost
from furlong.transfer import cuda_allocator as allocator_module
from furlong.transfer.cuda_allocator import CudaAllocator, without_expandable_segments

MODEL = Path("model")
CUDA = torch.device("cuda")


@pytest.fixture
def passed(monkeypatch) -> list[str]:
    """Settings passed to the allocator."""
    words: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", words.append)
    return words


@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, "max_split_size_mb:512,expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, "backend:native,expandable_segments:True"),
    ],
)
def test_expandable_segments_are_added_to_the_settings_of_the_environment(passed, environment, settings):
    allocator = CudaAllocator(environment)
    allocator.expand_segments(torch.device("cpu"))
    assert passed == []
    allocator.expand_segments(CUDA)
    allocator.expand_segments(CUDA)
    assert passed == [settings]


@pytest.mark.parametrize(
    "setting", ["expandable_segments:False", "backend:cudaMallocAsync", "expandable_segments:True"]
)
def test_settings_of_the_user_take_precedence(passed, setting):
    CudaAllocator({"PYTORCH_CUDA_ALLOC_CONF": setting}).expand_segments(CUDA)
    assert passed == []


def test_fixed_segments_are_reset_after_an_error(passed):
    allocator = CudaAllocator({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"})
    with pytest.raises(RuntimeError, match="no room"), allocator.fixed_segments():
        raise RuntimeError("no room")
    assert passed == [
        "max_split_size_mb:64,expandable_segments:False",
        "max_split_size_mb:64,expandable_segments:True",
    ]


def test_spaces_in_settings_are_ignored(passed):
    environment = {"PYTORCH_ALLOC_CONF": "max_split_size_mb: 64, expandable_segments: True"}
    with CudaAllocator(environment).fixed_segments():
        pass
    assert passed == [
        "max_split_size_mb:64,expandable_segments:False",
        "max_split_size_mb:64,expandable_segments:True",
    ]
    assert without_expandable_segments(environment) == {
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:False"
    }


def test_fixed_segments_need_no_change_without_expandable_ones(passed):
    with CudaAllocator({}).fixed_segments():
        pass
    assert passed == []


def test_torch_accepts_the_settings():
    """The allocator itself; without a device it only stores the settings."""
    allocator = CudaAllocator({})
    allocator.expand_segments(CUDA)
    try:
        assert torch._C._accelerator_getAllocatorSettings() == "expandable_segments:True"
    finally:
        allocator._set(allocator_module.FIXED)


def test_colocated_sglang_runs_without_expandable_segments(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:512")
    place = HostGpus(LocalHost(), first_gpu=0, num_gpus=1)
    own = SglangLaunch(MODEL, num_gpus=1).environment(place)
    shared = SglangLaunch(MODEL, num_gpus=1, is_colocated=True).environment(place)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in own
    assert shared["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False,max_split_size_mb:512"
    assert without_expandable_segments({}) == {}
