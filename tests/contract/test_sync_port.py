"""Contract of every weight transport, with `furlong serve` in a separate process.

Weights arrive bit for bit. An engine rejects tensors that differ from those of the trainer, and then does not serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import pytest
import torch

from fakes_engine import run
from furlong.core.transports import transport_spec
from furlong.core.weights import WeightSource, checksum
from furlong.diagnosis.monitors import MONITORS
from furlong.diagnosis.monitors.monitor import MonitorSuite, RunFacts
from furlong.errors import EngineError, SyncError
from furlong.inference.embedded import EmbeddedEngine
from furlong.inference.embedded.model_loading import source_from_folder
from furlong.inference.server.http_server import running_server
from furlong.inference.sglang.engine import HttpEngine
from furlong.inference.sglang.server import ServerInfo, SglangServer
from furlong.interfaces import SamplingParams
from furlong.models import hf_model as hf
from furlong.weight_sync.remote_sync import LocalSync
from furlong.weight_sync.transports.broadcast import BroadcastTransport
from furlong.weight_sync.transports.disk import DeltaTransport, DiskTransport
from furlong.weight_sync.transports.ipc import IpcTransport
from models_zoo import family_config
from runs import write_model
from served_engine import ScriptedServer, Untrained, connect, serve_process
from transport_context import transport_context

WAYS = ["disk", "delta xor", "delta overwrite", "gloo broadcast", "ipc"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def url(folder):
    with serve_process(folder) as (_, url):
        yield url


@pytest.fixture
def state(folder):
    return {name: tensor.clone() for name, tensor in source_from_folder(folder).open()}


def transport_of(way, path, folder, timeout_s=20):
    if way == "ipc":
        return IpcTransport(transport_context(8192, timeout=timeout_s))
    if way == "gloo broadcast":
        return BroadcastTransport(transport_context(8192, timeout=timeout_s))
    versions = {"folder": path / "w", "model_dir": folder, "timeout": timeout_s}
    if way == "disk":
        return DiskTransport(transport_context(8192, **versions))
    return DeltaTransport(transport_context(8192, **versions, delta_encoding=way.split()[1]))


class Spoiling:
    """A transport that sends tensors other than the recorded ones, from the second weight update on."""

    def __init__(self, inner, spoil):
        self.inner, self.spoil, self.count = inner, spoil, 0
        self.name, self.every_rank = inner.name, inner.every_rank

    async def send(self, source, servers, version, sent):
        self.count += 1
        spoiled = source if self.count == 1 else WeightSource(lambda: self.spoil(source.open()))
        await self.inner.send(spoiled, servers, version, sent)

    async def resend(self, servers, version):
        return await self.inner.resend(servers, version)

    async def close(self, connect):
        await self.inner.close(connect)


@contextlib.asynccontextmanager
async def syncing(url, trainer, transport):
    client = await asyncio.to_thread(connect, url)  # the server may run in this thread
    engine = HttpEngine([client])
    sync = LocalSync(trainer, engine.pool.reachable, transport)
    try:
        yield sync, engine, client
    finally:
        await sync.close()
        await engine.close()


def changed(state, seed):
    generator = torch.Generator().manual_seed(seed)
    for tensor in state.values():
        tensor += 1e-3 * torch.randn(tensor.shape, generator=generator) * (torch.rand(tensor.shape) < 0.1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.nightly
def test_every_weight_update_arrives_bit_for_bit(way, url, folder, state, tmp_path):
    async def body():
        trainer = Untrained(state)
        async with syncing(url, trainer, transport_of(way, tmp_path, folder)) as (sync, engine, client):
            reports = []
            for version in (11, 12, 13):
                changed(state, version)
                reports.append(await sync.update_weights(version))
                loaded, _ = await client.checksums()
                assert loaded == {name: checksum(tensor) for name, tensor in state.items()}
                assert await client.served_version() == str(version)
            completion = await engine.generate([5, 6], SamplingParams(max_new_tokens=2))
            assert completion.versions == [13, 13]
            return reports

    reports = asyncio.run(body())
    assert all(report.num_bytes == sum(t.nbytes for t in state.values()) for report in reports)
    assert (reports[-1].wire_bytes is not None) == way.startswith("delta")


@pytest.mark.parametrize("way", ["ipc", "gloo broadcast"])
def test_weights_travel_to_a_server_with_an_ipv6_address(way, folder, state, tmp_path):
    with serve_process(folder, "--host", "::1") as (_, url):
        assert url.startswith("http://[::1]:")

        async def body():
            async with syncing(url, Untrained(state), transport_of(way, tmp_path, folder)) as (sync, engine, client):
                await sync.update_weights(1)
                assert (await client.checksums())[0] == {name: checksum(tensor) for name, tensor in state.items()}
                assert (await engine.generate([5, 6], SamplingParams(max_new_tokens=2))).versions == [1, 1]

        asyncio.run(body())


@pytest.mark.nightly
def test_engines_that_wait_for_one_that_hangs_are_not_blamed_and_get_the_next_weight_update(
    folder, state, tmp_path, monkeypatch
):
    """Rank 2 of a broadcast to three engines passes tensors on to rank 3."""
    monkeypatch.setattr("furlong.inference.sglang.server.LEAVE_S", 1.0)

    async def body(served):
        clients = [await asyncio.to_thread(connect, url) for _, url in served]
        in_use = list(clients)

        async def servers():
            return in_use

        sync = LocalSync(Untrained(state), servers, transport_of("gloo broadcast", tmp_path, folder, timeout_s=4))
        try:
            await sync.update_weights(1)
            for process, hung in zip((process for process, _ in served), clients, strict=True):
                os.kill(process.pid, signal.SIGSTOP)
                with pytest.raises(SyncError) as caught:
                    await sync.update_weights(2)
                assert caught.value.late is not None
                assert caught.value.late["missing"] == [hung.url]
                in_use.remove(hung)
                if len(in_use) < 2:
                    break
            await sync.update_weights(2)
            for client in in_use:
                assert await client.served_version() == "2"
                assert (await client.checksums())[0] == {name: checksum(tensor) for name, tensor in state.items()}
        finally:
            for process, _ in served:
                os.kill(process.pid, signal.SIGCONT)
            await sync.close()
            for client in clients:
                await client.close()

    with contextlib.ExitStack() as stack:
        asyncio.run(body([stack.enter_context(serve_process(folder)) for _ in range(3)]))


@pytest.mark.parametrize("way", [way for way in WAYS if way != "gloo broadcast"])  # it needs two processes
def test_experts_arrive_one_by_one_as_trainers_send_them(way, tmp_path):
    config = family_config("qwen3_moe")
    models = [hf.build_model(config, seed=seed) for seed in (0, 1)]
    hf.save_model(models[0], tmp_path / "first")
    expected = {n: t for name, p in hf.named_tensors(models[1]) for n, t in hf.on_disk(models[1], name, p.detach())}

    async def body():
        served = EmbeddedEngine(tmp_path / "first", dtype=torch.float32, num_slots=2)
        async with (
            running_server(served) as url,
            syncing(url, Untrained(expected), transport_of(way, tmp_path, tmp_path / "first")) as (sync, _, client),
        ):
            for version in (1, 2):
                await sync.update_weights(version)
                loaded, _ = await client.checksums()
                assert loaded == {name: checksum(tensor) for name, tensor in expected.items()}
                changed(expected, version)
        await served.close()

    with torch.no_grad():
        asyncio.run(body())


def flip(tensors):
    for i, (name, tensor) in enumerate(tensors):
        if i == 3:
            tensor = tensor.clone()
            tensor.view(-1)[0] += 1
        yield name, tensor


def swap(tensors):
    first, second, *rest = tensors
    names = {"model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight"}
    pairs = {name: tensor for name, tensor in [first, second, *rest] if name in names}
    (one, two) = pairs
    for name, tensor in [first, second, *rest]:
        yield name, pairs[two] if name == one else pairs[one] if name == two else tensor


def rename(tensors):
    for name, tensor in tensors:
        yield name.replace("model.norm.", "model.morn."), tensor


def lose(tensors):
    for name, tensor in tensors:
        if name != "model.norm.weight":
            yield name, tensor


SPOILED = {
    flip: "differ",
    swap: "differ",
    rename: r"has no tensor 'model\.morn\.weight'|model\.morn\.weight was not in the previous|had no",
    lose: r"are missing|did not come|not arrive|lacks 1 tensors|reports version",
}


@pytest.mark.parametrize("spoil", list(SPOILED), ids=lambda f: f.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_weights_that_differ_from_those_sent_are_refused_and_not_served(way, spoil, url, folder, state, tmp_path):
    state["model.layers.0.input_layernorm.weight"] = state["model.layers.0.input_layernorm.weight"] * 0.5

    async def body():
        transport = Spoiling(transport_of(way, tmp_path, folder), spoil)
        async with syncing(url, Untrained(state), transport) as (sync, engine, _):
            await sync.update_weights(21)
            with pytest.raises(SyncError, match=SPOILED[spoil]):
                await sync.update_weights(22)
            with pytest.raises(EngineError, match="weight version 22 was not loaded completely"):
                await engine.generate([5, 6], SamplingParams(max_new_tokens=1))

    asyncio.run(body())


@pytest.mark.parametrize("way", ["disk", "delta xor", "gloo broadcast", "ipc"])
def test_a_refusal_in_a_reply_of_status_200_is_read(way, folder, state, tmp_path):
    async def answer(path, body):
        del path, body
        return 200, {"success": False, "message": "not today"}

    server = ScriptedServer(answer)
    info = {"version": "furlong 1", "dtype": "float32"}
    client = SglangServer(server.url, ServerInfo.read(info))

    async def servers():
        return [client]

    async def body():
        sync = LocalSync(Untrained(state), servers, transport_of(way, tmp_path, folder))
        with pytest.raises(SyncError, match=rf"1 of 1 engines failed to .*{server.url}.*not today"):
            await sync.update_weights(1)
        assert client.stale
        await sync.close()

    try:
        run(client, body)
    finally:
        server.stop()


@pytest.mark.parametrize("way", ["ipc", "disk", "delta xor", "gloo broadcast"])
@pytest.mark.nightly
def test_an_engine_that_does_not_answer_is_named_with_the_bucket(way, folder, state, tmp_path):
    async def answer(path, body):
        del path, body
        await asyncio.sleep(2)
        return 200, {"success": True}

    server = ScriptedServer(answer)
    client = SglangServer(server.url, ServerInfo.read({"version": "furlong 1", "dtype": "float32"}))

    async def servers():
        return [client]

    async def body():
        transport = transport_of(way, tmp_path, folder, timeout_s=0.05)
        sync = LocalSync(Untrained(state), servers, transport)
        what = {"ipc": "bucket 0 by ipc", "gloo broadcast": "join"}.get(way, "load .*version_000001")
        with pytest.raises(SyncError, match=rf"{what}.*{server.url}: did not answer within 0\.05 s") as caught:
            await sync.update_weights(1)
        assert caught.value.late is not None
        [warning] = MonitorSuite(MONITORS, RunFacts()).event({"event": "weight_update_timeout", **caught.value.late})
        assert (warning.id, server.url in warning.finding, warning.cause) == (
            "SYNC01",
            True,
            transport_spec(transport.name).timeout_cause,
        )
        await sync.close()

    try:
        run(client, body)
    finally:
        server.stop()


@pytest.mark.parametrize("way", ["ipc", "delta xor"])
def test_released_weights_are_not_served_until_the_next_weight_update(way, url, folder, state, tmp_path):
    async def body():
        async with syncing(url, Untrained(state), transport_of(way, tmp_path, folder)) as (sync, engine, client):
            await sync.update_weights(31)
            await engine.generate([5, 6], SamplingParams(max_new_tokens=4))
            answer = await client.command("/release_memory_occupation", tags=["weights", "kv_cache"])
            assert answer["released_bytes"] > 0.8 * sum(tensor.nbytes for tensor in state.values())
            assert await client.served_version() == "incomplete"
            with pytest.raises(EngineError, match="they were released"):
                await engine.generate([5, 6], SamplingParams(max_new_tokens=1))
            with pytest.raises(SyncError, match="call /resume_memory_occupation first"):
                await sync.update_weights(32)
            client.stale = ""
            await client.resume_memory(["weights"])
            await sync.update_weights(33)
            assert (await engine.generate([5, 6], SamplingParams(max_new_tokens=2))).versions == [33, 33]
            with pytest.raises(EngineError, match=r"tags\[0\] is 'everything'"):
                await client.release_memory(["everything"])

    asyncio.run(body())
