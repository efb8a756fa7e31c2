"""Servers of several processes: what each of them shows, and which share of every tensor it has."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest
import torch

from fakes_engine import tiny_model
from furlong.errors import EngineError
from furlong.inference.sglang.server import ServerInfo, SglangServer
from furlong.weight_sync.remote_sync import LocalSync
from furlong.weight_sync.transports.disk import DiskTransport
from served_engine import ScriptedServer, Untrained
from transport_context import transport_context

STATE = {name: tensor.clone() for name, tensor in tiny_model("qwen2")[1].state_dict().items()}


def published(shown, folder, **info):
    """Publish to a server that answers `shown` of the rows that it is asked for."""
    version = "0"

    async def answer(path, body):
        nonlocal version
        if path == "/update_weights_from_disk":
            version = body["weight_version"]
        if path == "/get_weights_by_name":
            return 200, shown(STATE[body["name"]][: body["truncate_size"]].tolist())
        checked = {"success": True, "ranks": [{"checksums": {}, "per_gpu_checksum": "x"}]}
        answers = {"/model_info": {"weight_version": version}, "/weights_checker": checked}
        return 200, answers.get(path, {"success": True})

    server = ScriptedServer(answer)
    client = SglangServer(server.url, ServerInfo.read({"version": "0.4.0"} | info))

    async def servers():
        return [client]

    async def body():
        (folder / "config.json").write_text("{}")
        sync = LocalSync(Untrained(STATE), servers, DiskTransport(transport_context(1 << 20, folder=folder / "w")))
        try:
            await sync.update_weights(1)
        finally:
            await sync.close()
            await client.close()

    try:
        asyncio.run(body())
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("shown", "compared", "is_attention"),
    [(lambda rows: [None, None], "0", True), (lambda rows: [None, rows], "[1-9]", False)],
)
def test_only_schedulers_that_return_rows_are_compared(shown, compared, is_attention, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    published(shown, tmp_path, tp_size=2 if is_attention else 1, dp_size=2, enable_dp_attention=is_attention)
    done = next(line for line in caplog.messages if line.startswith("weight_sync done"))
    assert re.search(rf" s, {compared}\d* tensors compared by rows", done)


def test_schedulers_that_show_different_rows_are_an_error(tmp_path):
    def shown(rows):
        return [rows, torch.tensor(rows).add(1).tolist(), None]

    with pytest.raises(EngineError, match=r"http://.* 2 copies of .*"):
        published(shown, tmp_path, tp_size=4, dp_size=3, enable_dp_attention=True)
