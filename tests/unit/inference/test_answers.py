"""Answers of servers: cut, redirected or of another form, completions, and streamed events."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import orjson
import pytest

from furlong.core.routing import RoutingShape, text_from_routes
from furlong.core.token_stream import TokenStream
from furlong.errors import ConfigError, EngineError, EngineTimeoutError, UnreachableError
from furlong.inference.sglang.answers import REASON_CHARS, AnswerReader, EventReader, reason_in, streamed_tokens
from furlong.inference.sglang.server import ServerInfo, SglangServer, probe
from furlong.interfaces import SamplingParams
from raw_server import chunks, endless, http, raw_server
from served_engine import reply

LONG = b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"
INFO = ServerInfo.read({})


def ask(server, *calls, timeout_s=20.0):
    """The answers to requests of one client; one to /path without `calls`."""

    async def body():
        client = SglangServer(server.url, INFO)
        try:
            if not calls:
                return await client.ask("/path", {"a": 1}, timeout_s=timeout_s)
            return [await call(client) for call in calls]
        finally:
            await client.close()

    return asyncio.run(body())


@pytest.mark.parametrize(
    "answer",
    [b"", b"\x16\x03\x01\x02\x00\x01", b"HTTP/1.1 200 OK\r\n", http(b"{}", length=20), chunks(b"{}", end=b"5\r\nab")],
    ids=["nothing", "TLS", "half a head", "half a body", "half a chunk"],
)
def test_an_answer_that_is_cut_or_not_http_counts_as_none(answer):
    with raw_server(answer) as server, pytest.raises(UnreachableError) as caught:
        ask(server)
    assert f"POST {server.url}/path" in str(caught.value)
    assert caught.value.url == server.url


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (http(b"{}", status="307 Temporary Redirect", head="Location: http://me:secret@other/\r\n"), "answered 307"),
        (http("é".encode("latin-1")), "JSON in UTF-8"),
        (http(b'{"a": 1}{"a": 1}'), "JSON in UTF-8"),
        (http(b"<html><title>Login</title></html>"), "JSON in UTF-8"),
        (http(b"{}", status="206 Partial Content"), "answered 206"),
        (http(b"<title>Login\x1b[2J</title>", status="403 Forbidden"), "a web page"),
        (http(b"", status="401 Unauthorized"), "--sglang-api-key"),
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


def test_the_reason_is_found_in_every_form_and_shortened():
    for content, words in (
        (b'{"error": {"message": "a"}}', "a"), (b'{"message": "b"}', "b"), (b'{"detail": "c"}', "c"), (b"oops", "oops")
    ):  # fmt: skip
        assert reason_in(content) == words
    long = b"x" * 60_000
    for content in (long, b'{"message": "%s"}' % long, b'{"error": ["%s"]}' % long):
        assert len(reason_in(content)) < 2 * REASON_CHARS


def test_an_answer_that_comes_too_slowly_is_late():
    with raw_server(endless(LONG, b" ", 0.01)) as server, pytest.raises(EngineTimeoutError, match=r"within 0\.1 s"):
        ask(server, timeout_s=0.1)


def test_connections_are_used_again():
    with raw_server(http(b"{}"), closes=False) as server:
        assert ask(server, *[lambda client: client.ask("/path", {})] * 3) == [{}, {}, {}]
        assert server.num_connections == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (http(b"[]"), "expected a JSON object"),
        (http(b"", status="302 Found", head="Location: /login\r\n"), "answered 302"),
        (http(b"<html>"), "JSON"),
        (b"", "no engine answers"),
    ],
)
def test_a_probe_names_what_answered(answer, words):
    with raw_server(answer) as server, pytest.raises(ConfigError, match=words) as caught:
        probe(server.url, api_key=None)
    assert server.url in str(caught.value)


def test_a_probe_has_a_time_limit(monkeypatch):
    monkeypatch.setattr("furlong.inference.sglang.server.PROBE_S", 0.1)
    with raw_server(endless(LONG, b" ", 0.01)) as server, pytest.raises(ConfigError, match=r"0\.1 s"):
        probe(server.url, api_key=None)


def test_settings_and_reports_of_another_form_are_errors_with_the_address():
    for value in ({"tp_size": "two"}, {"tp_size": [1]}, {"context_length": "long"}, {"device": ["cuda"]}):
        with pytest.raises(EngineError, match=r"GET http://e/server_info answered"):
            ServerInfo.read(value, "GET http://e/server_info")
    for body, call in (
        (b"[]", SglangServer.served_version), (b"{}", SglangServer.served_version),
        (b'{"ranks": [4]}', SglangServer.all_checksums), (b'{"ranks": [{}]}', SglangServer.all_checksums),
        (b'[[1.0], [2.0, 3.0]]', lambda server: server.first_rows("a.weight", 2)),
    ):  # fmt: skip
        with raw_server(http(body)) as raw, pytest.raises(EngineError, match="answered") as caught:
            ask(raw, call)
        assert raw.url in str(caught.value)
    with raw_server(http(b'{"loads": 1}')) as raw:
        assert ask(raw, lambda server: server.num_requests(1)) == [None]


def completion(answer, *, prompt_len=1, version=None, newest=None, routing=None, **params):
    return AnswerReader(None, routing).completion(
        answer, where="POST http://e/generate", prompt_len=prompt_len, version=version, newest=newest,
        params=SamplingParams(max_new_tokens=9, **params),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"text": "a"}, "without 'meta_info'"),
        ("<html>a proxy's page</html>", "<html>a proxy's page"),
        ({"error": {"message": "out of memory"}}, "out of memory"),
        (None, "something else"),
        (reply([4], output_token_logprobs=[[None, 4, None]]), "log-prob that is not finite"),
        (reply([4], output_token_logprobs=[[-1.0, 5, None]]), "answered 1 tokens"),
        (reply([4], output_token_logprobs=None), "log-probs of 0"),
        (reply([4], reason=["stop"], output_token_logprobs=7), "something else"),
    ],
)
def test_an_unusable_answer_is_an_error(answer, words):
    with pytest.raises(EngineError, match=words) as caught:
        completion(answer)
    assert "POST http://e/generate" in str(caught.value)


def test_tokens_have_the_version_that_the_server_had_unless_it_reports_one_for_each():
    assert completion(reply([4, 5], version="4"), version=3, newest=4).versions == [3, 3]
    assert completion(reply([4, 5], version="4", token_versions=[3, 4]), version=3, newest=4).versions == [3, 4]
    assert completion(reply([4, 5])).versions == [-1, -1]  # "default" is not a version number
    with pytest.raises(EngineError, match=r"'default', but the server was given 3 \.\. 3"):
        completion(reply([4]), version=3, newest=3)


ROUTES = np.tile(np.array([1, 3], np.int16), (2, 2, 1))  # of two of three tokens, in two layers


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "--enable-return-routed-experts"),
        (text_from_routes(ROUTES[:1]), "of 1 tokens; expected 2"),
        ("***", "base64"),
        (text_from_routes(ROUTES[:, :1][:1]), "2 layers x"),
    ],
)
def test_missing_routed_experts_are_an_error(given, words):
    asked = {"routing": RoutingShape(2, 2, 4), "return_routed_experts": True}
    done = completion(reply([4, 5], routed_experts=text_from_routes(ROUTES)), **asked)
    np.testing.assert_array_equal(done.routed_experts, ROUTES)
    with pytest.raises(EngineError, match=words):
        completion(reply([4, 5], routed_experts=given), **asked)


def event(tokens: list[int], reason: str | None = None) -> bytes:
    rows = [[-0.5, token, None] for token in tokens]
    meta = {"id": "r", "finish_reason": reason and {"type": reason}, "output_token_logprobs": rows}
    return b"data: " + orjson.dumps({"text": "x" * len(tokens), "output_ids": tokens, "meta_info": meta})


def reader(seen: list[Any], *, is_incremental: bool) -> EventReader:
    return EventReader("POST x", lambda e: seen.append(e["output_ids"][:]), url="x", is_incremental=is_incremental)


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("is_incremental", [False, True])
def test_the_last_event_is_the_whole_answer_in_any_pieces(is_incremental, size):
    parts = [[1], [2, 3], [4]] if is_incremental else [[1], [1, 2, 3], [1, 2, 3, 4]]
    stream = b"\n\n".join([event(parts[0]), event(parts[1]), event(parts[2], "stop"), b"data: [DONE]", b""])
    seen: list[Any] = []
    events = reader(seen, is_incremental=is_incremental)
    for start in range(0, len(stream), size):
        events.feed(stream[start : start + size])
    last = events.last()
    assert last["output_ids"] == [row[1] for row in last["meta_info"]["output_token_logprobs"]] == [1, 2, 3, 4]
    assert streamed_tokens(last, 2) == ([3, 4], [-0.5, -0.5])
    assert (len(last["text"]), last["meta_info"]["finish_reason"]) == (4, {"type": "stop"})
    assert seen == ([[1], [1, 2, 3], [1, 2, 3, 4]] if size < 100 else [[1, 2, 3, 4]])


def test_error_events_and_empty_streams_raise():
    with pytest.raises(UnreachableError):
        reader([], is_incremental=False).last()
    for code, kind in ((503, UnreachableError), (400, EngineError)):
        error = b"data: " + orjson.dumps({"error": {"message": "no room", "code": code}}) + b"\n\n"
        with pytest.raises(kind, match="no room"):
            reader([], is_incremental=False).feed(error)


def test_tokens_that_do_not_continue_a_stream_are_an_error():
    stream = TokenStream()
    stream.put(0, [1, 2], [-0.5, -0.5])
    with pytest.raises(EngineError, match="do not continue"):
        stream.put(0, [1, 3], [-0.5, -0.5])
