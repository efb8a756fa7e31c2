"""OpenAI's completions and chat completions over the embedded engine, streaming included."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from furlong.errors import EngineError
from furlong.inference.embedded.engine import EmbeddedEngine
from furlong.inference.embedded.request import Finished
from furlong.inference.request_error import RequestError
from furlong.inference.server import field_rules as rules
from furlong.inference.server.bodies import SMALL_BYTES, json_reply, off_loop
from furlong.inference.server.events import DONE, event_stream, sse
from furlong.inference.server.fields import quote
from furlong.inference.server.generate_api import (
    ServerContext,
    check_samples,
    completed,
    reject_unsupported,
    sample_requests,
    sampling_params,
)
from furlong.inference.server.generate_fields import check_rows, num_samples
from furlong.inference.server.limits import RequestGuard
from furlong.inference.server.streaming import (
    GenerateRequest,
    decoded,
    progress,
    text_deltas,
)
from furlong.interfaces import SamplingParams

UNSUPPORTED: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": None,
    "top_logprobs": 0,
    "response_format": {"type": "text"},
    "suffix": None,
    "echo": False,
    "best_of": 1,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "return_token_ids": False,
    "modalities": ["text"],
}
SHARED = ("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens")
_FIELDS: rules.Fields = {
    **rules.SAMPLING,
    "stop": rules.one_or_more_stops,
    "stop_token_ids": rules.stop_ids,
    "seed": rules.seed,
    "max_tokens": rules.whole(0, rules.MAX_INT32),
    "max_completion_tokens": rules.whole(0, rules.MAX_INT32),
    "n": rules.num_samples,
    "model": rules.text,
    "stream_options": rules.object_of({"include_usage": rules.flag, "include_obfuscation": rules.flag}),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "stream"), rules.flag),
    **dict.fromkeys(UNSUPPORTED, rules.anything),
    # Without an effect; sglang-router sends the last two, and there is no reasoning parser.
    **dict.fromkeys(("user", "service_tier", "safety_identifier", "prompt_cache_key"), rules.text),
    "metadata": rules.metadata,
    **dict.fromkeys(("store", "separate_reasoning", "stream_reasoning"), rules.flag),
}
CHAT_FIELDS: rules.Fields = {
    **_FIELDS,
    "logprobs": rules.flag,
    **dict.fromkeys(
        ("messages", "chat_template", "chat_template_kwargs"), rules.anything
    ),  # checked with their content
    "tools": rules.list_of(rules.an_object),
}
COMPLETION_FIELDS: rules.Fields = {
    **_FIELDS,
    "prompt": rules.anything,
    "logprobs": rules.either("true, false, 0 or 1; only the sampled token's is known", rules.flag, rules.whole(0, 1)),
}


async def chat_completions(http: HttpRequest, model: ServerContext, body: Mapping[str, Any]) -> Response:
    """Answer POST /v1/chat/completions."""
    _check_fields(body, model, num_prompts=1, is_chat=True)
    ids = await model.prompts.encode_chat(body)
    return await _answer(http, model, body, [ids], is_chat=True)


async def completions(http: HttpRequest, model: ServerContext, body: Mapping[str, Any]) -> Response:
    """Answer POST /v1/completions; `prompt` is a string, token ids, or a list of either."""
    prompt = body.get("prompt")
    rows: list[Any] = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    _check_fields(body, model, num_prompts=len(rows), is_chat=False)
    texts = {i: row for i, row in enumerate(rows) if isinstance(row, str)}
    others = [row for row in rows if not isinstance(row, str)]
    try:
        await off_loop(http.state.guard.body_bytes, check_rows, "prompt", others)
    except RequestError:
        raise RequestError("prompt must be a string, a list of token ids, or a list of those") from None
    encoded = await model.prompts.encode(list(texts.values())) if texts else []
    ids_of_texts = dict(zip(texts, encoded, strict=True))
    ids: list[Any] = [ids_of_texts.get(i, row) for i, row in enumerate(rows)]
    return await _answer(http, model, body, ids, is_chat=False)


def _check_fields(body: Mapping[str, Any], model: ServerContext, *, num_prompts: int, is_chat: bool) -> None:
    """Raise RequestError for invalid and unknown fields, before prompts are tokenized."""
    rules.check_fields(body, CHAT_FIELDS if is_chat else COMPLETION_FIELDS, allows_off=True)
    is_default = body.get("tool_choice") == "none" and not body.get("tools")
    reject_unsupported({**body, "tool_choice": None} if is_default else body, UNSUPPORTED)
    _check_model(body.get("model"), model.name)
    check_samples(num_prompts, num_samples("n", body.get("n")), model.limits)
    _params(body, is_chat=is_chat)


def _check_model(asked: Any, served: str) -> None:
    """Raise RequestError for a model that is not served; the last part of its path will do."""
    if asked not in (None, "", "default", served, PurePath(served).name):
        raise RequestError(f"model is {quote(asked)}, but this server has {quote(served)} only; use that name, or none")


def _usage_wanted(body: Mapping[str, Any]) -> bool:
    return bool((body.get("stream_options") or {}).get("include_usage"))


def _params(body: Mapping[str, Any], *, is_chat: bool) -> SamplingParams:
    fields = {key: body[key] for key in SHARED if body.get(key) is not None}
    fields["sampling_seed"] = body.get("seed")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    fields["max_new_tokens"] = limit if limit is not None else (128 if is_chat else 16)
    return sampling_params(fields)


def _requests(body: Mapping[str, Any], rows: list[list[int]], name: str, *, is_chat: bool) -> list[GenerateRequest]:
    n = num_samples("n", body.get("n"))
    rids = [f"{name}-{i}" for i in range(len(rows) * n)]
    return sample_requests(rids, rows, [_params(body, is_chat=is_chat)] * len(rows))


async def _answer(
    http: HttpRequest, model: ServerContext, body: Mapping[str, Any], rows: list[list[int]], *, is_chat: bool
) -> Response:
    name = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
    guard: RequestGuard = http.state.guard
    requests = _requests(body, rows, name, is_chat=is_chat)
    await off_loop(sum(map(len, rows)) * 8, model.check, requests)
    kind = "chat.completion" if is_chat else "text_completion"
    head = {"id": name, "object": kind, "created": int(time.time()), "model": model.name}
    if body.get("stream"):
        if is_chat:
            head["object"] = "chat.completion.chunk"
        chunks = _Chunks(head, is_chat=is_chat, with_usage=_usage_wanted(body))
        return event_stream(guard, _stream(model.engine, requests, chunks, guard))
    results = await completed(http, model.engine, requests)
    with_log_probs = body.get("logprobs") not in (None, False)

    generated = sum(len(finished.completion.tokens) for finished in results)
    return await json_reply(
        guard,
        list(enumerate(results)),
        lambda pair: _choice(model.engine, *pair, is_chat=is_chat, with_log_probs=with_log_probs),
        size=max(generated * 64, SMALL_BYTES + 1 if len(results) > 64 else 0),
        before=orjson.dumps(head)[:-1] + b',"choices":[',
        after=b'],"usage":' + orjson.dumps(_usage(rows, generated)) + b"}",
    )


def _usage(rows: Sequence[Sequence[int]], generated: int) -> dict[str, int]:
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


@dataclass(frozen=True)
class _Chunks:
    """The chunks of a stream. `head` is common to all of them."""

    head: Mapping[str, Any]
    is_chat: bool
    with_usage: bool

    def text(self, index: int, text: str, reason: str | None = None, *, is_first: bool = False) -> bytes:
        """A chunk with text of one completion."""
        body: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
        if self.is_chat:
            body["delta"] = ({"role": "assistant"} if is_first else {}) | ({"content": text} if text else {})
        else:
            body["text"] = text
        return sse({**self.head, "choices": [body]})


async def _stream(
    engine: EmbeddedEngine, requests: list[GenerateRequest], chunks: _Chunks, guard: RequestGuard
) -> AsyncIterator[bytes]:
    """Text deltas. An incomplete character, or a possible start of a stop string, is held back."""
    texts = [text_deltas(engine, request.params) for request in requests]
    generated = 0
    if chunks.is_chat:
        for index in range(len(requests)):
            yield chunks.text(index, "", is_first=True)
    async for index, so_far, finished in progress(engine, requests, guard):
        if isinstance(finished, EngineError):
            yield sse({"error": {"message": str(finished), "type": "server_error", "code": 500}})
        elif finished is not None:
            completion = finished.completion
            generated += len(completion.tokens)
            yield chunks.text(index, texts[index].rest(completion.text), completion.finish_reason)
        elif new := texts[index].delta(so_far.tokens):
            yield chunks.text(index, new)
    if chunks.with_usage:
        rows = {id(request.ids): request.ids for request in requests}
        yield sse({**chunks.head, "choices": [], "usage": _usage(list(rows.values()), generated)})
    yield DONE
