"""SGLang's `POST /generate`: requests, replies and streams; and what `/v1/completions` shares with it."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from furlong.chat.messages import longest_token
from furlong.chat.text_deltas import TextDeltas
from furlong.core.routing import text_from_routes
from furlong.errors import EngineError
from furlong.inference.embedded.engine import EmbeddedEngine
from furlong.inference.embedded.request import Finished, Progress
from furlong.inference.request_error import RequestError
from furlong.inference.server.schemas import (
    Count,
    FilledText,
    Name,
    NumSamples,
    Sampling,
    Schema,
    Seed,
    StopIds,
    Stops,
    TokenIds,
    convert,
    quote,
    read_fields,
    stops_of,
)
from furlong.inference.server.web import (
    DONE,
    SMALL_BYTES,
    RefusedError,
    ServerLimits,
    event_stream,
    json_reply,
    off_loop,
    read_object,
    sse,
    unless_left,
)
from furlong.interfaces import SamplingParams

BACKLOG = 16  # reports of a stream that wait; more of them are merged into one event for each completion
_IDS = "a list of integers, or a list of such lists"


class SamplingFields(Sampling):
    """`sampling_params` of a request."""

    max_new_tokens: Count | None = None
    min_new_tokens: Count | None = None
    stop: Stops | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    sampling_seed: Seed | None = None
    json_schema: FilledText | None = None
    n: NumSamples | None = None

    IGNORED: ClassVar = ("spaces_between_special_tokens", "custom_params", "stream_interval")
    ONLY: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **dict.fromkeys(("stop_regex", "regex", "ebnf", "structural_tag", "logit_bias"), ()),
        **dict.fromkeys(("frequency_penalty", "presence_penalty"), (0,)),
        "repetition_penalty": (1,),
    }

    def params(self) -> SamplingParams:
        """Return the sampling parameters, with SGLang's defaults."""
        values: dict[str, Any] = {
            name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None
        }
        values.pop("n", None)
        values |= {"stop": stops_of(self.stop), "stop_token_ids": tuple(self.stop_token_ids or ())}
        values.setdefault("no_stop_trim", False)
        return SamplingParams(**values)


