"""Values of requests to `furlong serve`, one by one."""

from __future__ import annotations

import asyncio
import json

import pytest

from furlong.inference.request_error import RequestError
from furlong.inference.server.bodies import MAX_CONTAINERS, decode_object, error_response
from furlong.inference.server.chat_prompts import PromptEncoder
from furlong.inference.server.fields import MAX_INT64, boolean, check_name, integer, quote, version_label
from furlong.inference.server.generate_api import sampling_params
from furlong.inference.server.limits import Counts, RefusedError, RequestGuard, ServerLimits, Slots
from furlong.interfaces import SamplingParams
from furlong.models.tokenizer import build_tokenizer


@pytest.mark.parametrize("value", ["7", "step-7", "0", str(MAX_INT64), "a b", "007", "1.5", "é"])
def test_a_weight_version_is_an_integer_or_a_printable_name(value):
    assert version_label({"weight_version": value}, "weight_version") == value


def test_a_weight_version_may_be_a_json_number_or_absent():
    assert version_label({"v": 12}, "v") == "12"
    assert version_label({}, "v") is None


@pytest.mark.parametrize(
    "value",
    ["", " ", "a\nb", "a\0", "-1", "+1", -1, 5.5, True, [], {}, str(MAX_INT64 + 1), 1e20, "9" * 400, "a" * 129, " a"],
)
def test_other_weight_versions_are_refused(value):
    with pytest.raises(RequestError, match="weight version"):
        version_label({"v": value}, "v")


def test_values_in_messages_are_short_whatever_their_size():
    for value in (
        "a" * 10**7,
        ["a" * 10**6] * 1000,
        {str(i): "b" * 10**5 for i in range(1000)},
        [[[[[[1]]]]]],
        10**4000,
    ):
        assert len(quote(value)) <= 210
    reply = json.loads(bytes(error_response("x" * 10**6 + "\ud800", 400).body))
    assert len(reply["error"]["message"]) < 1100


def test_quoted_small_values_are_their_repr():
    assert quote({"a": [1, "x"]}) == "{'a': [1, 'x']}"


@pytest.mark.parametrize("value", [1.0, "1", True, -1, 11, [], {}])
def test_integers_are_checked_for_type_and_range(value):
    with pytest.raises(RequestError, match="from 0 to 10"):
        integer({"n": value}, "n", low=0, high=10)


@pytest.mark.parametrize("value", [0, 1, "true", [], {}])
def test_booleans_are_true_or_false(value):
    with pytest.raises(RequestError, match="true or false"):
        boolean({"stream": value}, "stream")


@pytest.mark.parametrize("value", ["", "a\n", "x" * 513, 5, None])
def test_names_are_short_and_printable(value):
    with pytest.raises(RequestError, match="printable"):
        check_name("rid", value)


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["x"] * 129},
        {"stop": "x" * 1025},
        {"stop_token_ids": [1] * 1025},
        {"stop_token_ids": [1.5]},
        {"temperature": True},
        {"top_k": 1.5},
        {"unknown": 1},
        {"x" * 10**6: 1},
    ],
)
def test_invalid_sampling_parameters_are_refused(fields):
    with pytest.raises(RequestError) as refused:
        sampling_params(fields)
    assert len(str(refused.value)) < 1000


def test_valid_sampling_parameters_are_unchanged():
    assert sampling_params({"temperature": 0.5, "stop": "a", "stop_token_ids": [3], "n": 2}) == SamplingParams(
        temperature=0.5, stop=("a",), stop_token_ids=(3,), no_stop_trim=False
    )


def test_json_is_refused_for_depth_and_number_of_containers():
    deep = bytearray(b'{"a":' * 10 + b"1" + b"}" * 10)
    assert decode_object(deep, 10)
    with pytest.raises(RequestError, match="--max-json-depth"):
        decode_object(deep, 9)
    with pytest.raises(RequestError, match="lists and objects"):
        decode_object(bytearray(b"[" * (MAX_CONTAINERS + 1)), 10)
    for raw in (b"[1]", b"{", b'{"a":NaN}', b'{"a":"\\ud800"}', b"\xff", b'{"a":' * 5000):
        with pytest.raises(RequestError):
            decode_object(bytearray(raw), 64)


