"""Weight verification detects every wrong shard in a process of a tensor-parallel server."""

from __future__ import annotations

import logging
import random
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fakes_sglang
from fakes_sglang import Sglang
from furlong.errors import SyncError
from furlong.transfer.device_checksum import Checksums

EVERY, BUT_EXPERTS = "every checksum verified", "every checksum but those of experts verified"
EXPERTS = 4
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def state_of(family="qwen3", *, num_kv_heads=2, vocab=70, width=12, is_tied=False, dtype=torch.bfloat16):
    """Return the tensors of a model with four query heads, as a trainer sends them."""
    head_dim, inner = 6, 20
    sizes = {"q_proj": 4 * head_dim, "k_proj": num_kv_heads * head_dim, "v_proj": num_kv_heads * head_dim}
    shapes = {EMBEDDING: (vocab, width), "model.norm.weight": (width,)}
    if not is_tied:
        shapes[HEAD] = (vocab, width)
    for layer in ("model.layers.0", "model.layers.1"):
        shapes |= {f"{layer}.self_attn.{name}.weight": (size, width) for name, size in sizes.items()}
        shapes |= {
            f"{layer}.self_attn.o_proj.weight": (width, 4 * head_dim),
            f"{layer}.input_layernorm.weight": (width,),
        }
        mlps = [f"{layer}.mlp"]
        if family == "qwen3_moe":
            shapes[f"{layer}.mlp.gate.weight"] = (EXPERTS, width)
            mlps = [f"{layer}.mlp.experts.{number}" for number in range(EXPERTS)]
        for mlp in mlps:
            shapes |= {f"{mlp}.{name}.weight": (inner, width) for name in ("gate_proj", "up_proj")}
            shapes[f"{mlp}.down_proj.weight"] = (width, inner)
        if family in ("qwen2", "llama"):  # llama with attention_bias
            shapes |= {f"{layer}.self_attn.{name}.bias": (size,) for name, size in sizes.items()}
        if family == "llama":
            shapes[f"{layer}.self_attn.o_proj.bias"] = (width,)
        if family in ("qwen3", "qwen3_moe"):
            shapes |= {f"{layer}.self_attn.{name}.weight": (head_dim,) for name in ("q_norm", "k_norm")}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


class Server(Sglang):
    """One of several servers."""

    def __init__(self, state, family="qwen3", *, num_kv_heads=2, name="engine", **answer):
        super().__init__(state, **answer)
        self.url, self.family, self.num_kv_heads = f"http://{name}", family, num_kv_heads
        self.wrong = {}  # wrong tensors by rank
        if HEAD not in state:
            self.missing = [HEAD]

    def ranks(self):
        return [(rank, tensors | self.wrong.get(rank, {})) for rank, tensors in super().ranks()]


def verify(servers, *updates, num_kv_heads=2, num_experts=EXPERTS, is_live=True):
    return fakes_sglang.verify(servers, *updates, num_kv_heads=num_kv_heads, num_experts=num_experts, is_live=is_live)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"]),
    st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]),
    st.sampled_from([4, 64, 70, 128]), st.sampled_from([11, 12]), st.booleans(), st.booleans(),
    st.sampled_from([1, 2, 4]), st.booleans(),
    st.sampled_from([torch.bfloat16, torch.float32]), st.sampled_from([1, 200, 1 << 30]),
    st.randoms(use_true_random=False),
)  # fmt: skip
@pytest.mark.nightly
def test_every_tensor_of_every_process_is_compared(
    family, tp_size, num_kv_heads, vocab, width, is_tied, is_live, dp_size, has_dp_head, dtype, flush_bytes,
    shuffled: random.Random,
):  # fmt: skip
    has_experts = family == "qwen3_moe"
    is_tied = is_tied and not has_experts
    state = state_of(family, num_kv_heads=num_kv_heads, vocab=vocab, width=width, is_tied=is_tied, dtype=dtype)
    items = list(state.items())
    if not is_tied and not has_experts and shuffled.random() < 0.5:
        items[2] = (HEAD, state[EMBEDDING])  # a trainer that sends a tied tensor under both names
        state, is_tied = state | {HEAD: state[EMBEDDING]}, True
    shuffled.shuffle(items)
    answer = {"tp_size": tp_size}
    if family == "qwen3" and dp_size <= tp_size:
        answer |= {"dp_size": dp_size, "enable_dp_attention": True, "enable_dp_lm_head": has_dp_head}
    other = shuffled.choice([1, 2, 4])
    servers = [
        Server(state, family, num_kv_heads=num_kv_heads, ep_size=tp_size if has_experts else 1, **answer),
        Server(
            state, family, num_kv_heads=num_kv_heads, name="other", tp_size=other, ep_size=other if has_experts else 1
        ),
    ]
    if is_tied:
        for server in servers:
            server.missing = [HEAD]
    with mock.patch.object(Checksums.__init__, "__kwdefaults__", {"flush_bytes": flush_bytes}):
        assert verify(servers, items, num_kv_heads=num_kv_heads, is_live=is_live) == EVERY
    assert servers[0].shown == servers[1].shown == []


