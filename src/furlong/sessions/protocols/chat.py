"""OpenAI's POST /v1/chat/completions of a session, and what the other protocols of messages share with it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from furlong.chat.messages import checked_messages
from furlong.inference.request_error import RequestError
from furlong.inference.server.schemas import (
    Count,
    FilledText,
    NumSamples,
    NumTokens,
    Sampling,
    Seed,
    StopIds,
    Stops,
    StreamOptions,
    convert,
    quote,
    read_fields,
    stops_of,
)
from furlong.inference.server.web import DONE, sse
from furlong.sessions.json_replies import json_reply, read_format, read_tool_choice
from furlong.sessions.open_session import ClientCall, StreamPart
from furlong.sessions.session import Reply, ReplyPiece, ReplyStream

RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize", "conversation")


# What other servers constrain sampling with. Fields that nobody knows have no effect; these would.
CONSTRAINTS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend"), ()),
    **dict.fromkeys(("structured_outputs", "regex", "ebnf", "json_schema", "structural_tag", "grammar"), ()),
    **dict.fromkeys(("bad_words", "allowed_token_ids", "logits_processors", "custom_logit_processor"), ()),
    **dict.fromkeys(("typical_p", "top_a", "use_beam_search", "best_of", "prompt_logprobs", "stop_regex"), ()),
    **dict.fromkeys(("truncate_prompt_tokens", "lora_path", "custom_params"), ()),
}


class Function(msgspec.Struct, frozen=True):
    """A function that a model may call. Templates show the whole tool, so it may have further fields."""

    name: FilledText
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatFields(Sampling):
    """The body of a request."""

    messages: Any = None  # checked with their content
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: Any = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: NumSamples | None = None
    max_tokens: NumTokens | None = None
    max_completion_tokens: NumTokens | None = None
    min_tokens: Count | None = None
    stop: Stops | None = None
    stop_token_ids: StopIds | None = None
    seed: Seed | None = None
    ignore_eos: bool | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    IGNORED: ClassVar = (
        *("user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "request_id"),
        *("rid", "store", "stream_reasoning", "metadata", "prompt_cache_options"),
        "skip_special_tokens",  # the text of an answer has none
    )
    ONLY: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs"), (0,)),
        "repetition_penalty": (1,),
        "function_call": ("none",),
        "modalities": (["text"],),
        **dict.fromkeys(("logit_bias", "functions", "audio"), ()),
        **CONSTRAINTS,
        "chat_template": (),  # a program
        **dict.fromkeys(("separate_reasoning", "include_reasoning", "add_generation_prompt"), (True,)),
        **dict.fromkeys(("echo", "continue_final_message"), (False,)),
    }


def read(body: Mapping[str, Any]) -> ClientCall:
    """Check a request. Raises RequestError and MessageError naming the field."""
    ignored: list[str] = []
    fields = read_fields(ChatFields, body, ignored=ignored)
    kwargs = fields.chat_template_kwargs or {}
    if wrong := next((key for key in kwargs if not key.isidentifier() or key in RESERVED), None):
        raise RequestError(f"chat_template_kwargs.{wrong} is not a value that a request may set; remove it")
    if fields.reasoning_effort is not None:
        kwargs = {"reasoning_effort": fields.reasoning_effort, **kwargs}
    tools = fields.tools or []
    is_strict = False
    for i, tool in enumerate(tools):
        if tool.get("type", "function") != "function":
            raise RequestError(f"tools[{i}].type is {quote(tool.get('type'))}; only functions are supported")
        is_strict = bool(convert(tool.get("function"), Function, f"tools[{i}].function.").strict) or is_strict
    reads_calls, forced = read_tool_choice(fields.tool_choice, tools)
    schema = read_format("response_format", fields.response_format)
    return ClientCall(
        messages=checked_messages(fields.messages),
        tools=tools or None,
        template_kwargs=kwargs,
        sampling={
            **{name: getattr(fields, name) for name in ("temperature", "top_p", "min_p", "ignore_eos")},
            "top_k": fields.top_k or None,
            "stop": stops_of(fields.stop) or None,
            "stop_token_ids": fields.stop_token_ids or None,
            "min_new_tokens": fields.min_tokens,
            "sampling_seed": fields.seed,
        },
        max_tokens=fields.max_completion_tokens or fields.max_tokens,
        n=fields.n or 1,
        model=fields.model,
        is_stream=bool(fields.stream),
        reads_calls=reads_calls,
        json_reply=json_reply(schema, forced, tools, reads_calls=reads_calls),
        max_calls=1 if fields.parallel_tool_calls is False else None,
        overridden=["strict"] if is_strict else [],
        ignored=ignored,
        wants_texts=bool(fields.logprobs),
        wants_prompt_ids=bool(fields.return_token_ids),
        request=fields,
    )


def finish_reason(reply: Reply) -> str:
    """Return OpenAI's finish reason."""
    if reply.tool_calls and reply.finish_reason == "stop":
        return "tool_calls"
    return "stop" if reply.finish_reason == "stop" else "length"


