"""SGLang's `POST /generate`: parsing of requests, replies and server-sent events.

Unsupported fields that would change the result are rejected by name; informational fields are ignored.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from furlong.core.routing import text_from_routes
from furlong.core.text import abbreviate
from furlong.errors import EngineError
from furlong.inference.embedded.engine import EmbeddedEngine
from furlong.inference.embedded.request import Finished
from furlong.inference.request_error import RequestError
from furlong.inference.server import field_rules as rules
from furlong.inference.server.bodies import SMALL_BYTES, json_list, off_loop
from furlong.inference.server.chat_prompts import PromptEncoder
from furlong.inference.server.events import DONE, event_stream, sse
from furlong.inference.server.fields import boolean, check_name, integer, quote
from furlong.inference.server.generate_fields import check_rows, num_samples, prompts_of, token_log_probs
from furlong.inference.server.limits import RefusedError, RequestGuard, ServerLimits, flag_of
from furlong.inference.server.streaming import GenerateRequest, progress, text_deltas
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
SAMPLING_DEFAULTS = {
    f.name: getattr(SamplingParams(), f.name)
    for f in dataclasses.fields(SamplingParams)
    if f.name not in ("return_routed_experts", "prefix_key")
}
IGNORED_SAMPLING = {"spaces_between_special_tokens", "custom_params", "stream_interval", "n"}
# Fields that do not change the result.
WITHOUT_EFFECT: rules.Fields = {
    **dict.fromkeys(("session_id", "routing_key", "extra_key", "conversation_id"), rules.text),
    **dict.fromkeys(("log_metrics", "no_logs", "background", "return_text_in_logprobs"), rules.flag),
    "priority": rules.whole(-rules.MAX_INT32, rules.MAX_INT32),
    "custom_labels": rules.an_object,
}
GENERATE_FIELDS: rules.Fields = {
    **dict.fromkeys(("input_ids", "text", "rid", "return_logprob", "logprob_start_len"), rules.anything),  # see below
    "sampling_params": rules.either(
        "an object, or a list of objects", rules.an_object, rules.list_of(rules.an_object, least=1)
    ),
    **dict.fromkeys(("stream", "incremental_streaming_output", "return_routed_experts"), rules.flag),
    "routed_experts_start_len": rules.whole(0, rules.MAX_INT32),
    **dict.fromkeys(UNSUPPORTED_FIELDS, rules.anything),
    **WITHOUT_EFFECT,
}


@dataclass(frozen=True)
class ServerContext:
    """What endpoints answer requests with: the engine, the encoder of prompts, and the limits of requests.

    incremental_streaming: Whether streams of /generate contain only new tokens unless a request says otherwise.
    """

    engine: EmbeddedEngine
    name: str
    prompts: PromptEncoder
    limits: ServerLimits
    incremental_streaming: bool = False

    def check(self, requests: Sequence[GenerateRequest]) -> None:
        """Raise RequestError for an invalid request, and RefusedError (429) if the queue is full."""
        seen: set[tuple[int, int]] = set()
        for request in requests:  # samples of a prompt share its ids; their parameters differ in the seed
            if (key := (id(request.ids), request.params_id)) not in seen:
                seen.add(key)
                self.engine.check(request.ids, request.params)
        stats = self.engine.stats()
        if (open_samples := stats.running + stats.waiting) + len(requests) > self.limits.max_total_samples:
            raise RefusedError(
                f"{open_samples} samples are running or queued, and the limit of {flag_of('max_total_samples')} is "
                f"{self.limits.max_total_samples}; retry later",
                429,
            )


def reject_unsupported(fields: Mapping[str, Any], unsupported: Mapping[str, Any]) -> None:
    """Raise RequestError naming every unsupported field that is set."""
    names = [name for name, off in unsupported.items() if not _is_off(fields.get(name), off)]
    if names:
        raise RequestError(f"not supported by the embedded engine: {', '.join(names)}; remove them, or use SGLang")


def _is_off(value: Any, off: Any) -> bool:
    return value in (None, [], {}, "") or (value == off and isinstance(value, bool) == isinstance(off, bool))


def sampling_params(fields: Mapping[str, Any]) -> SamplingParams:
    """Convert SGLang's sampling parameters. Raises RequestError for unknown, unsupported or ill-typed ones."""
    reject_unsupported(fields, UNSUPPORTED_SAMPLING)
    unknown = sorted(set(fields) - SAMPLING_DEFAULTS.keys() - set(UNSUPPORTED_SAMPLING) - IGNORED_SAMPLING)
    if unknown:
        raise RequestError(
            f"sampling_params has unknown fields {quote(unknown)}; known are {sorted(SAMPLING_DEFAULTS)}"
        )
    values = {name: value for name, value in fields.items() if name in SAMPLING_DEFAULTS and value is not None}
    values.setdefault("no_stop_trim", False)  # SGLang's default
    for name, value in values.items():
        default = SAMPLING_DEFAULTS[name]
        if name == "stop":
            values[name] = _tuple_of(name, [value] if isinstance(value, str) else value, str, rules.MAX_STOPS)
            longest = max(map(len, values[name]), default=0)
            _expect(
                name, value, longest <= rules.MAX_STOP_CHARS, f"strings of at most {rules.MAX_STOP_CHARS} characters"
            )
        elif name == "stop_token_ids":
            values[name] = _tuple_of(name, value, int, rules.MAX_STOP_IDS)
        elif isinstance(default, bool):
            _expect(name, value, isinstance(value, bool), "true or false")
        elif isinstance(default, float):
            _expect(name, value, isinstance(value, (int, float)) and not isinstance(value, bool), "a number")
        else:
            _expect(name, value, isinstance(value, int) and not isinstance(value, bool), "an integer")
    return SamplingParams(**values)


