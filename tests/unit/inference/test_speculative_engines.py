"""Servers with a draft model: only the target model receives weights."""

from __future__ import annotations

import asyncio

import pytest

from furlong.inference.sglang.server import ServerInfo, SglangServer
from furlong.sglang_layout.quantized_loading import LOADER
from served_engine import ScriptedServer

RANKS = [
    {"checksums": {"model.norm.weight": "a", "draft.model.norm.weight": "b"}, "per_gpu_checksum": "x"},
    {"checksums": {"model.norm.weight": "a"}, "per_gpu_checksum": "x", "parallelism_info": {"tp_rank": 1}},
]


async def answer(path, body):
    return 200, {"success": True, **({"ranks": RANKS} if path == "/weights_checker" else {})}


def ask(call, **info):
    """The result of `call` on a client, and the requests to its server."""
    server = ScriptedServer(answer)

    async def body():
        client = SglangServer(server.url, ServerInfo.read({"version": "0.5.16"} | info))
        try:
            return await call(client)
        finally:
            await client.close()

    try:
        return asyncio.run(body()), server.asked
    finally:
        server.stop()


@pytest.mark.parametrize(("algorithm", "is_told"), [("NGRAM", True), ("EAGLE", True), (None, False)])
def test_ipc_updates_exclude_the_draft_model(algorithm, is_told):
    async def load(client):
        await client.load_handles([b"handle"], 3, is_last=True)

    _, [(path, body)] = ask(load, speculative_algorithm=algorithm)
    assert path == "/update_weights_from_tensor"
    assert body.get("disable_draft_model", False) is is_told


@pytest.mark.parametrize(("loaders", "form"), [([], "flattened_bucket"), ([LOADER], LOADER), (["x.y", LOADER], LOADER)])
def test_servers_with_furlongs_loader_of_quantized_weights_use_it(loaders, form):
    async def load(client):
        await client.load_handles([b"handle"], 3, is_last=True)

    _, [(_, body)] = ask(load, custom_weight_loader=loaders)
    assert body["load_format"] == form


def test_checksums_exclude_the_draft_model():
    (found, digest), _ = ask(lambda client: client.all_checksums(), speculative_algorithm="EAGLE")
    assert found == [(0, {"model.norm.weight": "a"}), (1, {"model.norm.weight": "a"})]
    assert digest == "x"