STATE = state_of()
WITH_EXPERTS = state_of("qwen3_moe")


@pytest.mark.parametrize("tp_size", [1, 2])
def test_whole_copies_of_a_server_are_compared_and_must_be_alike(tp_size):
    server = Server(STATE, tp_size=tp_size, dp_size=2)
    assert verify([server], STATE.items()) == EVERY
    ranks = server.ranks()
    server.ranks = lambda: [*ranks[:-1], (tp_size - 1, ranks[-1][1] | {"model.norm.weight": torch.zeros(12)})]
    with pytest.raises(SyncError, match=rf"has copies of process {tp_size - 1} that differ in 1 tensors"):
        verify([server], STATE.items())


NAMES = [
    EMBEDDING, HEAD, "model.norm.weight", "model.layers.1.self_attn.qkv_proj.weight",
    "model.layers.1.self_attn.o_proj.weight", "model.layers.1.self_attn.k_norm.weight",
    "model.layers.0.mlp.gate_up_proj.weight", "model.layers.0.mlp.down_proj.weight",
]  # fmt: skip


@pytest.mark.parametrize("answer", [{}, {"dp_size": 2, "enable_dp_attention": True}])
def test_a_wrong_bit_of_one_process_is_found_and_it_and_the_tensor_are_named(answer):
    for name in NAMES:
        server = Server(STATE, tp_size=2, **answer)
        tensor = server.ranks()[1][1][name].clone()
        tensor.view(torch.int16).view(-1)[-1] ^= 1
        server.wrong = {1: {name: tensor}}
        with pytest.raises(SyncError, match=rf"http://engine, process 1 of 2: .*1 differ \(first: {name}"):
            verify([server], STATE.items())


class Odd(Server):
    """A server whose processes' answers are modified by `change`."""

    def __init__(self, change, state=None, family="qwen3", **answer):
        super().__init__(STATE if state is None else state, family, **answer)
        self.change = change

    def ranks(self):
        return self.change(super().ranks())


def without_a_tensor(ranks):
    return [(rank, {name: t for name, t in of.items() if rank == 0 or name != NAMES[3]}) for rank, of in ranks]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ranks: ranks[:1], r"checksums of processes \[0\]"),
        (
            lambda ranks: [(1 - rank, of) for rank, of in ranks],
            r"process 0 of 2: .*of 17 tensors, 10 differ \(first: model.embed_tokens.weight",
        ),
        (without_a_tensor, rf"process 1 of 2: .*1 did not arrive \(first: {NAMES[3]}"),
    ],
)
def test_processes_that_are_missing_exchanged_or_unlike_their_copies_are_an_error(change, words):
    with pytest.raises(SyncError, match=f"http://engine.*{words}"):
        verify([Odd(change, tp_size=2)], STATE.items())


