"""Who has the device when: what is released before what is resumed, and what a step records of it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from furlong.core.device_memory import DeviceMemory, MemoryTransfer
from furlong.errors import EngineError, SyncError
from furlong.interfaces import DeviceSharing
from furlong.loop.device_sharing import Colocated


class Device:
    """Trainer and engine on one device; both parts may never be on it whole.

    `kept`: whether a trainer that is there has used memory, which nobody else gets until it was given back.
    """

    def __init__(self):
        self.log, self.tags, self.awake, self.kept = [], {"weights", "kv_cache", "cuda_graph"}, True, True

    async def offload(self):
        assert self.awake
        self.awake = self.kept = False
        self.log.append("sleep")
        return MemoryTransfer(3 << 30, 0.1)

    async def onload(self):
        assert not self.awake
        assert "kv_cache" not in self.tags
        self.awake = self.kept = True
        self.log.append("wake")
        return MemoryTransfer(3 << 30, 0.1)

    async def empty_cache(self):
        assert self.awake
        self.kept = False
        self.log.append("trim")

    async def release_memory(self, tags):
        assert set(tags) <= self.tags  # SGLang ends at a tag that it has not
        self.tags -= set(tags)
        self.log.append("release " + " ".join(tags))

    async def resume_memory(self, tags):
        assert not set(tags) & self.tags
        assert not ("kv_cache" in tags and self.awake)
        assert not self.kept
        self.tags |= set(tags)
        self.log.append("resume " + " ".join(tags))

    async def device_memory(self):
        return DeviceMemory(used=30, total=100, reserved=10, peak=60)

    is_awaited = False  # by a weight update that found no engine
    num_running = 0

    @contextlib.contextmanager
    def hold_requests(self):
        if self.num_running:
            raise SyncError("requests are with other engines")
        self.log.append("hold")
        try:
            yield
        finally:
            self.log.append("let go")


class Fresh(Device):
    """An engine that is started again; `on` is what it starts on."""

    def __init__(self, on):
        super().__init__()
        assert not on.awake  # it sizes its cache by what is free
        assert not on.kept
        self.log, self.awake = on.log, False
        self.log.append("engine starts")


def test_a_step_makes_room_before_it_takes_room():
    device = Device()

    async def body():
        shared = Colocated(device, device)
        async with shared.updating_weights():
            assert device.tags == {"weights"}
        for _ in range(2):
            async with shared.generating(), shared.generating():
                assert not device.awake
            async with shared.training():
                assert not device.tags
                assert device.awake
            async with shared.updating_weights():
                assert device.tags == {"weights"}
            async with shared.updating_weights():  # a save
                assert device.awake
        return shared.metrics(), shared.metrics()

    metrics, again = asyncio.run(body())
    step = [
        "sleep",
        "resume cuda_graph kv_cache",
        "release cuda_graph kv_cache weights",
        "wake",
        "trim",
        "resume weights",
    ]
    assert device.log == ["release cuda_graph kv_cache", *step, *step]
    assert set(metrics) == {
        "perf/sleep_time",
        "perf/wake_up_time",
        "perf/offload_rollout_time",
        "perf/onload_rollout_time",
        "memory/engine_kept_frac",
        "memory/trainer_kept_frac",
        "memory/trainer_peak_frac",
        "memory/trainer_moved_gib",
    }
    assert metrics["memory/trainer_moved_gib"].value == 3.0
    assert metrics["memory/engine_kept_frac"].value == 0.2
    assert metrics["memory/trainer_kept_frac"].value == 0.1
    assert metrics["memory/trainer_peak_frac"].value == 0.6
    assert again == {}


def test_engines_start_on_a_device_that_the_trainer_has_left():
    device = Device()
    device.tags = set()  # no engine yet

    async def body():
        shared = Colocated(device, device)
        await shared.make_room()
        assert not device.awake
        device.tags = {"weights", "kv_cache", "cuda_graph"}  # an engine starts
        device.log.append("engine starts")
        async with shared.updating_weights():
            device.log.append("update weights")
        async with shared.generating():
            device.log.append("generate")

    asyncio.run(body())
    assert device.log == [
        "sleep",
        "engine starts",
        "release cuda_graph kv_cache",
        "wake",
        "update weights",
        "sleep",
        "resume cuda_graph kv_cache",
        "generate",
    ]


def test_an_engine_that_is_lost_while_the_trainer_trains_starts_when_it_sleeps_and_releases_what_others_have():
    device = Device()

    async def start(shared):
        async with shared.starting() as settle:
            fresh = Fresh(device)
            await settle(fresh)
            return fresh, device.awake

    async def body():
        shared = Colocated(device, device)
        async with shared.updating_weights():
            pass
        async with shared.training():
            starting = asyncio.create_task(start(shared))
            await asyncio.sleep(0.005)
            assert not starting.done()
        fresh, was_awake = await starting
        assert (fresh.tags, was_awake) == (set(), False)
        async with shared.updating_weights():
            assert device.awake
        async with shared.generating():  # where the trainer sleeps already, and others generate
            fresh, _ = await start(shared)
            assert fresh.tags == {"weights", "kv_cache", "cuda_graph"}

    asyncio.run(body())


def test_weight_update_without_engines_continues_with_one_started_while_the_trainer_slept():
    device = Device()

    async def body():
        shared = Colocated(device, device)
        async with shared.updating_weights():
            device.is_awaited, device.log = True, []
            async with shared.starting() as settle:
                fresh = Fresh(device)
                assert fresh.tags > {"weights"}
                await settle(fresh)
                assert fresh.tags == {"weights"}
                assert device.awake  # before the engine is used

    asyncio.run(body())
    assert device.log == ["sleep", "engine starts", "release cuda_graph kv_cache", "wake"]


def test_an_engine_without_weights_gets_them_in_the_middle_of_generation_if_no_other_generates():
    device = Device()

    async def body():
        shared = Colocated(device, device)
        with pytest.raises(SyncError, match="the device is in use"):
            async with shared.reloading():
                raise AssertionError
        async with shared.updating_weights():
            pass
        async with shared.generating():
            device.num_running, device.log = 1, []
            with pytest.raises(SyncError, match="requests are with other engines"):
                async with shared.reloading():
                    raise AssertionError
            device.num_running = 0
            async with shared.reloading():
                assert (device.awake, device.tags) == (True, {"weights"})
            assert (device.awake, len(device.tags)) == (False, 3)

    asyncio.run(body())
    assert device.log == [
        "hold",
        "release cuda_graph kv_cache",
        "wake",
        "sleep",
        "resume cuda_graph kv_cache",
        "let go",
    ]


class Interrupted(Device):
    """A device at one of whose changes the task that asked for it is cancelled."""

    def __init__(self, change):
        super().__init__()
        self.change, self.task = change, None

    async def _at(self, change):
        if change == self.change and self.task is not None:
            task, self.task = self.task, None
            task.cancel()
            await asyncio.sleep(0.001)

    async def offload(self):
        await self._at("sleep")
        return await super().offload()

    async def onload(self):
        await self._at("wake")
        return await super().onload()

    async def release_memory(self, tags):
        await self._at("release")
        await super().release_memory(tags)

    async def resume_memory(self, tags):
        await self._at("resume")
        await super().resume_memory(tags)


@pytest.mark.parametrize("change", ["release", "wake", "sleep", "resume"])
def test_engine_that_dies_before_receiving_weights_does_not_change_memory_of_the_others(change):
    device = Interrupted(change)

    async def body():
        shared = Colocated(device, device)
        async with shared.updating_weights():
            pass

        async def mend():
            async with shared.reloading():
                pass

        async with shared.generating():
            device.task = reloading = asyncio.create_task(mend())
            with pytest.raises(asyncio.CancelledError):
                await reloading
            assert (device.awake, len(device.tags), device.log[-1]) == (False, 3, "let go")

    asyncio.run(body())


def test_engines_that_start_first_leave_the_device_before_the_trainer_is_built():
    device = Device()

    async def body():
        shared = Colocated(device, device)
        await shared.release_engines()
        assert not device.tags
        device.log.append("trainer is built")
        async with shared.updating_weights():
            device.log.append("update weights")
        async with shared.generating():
            assert (device.awake, len(device.tags)) == (False, 3)

    asyncio.run(body())
    assert device.log[:5] == [
        "release cuda_graph kv_cache weights", "trainer is built", "trim", "resume weights", "update weights"
    ]  # fmt: skip


def test_a_trainer_that_stays_makes_room_of_what_no_tensor_has():
    device = Device()
    asyncio.run(Colocated(device, device, offload_train=False).make_room())
    assert device.log == ["trim"]


def test_engine_starts_next_to_a_resident_trainer_after_it_released_its_cache():
    device = Device()

    async def body():
        shared = Colocated(device, device, offload_train=False)
        async with shared.training():
            pass
        device.kept = True
        async with shared.starting():
            assert device.awake
            assert not device.kept

    asyncio.run(body())


def test_released_weights_are_not_generated_with():
    async def body():
        device = Device()
        shared = Colocated(device, device)
        async with shared.updating_weights():
            pass
        async with shared.training():
            pass
        with pytest.raises(EngineError, match="weights were released"):
            async with shared.generating():
                raise AssertionError
        async with shared.updating_weights():
            pass
        async with shared.generating():
            pass

    asyncio.run(body())


def test_training_waits_for_all_generation():
    order = []

    async def body():
        device = Device()
        shared = Colocated(device, device)
        async with shared.updating_weights():
            pass

        async def generate(name, ends):
            async with shared.generating():
                order.append(f"{name} begins")
                await ends.wait()
                order.append(f"{name} ends")

        async def train():
            async with shared.training():
                order.append("train")

        one, two = asyncio.Event(), asyncio.Event()
        tasks = [asyncio.create_task(generate("a", one)), asyncio.create_task(generate("b", two))]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(train()))
        one.set()
        await asyncio.sleep(0.005)
        two.set()
        await asyncio.gather(*tasks)

    asyncio.run(body())
    assert order == ["a begins", "b begins", "a ends", "b ends", "train"]


@pytest.mark.parametrize(("train", "rollout"), [(False, True), (True, False)])
def test_a_part_that_is_not_offloaded_stays(train, rollout):
    class Roomy(Device):
        async def onload(self):
            self.awake = self.kept = True
            self.log.append("wake")
            return MemoryTransfer(0, 0.0)

        async def resume_memory(self, tags):
            assert not self.kept
            self.tags |= set(tags)
            self.log.append("resume")

    device = Roomy()

    async def body():
        shared = Colocated(device, device, offload_train=train, offload_rollout=rollout)
        async with shared.updating_weights():
            pass
        async with shared.generating():
            assert device.awake != train
        async with shared.training():
            assert bool(device.tags) != rollout

    asyncio.run(body())


def test_without_sharing_everything_may_run_at_once():
    async def body():
        shared = DeviceSharing()
        async with shared.training(), shared.updating_weights(), shared.generating():
            return shared.metrics()

    assert asyncio.run(body()) == {}
