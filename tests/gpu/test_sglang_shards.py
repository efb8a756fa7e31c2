"""Weight shards of SGLang servers with two processes, with and without data-parallel attention."""

from __future__ import annotations

import asyncio
import importlib.util
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from furlong.machine import disable_nccl_cumem
from furlong.models.hf_model import build_model, save_model
from furlong.weight_sync.remote_sync import LocalSync
from furlong.weight_sync.transports.broadcast import BroadcastTransport
from furlong.weight_sync.transports.disk import DiskTransport
from served_engine import Untrained
from served_sglang import mean_difference, served
from transport_context import transport_context

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="an engine of two processes needs two CUDA devices"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]
disable_nccl_cumem()


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module", params=[{}, {"dp_size": 2, "enable_dp_attention": True}], ids=["tp2", "tp2-dp2"])
def shared(request, runner, tmp_path_factory):
    """Return a model with uneven shards and one key/value head, and an engine with two processes that serves it."""
    folder = tmp_path_factory.mktemp("shared")
    config = Qwen3Config(
        vocab_size=1000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    built = build_model(config, seed=4, dtype=torch.bfloat16)
    save_model(built, folder / "model")
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    plain.load_state_dict(built.state_dict())
    with served(folder, runner, num_gpus=2, **request.param) as engine:
        yield plain.to("cuda").eval(), engine


@pytest.mark.parametrize("transport", ["disk", "nccl"])
def test_every_tensor_of_both_processes_is_verified(shared, runner, tmp_path, transport, caplog, monkeypatch):
    model, engine = shared
    if torch.cuda.device_count() < 3:  # NCCL needs different host IDs to share a GPU
        monkeypatch.setenv("NCCL_HOSTID", "trainer")
    version = {"disk": 1, "nccl": 2}[transport]
    state = model.state_dict()
    with torch.no_grad():
        for value in state.values():
            value.mul_(1.0 + 0.03 * version)
    way = BroadcastTransport(transport_context(1 << 22, on_gpu=True))
    if transport == "disk":
        (tmp_path / "config.json").write_text(model.config.to_json_string())
        way = DiskTransport(transport_context(1 << 24, folder=tmp_path / "weights"))
    sync = LocalSync(Untrained(state, num_kv_heads=1), engine.pool.reachable, way)

    async def update() -> None:
        await sync.update_weights(version)
        await sync.close()

    with caplog.at_level(logging.INFO, logger="furlong.weight_sync"):
        runner.run(update())
    assert "every checksum verified" in caplog.text, caplog.text
    assert mean_difference(model, runner, engine) < 0.02
