"""vLLM's POST /inference/v1/generate of a session: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from furlong.inference.request_error import RequestError
from furlong.inference.server.fields import boolean, quote
from furlong.inference.server.generate_fields import num_samples
from furlong.sessions.endpoints.client_call import ClientCall, check_fields, token_limit
from furlong.sessions.reply import Reply

HONORED = {"token_ids", "sampling_params", "model", "request_id", "stream"}
NEUTRAL = {"priority", "cache_salt"}
OFF: Mapping[str, Sequence[Any]] = {"features": (), "kv_transfer_params": (), "stream_options": ()}
SAMPLING_HONORED = {
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "seed", "min_tokens", "n"),
    "logprobs",
}
SAMPLING_NEUTRAL = {"detokenize", "output_kind", "spaces_between_special_tokens", "skip_special_tokens"}
SAMPLING_OFF: Mapping[str, Sequence[Any]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "ignore_eos": (False,),
    "prompt_logprobs": (),
    "include_stop_str_in_output": (True, False),
    "skip_reading_prefix_cache": (False,),
    "logit_bias": (),
    "allowed_token_ids": (),
    "bad_words": (),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "extra_args": (),
    "flat_logprobs": (False,),
}


def read(body: Mapping[str, Any]) -> ClientCall:
    """Check a request. Raises RequestError naming the field."""
    check_fields(body, honored=HONORED, neutral=NEUTRAL, off=OFF)
    ids: Any = body.get("token_ids")
    if not isinstance(ids, list) or not ids or not all(type(id) is int for id in cast("list[Any]", ids)):
        raise RequestError(f"token_ids is {quote(ids)}, must be a list of at least one integer")
    if boolean(body, "stream"):
        raise RequestError("stream is True, but this endpoint does not stream; remove it")
    params: Any = body.get("sampling_params") or {}
    if not isinstance(params, dict):
        raise RequestError(f"sampling_params is {quote(params)}, must be an object")
    fields = cast("dict[str, Any]", params)
    check_fields(fields, honored=SAMPLING_HONORED, neutral=SAMPLING_NEUTRAL, off=SAMPLING_OFF)
    if fields.get("logprobs") not in (None, 0, 1):
        raise RequestError(
            f"sampling_params.logprobs is {quote(fields['logprobs'])}; only the sampled token's are known"
        )
    return ClientCall(
        ids=cast("list[int]", ids),
        sampling={
            **{name: fields.get(name) for name in ("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids")},
            "min_new_tokens": fields.get("min_tokens"),
            "sampling_seed": fields.get("seed"),
        },
        max_tokens=token_limit(fields, "max_tokens"),
        n=num_samples("sampling_params.n", fields.get("n")),
        body=body,
    )


def write(call: ClientCall, replies: Sequence[Reply]) -> dict[str, Any]:
    """Return the body of the reply. A token is named `token_id:ID` in the log-probs, as vLLM does."""
    with_log_probs = (call.body.get("sampling_params") or {}).get("logprobs") is not None
    choices: list[dict[str, Any]] = []
    for index, reply in enumerate(replies):
        content = [
            {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
            for token, value in zip(reply.tokens, reply.log_probs, strict=True)
        ]
        choices.append(
            {
                "index": index,
                "token_ids": reply.tokens,
                "finish_reason": "stop" if reply.finish_reason == "stop" else "length",
                "logprobs": {"content": content} if with_log_probs else None,
                "weight_versions": reply.versions,
            }
        )
    usage = {"prompt_tokens": replies[0].prompt_tokens, "cached_tokens": replies[0].cached_tokens}
    name = call.body.get("request_id") or replies[0].id
    return {"request_id": name, "choices": choices, "prompt_logprobs": None, "kv_transfer_params": None, "usage": usage}
