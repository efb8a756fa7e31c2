"""SGLang's POST /generate of a session: text or token ids in, text and token ids out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from furlong.inference.request_error import RequestError
from furlong.inference.server import field_rules as rules
from furlong.inference.server.generate_fields import prompts_of, token_log_probs
from furlong.sessions.endpoints.client_call import ClientCall, token_limit
from furlong.sessions.reply import Reply

_STOPS = ("stop", "stop_token_ids")
_SAMPLING = rules.object_of(
    {
        **rules.SAMPLING,
        "max_new_tokens": rules.num_tokens,
        "min_new_tokens": rules.whole(0, rules.MAX_INT32),
        "stop": rules.one_or_more_stops,
        "stop_token_ids": rules.stop_ids,
        "sampling_seed": rules.seed,
        "n": rules.num_samples,
        # Without an effect on the result:
        **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"), rules.flag),
        # Not implemented:
        "ignore_eos": rules.only(False),
        **dict.fromkeys(("presence_penalty", "frequency_penalty"), rules.only(0)),
        "repetition_penalty": rules.only(1),
    }
)
FIELDS: rules.Fields = {
    "input_ids": rules.either("token ids, or a list of lists of them", rules.token_ids, rules.list_of(rules.token_ids)),
    "text": rules.either("text, or a list of texts", rules.text, rules.list_of(rules.text)),
    "sampling_params": _SAMPLING,
    "return_logprob": rules.flag,
    "stream": rules.flag,
    # Without an effect on the result:
    **dict.fromkeys(("rid", "session_id", "routing_key", "extra_key"), rules.text),
    **dict.fromkeys(("log_metrics", "return_text_in_logprobs"), rules.flag),
    "priority": rules.whole(-rules.MAX_INT32, rules.MAX_INT32),
    # Not implemented:
    "logprob_start_len": rules.only(-1),
    "top_logprobs_num": rules.only(0),
    **dict.fromkeys(("return_hidden_states", "return_routed_experts"), rules.only(False)),
}


def read(body: Mapping[str, Any]) -> ClientCall:
    """Check a request for one prompt. Raises RequestError naming the field."""
    rules.check_fields(body, FIELDS)
    prompts, is_list = prompts_of(body)
    if is_list and len(prompts) != 1:
        raise RequestError(f"there are {len(prompts)} prompts; a session answers one at a time: send one request each")
    if body.get("stream"):
        raise RequestError("stream is True, but this endpoint does not stream; remove it")
    (prompt,) = prompts
    fields: dict[str, Any] = body.get("sampling_params") or {}
    return ClientCall(
        ids=prompt,
        sampling={name: fields.get(name) for name in (*rules.SAMPLING, *_STOPS, "min_new_tokens", "sampling_seed")},
        max_tokens=token_limit(fields, "max_new_tokens"),
        n=fields.get("n") or 1,
        body=body,
    )


def write(call: ClientCall, replies: Sequence[Reply]) -> Any:
    """Return the body of the reply: an object, or a list if several were asked for."""
    rows = [_row(call, reply) for reply in replies]
    return rows if isinstance(_first(call.body), list) or call.n > 1 else rows[0]


def _first(body: Mapping[str, Any]) -> Any:
    value: Any = body.get("input_ids") if body.get("text") is None else body["text"]
    return value if isinstance(body.get("text"), list) else value[0]


def _row(call: ClientCall, reply: Reply) -> dict[str, Any]:
    done = reply.finish_reason
    finish: dict[str, Any] = {"type": done, "matched": reply.tokens[-1] if done == "stop" and reply.tokens else None}
    if done != "stop":
        finish = {"type": "length", "length": reply.num_tokens}
    meta: dict[str, Any] = {
        "id": call.body.get("rid") or reply.id,
        "finish_reason": finish,
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.num_tokens,
        "cached_tokens": reply.cached_tokens,
        "weight_version": str(reply.versions[-1]) if reply.versions else None,
        "token_versions": reply.versions,
    }
    if call.body.get("return_logprob"):
        meta["output_token_logprobs"] = token_log_probs(reply.tokens, reply.log_probs)
        meta["output_token_logprobs_length"] = reply.num_tokens
    return {"text": reply.message["content"] or "", "output_ids": reply.tokens, "meta_info": meta}