def usage(replies: Sequence[Reply]) -> dict[str, Any]:
    """Return the tokens of a request; the prompt counts once."""
    prompt = replies[0].prompt_tokens
    sampled = sum(len(reply.tokens) for reply in replies)
    cached = max(reply.cached_tokens for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def write(call: ClientCall, replies: Sequence[Reply], model: str) -> dict[str, Any]:
    """Return the body of the reply."""
    choices = [
        {
            "index": index,
            "message": reply.message,
            "finish_reason": finish_reason(reply),
            "logprobs": None,
            **_tokens_of(call, reply),
        }
        for index, reply in enumerate(replies)
    ]
    body = {**_head(replies[0].id, model, "chat.completion"), "choices": choices, "usage": usage(replies)}
    return body | ({"prompt_token_ids": replies[0].prompt_ids} if call.wants_prompt_ids else {})


def _head(response_id: str, model: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{response_id}", "object": kind, "created": int(time.time()), "model": model}


async def stream(
    call: ClientCall, model: str, parts: AsyncIterator[StreamPart], streams: Sequence[ReplyStream]
) -> AsyncGenerator[bytes]:
    """Yield the events of replies while they are sampled."""
    head = _head(streams[0].response_id, model, "chat.completion.chunk")
    begun = [False] * len(streams)
    replies: list[Reply] = []

    def event(index: int, delta: Mapping[str, Any], reason: str | None = None, **fields: Any) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None, **fields}
        return sse({**head, "choices": [choice]})

    async for index, part in parts:
        if not begun[index]:
            begun[index] = True
            yield event(index, {"role": "assistant", "content": ""})
        if isinstance(part, Reply):
            replies.append(part)
            for i, made in enumerate(part.tool_calls):
                yield event(index, {"tool_calls": [{"index": i, **made}]})
            yield event(index, {}, finish_reason(part))
            continue
        extra = _tokens_of(call, part) if part.tokens else {}
        if part.reasoning:
            yield event(index, {"reasoning_content": part.reasoning}, **({} if part.content else extra))
        if part.content or (extra and not part.reasoning):
            yield event(index, {"content": part.content} if part.content else {}, **extra)
    options: StreamOptions | None = call.request.stream_options
    if options is not None and options.include_usage:
        yield sse({**head, "choices": [], "usage": usage(replies)})
    yield DONE


def _tokens_of(call: ClientCall, source: Reply | ReplyPiece) -> dict[str, Any]:
    """Return the fields of a choice that the client asked for: token ids and log-probs."""
    fields: dict[str, Any] = {}
    if call.wants_texts:
        fields["logprobs"] = {
            "content": [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                for text, value in zip(source.texts, source.log_probs, strict=True)
            ]
        }
    if call.wants_prompt_ids:
        fields["token_ids"] = source.tokens
    return fields
