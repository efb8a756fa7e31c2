"""Streams of SGLang: events with all tokens so far or with new ones only, in any pieces, and errors."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from furlong.errors import EngineError, UnreachableError
from furlong.inference.sglang.event_reader import EventReader
from furlong.inference.sglang.http_client import ForbiddenAnswerError


def event(tokens: list[int], reason: str | None = None) -> bytes:
    rows = [[-0.5, token, None] for token in tokens]
    meta = {"id": "r", "finish_reason": reason and {"type": reason}, "output_token_logprobs": rows}
    return b"data: " + orjson.dumps({"text": "x" * len(tokens), "output_ids": tokens, "meta_info": meta})


def reader(seen: list[Any], *, is_incremental: bool, limit_bytes: int = 1 << 20) -> EventReader:
    def on_event(each: dict[str, Any]) -> None:
        seen.append(list(each["output_ids"]))

    return EventReader("POST x", on_event, url="x", limit_bytes=limit_bytes, is_incremental=is_incremental)


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
    assert (len(last["text"]), last["meta_info"]["finish_reason"]) == (4, {"type": "stop"})
    assert seen == ([[1], [1, 2, 3], [1, 2, 3, 4]] if size < 100 else [[1, 2, 3, 4]])


def test_error_events_and_empty_streams_raise():
    with pytest.raises(UnreachableError):
        reader([], is_incremental=False).last()
    for code, kind in ((503, UnreachableError), (400, EngineError)):
        error = b"data: " + orjson.dumps({"error": {"message": "no room", "code": code}}) + b"\n\n"
        with pytest.raises(kind, match="no room"):
            reader([], is_incremental=False).feed(error)
    with pytest.raises(ForbiddenAnswerError):
        reader([], is_incremental=False, limit_bytes=20).feed(event([1, 2, 3]))
