"""How memory of CUDA devices is held: what is asked of torch's allocator, and what processes beside it are told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from furlong.core import cuda_segments
from furlong.core.cuda_segments import Segments, whole_in
from furlong.inference.supervisor.host import LocalHost, Place
from furlong.inference.supervisor.server_launch import SglangLaunch

MODEL = Path("model")
CUDA = torch.device("cuda")


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """What the allocator is told."""
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
def test_segments_grow_and_what_else_the_environment_says_is_kept(asked, environment, settings):
    segments = Segments(environment)
    segments.let_grow(torch.device("cpu"))
    assert asked == []
    segments.let_grow(CUDA)
    segments.let_grow(CUDA)
    assert asked == [settings]


@pytest.mark.parametrize("said", ["expandable_segments:False", "backend:cudaMallocAsync", "expandable_segments:True"])
def test_a_user_who_chose_keeps_that(asked, said):
    Segments({"PYTORCH_CUDA_ALLOC_CONF": said}).let_grow(CUDA)
    assert asked == []


def test_memory_for_other_processes_is_whole_also_where_taking_it_fails(asked):
    segments = Segments({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"})
    with pytest.raises(RuntimeError, match="no room"), segments.whole():
        raise RuntimeError("no room")
    assert asked == [
        "max_split_size_mb:64,expandable_segments:False",
        "max_split_size_mb:64,expandable_segments:True",
    ]


def test_settings_with_spaces_are_read_as_torch_reads_them(asked):
    environment = {"PYTORCH_ALLOC_CONF": "max_split_size_mb: 64, expandable_segments: True"}
    with Segments(environment).whole():
        pass
    assert asked == [
        "max_split_size_mb:64,expandable_segments:False",
        "max_split_size_mb:64,expandable_segments:True",
    ]
    assert whole_in(environment) == {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:False"}


def test_nothing_is_asked_where_segments_are_whole_anyhow(asked):
    with Segments({}).whole():
        pass
    assert asked == []


def test_torch_takes_what_it_is_told():
    """Of the allocator itself; without a device it keeps the words."""
    segments = Segments({})
    segments.let_grow(CUDA)
    try:
        assert torch._C._accelerator_getAllocatorSettings() == "expandable_segments:True"
    finally:
        segments._set(cuda_segments.WHOLE)


def test_an_sglang_that_gives_memory_away_takes_whole_segments(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:512")
    place = Place(LocalHost(), first_gpu=0, num_gpus=1)
    own = SglangLaunch(MODEL, num_gpus=1).environment(0, place)
    shared = SglangLaunch(MODEL, num_gpus=1, is_colocated=True).environment(0, place)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in own
    assert shared["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False,max_split_size_mb:512"
    assert whole_in({}) == {}
