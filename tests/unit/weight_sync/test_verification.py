"""Messages about weights that an engine has otherwise than they were sent."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
import torch

from furlong.core.weights import WeightSource
from furlong.errors import SyncError
from furlong.inference.sglang.server import ServerInfo
from furlong.sglang_layout.quantized_loading import LOADER
from furlong.transfer.device_checksum import Checksums
from furlong.weight_sync.verification import WeightVerifier, compare_checksums, record_for
from sglang_messages import unpickled

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("sent", "loaded", "cause"),
    [
        ({TABLE: "a"}, {TABLE: "a", HEAD: "b"}, "other values than its embedding"),
        ({TABLE: "a"}, {TABLE: "a", HEAD: "a"}, "the same values as its embedding"),
        ({TABLE: "a", HEAD: "b"}, {TABLE: "a"}, "The trainer has a separate output layer"),
    ],
)
def test_a_separate_output_layer_is_compared_with_the_embedding(
    sent: dict[str, str], loaded: dict[str, str], cause: str
) -> None:
    with pytest.raises(SyncError, match="CKPT03") as refused:
        compare_checksums(sent, loaded, version=1)
    assert cause in str(refused.value)
    assert "tie_word_embeddings" in str(refused.value)
    assert "pipeline stages" not in str(refused.value)


def test_other_tensors_keep_the_general_cause() -> None:
    with pytest.raises(SyncError, match="pipeline stages"):
        compare_checksums({TABLE: "a", "x": "b"}, {TABLE: "c", "x": "d"}, version=1)
    compare_checksums({TABLE: "a"}, {TABLE: "a"}, version=1)


class Quantized:
    """An SGLang server with furlong's loader of quantized weights; `weights` are those that are not quantized."""

    url, checksum_dtype, device_dtypes = "http://engine", None, {torch.bfloat16}
    info = ServerInfo.read({"version": "furlong 1", "custom_weight_loader": [LOADER]})
    address = SimpleNamespace(info=None)

    def __init__(self, weights):
        self.weights, self.version, self.asked, self.messages = weights, 0, 0, []

    async def served_version(self):
        return str(self.version)

    async def model_type(self):
        return "qwen3"

    def has_own_head(self, family):
        return False

    def unused_weights(self, family):
        return ""

    async def all_checksums(self):
        self.asked += 1
        sums = Checksums()
        for name, tensor in self.weights.items():
            sums.add(name, [tensor])
        return [(0, sums.digests() | {"model.layers.0.mlp.up_proj.weight": "dequantized"})], f"all {self.asked}"

    async def load_handles(self, handles, version, *, is_last):
        assert is_last
        assert version == self.version
        self.messages += [unpickled(each) for each in handles]


def test_unquantized_tensors_are_compared_by_the_loader_from_the_second_update_on():
    weights = {TABLE: torch.randn(64, 4).bfloat16(), "model.norm.weight": torch.ones(4).bfloat16()}
    server, verifier = Quantized(weights), WeightVerifier()

    def update():
        for tensor in weights.values():
            tensor.mul_(-2)
        server.version += 1
        sent = record_for([server], is_quantized=True)
        parts = {"model.layers.0.mlp.up_proj.weight_packed": torch.zeros(4, 1, dtype=torch.int32)}
        for _ in sent.recording(WeightSource((weights | parts).items)).open():
            pass
        return asyncio.run(verifier.check([server], sent, server.version))

    assert "every checksum verified, sums" in update()
    assert "by the engine's loader" in update()
    assert server.asked == 1
    [[(header, tensor)]] = server.messages
    assert not tensor.numel()
    sums = Checksums()
    for name, each in weights.items():
        sums.add(name, [each])
    assert json.loads(header)["checksums"] == {name: [digest] for name, digest in sums.digests().items()}
