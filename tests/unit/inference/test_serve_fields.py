"""Values of requests to `furlong serve`, one by one."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import pytest

from furlong.inference.request_error import RequestError
from furlong.inference.server.generate_api import ServerContext, sampling_params
from furlong.inference.server.schemas import MAX_INT64, Name, convert, quote, version_label
from furlong.inference.server.web import ServerLimits, decode_object, error_response
from furlong.interfaces import SamplingParams
from furlong.models.tokenizer import build_tokenizer


def test_a_weight_version_is_an_integer_or_a_printable_name():
    for value in ("7", "step-7", "0", str(MAX_INT64), "a b", "007", "1.5", "é"):
        assert version_label("weight_version", value) == value
    assert version_label("v", 12) == "12"
    assert version_label("v", None) is None
    wrong = ["", " ", "a\nb", "a\0", "-1", "+1", -1, 5.5, True, [], {}, str(MAX_INT64 + 1), 1e20, "9" * 400]
    for value in (*wrong, "a" * 129, " a"):
        with pytest.raises(RequestError, match="weight version"):
            version_label("v", value)


def test_values_in_messages_are_short_whatever_their_size():
    large = ["a" * 10**7, ["a" * 10**6] * 1000, {str(i): "b" * 10**5 for i in range(1000)}, [[[[[[1]]]]]], 10**4000]
    for value in large:
        assert len(quote(value)) <= 210
    reply = json.loads(bytes(error_response("/", "x" * 10**6 + "\ud800", 400).body))
    assert len(reply["error"]["message"]) < 1100
    assert quote({"a": [1, "x"]}) == "{'a': [1, 'x']}"


def test_names_are_short_and_printable():
    for value in ("", "a\n", "x" * 513, 5, None):
        with pytest.raises(RequestError):
            convert(value, Name, "rid")
    assert convert("step 7 é", Name) == "step 7 é"


def test_sampling_parameters_are_unchanged_or_refused_in_few_words():
    assert sampling_params({"temperature": 0.5, "stop": "a", "stop_token_ids": [3], "n": 2}) == SamplingParams(
        temperature=0.5, stop=("a",), stop_token_ids=(3,), no_stop_trim=False
    )
    wrong = [
        {"stop": ["x"] * 129},
        {"stop": "x" * 1025},
        {"stop_token_ids": [1] * 1025},
        {"stop_token_ids": [1.5]},
        {"temperature": True},
        {"top_k": 1.5},
        {"unknown": 1},
        {"x" * 10**6: 1},
    ]
    for fields in wrong:
        with pytest.raises(RequestError) as refused:
            sampling_params(fields)
        assert len(str(refused.value)) < 1000


def test_what_is_no_json_object_is_refused():
    for raw in (b"[1]", b"{", b'{"a":NaN}', b'{"a":"\\ud800"}', b"\xff", b'{"a":' * 5000):
        with pytest.raises(RequestError):
            decode_object(bytearray(raw))


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized():
    class Engine:
        tokenizer, context_len = build_tokenizer(), 100

    model = ServerContext(Engine(), "tiny", ServerLimits())  # pyright: ignore[reportArgumentType]
    with pytest.raises(RequestError, match="cannot fit"):
        asyncio.run(model.encode(["a" * 10_000]))
    assert asyncio.run(model.encode(["ab", "c"])) == [Engine.tokenizer.encode("ab"), Engine.tokenizer.encode("c")]


def test_reading_a_request_leaves_memory_intact():
    """msgspec 0.22 writes beyond the end of a field that is text with a pattern, or a list."""
    read = "from furlong.inference.server.generate_api import *; read_fields(GenerateFields, {'rid': ['a']})"
    words = [sys.executable, "-c", read]
    assert subprocess.run(words, env={**os.environ, "PYTHONMALLOC": "debug"}, check=False).returncode == 0