class PromptFields(Schema):
    """The body of `/generate`, without what sessions do not support. Prompts may be a list."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    logprob_start_len: int | None = None
    stream: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: Count | None = None

    IGNORED: ClassVar = (
        *("session_id", "routing_key", "extra_key", "conversation_id", "priority", "custom_labels"),
        *("log_metrics", "no_logs", "background", "return_text_in_logprobs"),
        *("routed_dp_rank", "disagg_prefill_dp_rank"),
    )
    ONLY: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **dict.fromkeys(("input_embeds", "image_data", "video_data", "audio_data", "lora_path"), ()),
        **dict.fromkeys(("custom_logit_processor", "session_params", "token_ids_logprob"), ()),
        "top_logprobs_num": (0,),
        **dict.fromkeys(("return_hidden_states", "return_sampling_mask"), (False,)),
    }

    SCORES: ClassVar = False  # whether log-probs of prompts are supported

    @property
    def wants_prompt(self) -> bool:
        """Whether log-probs of the prompt are asked for."""
        start = self.logprob_start_len
        return start is not None and start >= 0 and bool(getattr(self, "return_logprob", None))

    @property
    def is_list(self) -> bool:
        """Whether the prompts are a list."""
        return isinstance(self.text, list) or bool(self.input_ids and isinstance(self.input_ids[0], list))

    def prompts(self) -> list[Any]:
        """Return the prompts. Raises RequestError unless there are texts or ids."""
        if (self.input_ids is None) == (self.text is None):
            raise RequestError("give either input_ids or text")
        if self.wants_prompt and not self.SCORES:
            raise RequestError("logprob_start_len >= 0 (log-probs of the prompt) is not supported; leave it at -1")
        given: Any = self.input_ids if self.text is None else self.text
        return given if self.is_list else [given]


class GenerateFields(PromptFields):
    """The body of `/generate`. Parameters may be lists.

    From `logprob_start_len` on, log-probs of the prompt are returned, with those of the `top_logprobs_num` most likely
    tokens and of the `token_ids_logprob` at each position. Unlike SGLang's, they have the request's temperature.
    """

    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None  # of `Name`; msgspec 0.22 corrupts memory for a text with a pattern, or a list
    return_logprob: bool | list[bool] | None = None
    incremental_streaming_output: bool | None = None
    top_logprobs_num: Count | None = None
    token_ids_logprob: TokenIds | None = None

    SCORES: ClassVar = True

    def prompts(self) -> list[Any]:
        """Return the prompts. Raises RequestError for log-probs that are not of a prompt, or that are streamed."""
        if (self.top_logprobs_num or self.token_ids_logprob) and not self.wants_prompt:
            name = "top_logprobs_num" if self.top_logprobs_num else "token_ids_logprob"
            raise RequestError(f"{name} is supported for log-probs of the prompt only; add logprob_start_len >= 0")
        if self.wants_prompt and self.stream:
            raise RequestError("logprob_start_len >= 0 (log-probs of the prompt) cannot be streamed; remove stream")
        return super().prompts()

    async def scored(self, engine: EmbeddedEngine, request: GenerateRequest) -> dict[str, Any]:
        """Return the log-probs of a request's prompt, for `meta_info`; the first of them is None."""
        start, ids = self.logprob_start_len or 0, request.ids
        rows: dict[str, list[Any]] = {"token": [[None, *ids[start : start + 1], None]]}
        if self.top_logprobs_num:
            rows["top"] = [None]
        if self.token_ids_logprob:
            rows["token_ids"] = [None]
        if start >= len(ids):
            raise RequestError(f"logprob_start_len is {start}, must be below the {len(ids)} tokens of the prompt")
        if count := len(ids) - 1 - start:
            asked_RK = np.tile(np.array(self.token_ids_logprob or (), np.int32), (count, 1))
            if asked_RK.size and asked_RK.max() >= engine.model.vocab_size:
                raise RequestError(
                    f"token_ids_logprob has {asked_RK.max()}, must be below {engine.model.vocab_size}, the vocabulary"
                )
            scores = await engine.score(
                ids, count, temperature=request.params.temperature, num_top=self.top_logprobs_num or 0, ids_RK=asked_RK
            )
            rows["token"] += token_log_probs(list(ids[start + 1 :]), scores.log_probs_R.tolist())
            pairs = {"top": (scores.top_ids_RK, scores.top_log_probs_RK), "token_ids": (asked_RK, scores.asked_RK)}
            for name in rows.keys() & pairs.keys():
                rows[name] += [token_log_probs(*pair) for pair in zip(*(a.tolist() for a in pairs[name]), strict=True)]
        return {f"input_{name}_logprobs": values for name, values in rows.items()}


def sampling_params(fields: Mapping[str, Any]) -> SamplingParams:
    """Convert SGLang's sampling parameters. Raises RequestError for unknown, unsupported or ill-typed ones."""
    return read_fields(SamplingFields, fields, "sampling_params.").params()


@dataclass(frozen=True)
class GenerateRequest:
    """One completion to generate.

    params_id: Equal for requests whose parameters differ in the seed at most.
    routes_from: Tokens at the start that the routed experts leave out.
    """

    rid: str
    ids: Sequence[int]
    params: SamplingParams
    params_id: int = 0
    routes_from: int = 0


