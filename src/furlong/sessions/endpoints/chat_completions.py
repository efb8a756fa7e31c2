"""OpenAI's POST /v1/chat/completions of a session."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, cast

from furlong.chat.messages import checked_messages
from furlong.inference.request_error import RequestError
from furlong.inference.server.events import DONE, sse
from furlong.inference.server.fields import boolean, quote
from furlong.inference.server.generate_fields import num_samples
from furlong.sessions.endpoints.client_call import (
    ClientCall,
    check_fields,
    check_keys,
    checked_tools,
    objects,
    strict_tools,
    token_limit,
)
from furlong.sessions.endpoints.served_session import StreamHead, StreamPart
from furlong.sessions.reply import Reply
from furlong.sessions.reply_stream import ReplyPiece

HONORED = {
    *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "n", "stream", "stream_options", "logprobs"),
    *(
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop",
        "stop_token_ids",
        "seed",
    ),
    *("return_token_ids", "chat_template_kwargs", "reasoning_effort", "min_tokens"),
}
NEUTRAL = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("prompt_cache_options", "request_id", "rid", "stream_reasoning"),
}
OFF: Mapping[str, Sequence[Any]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": (),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "functions": (),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "moderation": (),
    "separate_reasoning": (True,),
    "include_reasoning": (True,),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "ignore_eos": (False,),
    "skip_special_tokens": (True, False),
}


def read(body: Mapping[str, Any]) -> ClientCall:
    """Check a request. Raises RequestError and MessageError naming the field."""
    check_fields(body, honored=HONORED, neutral=NEUTRAL, off=OFF)
    tools = checked_tools(objects(body, "tools"))
    reads_calls = read_tool_choice(body.get("tool_choice"), has_tools=tools is not None)
    kwargs: Any = body.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise RequestError(f"chat_template_kwargs is {quote(kwargs)}, must be an object")
    if body.get("reasoning_effort") is not None:
        kwargs = {"reasoning_effort": body["reasoning_effort"], **kwargs}
    options: Any = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise RequestError(f"stream_options is {quote(options)}, must be an object with include_usage")
    check_keys(cast("dict[str, Any]", options), ("include_usage", "include_obfuscation"), "stream_options")
    stop = body.get("stop")
    return ClientCall(
        messages=checked_messages(body.get("messages")),
        tools=tools,
        template_kwargs=kwargs,
        sampling={
            "temperature": body.get("temperature"),
            "top_p": body.get("top_p"),
            "top_k": body.get("top_k"),
            "min_p": body.get("min_p"),
            "stop": stop,
            "stop_token_ids": body.get("stop_token_ids"),
            "min_new_tokens": body.get("min_tokens"),
            "sampling_seed": body.get("seed"),
        },
        max_tokens=token_limit(body, "max_completion_tokens", "max_tokens"),
        n=num_samples("n", body.get("n")),
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
