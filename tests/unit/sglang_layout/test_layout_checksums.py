"""Every tensor of an SGLang server is compared, in the layout of its model."""

from __future__ import annotations

import logging
import re

import pytest
import torch

from fakes_engine import tiny_model
from fakes_sglang import Sglang, verify
from furlong.core.weights import EngineSharding
from furlong.errors import SyncError
from furlong.quantization.fp8 import Fp8Blocks
from furlong.quantization.scheme import QuantizationScheme
from furlong.sglang_layout.layout_checksums import LayoutChecksums
from furlong.sglang_layout.quantized_loading import LOADER

STATE = {name: tensor.clone() for name, tensor in tiny_model("qwen2")[1].state_dict().items()}


def check(server):
    return verify([server], STATE.items())


@pytest.mark.parametrize(("dtype", "family"), [("auto", "qwen2"), ("bfloat16", "mimo")])
def test_every_tensor_of_a_known_family_is_compared(dtype, family):
    server = Sglang(STATE, dtype=dtype)
    server.family = family
    assert check(server) == "every checksum verified"
    assert server.shown == []


@pytest.mark.parametrize(
    ("answer", "family"),
    [
        ({"quantization": "fp8"}, "qwen2"), ({"device": "cpu"}, "qwen2"),
        ({"version": "0.4.0"}, "qwen2"), ({}, "gemma3"),
    ],
)  # fmt: skip
def test_other_servers_are_compared_by_rows(answer, family):
    server = Sglang(STATE, **answer)
    server.family = family
    assert "tensors compared by rows" in check(server)
    assert server.shown


def test_unexpected_layout_is_reported_and_rows_are_compared(caplog):
    server = Sglang(STATE | {"model.extra.weight": torch.zeros(3)})
    with caplog.at_level(logging.WARNING):
        assert "tensors compared by rows" in check(server)
    assert "model.extra.weight" in caplog.text


def test_a_joined_projection_that_is_sent_whole_is_split_by_halves():
    gate, up = torch.randn(2, 24, 8)
    digests = []
    for tensors in ({"gate_up_proj": torch.cat([gate, up])}, {"gate_proj": gate, "up_proj": up}):
        sums = LayoutChecksums(frozenset({torch.float32}), (EngineSharding(2),))
        for name, tensor in tensors.items():
            sums.add(f"model.layers.0.mlp.{name}.weight", tensor)
        digests.append(sums.digests())
    assert digests[0] == digests[1]
    assert len(digests[0]) == 3  # whole, and both processes


QUANTIZED = {"quantization": "fp8", "custom_weight_loader": [LOADER]}
MATRICES = re.compile(r".*(mlp|self_attn)\..*\.weight")
SCHEME = QuantizationScheme(Fp8Blocks((8, 8)), frozenset(filter(MATRICES.fullmatch, STATE)), torch.bfloat16)


class LoadedQuantized(Sglang):
    """A server with furlong's loader: it has the other tensors as they are, and quantized ones in forms of its own."""

    def ranks(self):
        own = {"model.layers.0.mlp.gate_up_proj.weight": torch.ones(3), "model.layers.0.mlp.workspace": torch.ones(2)}
        [(_, tensors)] = super().ranks()
        return [(0, {name: tensor for name, tensor in tensors.items() if not MATRICES.fullmatch(name)} | own)]


def check_quantized(state):
    server = LoadedQuantized({name: tensor.to(torch.bfloat16) for name, tensor in state.items()}, **QUANTIZED)
    return verify([server], STATE.items(), scheme=SCHEME), server.shown


def test_beside_quantized_weights_every_other_tensor_is_compared():
    text, rows = check_quantized(STATE)
    assert text == "every checksum verified, sums of all quantized tensors verified"
    assert rows == []


def test_one_wrong_element_beside_quantized_weights_is_found():
    name = "model.norm.weight"
    stored = {key: tensor.clone() for key, tensor in STATE.items()}
    stored[name].view(-1)[-1] += 1
    with pytest.raises(SyncError, match=r"http://engine: .*differ"):
        check_quantized(stored)
