"""OpenAI's POST /v1/chat/completions of a session."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

from furlong.chat.messages import checked_messages
from furlong.inference.request_error import RequestError
from furlong.inference.server import field_rules as rules
from furlong.inference.server.events import DONE, sse
from furlong.inference.server.fields import boolean, quote
from furlong.sessions.endpoints.client_call import (
    ClientCall,
    checked_tools,
    objects,
    strict_tools,
    template_kwargs,
    token_limit,
)
from furlong.sessions.endpoints.served_session import StreamHead, StreamPart
from furlong.sessions.reply import Reply
from furlong.sessions.reply_stream import ReplyPiece

FIELDS: rules.Fields = {
    **rules.SAMPLING,
    "model": rules.text,
    "messages": rules.anything,  # checked with their content
    "tools": rules.list_of(rules.an_object),
    "tool_choice": rules.anything,
    "stream_options": rules.object_of({"include_usage": rules.flag, "include_obfuscation": rules.flag}),
    "n": rules.num_samples,
    "max_tokens": rules.num_tokens,
    "max_completion_tokens": rules.num_tokens,
    "min_tokens": rules.whole(0, rules.MAX_INT32),
    "stop": rules.one_or_more_stops,
    "stop_token_ids": rules.stop_ids,
    "seed": rules.seed,
    "chat_template_kwargs": template_kwargs,
    "reasoning_effort": rules.text,
    **dict.fromkeys(("parallel_tool_calls", "stream", "logprobs", "return_token_ids"), rules.flag),
    # Without an effect on the result:
    **dict.fromkeys(("user", "service_tier", "safety_identifier", "prompt_cache_key"), rules.text),
    **dict.fromkeys(("prompt_cache_retention", "request_id", "rid"), rules.text),
    **dict.fromkeys(("store", "stream_reasoning"), rules.flag),
    "metadata": rules.metadata,
    "prompt_cache_options": rules.an_object,
    # Not implemented:
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs"), rules.only(0)),
    "repetition_penalty": rules.only(1),
    "logit_bias": rules.only({}),
    "response_format": rules.only({"type": "text"}),
    "functions": rules.only([]),
    "function_call": rules.only("none"),
    "modalities": rules.only(["text"]),
    "verbosity": rules.only("medium"),
    **dict.fromkeys(("audio", "prediction", "web_search_options", "moderation"), rules.only()),
    **dict.fromkeys(("separate_reasoning", "include_reasoning", "add_generation_prompt"), rules.only(True)),
    **dict.fromkeys(("echo", "continue_final_message", "ignore_eos"), rules.only(False)),
    "skip_special_tokens": rules.flag,  # the text of an answer has none
}


def read(body: Mapping[str, Any]) -> ClientCall:
    """Check a request. Raises RequestError and MessageError naming the field."""
    rules.check_fields(body, FIELDS)
    tools = checked_tools(objects(body, "tools"))
    reads_calls = read_tool_choice(body.get("tool_choice"), has_tools=tools is not None)
    kwargs: dict[str, Any] = body.get("chat_template_kwargs") or {}
    if body.get("reasoning_effort") is not None:
        kwargs = {"reasoning_effort": body["reasoning_effort"], **kwargs}
    return ClientCall(
        messages=checked_messages(body.get("messages")),
        tools=tools,
        template_kwargs=kwargs,
        sampling={
            "temperature": body.get("temperature"),
            "top_p": body.get("top_p"),
            "top_k": body.get("top_k"),
            "min_p": body.get("min_p"),
            "stop": body.get("stop"),
            "stop_token_ids": body.get("stop_token_ids"),
            "min_new_tokens": body.get("min_tokens"),
            "sampling_seed": body.get("seed"),
        },
        max_tokens=token_limit(body, "max_completion_tokens", "max_tokens"),
        n=body.get("n") or 1,
        is_stream=boolean(body, "stream"),
        reads_calls=reads_calls,
        max_calls=None if boolean(body, "parallel_tool_calls", default=True) else 1,
        overridden=strict_tools(tools or ()),
        wants_texts=boolean(body, "logprobs"),
        wants_prompt_ids=boolean(body, "return_token_ids"),
        body=body,
    )


def read_tool_choice(choice: Any, *, has_tools: bool) -> bool:
    """Return whether tool calls are parsed. Raises RequestError for a choice that would constrain the model."""
    if choice in (None, "auto"):
        return True
    if choice == "none":
        return False
    del has_tools
    raise RequestError(
        f"tool_choice is {quote(choice)}, but the policy samples freely: only 'auto' and 'none' are supported; ask for "
        "the call in the prompt"
    )


def finish_reason(reply: Reply) -> str:
    """Return OpenAI's finish reason."""
    if reply.tool_calls and reply.finish_reason == "stop":
        return "tool_calls"
    return "stop" if reply.finish_reason == "stop" else "length"


def usage(replies: Sequence[Reply]) -> dict[str, Any]:
    """Return the tokens of a request; the prompt counts once."""
    prompt = replies[0].prompt_tokens
    sampled = sum(reply.num_tokens for reply in replies)
    cached = max(reply.cached_tokens for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def write(call: ClientCall, replies: Sequence[Reply], model: str) -> dict[str, Any]:
    """Return the body of the reply."""
    body = {
        **_head(replies[0].id, model, "chat.completion"),
        "choices": [_choice(call, i, reply) for i, reply in enumerate(replies)],
        "usage": usage(replies),
    }
    if call.wants_prompt_ids:
        body["prompt_token_ids"] = replies[0].prompt_ids
    return body


def _head(response_id: str, model: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{response_id}", "object": kind, "created": int(time.time()), "model": model}


def _choice(call: ClientCall, index: int, reply: Reply) -> dict[str, Any]:
    return {
        "index": index,
        "message": reply.message,
        "finish_reason": finish_reason(reply),
        "logprobs": None,
        **_tokens_of(call, reply),
    }


def _log_probs(texts: Sequence[str], values: Sequence[float]) -> dict[str, Any]:
    """Return the log-probs of sampled tokens."""
    return {
        "content": [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in zip(texts, values, strict=True)
        ]
    }


async def stream(
    call: ClientCall, model: str, parts: AsyncIterator[StreamPart], streams: Sequence[StreamHead]
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
    if (call.body.get("stream_options") or {}).get("include_usage"):
        yield sse({**head, "choices": [], "usage": usage(replies)})
    yield DONE


def _tokens_of(call: ClientCall, source: Reply | ReplyPiece) -> dict[str, Any]:
    """Return the fields of a choice that the client asked for: token ids and log-probs."""
    fields: dict[str, Any] = {}
    if call.wants_texts:
        fields["logprobs"] = _log_probs(source.texts, source.log_probs)
    if call.body.get("return_token_ids"):
        fields["token_ids"] = source.tokens
    return fields
