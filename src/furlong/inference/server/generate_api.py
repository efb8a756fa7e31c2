"""SGLang's `POST /generate`: parsing of requests, replies and server-sent events.

Unsupported fields that would change the result are rejected by name; informational fields are ignored.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from furlong.core.routing import text_from_routes
from furlong.errors import EngineError
from furlong.inference.embedded.engine import EmbeddedEngine
from furlong.inference.embedded.request import Finished, Progress, RequestError
from furlong.interfaces import SamplingParams

# Fields that the engine does not support; each must be absent or have this value.
UNSUPPORTED_FIELDS: dict[str, Any] = {
    "input_embeds": None,
    "image_data": None,
    "video_data": None,
    "audio_data": None,
    "lora_path": None,
    "custom_logit_processor": None,
    "session_params": None,
    "top_logprobs_num": 0,
    "token_ids_logprob": None,
    "return_hidden_states": False,
    "return_sampling_mask": False,
}
UNSUPPORTED_SAMPLING: dict[str, Any] = {
    "stop_regex": None,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "logit_bias": None,
}
MAX_SAMPLES = 1024  # of one prompt in one request
IGNORED_SAMPLING = {"spaces_between_special_tokens", "custom_params", "stream_interval", "n"}


@dataclass(frozen=True)
class GenerateRequest:
    """One completion to generate. `routes_from`: tokens at the start that the routed experts leave out."""

    rid: str
    ids: list[int]
    params: SamplingParams
    routes_from: int = 0


def reject_unsupported(fields: Mapping[str, Any], unsupported: Mapping[str, Any]) -> None:
    """Raise RequestError naming every unsupported field that is set."""
    names = [name for name, off in unsupported.items() if fields.get(name) not in (None, off, [], "")]
    if names:
        raise RequestError(f"not supported by the embedded engine: {', '.join(names)}; remove them, or use SGLang")


def sampling_params(fields: Mapping[str, Any]) -> SamplingParams:
    """Convert SGLang's sampling parameters. Raises RequestError for unknown, unsupported or ill-typed ones."""
    reject_unsupported(fields, UNSUPPORTED_SAMPLING)
    known = {f.name for f in dataclasses.fields(SamplingParams) if f.name != "return_routed_experts"}
    unknown = sorted(set(fields) - set(known) - set(UNSUPPORTED_SAMPLING) - IGNORED_SAMPLING)
    if unknown:
        raise RequestError(f"sampling_params has unknown fields {unknown}; known are {sorted(known)}")
    values = {name: value for name, value in fields.items() if name in known and value is not None}
    values.setdefault("no_stop_trim", False)  # SGLang's default
    for name, value in values.items():
        default = getattr(SamplingParams(), name)
        if name == "stop":
            values[name] = _tuple_of(name, [value] if isinstance(value, str) else value, str)
        elif name == "stop_token_ids":
            values[name] = _tuple_of(name, value, int)
        elif isinstance(default, bool):
            _expect(name, value, isinstance(value, bool), "true or false")
        elif isinstance(default, float):
            _expect(name, value, isinstance(value, (int, float)) and not isinstance(value, bool), "a number")
        else:
            _expect(name, value, isinstance(value, int) and not isinstance(value, bool), "an integer")
    return SamplingParams(**values)


