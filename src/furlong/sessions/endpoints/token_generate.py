"""vLLM's POST /inference/v1/generate of a session: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from furlong.inference.request_error import RequestError
from furlong.inference.server import field_rules as rules
from furlong.inference.server.fields import quote
from furlong.sessions.endpoints.client_call import ClientCall, token_limit
from furlong.sessions.reply import Reply

_SAMPLING = rules.object_of(
    {
        **rules.SAMPLING,
        "top_k": rules.whole(-1, rules.MAX_INT32),  # 0 is off
        "max_tokens": rules.num_tokens,
        "min_tokens": rules.whole(0, rules.MAX_INT32),
        "stop": rules.one_or_more_stops,
        "stop_token_ids": rules.stop_ids,
        "seed": rules.seed,
        "n": rules.num_samples,
        "logprobs": rules.whole(0, 1),  # only the sampled token's are known
        # Without an effect on the result:
        **dict.fromkeys(("detokenize", "spaces_between_special_tokens", "skip_special_tokens"), rules.flag),
        "output_kind": rules.whole(0, 2),
        "include_stop_str_in_output": rules.flag,
        # Not implemented:
        **dict.fromkeys(("presence_penalty", "frequency_penalty"), rules.only(0)),
        "repetition_penalty": rules.only(1),
        **dict.fromkeys(("ignore_eos", "skip_reading_prefix_cache", "flat_logprobs"), rules.only(False)),
        **dict.fromkeys(("logit_bias", "extra_args"), rules.only({})),
        **dict.fromkeys(("allowed_token_ids", "bad_words"), rules.only([])),
        **dict.fromkeys(("prompt_logprobs", "structured_outputs", "truncate_prompt_tokens"), rules.only()),
    }
)
FIELDS: rules.Fields = {
    "token_ids": rules.token_ids,
    "sampling_params": _SAMPLING,
    "model": rules.text,
    "request_id": rules.text,
    "stream": rules.flag,
    "priority": rules.whole(-rules.MAX_INT32, rules.MAX_INT32),  # without an effect on the result
    "cache_salt": rules.text,
    **dict.fromkeys(("features", "kv_transfer_params", "stream_options"), rules.only({})),
}


def read(body: Mapping[str, Any]) -> ClientCall:
    """Check a request. Raises RequestError naming the field."""
    rules.check_fields(body, FIELDS)
    ids: list[int] | None = body.get("token_ids")
    if not ids:
        raise RequestError(f"token_ids is {quote(ids)}, must be a list of at least one token id")
    if body.get("stream"):
        raise RequestError("stream is True, but this endpoint does not stream; remove it")
    fields: dict[str, Any] = body.get("sampling_params") or {}
    return ClientCall(
        ids=ids,
        sampling={
            **{name: fields.get(name) for name in ("temperature", "top_p", "min_p", "stop", "stop_token_ids")},
            "top_k": -1 if fields.get("top_k") == 0 else fields.get("top_k"),
            "min_new_tokens": fields.get("min_tokens"),
            "sampling_seed": fields.get("seed"),
        },
        max_tokens=token_limit(fields, "max_tokens"),
        n=fields.get("n") or 1,
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
