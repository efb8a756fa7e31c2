"""Conversions of many files: memory in use at one time, and what a kill at any moment leaves."""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from furlong.cli import main
from furlong.errors import ConfigError
from furlong.files import atomic as files
from furlong.models.hf_model import load_model
from furlong.quantization.fp8 import Fp8Blocks
from furlong.quantization.int4 import Int4Groups
from furlong.tools import quantize_folder as conversion
from runs import FORKED, write_model
from stored_models import write_stored_model

NUM_SHARDS, PER_SHARD, SHAPE = 20, 8, (128, 128)
SHARD_BYTES = PER_SHARD * SHAPE[0] * SHAPE[1] * 2


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of all storages that were made while it is active, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live: set[int] = set()
        self.num_bytes = self.peak = 0

    def count(self, address: int, num_bytes: int) -> None:
        self.live ^= {address}
        self.num_bytes += num_bytes
        self.peak = max(self.peak, self.num_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                if storage.data_ptr() not in self.live:
                    self.count(storage.data_ptr(), storage.nbytes())
                    weakref.finalize(storage, self.count, storage.data_ptr(), -storage.nbytes())
        return result


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A folder of files with eight matrices each."""
    folder = tmp_path / "model"
    names = [
        [f"model.layers.{file}.mlp.experts.{n}.up_proj.weight" for n in range(PER_SHARD)] for file in range(NUM_SHARDS)
    ]
    write_stored_model(folder, [dict.fromkeys(some, ("BF16", SHAPE)) for some in names])
    weight = torch.randn(SHAPE, dtype=torch.bfloat16)
    for path, some in zip(sorted(folder.glob("*.safetensors")), names, strict=True):
        save_file({name: weight + n for n, name in enumerate(some)}, path, {"format": "pt"})
    return folder


@pytest.mark.parametrize("form", [Int4Groups(32), Fp8Blocks()], ids=["int4", "fp8"])
def test_less_than_two_files_are_in_memory(shards, tmp_path, form):
    for name in ("quantized", "whole"):
        (tmp_path / name).mkdir()
    with LiveTensors() as used:
        done = conversion.quantize_folder(shards, tmp_path / "quantized", form)
    assert done.source_bytes == NUM_SHARDS * SHARD_BYTES
    assert SHARD_BYTES / 4 < used.peak < 2 * SHARD_BYTES
    with LiveTensors() as used:
        conversion.dequantize_folder(tmp_path / "quantized", tmp_path / "whole")
    assert SHARD_BYTES < used.peak < 2 * SHARD_BYTES


def killed_at(moment: str, calls: int, words: list[str]) -> None:
    """Run a command and kill this process at the nth call of a function of the conversion."""
    left = calls

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return run

    owner, _, name = moment.rpartition(".")
    target: Any = files if owner else conversion
    setattr(target, name, wrapped(getattr(target, name)))
    main(words)


MOMENTS = [("save_file", 3), ("_verify", 1), ("files.sync_files", 1)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("small") / "model")
    model = load_model(folder)
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize(("moment", "calls"), MOMENTS, ids=[f"{moment}-{calls}" for moment, calls in MOMENTS])
@pytest.mark.nightly
def test_a_killed_conversion_leaves_nothing_that_loads_and_can_be_repeated(small, tmp_path, moment, calls):
    target = tmp_path / "target"
    words = ["convert", "hf-to-int4", str(small), str(target), "--group-size", "16"]
    child = FORKED.Process(target=killed_at, args=(moment, calls, words))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert not target.exists()
    # At the last moments, the folder is complete and verified, but does not have its name.
    is_complete = moment == "files.sync_files"
    for left in {path.parent for path in tmp_path.rglob("*.safetensors") if not is_complete}:
        with pytest.raises(ConfigError):
            load_model(left)
    assert main(words) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    load_model(target)