def test_slots_are_limited_in_all_and_by_client():
    slots = Slots("requests", 3, "--all", 2, "--each")
    slots.enter("a")
    slots.enter("a")
    with pytest.raises(RefusedError, match="--each") as refused:
        slots.enter("a")
    assert refused.value.status == 429
    slots.enter("b")
    with pytest.raises(RefusedError, match="--all"):
        slots.enter("c")
    for client in ("b", "a", "a"):
        slots.leave(client)
    assert slots.in_use == 0
    slots.enter("a")


def test_bodies_are_limited_one_by_one_and_together():
    async def main():
        counts = Counts(ServerLimits(max_body_bytes=10, max_total_body_bytes=15, max_weight_body_bytes=100))
        one, two = RequestGuard(counts, "a", "/generate"), RequestGuard(counts, "a", "/generate")
        one.add_body(10)
        with pytest.raises(RefusedError, match="--max-body-bytes") as large:
            one.add_body(1)
        with pytest.raises(RefusedError, match="--max-total-body-bytes") as full:
            two.add_body(6)
        weights = RequestGuard(counts, "a", "/update_weights_from_tensor")
        weights.check_declared(100)
        one.close()
        two.add_body(10)
        two.close()
        assert counts.body_bytes == 0
        return large.value.status, full.value.status

    assert asyncio.run(main()) == (413, 429)


class Served:
    """The part of an engine that encodes prompts."""

    tokenizer = build_tokenizer()
    context_len = 100


def encoder(**options):
    return PromptEncoder(Served(), ServerLimits(), **options)  # pyright: ignore[reportArgumentType]


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized():
    prompts = encoder()
    with pytest.raises(RequestError, match="cannot fit"):
        asyncio.run(prompts.encode(["a" * (prompts.max_chars + 1)]))
    assert asyncio.run(prompts.encode(["ab", "c"])) == [Served.tokenizer.encode("ab"), Served.tokenizer.encode("c")]


@pytest.mark.parametrize("field", [{"chat_template": "{{ 1 }}"}, {"chat_template_kwargs": {"a": 1}}])
def test_templates_of_requests_need_the_flag(field):
    messages = [{"role": "user", "content": "1"}]
    with pytest.raises(RequestError, match="--trust-request-chat-template"):
        asyncio.run(encoder().encode_chat({"messages": messages, **field}))


@pytest.mark.slow
def test_a_template_of_a_request_renders_in_a_process_as_in_transformers():
    messages = [{"role": "user", "content": "1+1"}]
    template = "{% for m in messages %}{{ m.content }}{{ extra }}{% endfor %}{{ eos_token }}"
    values = {"chat_template": template, "chat_template_kwargs": {"extra": "x"}}
    expected = Served.tokenizer.apply_chat_template(
        messages, chat_template=template, extra="x", add_generation_prompt=True, tokenize=True, return_dict=False
    )
    prompts = encoder(trusts_templates=True)
    assert asyncio.run(prompts.encode_chat({"messages": messages, **values})) == list(expected)
    plain = Served.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert asyncio.run(prompts.encode_chat({"messages": messages})) == list(plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**9) %}{% for j in range(10**9) %}{% endfor %}{% endfor %}",
        "{% set s = 'a' * 500000000 %}{{ s * 8 }}",
        "{{ 'a' * 5000000 }}",
        "{{ 1",
        "{{ raise_exception('no') }}",
        "{{ ''.__class__ }}{{ x.y.z }}",
    ],
)
def test_hostile_templates_end_within_their_limits(template):
    limits = ServerLimits(chat_template_timeout=2, chat_template_bytes=1 << 28)
    prompts = PromptEncoder(Served(), limits, trusts_templates=True)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RequestError, match="the chat template of the request failed"):
        asyncio.run(prompts.encode_chat({"messages": [{"role": "user", "content": "1"}], "chat_template": template}))
