from __future__ import annotations

import asyncio
import logging

import pytest
import torch

from fakes_loop import FakeEngineControl, FakeTrainer, World
from furlong.core.weights import WeightSource, checksum
from furlong.errors import SyncError
from furlong.interfaces import WeightSync
from furlong.weight_sync.memory_sync import MemorySync


class Weights(FakeTrainer):
    def __init__(self) -> None:
        super().__init__(World())
        self.tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}

    def weights(self) -> WeightSource:
        return WeightSource(lambda: list(self.tensors.items()))


class Copying(FakeEngineControl):
    """Stores copies in its own precision; `spoil` may change them before they are read back."""

    def __init__(self, dtype=torch.float32, spoil=None) -> None:
        super().__init__(World())
        self.dtype, self.spoil, self.loads = dtype, spoil, 0
        self.stored: dict[str, torch.Tensor] = {}

    async def load_weights(self, source: WeightSource, version: int) -> dict[str, str]:
        self.loads += 1
        self.stored = {name: tensor.to(self.dtype, copy=True) for name, tensor in source.open()}
        if self.spoil is not None:
            self.spoil(self.stored)
        return await self.checksums()

    async def checksums(self) -> dict[str, str]:
        return {name: checksum(tensor) for name, tensor in self.stored.items()}


def sync_of(trainer, engine, **options) -> MemorySync:
    return MemorySync(trainer, engine, as_stored=lambda _, tensor: tensor.to(engine.dtype), **options)


def test_report_counts_what_was_sent_and_has_its_checksums():
    trainer, engine = Weights(), Copying()
    report = asyncio.run(sync_of(trainer, engine).update_weights(3))
    assert (report.version, report.num_tensors, report.num_bytes) == (3, 2, 40)
    assert report.checksums == {name: checksum(t) for name, t in trainer.tensors.items()}
    assert torch.equal(engine.stored["a"], trainer.tensors["a"])


def test_engine_of_lower_precision_is_verified_in_that_precision():
    report = asyncio.run(sync_of(Weights(), Copying(torch.bfloat16)).update_weights(1))
    assert report.num_tensors == 2


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda stored: stored["b"].view(torch.int32).bitwise_xor_(1),
            r"of 2 tensors, 1 differ \(first: b, \(4,\) float32",
        ),
        (lambda stored: stored.pop("a"), r"1 did not arrive \(first: a, "),
        (lambda stored: stored.update(c=torch.zeros(1)), r"1 were never sent \(first: c\)"),
    ],
)
def test_tensor_that_differs_from_the_sent_one_ends_the_run(spoil, message):
    with pytest.raises(SyncError, match=message):
        asyncio.run(sync_of(Weights(), Copying(spoil=spoil)).update_weights(1))


def test_first_weight_update_is_checked_by_a_second_one(caplog):
    engine = Copying()
    sync = sync_of(Weights(), engine, engine_checksums=engine.checksums)
    with caplog.at_level(logging.INFO, "furlong"):
        asyncio.run(sync.update_weights(0))
        asyncio.run(sync.update_weights(1))
    assert engine.loads == 3
    assert [r.getMessage() for r in caplog.records if "check:" in r.getMessage()] == [
        "weight_sync check: updated twice, 2 tensors were the same in the engine"
    ]


def test_tensor_that_changes_in_the_engine_between_two_weight_updates_is_detected():
    engine = Copying()

    async def stored() -> dict[str, str]:
        engine.stored["a"] += 1
        return await engine.checksums()

    with pytest.raises(SyncError, match=r"1 differ \(first: a\)"):
        asyncio.run(sync_of(Weights(), engine, engine_checksums=stored).update_weights(0))


def test_every_tensor_is_logged_if_asked(caplog):
    with caplog.at_level(logging.INFO, "furlong"):
        asyncio.run(sync_of(Weights(), Copying(), verbose=True).update_weights(2))
    lines = [r.getMessage() for r in caplog.records if "weight_sync version 2:" in r.getMessage()]
    assert [line.split()[3] for line in lines] == ["a", "b"]
    assert "(2, 3) torch.float32" in lines[0]


def test_a_run_without_engines_sends_no_weights():
    report = asyncio.run(WeightSync().update_weights(4))
    assert (report.version, report.num_tensors, report.checksums) == (4, 0, {})
