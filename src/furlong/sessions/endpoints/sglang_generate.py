"""SGLang's POST /generate of a session: text or token ids in, text and token ids out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from furlong.inference.request_error import RequestError
from furlong.inference.server.fields import boolean, quote
from furlong.inference.server.generate_fields import check_rows, num_samples, prompts_of, token_log_probs
from furlong.sessions.endpoints.client_call import ClientCall, check_fields, token_limit
from furlong.sessions.reply import Reply

HONORED = {"input_ids", "text", "sampling_params", "return_logprob", "stream"}
NEUTRAL = {"rid", "log_metrics", "return_text_in_logprobs", "session_id", "routing_key", "extra_key", "priority"}
OFF: Mapping[str, Sequence[Any]] = {
    "logprob_start_len": (-1,),
    "top_logprobs_num": (0,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
}
SAMPLING_HONORED = {
    *("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids"),
    *("sampling_seed", "n"),
}
SAMPLING_NEUTRAL = {"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"}
SAMPLING_OFF: Mapping[str, Sequence[Any]] = {
    "ignore_eos": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
}


def read(body: Mapping[str, Any]) -> ClientCall:
    """Check a request for one prompt. Raises RequestError naming the field."""
    check_fields(body, honored=HONORED, neutral=NEUTRAL, off=OFF)
    prompts, is_list = prompts_of(body)
    if is_list and len(prompts) != 1:
        raise RequestError(f"there are {len(prompts)} prompts; a session answers one at a time: send one request each")
    if boolean(body, "stream"):
        raise RequestError("stream is True, but this endpoint does not stream; remove it")
    (prompt,) = prompts
    if not isinstance(prompt, str):
        check_rows("input_ids", [prompt])
    params: Any = body.get("sampling_params") or {}
    if not isinstance(params, dict):
        raise RequestError(f"sampling_params is {quote(params)}, must be an object")
    fields = cast("dict[str, Any]", params)
    check_fields(fields, honored=SAMPLING_HONORED, neutral=SAMPLING_NEUTRAL, off=SAMPLING_OFF)
    return ClientCall(
        ids=prompt if isinstance(prompt, str) else cast("list[int]", prompt),
        sampling={name: fields.get(name) for name in sorted(SAMPLING_HONORED - {"max_new_tokens", "n"})},
        max_tokens=token_limit(fields, "max_new_tokens"),
        n=num_samples("sampling_params.n", fields.get("n")),
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
    if boolean(call.body, "return_logprob"):
        meta["output_token_logprobs"] = token_log_probs(reply.tokens, reply.log_probs)
        meta["output_token_logprobs_length"] = reply.num_tokens
    return {"text": reply.message["content"] or "", "output_ids": reply.tokens, "meta_info": meta}
