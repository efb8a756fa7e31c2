"""Experts that a trainer publishes one by one are compared with the two tensors that SGLang has of a layer."""

from __future__ import annotations

import logging
import re

import pytest
import torch

from fakes_engine import tiny_model
from fakes_sglang import Sglang, verify
from furlong.errors import SyncError
from furlong.models.hf_model import named_tensors, on_disk

MODEL = tiny_model("qwen3_moe")[1]
STATE = {
    known: part.detach().clone()
    for name, tensor in named_tensors(MODEL)
    for known, part in on_disk(MODEL, name, tensor)
}
LAYER = "model.layers.0.mlp.experts"
LAST = max(int(name.split(".")[5]) for name in STATE if name.startswith(LAYER))
ROWS = "tensors compared by rows"


def check(server, items, *, times=1, family="qwen3_moe"):
    """What the proof says, of the last publication."""
    server.family = family
    return verify([server], *[list(items)] * times)


def test_every_tensor_of_a_model_with_experts_is_compared():
    server = Sglang(STATE, dtype="auto", moe_runner_backend="triton")
    assert LAST >= 3
    assert check(server, list(reversed(STATE.items())), times=2) == "every checksum verified"
    assert server.shown == []


def test_pieces_that_changed_places_are_found():
    for one, other in (("2.gate_proj", "2.up_proj"), ("0.down_proj", "1.down_proj")):
        one, other = f"{LAYER}.{one}.weight", f"{LAYER}.{other}.weight"
        with pytest.raises(SyncError, match=r"1 differ \(first: model.layers.0.mlp.experts.w"):
            check(Sglang(STATE | {one: STATE[other], other: STATE[one]}), STATE.items())


def test_experts_of_mixtral_are_compared_under_its_names():
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    stored = {name.replace(".mlp.", ".block_sparse_moe."): tensor for name, tensor in STATE.items()}
    sent = {re.sub("gate_proj|up_proj|down_proj", lambda m: names[m[0]], name): stored[name] for name in stored}
    assert sum(".w3." in name for name in sent) > LAST
    assert check(Sglang(stored), sent.items(), family="mixtral") == "every checksum verified"
    gone = "model.layers.0.block_sparse_moe.experts.1.w3.weight"
    some = [(name, tensor) for name, tensor in sent.items() if name != gone]
    with pytest.raises(SyncError, match=rf"pieces are missing, the first is {gone}"):
        check(Sglang(stored), some, family="mixtral")
    swapped = sent | {gone: sent[gone.replace("w3", "w1")], gone.replace("w3", "w1"): sent[gone]}
    with pytest.raises(SyncError, match="1 differ"):
        check(Sglang(stored), swapped.items(), family="mixtral")


def test_a_piece_that_was_not_sent_is_an_error():
    for piece in (f"{LAST}.up_proj", f"{LAST}.gate_proj", "0.down_proj"):
        some = [(name, tensor) for name, tensor in STATE.items() if name != f"{LAYER}.{piece}.weight"]
        with pytest.raises(SyncError, match=f"1 of its .* pieces .*{LAYER}.{piece}.weight"):
            check(Sglang(STATE), some)
    whole = [(name, tensor) for name, tensor in STATE.items() if not name.startswith(f"{LAYER}.{LAST}.")]
    with pytest.raises(SyncError, match="2 differ"):
        check(Sglang(STATE), whole)


def test_a_piece_that_was_sent_twice_or_in_the_place_of_another_is_an_error():
    name = f"{LAYER}.1.up_proj.weight"
    for other in (STATE[name], STATE[f"{LAYER}.2.up_proj.weight"]):
        with pytest.raises(SyncError, match=rf"http://engine .*w13_weight: {name} was sent twice"):
            check(Sglang(STATE), [*STATE.items(), (name, other)])
    with pytest.raises(SyncError, match=rf"{name} has shape \(.*\), others have \("):
        check(Sglang(STATE), (STATE | {name: STATE[name][:-1]}).items())


def test_server_keeping_an_old_router_is_reported_once(caplog):
    server = Sglang(STATE)
    with caplog.at_level(logging.WARNING):
        assert ROWS in check(server, STATE.items(), times=2, family="glm4_moe")
    said = [record.getMessage() for record in caplog.records]
    assert [message for message in said if "_weight_fp32" in message] == said[:1]
    assert said[0].startswith("weight_sync version 7: http://engine routes tokens by a float32 copy of the router's")
    assert Sglang(STATE, version="0.5.17").unused_weights("glm4_moe") == ""
    assert server.unused_weights("qwen3_moe") == ""


def test_a_server_with_an_output_layer_that_is_never_sent_is_an_error():
    tied = {name: tensor for name, tensor in STATE.items() if name != "lm_head.weight"}
    assert len(tied) < len(STATE)
    with pytest.raises(SyncError, match=r"http://engine .*lm_head.weight.*'qwen3_moe'"):
        check(Sglang(STATE), tied.items())
    assert check(Sglang(STATE, version="0.5.17"), tied.items())
    assert check(Sglang(tied), tied.items(), family="qwen3") == "every checksum verified"


def odd_state():
    """Experts of an odd number of elements."""
    return {
        name: tensor[:-1, :-1]
        if name.startswith(LAYER) and (tensor.shape[0] - 1) * (tensor.shape[1] - 1) % 2
        else tensor
        for name, tensor in STATE.items()
    }


def several_precisions():
    name = f"{LAYER}.1.up_proj.weight"
    return {key: tensor.to(torch.float16 if key == name else torch.bfloat16) for key, tensor in STATE.items()}


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (odd_state, "0.up_proj.weight of shape .* would not begin at a multiple of 4 bytes"),
        (several_precisions, "1.up_proj.weight was sent in another precision than others"),
    ],
)
def test_experts_that_cannot_be_hashed_are_compared_by_rows_with_a_warning(state, why, caplog):
    state = state()
    server = Sglang(state, dtype="auto")
    with caplog.at_level(logging.WARNING):
        assert ROWS in check(server, state.items(), times=2)
    [said] = [record.getMessage() for record in caplog.records]
    assert re.search(why, said)