def _expect(name: str, value: Any, is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise RequestError(f"sampling_params.{name} is {value!r}, must be {expected}")


def _tuple_of(name: str, value: Any, kind: type) -> tuple[Any, ...]:
    _expect(name, value, isinstance(value, list) and all(type(v) is kind for v in value), f"a list of {kind.__name__}")
    return tuple(value)


def requests_from(body: Mapping[str, Any], engine: EmbeddedEngine) -> tuple[list[GenerateRequest], bool]:
    """Parse a body into the completions to generate; also returns whether the reply is a list.

    The reply to a list of prompts, or to `n` above 1, is a list in which the samples of one prompt are adjacent.
    """
    reject_unsupported(body, UNSUPPORTED_FIELDS)
    if (body.get("logprob_start_len") or -1) >= 0 and body.get("return_logprob"):
        raise RequestError("logprob_start_len >= 0 (log-probs of the prompt) is not supported; leave it at -1")
    rows, is_list = _token_rows(body, engine)
    params = body.get("sampling_params") or {}
    per_row = params if isinstance(params, list) else [params] * len(rows)
    if len(per_row) != len(rows) or not all(isinstance(p, dict) for p in per_row):
        raise RequestError(f"sampling_params must be one object, or a list of {len(rows)}, one for each prompt")
    counts = {num_samples("sampling_params.n", p.get("n")) for p in per_row}
    if len(counts) != 1:
        raise RequestError(f"sampling_params.n is {sorted(counts)}; it must be equal for all prompts")
    n = counts.pop()
    rids = _rids(body.get("rid"), len(rows), n)
    is_routed = body.get("return_routed_experts") is True
    skipped = body.get("routed_experts_start_len") or 0
    if type(skipped) is not int or skipped < 0:
        raise RequestError(f"routed_experts_start_len is {skipped!r}, must be an integer >= 0")
    parsed = [dataclasses.replace(sampling_params(fields), return_routed_experts=is_routed) for fields in per_row]
    return sample_requests(rids, rows, parsed, routes_from=skipped), is_list or n > 1


def sample_requests(
    rids: list[str], rows: list[list[int]], params: list[SamplingParams], *, routes_from: int = 0
) -> list[GenerateRequest]:
    """Return an equal number of requests for each prompt, one per id. Samples of a prompt have consecutive seeds."""
    requests: list[GenerateRequest] = []
    for row, base in zip(rows, params, strict=True):
        for sample in range(len(rids) // len(rows)):
            seed = None if base.sampling_seed is None else base.sampling_seed + sample
            sample_params = dataclasses.replace(base, sampling_seed=seed)
            requests.append(GenerateRequest(rids[len(requests)], row, sample_params, routes_from))
    return requests


def num_samples(name: str, value: Any) -> int:
    """Samples per prompt; 1 by default. Raises RequestError for anything but an integer up to `MAX_SAMPLES`."""
    if value is None:
        return 1
    if type(value) is not int or not 1 <= value <= MAX_SAMPLES:
        raise RequestError(f"{name} is {value!r}, must be an integer from 1 to {MAX_SAMPLES}")
    return value


def _token_rows(body: Mapping[str, Any], engine: EmbeddedEngine) -> tuple[list[list[int]], bool]:
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        raise RequestError("give either input_ids or text")
    if text is not None:
        is_list = isinstance(text, list)
        texts: list[Any] = text if is_list else [text]
        if not texts or not all(isinstance(t, str) for t in texts):
            raise RequestError("text must be a string or a list of strings")
        return [encode(engine, t) for t in texts], is_list
    is_list = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
    rows: list[Any] = list(ids) if isinstance(ids, list) and is_list else [ids]
    for row in rows:
        if not isinstance(row, list) or not all(type(t) is int for t in row):
            raise RequestError("input_ids must be a list of integers, or a list of such lists")
    return rows, is_list


def encode(engine: EmbeddedEngine, text: str) -> list[int]:
    """Tokenize `text`. Raises RequestError if the engine has no tokenizer."""
    tokenizer: Any = engine.tokenizer
    if tokenizer is None or not hasattr(tokenizer, "encode"):
        raise RequestError("the server has no tokenizer; send input_ids, or serve a folder that has tokenizer files")
    return list(tokenizer.encode(text))


def _rids(rid: Any, rows: int, n: int) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(rows * n)]
    names = rid if isinstance(rid, list) else [rid] if rows == 1 else [f"{rid}-{i}" for i in range(rows)]
    if len(names) != rows or not all(isinstance(name, str) for name in names):
        raise RequestError(f"rid must be a string, or a list of {rows} strings")
    return [name if n == 1 else f"{name}-{i}" for name in names for i in range(n)]


def finish_reason(finished: Finished) -> dict[str, Any]:
    """SGLang's finish_reason object."""
    completion = finished.completion
    match completion.finish_reason:
        case "stop":
            return {"type": "stop", "matched": finished.matched}
        case "length":
            return {"type": "length", "length": len(completion.tokens)}
        case _:
            return {"type": "abort", "message": "Aborted"}


def reply(request: GenerateRequest, finished: Finished, *, version: str, with_log_probs: bool) -> dict[str, Any]:
    """One element of /generate's reply."""
    completion = finished.completion
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": finish_reason(finished),
        "prompt_tokens": len(request.ids),
        "completion_tokens": len(completion.tokens),
        "cached_tokens": completion.cached_tokens,
        "weight_version": version,
        "token_versions": completion.versions,
        "num_retractions": finished.num_retractions,
        "e2e_latency": completion.latency_s,
    }
    if with_log_probs:
        meta["output_token_logprobs"] = token_log_probs(completion.tokens, completion.log_probs)
        meta["output_token_logprobs_length"] = len(completion.tokens)
    if completion.routed_experts is not None:
        meta["routed_experts"] = text_from_routes(completion.routed_experts[request.routes_from :])
    return {"text": completion.text, "output_ids": completion.tokens, "meta_info": meta}