@dataclass(frozen=True)
class ServerContext:
    """What endpoints answer requests with. incremental_streaming: the default of `incremental_streaming_output`."""

    engine: EmbeddedEngine
    name: str
    limits: ServerLimits
    incremental_streaming: bool = False

    async def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize texts. Raises RequestError without a tokenizer, or if a text cannot fit into the context."""
        tokenizer: Any = self.engine.tokenizer
        if tokenizer is None or not hasattr(tokenizer, "encode"):
            raise RequestError(
                "the server has no tokenizer; send input_ids, or serve a folder that has tokenizer files"
            )
        longest, most = longest_token(tokenizer), max(map(len, texts), default=0)
        if most > self.engine.context_len * longest:
            raise RequestError(
                f"the prompt has {most} characters, which cannot fit: the context length is {self.engine.context_len} "
                f"tokens and a token has at most {longest} characters; shorten it"
            )
        return await off_loop(sum(map(len, texts)), lambda: [list(tokenizer.encode(text)) for text in texts])

    async def check(self, requests: Sequence[GenerateRequest]) -> None:
        """Raise RequestError for an invalid request, and RefusedError (429) if the queue is full."""
        # Samples of a prompt share its ids; their parameters differ in the seed.
        distinct = {(id(request.ids), request.params_id): request for request in requests}

        def check_each() -> None:
            for request in distinct.values():
                self.engine.check(request.ids, request.params)

        await off_loop(sum(len(request.ids) for request in requests) * 8, check_each)
        for params in {request.params_id: request.params for request in distinct.values()}.values():
            await self.engine.grammar_of(params)  # a stream that has begun cannot be refused
        self.check_room(len(requests))

    def check_room(self, num_samples: int) -> None:
        """Raise RefusedError (429) if the engine cannot queue so many samples more."""
        stats, limit = self.engine.stats(), self.limits.max_total_samples
        if num_samples > limit:
            raise RequestError(
                f"the request has {num_samples} samples, and the limit of --max-total-samples is {limit}; send several "
                "requests"
            )
        if (open_samples := stats.running + stats.waiting) + num_samples > limit:
            raise RefusedError(
                f"{open_samples} samples are running or queued, and the limit of --max-total-samples is {limit}; retry "
                "later",
                429,
            )


async def generate(http: HttpRequest, model: ServerContext, version: str) -> Response:
    """Answer POST /generate."""
    body = await read_object(http)
    requests, fields, is_list = await _requests_from(body, model)
    wants = fields.return_logprob
    with_log_probs = bool(wants[0] if isinstance(wants, list) and wants else wants)
    if fields.stream:
        is_incremental = fields.incremental_streaming_output
        is_incremental = model.incremental_streaming if is_incremental is None else is_incremental
        events = _events(
            model.engine,
            requests,
            http.state.deadline_s,
            is_list=is_list,
            version=version,
            with_log_probs=with_log_probs,
            is_incremental=is_incremental,
        )
        return event_stream(events)
    results = await completed(http, model.engine, requests)
    scored: list[dict[str, Any]] = [{}] * len(requests)
    if fields.wants_prompt:
        scored = [await fields.scored(model.engine, request) for request in requests]

    def build() -> Any:
        pairs = zip(requests, results, strict=True)
        rows = [reply(*pair, version=version, with_log_probs=with_log_probs) for pair in pairs]
        for row, of_prompt in zip(rows, scored, strict=True):
            row["meta_info"] |= of_prompt
        return rows if is_list else rows[0]

    return await json_reply(build, size=size_of(results) if not fields.wants_prompt else SMALL_BYTES + 1)


def size_of(results: Sequence[Finished]) -> int:
    """Estimate the bytes of a reply."""
    size = sum(len(finished.completion.tokens) for finished in results) * 64
    return max(size, SMALL_BYTES + 1 if len(results) > 64 else 0)


async def _requests_from(
    body: Mapping[str, Any], model: ServerContext
) -> tuple[list[GenerateRequest], GenerateFields, bool]:
    """Parse a body into the completions to generate; also returns whether the reply is a list.

    The reply to a list of prompts, or to `n` above 1, is a list in which the samples of one prompt are adjacent.
    """
    fields = read_fields(GenerateFields, body)
    rows = fields.prompts()
    if fields.text is not None:
        rows = await model.encode(rows)
    else:
        await off_loop(sum(len(row) if isinstance(row, list) else 1 for row in rows) * 8, check_ids, "input_ids", rows)
    if not rows:
        raise RequestError("text is an empty list; send at least one prompt")
    given_params: Any = fields.sampling_params or {}
    per_row: list[Any] = given_params if isinstance(given_params, list) else [given_params] * len(rows)
    if len(per_row) != len(rows):
        raise RequestError(f"sampling_params must be one object, or a list of {len(rows)}, one for each prompt")
    parsed = {id(each): each for each in per_row}  # equal objects are parsed once
    checked = {key: read_fields(SamplingFields, each, "sampling_params.") for key, each in parsed.items()}
    counts = {each.n or 1 for each in checked.values()}
    if len(counts) > 1:
        raise RequestError(f"sampling_params.n is {quote(sorted(counts))}; it must be equal for all prompts")
    (n,) = counts
    wants_routes = bool(fields.return_routed_experts)
    params = {
        key: dataclasses.replace(each.params(), return_routed_experts=wants_routes) for key, each in checked.items()
    }
    rids = _rids(fields.rid, len(rows), n)
    requests = sample_requests(
        rids, rows, [params[id(each)] for each in per_row], routes_from=fields.routed_experts_start_len or 0
    )
    await model.check(requests)
    return requests, fields, fields.is_list or n > 1


def check_ids(name: str, rows: Sequence[Any]) -> None:
    """Raise RequestError unless these are lists of token ids."""
    for row in rows:
        if not isinstance(row, list) or not all(type(id) is int for id in cast("list[Any]", row)):
            raise RequestError(f"{name} must be {_IDS}")
        convert(row, TokenIds, name)


def _rids(rid: str | list[str] | None, rows: int, n: int) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(rows * n)]
    names = rid if isinstance(rid, list) else [rid] if rows == 1 else [f"{rid}-{i}" for i in range(rows)]
    if len(names) != rows:
        raise RequestError(f"rid is {quote(rid)}, must be a string, or a list of {rows} strings")
    convert(names, list[Name], "rid")
    return [name if n == 1 else f"{name}-{i}" for name in names for i in range(n)]


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


async def completed(http: HttpRequest, engine: EmbeddedEngine, requests: list[GenerateRequest]) -> list[Finished]:
    """Generate all completions. If the client disconnects first, abort them."""
    works = [engine.submit(each.ids, each.params, rid=each.rid, is_checked=True) for each in requests]
    return await unless_left(http, asyncio.gather(*works))


# -- replies ---------------------------------------------------------------------------------------------------


def reply(request: GenerateRequest, finished: Finished, *, version: str, with_log_probs: bool) -> dict[str, Any]:
    """One element of /generate's reply."""
    completion = finished.completion
    match completion.finish_reason:
        case "stop":
            reason: dict[str, Any] = {"type": "stop", "matched": finished.matched}
        case "length":
            reason = {"type": "length", "length": len(completion.tokens)}
        case _:
            reason = {"type": "abort", "message": "Aborted"}
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": reason,
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


