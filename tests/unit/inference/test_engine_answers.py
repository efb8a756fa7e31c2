"""Answers of servers that are cut, redirected, endless, encoded, too large or repeated, from raw sockets."""

from __future__ import annotations

import asyncio
import gzip
from types import SimpleNamespace

import pytest

from furlong.core.token_stream import TokenStream
from furlong.errors import ConfigError, EngineError, EngineTimeoutError, UnreachableError
from furlong.inference.sglang.answer_reader import AnswerReader
from furlong.inference.sglang.client import SglangClient, probe
from furlong.inference.sglang.engine_answers import REASON_CHARS
from furlong.inference.sglang.generate_requests import InFlightRequest
from furlong.inference.sglang.server import SglangServer
from furlong.inference.sglang.server_info import ServerInfo
from furlong.inference.supervisor.supervisor import num_requests
from furlong.interfaces import SamplingParams
from raw_server import chunks, endless, http, raw_server
from served_engine import reply

LIMIT = 1 << 16
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
LONG = b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"


def ask(server, *, timeout_s=20.0):
    """The answer to one request."""

    async def body():
        client = SglangClient(server.url, {})
        try:
            return await client.ask("/path", {"a": 1}, timeout_s=timeout_s, limit_bytes=LIMIT)
        finally:
            await client.close()

    return asyncio.run(body())


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x16\x03\x01\x02\x00\x01",  # of TLS
        b"hello\r\n\r\n",
        b'{"a": 1}',  # HTTP/0.9
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        http(b"{}", length=20),
        http(b"", length=1 << 70),
        chunks(b"{}", end=b""),
        chunks(b"{}", end=b"5\r\nab"),
        chunks(b"{}", end=b"zz\r\n"),
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        endless(b"HTTP/1.1 200 OK\r\n", b"X-Header: value\r\n"),
        endless(b"HTTP/1.1 200 OK\r\n", b"x" * 1000),
        endless(CHUNKED + b"0\r\n", b"X-Trailer: value\r\n"),
    ],
)
def test_an_answer_that_is_cut_or_not_http_counts_as_none(answer):
    with raw_server(answer) as server, pytest.raises(UnreachableError) as caught:
        ask(server)
    assert f"POST {server.url}/path" in str(caught.value)
    assert caught.value.url == server.url


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (http(b"", status="302 Found", head="Location: http://me:secret@other/\r\n"), "redirect"),
        (http(b"{}", status="307 Temporary Redirect"), "redirect"),
        (http(b"", status="304 Not Modified"), "redirect"),
        (endless(LONG, b"x" * 4096), f"more than {LIMIT:,} bytes"),
        (endless(CHUNKED, b"1000\r\n" + b"x" * 4096 + b"\r\n"), f"more than {LIMIT:,} bytes"),
        (endless(b"HTTP/1.1 200 OK\r\n\r\n", b" " * 4096), f"more than {LIMIT:,} bytes"),
        (endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), "interim"),
        (http(gzip.compress(b"{}", mtime=0), head="Content-Encoding: gzip\r\n"), "Content-Encoding 'gzip'"),
        (http(b"{}", head="Content-Encoding: br\r\n"), "Content-Encoding 'br'"),
        (http(gzip.compress(b"{}", mtime=0)), "JSON in UTF-8"),
        (http("é".encode("latin-1")), "JSON in UTF-8"),
        (http('{"a": 1}'.encode("utf-16")), "JSON in UTF-8"),
        (http(b'{"a": 1'), "JSON in UTF-8"),
        (http(b'{"a": 1}{"a": 1}'), "JSON in UTF-8"),
        (http(b'{"a": NaN}'), "JSON in UTF-8"),
        (http(b"[" * 3000 + b"]" * 3000), "JSON in UTF-8"),
        (http(b"<html><title>Login</title></html>"), "JSON in UTF-8"),
        (http(b"{}", status="206 Partial Content"), "answered 206"),
        (http(b"<title>Login\x1b[2J</title>", status="403 Forbidden"), "a web page"),
        (http(b"[" * 900 + b"]" * 900, status="500 Oops"), "answered 500"),
    ],
)
def test_an_answer_that_breaks_the_protocol_is_an_error_at_once(answer, words):
    with raw_server(answer) as server:
        with pytest.raises(EngineError, match=words) as caught:
            ask(server)
        assert len(server.requests) == 1
    message = str(caught.value)
    assert f"POST {server.url}/path" in message
    assert not isinstance(caught.value, UnreachableError)
    assert "secret" not in message
    assert "\x1b" not in message


