"""RemoteSync and RankSync: who is out of use when, what a rank does when its transport fails, deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import pickle

import pytest
import torch

from fakes_engine import run, tiny_model
from furlong.core.weights import EngineAddress, WeightSource, checksum
from furlong.errors import ENGINE_HANGS, ENGINE_UNANSWERED, EngineError, EngineTimeoutError, SyncError, UnreachableError
from furlong.inference.sglang.server import ServerInfo, SglangServer, connected
from furlong.interfaces import DeviceSharing, SamplingParams
from furlong.loop.train import WeightUpdater
from furlong.weight_sync.remote_sync import LocalSync, RankSync, RemoteSync
from furlong.weight_sync.transports.disk import DiskTransport
from furlong.weight_sync.transports.transport import buckets_of
from furlong.weight_sync.verification import record_for
from served_engine import ServedEngine, Untrained
from transport_context import transport_context

CONFIG, MODEL = tiny_model("qwen2")
STATE = {name: tensor.clone() for name, tensor in MODEL.state_dict().items()}
OTHER = {name: tensor.clone() for name, tensor in tiny_model("qwen2", seed=1)[1].state_dict().items()}


class Worker:
    """A publisher as a trainer process is: its own clients, made of addresses that crossed a process boundary."""

    def __init__(self, state, transport):
        self.rank = RankSync(lambda: WeightSource(state.items), transport, connect=connected)

    async def send_weights(self, addresses, version):
        addresses = pickle.loads(pickle.dumps(list(addresses)))
        sent = await asyncio.to_thread(lambda: asyncio.run(self.rank.send_weights(addresses, version)))
        return pickle.loads(pickle.dumps(sent))

    async def resend(self, addresses, version):
        return await asyncio.to_thread(lambda: asyncio.run(self.rank.resend(addresses, version)))

    async def close_sync(self):
        await self.rank.close_sync()


def disk(folder):
    (folder / "config.json").write_text("{}")
    return DiskTransport(transport_context(4096, folder=folder / "w"))


def test_a_weight_sync_in_another_event_loop_reaches_the_engines_by_address(tmp_path):
    engine = ServedEngine(CONFIG, STATE)
    worker = Worker(OTHER, disk(tmp_path))

    async def body():
        sync = RemoteSync(worker, engine.pool.reachable, name="disk")
        report = await sync.update_weights(3)
        completion = await engine.generate([5, 6], SamplingParams(max_new_tokens=2, temperature=0.0))
        (server,) = engine.servers
        server.stale = "it was started again"
        await engine.embedded.load_weights(WeightSource(STATE.items), 0)
        assert await sync.load_into(server, 3) is None
        again = await engine.generate([5, 6], SamplingParams(max_new_tokens=2, temperature=0.0))
        assert server.is_usable
        with pytest.raises(SyncError, match=r"version 2: the latest is 3"):
            await sync.load_into(server, 2)
        await sync.close()
        return report, completion, again

    report, completion, again = run(engine, body)
    assert report.num_bytes == sum(tensor.nbytes for tensor in OTHER.values())
    assert completion.versions == [3, 3] == again.versions
    assert completion.tokens == again.tokens


class Failing:
    name, every_rank = "failing", False

    def __init__(self, read):
        self.read = read

    async def send(self, source, servers, version, sent):
        if self.read is not None:
            opened = iter(source.open())
            for _ in range(self.read):
                next(opened)
        raise SyncError("the engine refused")


@contextlib.asynccontextmanager
async def nobody(addresses):
    yield []


@pytest.mark.parametrize("read", [None, 0, 2])  # None: it fails before it opens them, as where the disk is full
def test_a_rank_whose_transport_failed_reads_to_the_end_as_the_others_do(read):
    seen = []

    def source():
        def opened():
            for name, tensor in STATE.items():
                seen.append(name)
                yield name, tensor

        return WeightSource(opened)

    async def body():
        with pytest.raises(SyncError, match="refused"):
            await RankSync(source, Failing(read), connect=nobody, world_size=2).send_weights([], 1)

    asyncio.run(body())
    assert seen == list(STATE)


def test_the_ranks_that_do_not_send_read_all_weights():
    seen = []

    def source():
        return WeightSource(lambda: (seen.append(name) or (name, tensor) for name, tensor in STATE.items()))

    async def body():
        return await RankSync(source, Failing(0), connect=nobody, rank=1, world_size=2).send_weights([], 1)

    sent = asyncio.run(body())
    assert seen == list(STATE)
    assert sent.checksums == {}


class Silent:
    async def send_weights(self, addresses, version):
        await asyncio.sleep(60)


class Heard:
    """An observer that keeps the names and fields of events."""

    stop_requested = False

    def __init__(self):
        self.events = []

    def notify(self, event, **fields):
        self.events.append((event, fields))


def test_hanging_weight_update_is_an_error_and_an_event_that_name_transport_and_engines():
    engine, heard = ServedEngine(CONFIG, STATE), Heard()

    async def body():
        sync = RemoteSync(Silent(), engine.pool.reachable, name="nccl broadcast", timeout_s=0.05)
        url = engine.servers[0].url
        with pytest.raises(SyncError, match=rf"version 1 by nccl broadcast did not finish within 0\.05 s.*{url}"):
            await WeightUpdater(sync, heard, DeviceSharing())(1)
        missing = {"version": 1, "seconds": 0.05, "bucket": None, "transport": "nccl broadcast", "missing": []}
        assert heard.events == [("weight_update_started", {"version": 1}), ("weight_update_timeout", missing)]
        with pytest.raises(EngineError, match="weight version 1 was not loaded completely"):
            await engine.generate([5], SamplingParams(max_new_tokens=1))

    run(engine, body)


def test_a_server_is_not_given_weights_that_the_trainer_has_left_behind(tmp_path):
    engine = ServedEngine(CONFIG, STATE)
    trainer = Untrained(dict(OTHER))
    transport = disk(tmp_path)

    async def body():
        sync = LocalSync(trainer, engine.pool.reachable, transport)
        await sync.update_weights(1)
        (server,) = engine.servers
        transport._last = None  # as a transport that keeps nothing
        assert (await sync.load_into(server, 1)) is not None
        transport._last = None
        trainer.state["model.norm.weight"] = trainer.state["model.norm.weight"] + 1
        with pytest.raises(SyncError, match="no longer version 1"):
            await sync.load_into(server, 1)
        assert server.stale
        await sync.close()

    run(engine, body)


def test_buckets_are_read_ahead_and_the_last_is_known():
    sizes = [3, 1, 1, 5]
    source = WeightSource(lambda: ((str(i), torch.zeros(n, dtype=torch.uint8)) for i, n in enumerate(sizes)))

    async def body():
        async with buckets_of(source, 4) as buckets:
            return [(b.index, [name for name, _ in b.tensors], b.is_last) async for b in buckets]

    assert asyncio.run(body()) == [(0, ["0", "1"], False), (1, ["2"], False), (2, ["3"], True)]


def test_verification_during_serving_ends_before_training_and_removes_a_wrong_server(tmp_path, monkeypatch):
    engine = ServedEngine(CONFIG, STATE)
    allowed, wrong = asyncio.Event(), {}
    checksums = SglangServer.checksums

    async def later(self):
        await allowed.wait()
        loaded, digest = await checksums(self)
        return loaded | wrong, digest

    monkeypatch.setattr(SglangServer, "checksums", later)

    async def body():
        sync = LocalSync(Untrained(OTHER), engine.pool.reachable, disk(tmp_path), verify_while_serving=True)
        publish = WeightUpdater(sync, Heard(), DeviceSharing())
        await publish(1)
        completion = await engine.generate([5, 6], SamplingParams(max_new_tokens=2, temperature=0.0))
        assert set(completion.versions) == {1}  # while nothing is proven
        settled = asyncio.create_task(publish.finish_verification())
        await asyncio.sleep(0.05)
        assert not settled.done()
        allowed.set()
        await settled
        wrong["model.norm.weight"] = "0" * 32
        await publish(2)
        with pytest.raises(SyncError, match=r"1 differ \(first: model\.norm\.weight"):
            await publish.finish_verification()
        with pytest.raises(EngineError, match="weight version 2 was not loaded completely"):
            await engine.generate([5], SamplingParams(max_new_tokens=1))
        await publish.finish_verification()  # said once
        await sync.close()

    run(engine, body)


def test_next_weight_update_waits_for_the_previous_verification(tmp_path, monkeypatch):
    engine = ServedEngine(CONFIG, STATE)
    checksums = SglangServer.checksums

    async def wrong(self):
        loaded, digest = await checksums(self)
        return loaded | {"model.norm.weight": "0" * 32}, digest

    monkeypatch.setattr(SglangServer, "checksums", wrong)

    async def body():
        sync = LocalSync(Untrained(OTHER), engine.pool.reachable, disk(tmp_path), verify_while_serving=True)
        await sync.update_weights(1)
        with pytest.raises(SyncError, match=r"version 1: .*model\.norm\.weight"):
            await sync.update_weights(2)
        await sync.close()

    run(engine, body)


class Shown:
    """A server as the driver sees it: what it says it has, and whether it died before it said so."""

    checksum_dtype, device_dtypes = torch.float32, frozenset()

    def __init__(self, url, stored, *, is_dead=False):
        self.url, self.address, self.stored, self.is_dead, self.loading = url, EngineAddress(url), stored, is_dead, []

    def begin_loading(self, version):
        self.loading = [version]

    def finish_loading(self, version):
        self.loading.remove(version)

    async def served_version(self):
        if self.is_dead:
            raise EngineError(f"{self.url} is gone")
        return "1"

    async def checksums(self):
        await asyncio.sleep(0)
        return self.stored, ""


class Quick:
    """Sends the weights to nobody, and says what these servers should have of them."""

    def __init__(self, servers):
        self.servers, self.sent_to = servers, []

    async def send_weights(self, addresses, version):
        self.sent_to.append([address.url for address in addresses])
        sent = record_for(self.servers)
        for _ in sent.recording(WeightSource(STATE.items)).open():
            pass
        return sent


@pytest.mark.parametrize("is_replaced", [True, False])
def test_weight_update_is_repeated_if_an_engine_dies_during_verification(is_replaced):
    right = {name: checksum(tensor) for name, tensor in STATE.items()}
    dead, left = Shown("http://dead", right, is_dead=True), Shown("http://left", right)
    alive = [dead, left]

    async def servers():
        return list(alive)

    async def was_lost(asked, silent):
        assert (asked, silent) == ([dead, left], {})
        if is_replaced:
            alive.remove(dead)
        return is_replaced

    async def body():
        publisher = Quick([dead, left])
        sync = RemoteSync(publisher, servers, name="none", was_lost=was_lost)
        if not is_replaced:
            with pytest.raises(EngineError, match="http://dead is gone"):
                await sync.update_weights(1)
            return
        assert (await sync.update_weights(1)).version == 1
        assert publisher.sent_to == [["http://dead", "http://left"], ["http://left"]]

    asyncio.run(body())


@pytest.mark.parametrize(("kind", "code"), [(EngineTimeoutError, ENGINE_HANGS), (UnreachableError, ENGINE_UNANSWERED)])
def test_server_silent_during_verification_is_dropped_even_if_its_health_check_passes(kind, code):
    right = {name: checksum(tensor) for name, tensor in STATE.items()}
    silent, left = Shown("http://silent", right), Shown("http://left", right)
    alive, asked, why = [silent, left], [], {silent.url: code}

    async def no_answer():
        raise kind("closed", url=silent.url)

    silent.served_version = no_answer

    async def servers():
        return list(alive)

    async def was_lost(servers, urls):
        asked.append((servers, {url: loss.code for url, loss in urls.items()}))
        alive[:] = [server for server in alive if server.url not in urls]
        return any(server.url in urls for server in servers)

    async def body(verify_while_serving):
        alive[:] = [silent, left]
        sync = RemoteSync(
            Quick([silent, left]), servers, name="none", verify_while_serving=verify_while_serving, was_lost=was_lost
        )
        await sync.update_weights(1)
        await sync.finish_verification()
        assert (alive, left.loading) == ([left], [])

    asyncio.run(body(verify_while_serving=False))
    assert asked == [([silent, left], why)]
    asyncio.run(body(verify_while_serving=True))
    assert asked[1:] == [([silent], why), ([left], why)]


@pytest.mark.parametrize("error", [EngineTimeoutError("no answer within 120 s"), UnreachableError("refused")])
def test_a_server_that_does_not_answer_is_not_taken_for_one_without_checksums(error):
    server = Shown("http://sglang", {})
    server.checksum_dtype = None  # as of SGLang, of which a checksum may be all that it says
    server.has_own_head, server.unused_weights = (lambda family: False), (lambda family: "")
    server.info = ServerInfo.read({})

    async def family():
        return "qwen2"

    async def first_rows(name, rows):
        return None

    async def checksums():
        raise error

    server.model_type, server.first_rows, server.checksums = family, first_rows, checksums

    async def servers():
        return [server]

    with pytest.raises(type(error), match=str(error)):
        asyncio.run(RemoteSync(Quick([server]), servers, name="none").update_weights(1))


@pytest.mark.parametrize("is_wrong", [False, True])
def test_remaining_engines_are_verified_if_one_dies_before_verification(is_wrong):
    right = {name: checksum(tensor) for name, tensor in STATE.items()}
    dead = Shown("http://dead", right, is_dead=True)
    left = Shown("http://left", right | ({"model.norm.weight": "0" * 32} if is_wrong else {}))

    async def body():
        async def servers():
            return [dead, left]

        async def was_lost(asked, silent):
            assert not silent
            return any(server.is_dead for server in asked)

        sync = RemoteSync(Quick([dead, left]), servers, name="none", verify_while_serving=True, was_lost=was_lost)
        await sync.update_weights(1)
        if not is_wrong:
            await sync.finish_verification()
            assert left.loading == []
            return
        with pytest.raises(SyncError, match=r"http://left: .*model\.norm\.weight"):
            await sync.finish_verification()
        assert left.loading == [1]

    asyncio.run(body())
