"""DiskTransport against a real server in a thread and against servers that lie."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from fakes_engine import run, tiny_model
from furlong.errors import EngineError, SyncError
from furlong.inference.sglang.server import ServerInfo, SglangServer
from furlong.interfaces import SamplingParams
from furlong.weight_sync.remote_sync import LocalSync
from furlong.weight_sync.transports.disk import DiskTransport
from served_engine import ScriptedServer, ServedEngine, Untrained
from transport_context import transport_context

CONFIG, MODEL = tiny_model("qwen2")
STATE = {name: tensor.clone() for name, tensor in MODEL.state_dict().items()}
OTHER = {name: tensor.clone() for name, tensor in tiny_model("qwen2", seed=1)[1].state_dict().items()}
SGLANG = ServerInfo.read({"version": "0.5.16"})


def disk_sync(engine, folder, *, state=OTHER, **options):
    (folder / "config.json").write_text("{}")

    async def servers():
        return engine.servers

    transport = DiskTransport(transport_context(4096, folder=folder / "w", **options))
    return LocalSync(Untrained(state), servers, transport)


def test_a_version_is_a_whole_folder_and_the_one_before_is_removed(tmp_path):
    engine = ServedEngine(CONFIG, STATE)
    sync = disk_sync(engine, tmp_path)
    reports = run(engine, lambda: _twice(sync))
    asyncio.run(sync.close())
    assert [path.name for path in (tmp_path / "w").iterdir() if path.is_dir()] == ["version_000002"]
    folder = tmp_path / "w" / "version_000002"
    assert (folder / "config.json").is_file()
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(weight_map) == set(OTHER)
    assert len(set(weight_map.values())) > 1
    for name, file in weight_map.items():
        assert torch.equal(load_file(folder / file)[name], OTHER[name])
    assert [report.num_bytes for report in reports] == [sum(t.nbytes for t in OTHER.values())] * 2


async def _twice(sync):
    return [await sync.update_weights(1), await sync.update_weights(2)]


def test_a_user_function_runs_once_a_folder_is_complete_and_before_engines_read_it(tmp_path):
    engine = ServedEngine(CONFIG, STATE)
    calls: list[tuple[str, int, bool]] = []

    def after_write(folder: str, urls: list[str]) -> None:
        is_complete = (tmp_path / "w" / folder / "model.safetensors.index.json").is_file()
        calls.append((folder.rpartition("/")[2], len(urls), is_complete))
        if len(calls) == 2:  # what engines read is what the function left
            (tmp_path / "w" / "version_000002" / "model-00001.safetensors").unlink()

    (tmp_path / "config.json").write_text("{}")

    async def servers():
        return engine.servers

    context = dataclasses.replace(transport_context(4096, folder=tmp_path / "w"), after_write=after_write)
    sync = LocalSync(Untrained(OTHER), servers, DiskTransport(context))

    async def body():
        await sync.update_weights(1)
        with pytest.raises(SyncError):
            await sync.update_weights(2)

    run(engine, body)
    asyncio.run(sync.close())
    assert calls == [("version_000001", 1, True), ("version_000002", 1, True)]


def test_files_are_kept_on_request(tmp_path):
    engine = ServedEngine(CONFIG, STATE)
    sync = disk_sync(engine, tmp_path, disk_keep_files=True)
    run(engine, lambda: _twice(sync))
    asyncio.run(sync.close())
    assert sorted(p.name for p in (tmp_path / "w").iterdir() if p.is_dir()) == ["version_000001", "version_000002"]


def test_an_engine_that_failed_to_load_never_answers(tmp_path):
    engine = ServedEngine(CONFIG, STATE)
    wrong = {**OTHER, "model.norm.weight": torch.zeros(5)}
    sync = disk_sync(engine, tmp_path, state=wrong)

    async def body():
        with pytest.raises(SyncError, match=r"1 of 1 engines failed.*127\.0\.0\.1.*model\.norm\.weight"):
            await sync.update_weights(1)
        with pytest.raises(EngineError, match="weight version 1 was not loaded completely"):
            await engine.generate([5], SamplingParams(max_new_tokens=1))

    run(engine, body)
    asyncio.run(sync.close())


def test_a_folder_belongs_to_one_run(tmp_path):
    engine = ServedEngine(CONFIG, STATE)
    one, two = disk_sync(engine, tmp_path), disk_sync(engine, tmp_path)

    async def body():
        await one.update_weights(1)
        with pytest.raises(SyncError, match="used by another run"):
            await two.update_weights(1)

    run(engine, body)
    asyncio.run(one.close())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"/update_weights_from_disk": {"success": False, "message": "out of memory"}}, "out of memory"),
        ({"/model_info": {"weight_version": "default"}}, "reports version 'default'"),
        ({"/get_weights_by_name": [[7.0]]}, "has other values in"),
        ({"/get_weights_by_name": [[0.0]]}, r"SYNC02.*all zero in the engine"),
        ({"digest": "same"}, "did not change, unlike the trainer's"),
    ],
)
def test_a_server_that_lies_is_caught(tmp_path, change, words):
    """A server as SGLang is: no checksums of ours, rows of tensors, a checksum of its own."""
    state = {name: tensor.clone() for name, tensor in OTHER.items()}
    version = "0"

    async def answer(path, body):
        nonlocal version
        if path == "/update_weights_from_disk":
            version = body["weight_version"]
        answers = {
            "/model_info": {"weight_version": version},
            "/weights_checker": {"success": True, "ranks": [{"checksums": {}, "per_gpu_checksum": "x"}]}
            | {"per_engine_checksum": change.get("digest", version)},
        }
        if path == "/get_weights_by_name":
            answers[path] = state[body["name"]][: body["truncate_size"]].tolist()
        if version == "2":
            answers |= {name: value for name, value in change.items() if name.startswith("/")}
        return 200, answers.get(path, {"success": True})

    server = ScriptedServer(answer)
    client = SglangServer(server.url, SGLANG)
    client.servers = [client]  # pyright: ignore[reportAttributeAccessIssue]
    sync = disk_sync(client, tmp_path, state=state)

    async def body():
        await sync.update_weights(1)
        state["model.norm.weight"] += 1
        with pytest.raises(SyncError, match=words):
            await sync.update_weights(2)
        assert client.stale

    try:
        run(client, body)
    finally:
        server.stop()
        asyncio.run(sync.close())


def test_uncomparable_tensors_are_reported_once(tmp_path, caplog):
    loaded = [""]

    async def answer(path, body):
        if path == "/model_info":
            return 200, {"weight_version": loaded[-1]}
        if path != "/update_weights_from_disk":
            return 400, {"message": "cannot"}
        loaded.append(body["weight_version"])
        return 200, {"success": True}

    async def publish():
        for version in (1, 2):
            await asyncio.wait_for(sync.update_weights(version), 10)

    server = ScriptedServer(answer)
    client = SglangServer(server.url, SGLANG)
    client.servers = [client]  # pyright: ignore[reportAttributeAccessIssue]
    sync = disk_sync(client, tmp_path)
    try:
        run(client, publish)
    finally:
        server.stop()
        asyncio.run(sync.close())
    assert loaded == ["", "1", "2"]
    assert caplog.text.count("only its version label is checked") == 1
    assert caplog.text.count("has no checksum") == 1