def test_processes_that_share_an_attention_in_another_order_are_an_error():
    def interleaved(ranks):  # as if attention groups were interleaved
        part = next(name for name in NAMES if "qkv" in name)
        own = dict(ranks)
        return [(rank, own[rank] | {part: own[rank // 2][part]}) for rank in own]

    attention = {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}
    assert verify([Server(STATE, **attention)], STATE.items()) == EVERY
    with pytest.raises(SyncError, match=rf"process 1 of 4: .*1 differ \(first: {NAMES[3]}"):
        verify([Odd(interleaved, **attention)], STATE.items())


@pytest.mark.parametrize(
    ("answer", "family", "num_kv_heads", "words"),
    [
        ({"moe_dense_tp_size": 1}, "qwen3", 2, "may have tensors in another form (moe_dense_tp_size 1), so only rows"),
        ({"tp_size": 1, "rl_on_policy_target": "fsdp"}, "qwen3", 2, "in another form (rl_on_policy_target fsdp), so"),
        ({"dp_size": 2, "enable_dp_attention": True}, "llama", 2, "data-parallel attention in a model of the family"),
        ({}, "qwen3", None, "has shards of model.layers.0.self_attn.qkv_proj.weight"),
    ],
)
def test_unknown_shards_are_compared_by_rows_with_a_warning(answer, family, num_kv_heads, words, caplog):
    server = Server(STATE, family, **{"tp_size": 2} | answer)
    with caplog.at_level(logging.WARNING):
        assert "tensors compared by rows" in verify([server], STATE.items(), num_kv_heads=num_kv_heads)
    assert words in caplog.text


def test_unequal_shards_are_reported(caplog):
    state = {
        name: tensor[:-1] if "gate_proj" in name or "up_proj" in name else tensor for name, tensor in STATE.items()
    }
    server = Server(state, tp_size=2)
    server.ranks = lambda: [(0, {}), (1, {})]
    with caplog.at_level(logging.WARNING):
        assert "tensors compared by rows" in verify([server], state.items())
    assert "gate_up_proj.weight, which 2 processes cannot share: 19 is not a multiple of 2, so only rows" in caplog.text


@pytest.mark.parametrize(("index", "name"), [(0, "w13_weight"), (1, "w2_weight")])
def test_a_wrong_bit_of_an_expert_that_one_process_has_is_found(name, index):
    server = Server(WITH_EXPERTS, "qwen3_moe", tp_size=2, ep_size=2)
    name = f"model.layers.1.mlp.experts.{name}"
    tensor = server.ranks()[index][1][name].clone()
    tensor.view(torch.int16)[-1, -1, -1] ^= 1
    server.wrong = {index: {name: tensor}}
    with pytest.raises(SyncError, match=rf"http://engine, process {index} of 2: .*1 differ \(first: {name}"):
        verify([server], WITH_EXPERTS.items())


@pytest.mark.parametrize(
    ("answer", "num_experts", "words"),
    [
        ({"tp_size": 2}, EXPERTS, "splits each expert over 2 processes"),
        (
            {"tp_size": 2, "ep_size": 2},
            None,
            "has experts that cannot be split over 2 processes: their number is unknown",
        ),
        (
            {"tp_size": 2, "ep_size": 2, "moe_a2a_backend": "deepep"},
            EXPERTS,
            "rearranges experts (moe_a2a_backend deepep)",
        ),
    ],
)
def test_where_experts_are_not_known_the_rest_is_compared(answer, num_experts, words, caplog):
    server = Server(WITH_EXPERTS, "qwen3_moe", **answer)
    with caplog.at_level(logging.WARNING):
        assert BUT_EXPERTS in verify([server], WITH_EXPERTS.items(), num_experts=num_experts)
    said = f"weight_sync version 7: http://engine {words}, so for its experts only a change is checked"
    assert [record.getMessage() for record in caplog.records] == [said]
    assert server.shown == []
    name = "model.layers.1.self_attn.o_proj.weight"
    last = server.info.sharding.tp_size - 1
    server.wrong = {last: {name: server.ranks()[last][1][name] + 1}}
    with pytest.raises(SyncError, match=rf"1 differ \(first: {name}"):
        verify([server], WITH_EXPERTS.items(), num_experts=num_experts)


def first_stage(ranks):
    return [
        (rank, {name: t for name, t in of.items() if name == EMBEDDING or name.startswith("model.layers.0.")})
        for rank, of in ranks
    ]


@pytest.mark.parametrize(
    ("state", "family", "but", "tp_size"),
    [(STATE, "qwen3", "", 1), (WITH_EXPERTS, "qwen3_moe", " but those of experts", 2)],
)
def test_only_the_first_pipeline_stage_is_compared(tp_size, state, family, but):
    answer = {"tp_size": tp_size, "pp_size": 2}
    server = Odd(first_stage, state, family, **answer)
    but = but if tp_size > 1 else ""
    assert verify([server], state.items()).startswith(f"every checksum of the first of 2 stages{but} verified")
    server.wrong = {tp_size - 1: {NAMES[-3]: torch.zeros(6)} | {EMBEDDING: torch.zeros(3)}}
    with pytest.raises(SyncError, match=r"http://engine.*1 differ \(first: model.embed_tokens.weight"):
        verify([server], state.items())
    server = Odd(
        lambda ranks: [(rank, of | {"model.extra": torch.zeros(3)}) for rank, of in first_stage(ranks)], state, family
    )
    assert "tensors compared by rows" in verify([server], state.items())


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_an_unchanged_first_pipeline_stage_is_healthy(family):
    server = Odd(first_stage, STATE, family, pp_size=2)
    changed = STATE | {NAMES[5]: STATE[NAMES[5]] + 1}
    assert NAMES[5].startswith("model.layers.1.")

    def loaded(state):
        server.state = state
        yield from state.items()

    verify([server], loaded(STATE), loaded(changed))


def test_experts_that_stay_while_the_trainers_change_are_an_error_also_where_they_are_not_known():
    server = Server(WITH_EXPERTS, "qwen3_moe", tp_size=2)
    expert = "model.layers.0.mlp.experts.3.up_proj.weight"
    changed = WITH_EXPERTS | {expert: WITH_EXPERTS[expert] + 1}
    with pytest.raises(SyncError, match="http://engine did not change, unlike the trainer's"):
        verify([server], WITH_EXPERTS.items(), changed.items())
