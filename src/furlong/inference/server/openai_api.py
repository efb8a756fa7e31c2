"""OpenAI's completions over the embedded engine, streaming included. Chat completions are those of sessions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from furlong.errors import EngineError
from furlong.inference.embedded.engine import EmbeddedEngine
from furlong.inference.embedded.request import Finished
from furlong.inference.request_error import RequestError
from furlong.inference.server.generate_api import (
    GenerateRequest,
    ServerContext,
    check_ids,
    completed,
    progress,
    sample_requests,
    size_of,
    text_deltas,
)
from furlong.inference.server.schemas import (
    Count,
    NumSamples,
    Sampling,
    Seed,
    StopIds,
    Stops,
    StreamOptions,
    check_model,
    read_fields,
    stops_of,
)
from furlong.inference.server.web import DONE, event_stream, json_reply, off_loop, read_object, sse
from furlong.interfaces import SamplingParams

DEFAULT_TOKENS = 16  # of OpenAI's completions


class CompletionFields(Sampling):
    """The body of `/v1/completions`; `prompt` is a string, token ids, or a list of either."""

    prompt: str | list[Any] | None = None
    model: str | None = None
    stop: Stops | None = None
    stop_token_ids: StopIds | None = None
    seed: Seed | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: NumSamples | None = None
    logprobs: bool | Annotated[int, msgspec.Meta(ge=0, le=1)] | None = None  # only the sampled token's is known
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    IGNORED: ClassVar = (
        *("user", "service_tier", "safety_identifier", "prompt_cache_key", "metadata", "store"),
        *("separate_reasoning", "stream_reasoning"),  # sglang-router sends them
    )
    ONLY: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs"), (0,)),
        **dict.fromkeys(("logit_bias", "suffix"), ()),
        "response_format": ({"type": "text"},),
        "echo": (False,),
        "best_of": (1,),
        "return_token_ids": (False,),
    }

    def params(self) -> SamplingParams:
        """Return the sampling parameters of a request."""
        limit = self.max_completion_tokens or self.max_tokens
        names = ("temperature", "top_p", "top_k", "min_p", "ignore_eos", "skip_special_tokens")
        values = {name: value for name in names if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **values,
            max_new_tokens=DEFAULT_TOKENS if limit is None else limit,
            stop=stops_of(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            sampling_seed=self.seed,
            no_stop_trim=False,
        )


async def completions(http: HttpRequest, model: ServerContext) -> Response:
    """Answer POST /v1/completions."""
    fields = read_fields(CompletionFields, await read_object(http))
    check_model(fields.model, model.name)
    prompt, n = fields.prompt, fields.n or 1
    rows: list[Any] = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    others = [row for row in rows if not isinstance(row, str)]
    try:
        await off_loop(sum(len(row) if isinstance(row, list) else 1 for row in others) * 8, check_ids, "prompt", others)
    except RequestError as error:
        raise RequestError(f"prompt must be a string, a list of token ids, or a list of those: {error}") from None
    texts = await model.encode([row for row in rows if isinstance(row, str)]) if len(others) < len(rows) else []
    encoded = iter(texts)
    ids: list[list[int]] = [next(encoded) if isinstance(row, str) else row for row in rows]
    name = f"cmpl-{uuid.uuid4().hex}"
    requests = sample_requests([f"{name}-{i}" for i in range(len(ids) * n)], ids, [fields.params()] * len(ids))
    await model.check(requests)
    head = {"id": name, "object": "text_completion", "created": int(time.time()), "model": model.name}
    if fields.stream:
        with_usage = fields.stream_options is not None and bool(fields.stream_options.include_usage)
        events = _stream(model.engine, requests, head, ids, http.state.deadline_s, with_usage=with_usage)
        return event_stream(events)
    results = await completed(http, model.engine, requests)
    with_log_probs = fields.logprobs not in (None, False)

    def build() -> Any:
        choices = [_choice(model.engine, *pair, with_log_probs=with_log_probs) for pair in enumerate(results)]
        generated = sum(len(finished.completion.tokens) for finished in results)
        return {**head, "choices": choices, "usage": _usage(ids, generated)}

    return await json_reply(build, size=size_of(results))


def _usage(rows: Sequence[Sequence[int]], generated: int) -> dict[str, int]:
    prompt = sum(map(len, rows))
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def _choice(engine: EmbeddedEngine, index: int, finished: Finished, *, with_log_probs: bool) -> dict[str, Any]:
    done, tokenizer = finished.completion, engine.tokenizer
    log_probs = None
    if with_log_probs:
        texts = ["" if tokenizer is None else tokenizer.decode([t], skip_special_tokens=False) for t in done.tokens]
        log_probs = {"tokens": texts, "token_logprobs": done.log_probs}
    return {"index": index, "finish_reason": done.finish_reason, "logprobs": log_probs, "text": done.text}


async def _stream(
    engine: EmbeddedEngine,
    requests: list[GenerateRequest],
    head: Mapping[str, Any],
    rows: Sequence[Sequence[int]],
    deadline_s: float,
    *,
    with_usage: bool,
) -> AsyncIterator[bytes]:
    """Text deltas. An incomplete character, or a possible start of a stop string, is held back."""
    texts = [text_deltas(engine, request.params) for request in requests]
    generated = 0

    def chunk(index: int, text: str, reason: str | None = None) -> bytes:
        choice = {"index": index, "finish_reason": reason, "logprobs": None, "text": text}
        return sse({**head, "choices": [choice]})

    async for index, so_far, finished in progress(engine, requests, deadline_s):
        if isinstance(finished, EngineError):
            yield sse({"error": {"message": str(finished), "type": "server_error", "code": 500}})
        elif finished is not None:
            done = finished.completion
            generated += len(done.tokens)
            yield chunk(index, texts[index].rest(done.text), done.finish_reason)
        elif new := texts[index].delta(so_far.tokens):
            yield chunk(index, new)
    if with_usage:
        yield sse({**head, "choices": [], "usage": _usage(rows, generated)})
    yield DONE