@pytest.mark.parametrize("form", ["text", "message", "value"])
def test_a_long_reason_is_shortened(form):
    long = b"x" * (LIMIT - 100)
    body = {"text": long, "message": b'{"message": "%s"}' % long, "value": b'{"error": ["%s"]}' % long}[form]
    with raw_server(http(body, status="500 Oops")) as server, pytest.raises(EngineError) as caught:
        ask(server)
    assert len(str(caught.value)) < 2 * REASON_CHARS


@pytest.mark.parametrize("pieces", [endless(LONG, b" ", 0.01), endless(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n", 0.01)])
def test_an_answer_that_comes_too_slowly_is_late(pieces):
    with raw_server(pieces) as server, pytest.raises(EngineTimeoutError, match="did not answer within"):
        ask(server, timeout_s=0.1)


@pytest.mark.parametrize("together", [True, False])
def test_a_second_answer_is_not_that_to_the_next_request(together):
    first, twin = http(b'{"of": 1}'), http(b'{"of": "nobody"}')
    answer = first + twin if together else lambda: [first, twin]

    async def body():
        client = SglangClient(server.url, {})
        try:
            before = await client.ask("/first", {})
            idle = client._connections._idle
            while idle and idle[0].is_fresh:  # until the second answer is here
                await asyncio.sleep(0.001)
            return before, await client.ask("/second", {})
        finally:
            await client.close()

    with raw_server(answer, http(b'{"of": 2}'), closes=False) as server:
        assert asyncio.run(body()) == ({"of": 1}, {"of": 2})
        assert server.num_connections == 2


def test_connections_are_used_again():
    async def body():
        client = SglangClient(server.url, {})
        answers = [await client.ask("/path", {}) for _ in range(3)]
        await client.close()
        return answers

    with raw_server(http(b"{}"), closes=False) as server:
        assert asyncio.run(body()) == [{}, {}, {}]
        assert server.num_connections == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (http(b"[]"), "expected a JSON object"),
        (http(b"", status="302 Found", head="Location: /login\r\n"), "redirect"),
        (endless(LONG, b"x" * (1 << 20)), "more than"),
        (http(b"<html>"), "JSON"),
        (b"", "no engine answers"),
    ],
)
def test_a_probe_names_what_answered(answer, words):
    with raw_server(answer) as server, pytest.raises(ConfigError, match=words) as caught:
        probe(server.url, api_key=None)
    assert server.url in str(caught.value)


def test_a_probe_has_a_time_limit(monkeypatch):
    monkeypatch.setattr("furlong.inference.sglang.client.PROBE_S", 0.1)
    with (
        raw_server(endless(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n", 0.01)) as server,
        pytest.raises(ConfigError, match=r"0\.1 s"),
    ):
        probe(server.url, api_key=None)


@pytest.mark.parametrize(
    "value",
    [
        {"tp_size": "two"}, {"tp_size": -1}, {"tp_size": 1e300}, {"tp_size": [1]}, {"dp_size": 1 << 40},
        {"context_length": "long"}, {"context_length": -5}, {"context_length": 2.5}, {"dtype": 5}, {"device": ["cuda"]},
        {"version": None}, {"version": {}}, {"tokenizer_worker_num": "x"}, {"speculative_algorithm": 4},
        {"kv_cache_dtype": 8},
    ],
)  # fmt: skip
def test_settings_of_a_server_are_typed(value):
    with pytest.raises(EngineError, match=rf"GET http://e/server_info answered {next(iter(value))}"):
        ServerInfo.read(value, "GET http://e/server_info")


@pytest.mark.parametrize(
    ("body", "call"),
    [
        (b"[]", "served_version"), (b"{}", "served_version"), (b'{"weight_version": []}', "served_version"),
        (b'{"model_type": 4}', "model_type"), (b'{"ranks": 4}', "all_checksums"), (b'{"ranks": [4]}', "all_checksums"),
        (b'{"ranks": [{"checksums": []}]}', "all_checksums"), (b'{"ranks": [{}]}', "all_checksums"),
        (b'{"ranks": [{"checksums": {"a": 5}}]}', "all_checksums"),
        (b'{"ranks": [{"checksums": {}, "parallelism_info": []}]}', "all_checksums"),
        (b'{"ranks": [{"checksums": {}, "parallelism_info": {"tp_rank": "x"}}]}', "all_checksums"),
        (b'{"ranks": [{"checksums": {}}]}', "all_checksums"),
        (b'"abc"', "rows"), (b'[[1.0], [2.0, 3.0]]', "rows"), (b'{"a": 1}', "rows"), (b'[["x"]]', "rows"),
    ],
)  # fmt: skip
def test_reports_on_weights_are_typed(body, call):
    async def reports():
        server = SglangServer(raw.url, ServerInfo.read({}))
        try:
            if call == "rows":
                return await server.first_rows("a.weight", 2)
            return await getattr(server, call)()
        finally:
            await server.close()

    with raw_server(http(body)) as raw, pytest.raises(EngineError, match="answered") as caught:
        asyncio.run(reports())
    assert raw.url in str(caught.value)


@pytest.mark.parametrize("body", [b"[]", b'{"loads": 1}', b'{"loads": [{"num_running_reqs": -3}]}'])
def test_a_load_that_is_not_a_number_is_unknown(body):
    async def load():
        server = SglangServer(raw.url, ServerInfo.read({}))
        try:
            return await num_requests(server)
        finally:
            await server.close()

    with raw_server(http(body)) as raw:
        assert asyncio.run(load()) is None


class Letters:
    """A tokenizer whose id n is the n-th letter, 0 a space, 30 half a character, 31 is special, 32 unknown."""

    def decode(self, token_ids, *, skip_special_tokens=False):
        other = {0: " ", 30: "\ufffd", 31: "" if skip_special_tokens else "<end>", 32: ""}
        return "".join(other.get(token, chr(96 + token)) for token in token_ids)


def completion(answer, *, vocab_size=None, **params):
    request = InFlightRequest("r1", None, [1], SamplingParams(max_new_tokens=9, **params))
    request.server = SimpleNamespace(url="http://e")
    reader = AnswerReader(Letters(), None, vocab_size)
    return reader.completion(request, answer, newest=None, seconds=0.0)


@pytest.mark.parametrize(
    ("text", "reason", "stop"),
    [
        ("ab cd", "length", ()),
        ("abcd", "length", ()),  # white space may differ
        (" ab cd\ufffd", "length", ()),
        ("ab", "stop", (" c",)),  # cut at a stop string
        ("ab c", "stop", ()),  # cut at a stop token
        ("a", "abort", ()),
        ("", "length", ()),
    ],
)
def test_the_text_of_an_answer_belongs_to_its_tokens(text, reason, stop):
    answer = {**reply([1, 2, 0, 3, 4], reason=reason), "text": text}
    assert completion(answer, stop=stop).text == (text or "ab cd")


@pytest.mark.parametrize(
    ("text", "reason", "stop"),
    [
        ("hello", "length", ()),
        ("ab cde", "length", ()),
        ("ab", "length", ()),
        ("ab", "stop", ("x",)),
        ("b cd", "abort", ()),
        ("AB CD", "stop", ()),
    ],
)
def test_text_of_other_tokens_is_an_error(text, reason, stop):
    with pytest.raises(EngineError, match=r"POST http://e/generate answered text that its 5 tokens do not have"):
        completion({**reply([1, 2, 0, 3, 4], reason=reason), "text": text}, stop=stop)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("text", ["ab<end>c<end>", "abc", "ab<end>c", "a b c <end>"])
def test_special_tokens_may_be_shown_or_not(text, skip):
    answer = {**reply([1, 2, 31, 3, 31], reason="stop"), "text": text}
    assert completion(answer, skip_special_tokens=skip).text == text


@pytest.mark.parametrize("text", ["ab", "a b"])  # nothing, and the first id
def test_servers_show_ids_that_the_tokenizer_does_not_have_as_the_first_one(text):
    assert completion({**reply([1, 32, 2]), "text": text}).text == text
    with pytest.raises(EngineError, match="text that its 3 tokens do not have"):
        completion({**reply([1, 32, 2]), "text": "a!b"})


def test_the_letters_beside_special_tokens_are_compared():
    with pytest.raises(EngineError, match="from character 1 without spaces"):
        completion({**reply([1, 2, 31]), "text": "ac<end>"})


def test_incomplete_characters_are_not_compared():
    assert completion({**reply([1, 30]), "text": "a"}).text == "a"


def test_the_answer_to_another_request_is_an_error():
    assert completion(reply([1], id="r1")).tokens == [1]
    with pytest.raises(EngineError, match="the answer for r1"):
        completion(reply([1], id="r2"))


def test_ids_beyond_the_models_are_an_error():
    assert completion(reply([26]), vocab_size=27).tokens == [26]
    with pytest.raises(EngineError, match="0 to 26"):
        completion(reply([27]), vocab_size=27)


@pytest.mark.parametrize("rows", [[[-0.5, 1, None]] * 10, [[0.5, 1, None]], [[-0.5, -1, None]], [[-0.5]], [3]])
def test_a_stream_is_checked_while_it_arrives(rows):
    request = InFlightRequest("r1", None, [1], SamplingParams(max_new_tokens=9), stream=TokenStream())
    request.server = SimpleNamespace(url="http://e")
    reader = AnswerReader(Letters(), None, None)
    reader.put_progress(request, {"meta_info": {"output_token_logprobs": [[-0.5, 2, None]]}})
    with pytest.raises(EngineError, match="POST http://e/generate"):
        reader.put_progress(request, {"meta_info": {"output_token_logprobs": [[-0.5, 2, None], *rows]}})
    assert request.stream is not None
    assert request.stream.tokens == [2]


ODD = (
    None, True, 0, -1, 1 << 63, 10**30, 1.5, float("nan"), float("inf"), "", "1", str(1 << 63), "\ud800", [], [[]],
    [None], [1], [[1, 2]], {}, {"a": [1]}, [[-0.5, 1, None]] * 9,
)  # fmt: skip


def places_in(value, path=()):
    """Yield the path of every value within a JSON value."""
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places_in(value[key], (*path, key))


def replaced(value, path, new):
    """Return a JSON value with another one at `path`."""
    if not path:
        return new
    copied = value.copy()
    copied[path[0]] = replaced(copied[path[0]], path[1:], new)
    return copied


def test_a_value_of_any_kind_at_any_place_is_an_error_with_the_address_or_harmless():
    answer = {**reply([1, 2, 3], version="3", cached_tokens=1, token_versions=[3, 3, 3]), "text": "abc"}
    num_refused = 0
    for path in places_in(answer):
        for value in ODD:
            found = refused = None
            try:
                found = completion(replaced(answer, path, value))
            except EngineError as error:
                refused = str(error)
                num_refused += 1
            assert found is not None or "http://e" in (refused or "")
            if found is not None:
                assert found.tokens == [1, 2, 3], (path, value)
                assert [log_prob <= 0 for log_prob in found.log_probs] == [True] * 3, (path, value)
                assert all(type(each) is int and each < 1 << 63 for each in found.versions), (path, value)
    assert num_refused > 300