async def _events(
    engine: EmbeddedEngine,
    requests: list[GenerateRequest],
    deadline_s: float,
    *,
    is_list: bool,
    version: str,
    with_log_probs: bool,
    is_incremental: bool,
) -> AsyncIterator[bytes]:
    """Server-sent events, each with one completion so far, or only its new tokens if incremental.

    Events have an `index` if there are several completions.
    """
    texts = [text_deltas(engine, r.params if is_incremental else None) for r in requests]
    triples: list[list[list[Any]]] = [[] for _ in requests]
    async for index, so_far, finished in progress(engine, requests, deadline_s):
        request, text = requests[index], texts[index]
        start = so_far.num_sent if is_incremental else 0
        if isinstance(finished, EngineError):
            event: dict[str, Any] = {"error": {"message": str(finished), "code": 500}}
        elif finished is not None:
            event = reply(request, finished, version=version, with_log_probs=with_log_probs)
            if is_incremental:
                event |= {"text": text.rest(finished.completion.text), "output_ids": event["output_ids"][start:]}
                if with_log_probs:
                    event["meta_info"]["output_token_logprobs"] = event["meta_info"]["output_token_logprobs"][start:]
        else:
            meta: dict[str, Any] = {
                "id": request.rid,
                "finish_reason": None,
                "prompt_tokens": len(request.ids),
                "completion_tokens": len(so_far.tokens),
                "weight_version": version,
            }
            if with_log_probs:
                known = triples[index]
                known += token_log_probs(so_far.tokens[len(known) :], so_far.log_probs[len(known) :])
                meta["output_token_logprobs"] = known[start:]
            shown = text.delta(so_far.tokens) if is_incremental else text.whole(so_far.tokens)
            event = {"text": shown, "output_ids": so_far.tokens[start:], "meta_info": meta}
        so_far.num_sent = len(so_far.tokens)
        yield sse({"index": index, **event} if is_list else event)
    yield DONE


