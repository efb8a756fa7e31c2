from __future__ import annotations

import asyncio
import threading

import pytest

from fakes_trainer import FakeBackend
from furlong.algo.policy_loss import PolicyLoss
from furlong.config.sections import AlgoFlags
from furlong.core.device_memory import MemoryTransfer
from furlong.core.weights import checksum
from furlong.errors import CheckpointError, TrainerError
from furlong.training.local_trainer import LocalTrainer
from furlong.training.packing import Packing
from furlong.training.round_observer import RoundObserver
from furlong.training.worker import RoleLoss, RoundHooks, RoundWorker
from models_zoo import random_batch

BATCH = random_batch(prompts=[5, 3], responses=[[6, 2], [4, 7]])


def build(**options):
    flags = AlgoFlags()
    packing = Packing(micro_batch_size=4)
    return LocalTrainer(
        RoundWorker(
            FakeBackend(), algo=flags, losses=[RoleLoss("actor", PolicyLoss(flags))], packing=packing, **options
        )
    )


def sums(trainer):
    return {name: checksum(tensor) for name, tensor in trainer.weights().open()}


class SleepingBackend(FakeBackend):
    """A FakeBackend that can leave its device, which moves nothing."""

    def offload(self):
        return MemoryTransfer(0, 0.0)

    onload = offload


def test_every_call_to_an_offloaded_trainer_is_an_error(tmp_path):
    async def scenario():
        flags = AlgoFlags()
        trainer = LocalTrainer(
            RoundWorker(SleepingBackend(), algo=flags, losses=[RoleLoss("actor", PolicyLoss(flags))])
        )
        await trainer.offload()
        for asked in (trainer.train(BATCH), trainer.save(tmp_path), trainer.save_hf(tmp_path)):
            with pytest.raises(TrainerError, match="the trainer is asleep"):
                await asked
        with pytest.raises(TrainerError, match="the trainer is asleep"):
            sums(trainer)
        await trainer.onload()
        assert (await trainer.train(BATCH))["train/grad_norm"].value > 0
        await trainer.close()

    asyncio.run(scenario())


def test_a_round_does_not_block_the_event_loop():
    async def scenario():
        released = threading.Event()
        threads = []

        def wait(batch):
            threads.append(threading.current_thread().name)
            assert released.wait(timeout=30)

        trainer = build(hooks=RoundHooks(dump=wait))
        task = asyncio.create_task(trainer.train(BATCH))
        while not threads:
            await asyncio.sleep(0)
        assert not task.done()
        released.set()
        metrics = await task
        await trainer.close()
        assert metrics["train/grad_norm"].value > 0
        assert threads[0].startswith("furlong-trainer")

    asyncio.run(scenario())


def test_rounds_do_not_overlap():
    async def scenario():
        stages = []
        trainer = build(observer=RoundObserver(record=lambda step, row: stages.append(row["stage"])))
        await asyncio.gather(trainer.train(BATCH), trainer.train(BATCH))
        await trainer.close()
        assert [stage for stage in stages if stage in ("data", "parameters")] == ["data", "parameters"] * 2

    asyncio.run(scenario())


def test_loading_a_folder_without_a_checkpoint_is_an_error(tmp_path):
    async def scenario():
        trainer = build()
        with pytest.raises(CheckpointError, match=r"worker\.json"):
            await trainer.load(tmp_path)
        await trainer.close()

    asyncio.run(scenario())
