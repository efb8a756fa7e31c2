"""OpenAI's completions and chat completions over the embedded engine, streaming included."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from furlong.errors import EngineError
from furlong.inference.embedded.engine import EmbeddedEngine
from furlong.inference.embedded.request import Finished, RequestError
from furlong.inference.server.generate_api import (
    GenerateRequest,
    completed,
    decoded,
    encode,
    event_stream,
    json_response,
    num_samples,
    progress,
    reject_unsupported,
    sample_requests,
    sampling_params,
    sse,
)

UNSUPPORTED: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": None,
    "top_logprobs": 0,
    "response_format": {"type": "text"},
    "suffix": None,
    "echo": False,
    "best_of": 1,
}
SHARED = ("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens")


async def chat_completions(http: HttpRequest, engine: EmbeddedEngine, body: Mapping[str, Any], model: str) -> Response:
    """Answer POST /v1/chat/completions."""
    messages = _messages(body.get("messages"))
    tokenizer: Any = engine.tokenizer
    if getattr(tokenizer, "chat_template", None) is None:
        raise RequestError("the tokenizer has no chat template; use /v1/completions or /generate")
    try:
        ids = tokenizer.apply_chat_template(
            messages,
            tools=body.get("tools"),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **(body.get("chat_template_kwargs") or {}),
        )
    except Exception as error:
        raise RequestError(f"the chat template rejects these messages ({type(error).__name__}): {error}") from error
    return await _answer(http, engine, body, [list(ids)], model, is_chat=True)


def _messages(value: Any) -> list[dict[str, Any]]:
    """Validate the messages and join the text parts of each. Raises RequestError for images and audio."""
    if not isinstance(value, list) or not value:
        raise RequestError("messages must be a list with at least one message")
    return [_message(i, message) for i, message in enumerate(cast("list[Any]", value))]


def _message(i: int, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise RequestError(f"messages[{i}] must be an object with role and content")
    message = cast("dict[str, Any]", value)
    content: Any = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    if not isinstance(content, list) or not content:
        raise RequestError(f"messages[{i}].content is {content!r}, must be a string or a list of parts of type text")
    texts: list[str] = []
    for part in cast("list[Any]", content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise RequestError(f"messages[{i}].content has a part of type {kind!r}; only text is supported")
        texts.append(part["text"])
    return {**message, "content": "".join(texts)}


async def completions(http: HttpRequest, engine: EmbeddedEngine, body: Mapping[str, Any], model: str) -> Response:
    """Answer POST /v1/completions; `prompt` is a string, token ids, or a list of either."""
    prompt = body.get("prompt")
    rows: list[Any] = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    if not all(isinstance(r, str) or (isinstance(r, list) and all(type(t) is int for t in r)) for r in rows):
        raise RequestError("prompt must be a string, a list of token ids, or a list of those")
    ids = [encode(engine, row) if isinstance(row, str) else row for row in rows]
    return await _answer(http, engine, body, ids, model, is_chat=False)


def _requests(body: Mapping[str, Any], rows: list[list[int]], name: str, *, is_chat: bool) -> list[GenerateRequest]:
    reject_unsupported(body, UNSUPPORTED)
    fields = {key: body[key] for key in SHARED if body.get(key) is not None}
    fields["sampling_seed"] = body.get("seed")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    fields["max_new_tokens"] = limit if limit is not None else (128 if is_chat else 16)
    n = num_samples("n", body.get("n"))
    rids = [f"{name}-{i}" for i in range(len(rows) * n)]
    return sample_requests(rids, rows, [sampling_params(fields)] * len(rows))


async def _answer(
    http: HttpRequest,
    engine: EmbeddedEngine,
    body: Mapping[str, Any],
    rows: list[list[int]],
    model: str,
    *,
    is_chat: bool,
) -> Response:
    name = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
    requests = _requests(body, rows, name, is_chat=is_chat)
    kind = "chat.completion" if is_chat else "text_completion"
    head = {"id": name, "object": kind, "created": int(time.time()), "model": model}
    if body.get("stream"):
        if is_chat:
            head["object"] = "chat.completion.chunk"
        usage = bool((body.get("stream_options") or {}).get("include_usage"))
        events = _stream(engine, requests, head, is_chat=is_chat, with_usage=usage)
        return event_stream(engine, requests, events)
    results = await completed(http, engine, requests)
    with_log_probs = body.get("logprobs") not in (None, False)
    choices = [
        _choice(engine, i, finished, is_chat=is_chat, with_log_probs=with_log_probs)
        for i, finished in enumerate(results)
    ]
    generated = sum(len(finished.completion.tokens) for finished in results)
    return json_response({**head, "choices": choices, "usage": _usage(rows, generated)})


def _usage(rows: list[list[int]], generated: int) -> dict[str, int]:
    prompt = sum(map(len, rows))
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def _choice(
    engine: EmbeddedEngine, index: int, finished: Finished, *, is_chat: bool, with_log_probs: bool
) -> dict[str, Any]:
    completion = finished.completion
    choice: dict[str, Any] = {"index": index, "finish_reason": completion.finish_reason, "logprobs": None}
    if with_log_probs:
        texts = [decoded(engine, [token], skip_special_tokens=False) for token in completion.tokens]
        if is_chat:
            content = [
                {"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, log_prob in zip(texts, completion.log_probs, strict=True)
            ]
            choice["logprobs"] = {"content": content}
        else:
            choice["logprobs"] = {"tokens": texts, "token_logprobs": completion.log_probs}
    if is_chat:
        return {**choice, "message": {"role": "assistant", "content": completion.text}}
    return {**choice, "text": completion.text}


async def _stream(
    engine: EmbeddedEngine, requests: list[GenerateRequest], head: Mapping[str, Any], *, is_chat: bool, with_usage: bool
) -> AsyncIterator[bytes]:
    """Text deltas. An incomplete character, or a possible start of a stop string, is held back."""
    sent = [0] * len(requests)
    generated = 0

    def chunk(index: int, text: str, reason: str | None, *, first: bool) -> bytes:
        body: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
        if is_chat:
            body["delta"] = ({"role": "assistant"} if first else {}) | ({"content": text} if text else {})
        else:
            body["text"] = text
        return sse({**head, "choices": [body]})

    if is_chat:
        for index in range(len(requests)):
            yield chunk(index, "", None, first=True)
    async for index, so_far, finished in progress(engine, requests):
        if isinstance(finished, EngineError):
            yield sse({"error": {"message": str(finished), "type": "server_error", "code": 500}})
            continue
        params = requests[index].params
        if finished is not None:
            generated += len(finished.completion.tokens)
            text = finished.completion.text
            yield chunk(index, text[sent[index] :], finished.completion.finish_reason, first=False)
            continue
        text = decoded(engine, so_far.tokens, skip_special_tokens=params.skip_special_tokens)
        num_held = max((len(stop) - 1 for stop in params.stop), default=0)
        text = text[: len(text) - num_held].rstrip("\ufffd")
        if len(text) > sent[index]:
            yield chunk(index, text[sent[index] :], None, first=False)
            sent[index] = len(text)
    if with_usage:
        rows = {id(request.ids): request.ids for request in requests}
        yield sse({**head, "choices": [], "usage": _usage(list(rows.values()), generated)})
    yield b"data: [DONE]\n\n"