# -- streams of tokens -----------------------------------------------------------------------------------------


@dataclass
class SoFar:
    """The tokens of a completion so far, and how many of them an event contained."""

    tokens: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])
    num_sent: int = 0


async def progress(
    engine: EmbeddedEngine, requests: Sequence[GenerateRequest], deadline_s: float
) -> AsyncGenerator[tuple[int, SoFar, Finished | EngineError | None]]:
    """Yield (index, tokens so far, result or error or None) as completions grow.

    Ends when every request has a result, or with an error for the others at the deadline. A consumer that stops early
    aborts all of them.
    """
    queue: asyncio.Queue[tuple[int, Progress | Finished | EngineError]] = asyncio.Queue()

    async def submit(index: int, request: GenerateRequest) -> None:
        def report(new: Progress) -> None:
            queue.put_nowait((index, new))

        try:
            finished = await engine.submit(request.ids, request.params, rid=request.rid, report=report, is_checked=True)
        except EngineError as error:
            queue.put_nowait((index, error))
        else:
            queue.put_nowait((index, finished))

    tasks = [asyncio.create_task(submit(index, request)) for index, request in enumerate(requests)]
    so_far = [SoFar() for _ in requests]
    still_open = dict.fromkeys(range(len(requests)))
    try:
        while still_open:
            try:
                async with asyncio.timeout_at(deadline_s):
                    reports = [await queue.get()]
            except TimeoutError:
                for index in still_open:
                    yield index, so_far[index], EngineError("not finished in time; see --request-timeout")
                return
            if queue.qsize() > BACKLOG:
                reports += [queue.get_nowait() for _ in range(queue.qsize())]
            steps: dict[int, Finished | EngineError | None] = {}
            for index, report in reports:
                if isinstance(report, Progress):
                    so_far[index].tokens += report.tokens
                    so_far[index].log_probs += report.log_probs
                    steps.setdefault(index, None)
                else:
                    steps[index] = report
            for index, result in steps.items():
                if result is not None:
                    del still_open[index]
                yield index, so_far[index], result
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def text_deltas(engine: EmbeddedEngine, params: SamplingParams | None = None) -> TextDeltas:
    """Return the decoder of one completion; `params` are needed for `delta`."""
    if params is None:
        return TextDeltas(engine.tokenizer)
    trims = not params.no_stop_trim
    return TextDeltas(
        engine.tokenizer,
        skip_special_tokens=params.skip_special_tokens,
        end_ids={*params.stop_token_ids, *engine.eos_ids} if trims else (),
        stops=params.stop if trims else (),
        held_chars=max((len(stop) - 1 for stop in params.stop), default=0),
    )