def token_log_probs(tokens: list[int], log_probs: list[float]) -> list[list[Any]]:
    """SGLang's [log-prob, token id, text] triples."""
    return [[log_prob, token, None] for token, log_prob in zip(tokens, log_probs, strict=True)]


async def generate(http: HttpRequest, engine: EmbeddedEngine, body: Mapping[str, Any], version: str) -> Response:
    """Answer POST /generate."""
    requests, is_list = requests_from(body, engine)
    with_log_probs = bool(body.get("return_logprob"))
    if body.get("stream"):
        events = _stream(engine, requests, is_list=is_list, version=version, with_log_probs=with_log_probs)
        return event_stream(engine, requests, events)
    results = await completed(http, engine, requests)
    replies = [
        reply(request, finished, version=version, with_log_probs=with_log_probs)
        for request, finished in zip(requests, results, strict=True)
    ]
    return json_response(replies if is_list else replies[0])


async def _stream(
    engine: EmbeddedEngine, requests: list[GenerateRequest], *, is_list: bool, version: str, with_log_probs: bool
) -> AsyncIterator[bytes]:
    """Server-sent events; each has one completion so far, with its `index` if there are several."""
    async for index, so_far, finished in progress(engine, requests):
        if isinstance(finished, EngineError):
            event: dict[str, Any] = {"error": {"message": str(finished), "code": 500}}
        elif finished is not None:
            event = reply(requests[index], finished, version=version, with_log_probs=with_log_probs)
        else:
            meta: dict[str, Any] = {
                "id": requests[index].rid,
                "finish_reason": None,
                "prompt_tokens": len(requests[index].ids),
                "completion_tokens": len(so_far.tokens),
                "weight_version": version,
            }
            if with_log_probs:
                meta["output_token_logprobs"] = token_log_probs(so_far.tokens, so_far.log_probs)
            event = {"text": decoded(engine, so_far.tokens), "output_ids": so_far.tokens, "meta_info": meta}
        yield sse({"index": index, **event} if is_list else event)
    yield b"data: [DONE]\n\n"


def decoded(engine: EmbeddedEngine, tokens: list[int], *, skip_special_tokens: bool = True) -> str:
    """Text of tokens; empty without a tokenizer."""
    if engine.tokenizer is None:
        return ""
    return engine.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)


async def progress(
    engine: EmbeddedEngine, requests: list[GenerateRequest]
) -> AsyncIterator[tuple[int, Progress, Finished | EngineError | None]]:
    """Yield (index, tokens so far, result or error or None) as completions grow.

    Ends when every request has a result; a consumer that stops early aborts all of them.
    """
    queue: asyncio.Queue[tuple[int, Progress | Finished | EngineError]] = asyncio.Queue()

    async def submit(index: int, request: GenerateRequest) -> None:
        try:
            finished = await engine.submit(
                request.ids, request.params, rid=request.rid, report=lambda new: queue.put_nowait((index, new))
            )
        except EngineError as error:
            queue.put_nowait((index, error))
        else:
            queue.put_nowait((index, finished))

    tasks = [asyncio.create_task(submit(index, request)) for index, request in enumerate(requests)]
    so_far = [Progress([], [], 0) for _ in requests]
    num_open = len(requests)
    try:
        while num_open:
            index, item = await queue.get()
            if isinstance(item, Progress):
                old = so_far[index]
                so_far[index] = Progress(old.tokens + item.tokens, old.log_probs + item.log_probs, item.version)
                yield index, so_far[index], None
            else:
                num_open -= 1
                yield index, so_far[index], item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def completed(http: HttpRequest, engine: EmbeddedEngine, requests: list[GenerateRequest]) -> list[Finished]:
    """Generate all completions. If the client disconnects first, abort them."""
    task = asyncio.gather(*[engine.submit(r.ids, r.params, rid=r.rid) for r in requests])

    async def wait_for_disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    watcher = asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RequestError("the client disconnected")
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


def event_stream(
    engine: EmbeddedEngine, requests: list[GenerateRequest], events: AsyncIterator[bytes]
) -> StreamingResponse:
    """Reply with server-sent events, after all requests were checked."""
    for request in requests:
        engine.check(request.ids, request.params)
    return StreamingResponse(events, media_type="text/event-stream")


def sse(event: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(event) + b"\n\n"


class _OrjsonResponse(JSONResponse):
    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def json_response(content: Any, status_code: int = 200) -> Response:
    """A JSON reply; NaN becomes null."""
    return _OrjsonResponse(content, status_code=status_code)