def _expect(name: str, value: Any, is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise RequestError(f"sampling_params.{name} is {quote(value)}, must be {expected}")


def _tuple_of(name: str, value: Any, kind: type, limit: int) -> tuple[Any, ...]:
    _expect(name, value, isinstance(value, list), f"a list of {kind.__name__}")
    _expect(name, value, len(value) <= limit, f"at most {limit} values, not {len(value)}")
    _expect(name, value, all(type(v) is kind for v in value), f"a list of {kind.__name__}")
    return tuple(value)


async def requests_from(
    body: Mapping[str, Any], model: ServerContext, guard: RequestGuard
) -> tuple[list[GenerateRequest], bool]:
    """Parse a body into the completions to generate; also returns whether the reply is a list.

    The reply to a list of prompts, or to `n` above 1, is a list in which the samples of one prompt are adjacent.
    """
    reject_unsupported(body, UNSUPPORTED_FIELDS)
    rules.check_fields(body, GENERATE_FIELDS, allows_off=True)
    prompts, is_list = prompts_of(body)
    build = await off_loop(guard.body_bytes, parameters_of, body, len(prompts), model.limits)
    rows: list[list[int]]
    if body.get("text") is not None:
        rows = await model.prompts.encode(prompts)
    else:
        await off_loop(guard.body_bytes, check_rows, "input_ids", prompts)
        rows = prompts
    rids, parsed, skipped, n = build
    requests = sample_requests(rids, rows, parsed, routes_from=skipped)
    await off_loop(sum(map(len, rows)) * 8, model.check, requests)
    return requests, is_list or n > 1


def parameters_of(
    body: Mapping[str, Any], num_prompts: int, limits: ServerLimits
) -> tuple[list[str], list[SamplingParams], int, int]:
    """Return request ids, parameters for each prompt, tokens without routes, and samples per prompt."""
    start = body.get("logprob_start_len")
    if start is not None and type(start) is not int:
        raise RequestError(f"logprob_start_len is {quote(start)}, must be -1")
    if start is not None and start >= 0 and wants_log_probs(body):
        raise RequestError("logprob_start_len >= 0 (log-probs of the prompt) is not supported; leave it at -1")
    params = body.get("sampling_params") or {}
    per_row: list[Any] = params if isinstance(params, list) else [params] * num_prompts
    if len(per_row) != num_prompts or not all(isinstance(p, dict) for p in per_row):
        raise RequestError(f"sampling_params must be one object, or a list of {num_prompts}, one for each prompt")
    counts = {num_samples("sampling_params.n", p.get("n")) for p in per_row}
    if len(counts) != 1:
        raise RequestError(f"sampling_params.n is {abbreviate(sorted(counts))}; it must be equal for all prompts")
    n = counts.pop()
    check_samples(num_prompts, n, limits)
    rids = _rids(body.get("rid"), num_prompts, n)
    is_routed = boolean(body, "return_routed_experts")
    skipped = integer(body, "routed_experts_start_len", low=0, high=(1 << 31) - 1, default=0)
    parsed: dict[int, SamplingParams] = {}  # equal objects are parsed once
    for fields in per_row:
        if id(fields) not in parsed:
            parsed[id(fields)] = dataclasses.replace(sampling_params(fields), return_routed_experts=is_routed)
    return rids, [parsed[id(fields)] for fields in per_row], skipped, n


def wants_log_probs(body: Mapping[str, Any]) -> bool:
    """Return `return_logprob`: a boolean, or a list of equal ones."""
    value: Any = body.get("return_logprob")
    if isinstance(value, list) and value and all(flag is value[0] for flag in cast("list[Any]", value)):
        value = value[0]
    return boolean({"return_logprob": value}, "return_logprob")


def sample_requests(
    rids: list[str], rows: Sequence[Sequence[int]], params: list[SamplingParams], *, routes_from: int = 0
) -> list[GenerateRequest]:
    """Return an equal number of requests for each prompt, one per id. Samples of a prompt have consecutive seeds."""
    requests: list[GenerateRequest] = []
    for row, base in zip(rows, params, strict=True):
        ids = tuple(row)  # one copy for all samples
        for sample in range(len(rids) // len(rows)):
            seed = None if base.sampling_seed is None else base.sampling_seed + sample
            sample_params = dataclasses.replace(base, sampling_seed=seed)
            requests.append(GenerateRequest(rids[len(requests)], ids, sample_params, id(base), routes_from))
    return requests


def check_samples(num_prompts: int, n: int, limits: ServerLimits) -> None:
    """Raise RequestError for more samples than one request may have."""
    if num_prompts * n > limits.max_samples_per_request:
        raise RequestError(
            f"{num_prompts} prompts with n {n} are {num_prompts * n} samples, but the limit of "
            f"{flag_of('max_samples_per_request')} is {limits.max_samples_per_request}; send several requests"
        )


def _rids(rid: Any, rows: int, n: int) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(rows * n)]
    names: list[Any] = rid if isinstance(rid, list) else [rid] if rows == 1 else [f"{rid}-{i}" for i in range(rows)]
    if len(names) != rows or not isinstance(rid, str | list):
        raise RequestError(f"rid is {quote(rid)}, must be a string, or a list of {rows} strings")
    for name in names:
        check_name("rid", name)
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


async def generate(http: HttpRequest, model: ServerContext, body: Mapping[str, Any], version: str) -> Response:
    """Answer POST /generate."""
    guard: RequestGuard = http.state.guard
    with_log_probs, is_stream = wants_log_probs(body), boolean(body, "stream")
    is_incremental = boolean(body, "incremental_streaming_output", default=model.incremental_streaming)
    requests, is_list = await requests_from(body, model, guard)
    if is_stream:
        style = _Style(is_list=is_list, version=version, with_log_probs=with_log_probs)
        events = _stream(model.engine, requests, style, guard, is_incremental=is_incremental)
        return event_stream(guard, events)
    results = await completed(http, model.engine, requests)
    size = sum(len(finished.completion.tokens) for finished in results) * 64
    return await json_list(
        guard,
        list(zip(requests, results, strict=True)),
        lambda pair: reply(*pair, version=version, with_log_probs=with_log_probs),
        size=max(size, SMALL_BYTES + 1 if len(results) > 64 else 0),
        as_list=is_list,
    )


@dataclass(frozen=True)
class _Style:
    """How the events of a stream look."""

    is_list: bool
    version: str
    with_log_probs: bool


async def _stream(
    engine: EmbeddedEngine, requests: list[GenerateRequest], style: _Style, guard: RequestGuard, *, is_incremental: bool
) -> AsyncIterator[bytes]:
    """Server-sent events, each with one completion so far, or only its new tokens if incremental.

    Events have an `index` if there are several completions.
    """
    texts = [text_deltas(engine, r.params if is_incremental else None) for r in requests]
    triples: list[list[list[Any]]] = [[] for _ in requests]
    async for index, so_far, finished in progress(engine, requests, guard):
        request, text = requests[index], texts[index]
        start = so_far.num_sent if is_incremental else 0
        tokens = so_far.tokens[start:]
        if isinstance(finished, EngineError):
            event: dict[str, Any] = {"error": {"message": str(finished), "code": 500}}
        elif finished is not None:
            event = reply(request, finished, version=style.version, with_log_probs=style.with_log_probs)
            if is_incremental:
                event |= {"text": text.rest(finished.completion.text), "output_ids": event["output_ids"][start:]}
                if style.with_log_probs:
                    event["meta_info"]["output_token_logprobs"] = event["meta_info"]["output_token_logprobs"][start:]
        else:
            meta: dict[str, Any] = {
                "id": request.rid,
                "finish_reason": None,
                "prompt_tokens": len(request.ids),
                "completion_tokens": len(so_far.tokens),
                "weight_version": style.version,
            }
            if style.with_log_probs:
                known = triples[index]
                known += token_log_probs(so_far.tokens[len(known) :], so_far.log_probs[len(known) :])
                meta["output_token_logprobs"] = known[start:]
            shown = text.delta(so_far.tokens) if is_incremental else text.whole(so_far.tokens)
            event = {"text": shown, "output_ids": tokens, "meta_info": meta}
        so_far.num_sent = len(so_far.tokens)
        yield sse({"index": index, **event} if style.is_list else event)
    yield DONE


async def completed(http: HttpRequest, engine: EmbeddedEngine, requests: list[GenerateRequest]) -> list[Finished]:
    """Generate all completions. If the client disconnects first, abort them."""
    task = asyncio.gather(*[engine.submit(r.ids, r.params, rid=r.rid, is_checked=True) for r in requests])

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
