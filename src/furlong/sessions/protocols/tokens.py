"""Protocols of token ids: SGLang's POST /generate, and vLLM's POST /inference/v1/generate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from furlong.core.routing import text_from_routes
from furlong.inference.request_error import RequestError
from furlong.inference.server.generate_api import PromptFields, SamplingFields, check_ids, token_log_probs
from furlong.inference.server.schemas import (
    Count,
    NumSamples,
    NumTokens,
    Sampling,
    Schema,
    Seed,
    StopIds,
    Stops,
    TokenIds,
    quote,
    read_fields,
    stops_of,
)
from furlong.sessions.open_session import OF_TEXT, ClientCall
from furlong.sessions.session import Reply


class SglangFields(PromptFields):
    """The body of SGLang's request, for one prompt."""

    sampling_params: dict[str, Any] | None = None
    rid: str | None = None
    return_logprob: bool | None = None


def read_sglang(body: Mapping[str, Any]) -> ClientCall:
    """Check a request for one prompt. Raises RequestError naming the field."""
    fields = read_fields(SglangFields, body)
    prompts = fields.prompts()
    name = "input_ids" if fields.text is None else "text"
    if len(prompts) != 1:
        raise RequestError(
            f"{name} has {len(prompts)} prompts, which are answered one at a time: send one request each"
        )
    if fields.stream:
        raise RequestError("stream is True, which is not supported here; remove it")
    if fields.text is None:
        check_ids(name, prompts)
    sampling = read_fields(SamplingFields, fields.sampling_params or {}, "sampling_params.")
    if sampling.max_new_tokens == 0:
        raise RequestError("sampling_params.max_new_tokens is 0, must be at least 1")
    return ClientCall(
        ids=prompts[0],
        sampling={
            **{name: getattr(sampling, name) for name in ("temperature", "top_p", "min_p", "sampling_seed", *OF_TEXT)},
            **{name: getattr(sampling, name) or None for name in ("top_k", "min_new_tokens", "ignore_eos")},
            "stop": stops_of(sampling.stop) or None,
            "stop_token_ids": sampling.stop_token_ids or None,
            "return_routed_experts": fields.return_routed_experts or None,
        },
        max_tokens=sampling.max_new_tokens,
        n=sampling.n or 1,
        request=fields,
    )


def write_sglang(call: ClientCall, replies: Sequence[Reply], _model: str) -> Any:
    """Return the body of the reply: an object, or a list if several were asked for."""
    fields: SglangFields = call.request
    rows: list[dict[str, Any]] = []
    for reply in replies:
        done = reply.finish_reason
        finish: dict[str, Any] = {"type": "length", "length": len(reply.tokens)}
        if done == "stop":
            finish = {"type": done, "matched": reply.tokens[-1] if reply.tokens else None}
        meta: dict[str, Any] = {
            "id": fields.rid or reply.id,
            "finish_reason": finish,
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": len(reply.tokens),
            "cached_tokens": reply.cached_tokens,
            "weight_version": str(reply.versions[-1]) if reply.versions else None,
            "token_versions": reply.versions,
        }
        if fields.return_logprob:
            meta["output_token_logprobs"] = token_log_probs(reply.tokens, reply.log_probs)
            meta["output_token_logprobs_length"] = len(reply.tokens)
        routes = None if reply.node is None else reply.node.completion.routed_experts
        if fields.return_routed_experts and routes is not None:
            meta["routed_experts"] = text_from_routes(routes[fields.routed_experts_start_len or 0 :])
        rows.append({"text": reply.message["content"] or "", "output_ids": reply.tokens, "meta_info": meta})
    return rows if fields.is_list or call.n > 1 else rows[0]


class _VllmSampling(Sampling):
    max_tokens: NumTokens | None = None
    min_tokens: Count | None = None
    stop: Stops | None = None
    stop_token_ids: StopIds | None = None
    seed: Seed | None = None
    n: NumSamples | None = None
    logprobs: Annotated[int, Meta(ge=0, le=1)] | None = None  # only the sampled token's are known

    IGNORED: ClassVar = (
        *("detokenize", "spaces_between_special_tokens", "skip_special_tokens", "output_kind"),
        "include_stop_str_in_output",
    )
    ONLY: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **dict.fromkeys(("presence_penalty", "frequency_penalty"), (0,)),
        "repetition_penalty": (1,),
        **dict.fromkeys(("ignore_eos", "skip_reading_prefix_cache", "flat_logprobs"), (False,)),
        **dict.fromkeys(("logit_bias", "extra_args", "allowed_token_ids", "bad_words"), ()),
        **dict.fromkeys(("prompt_logprobs", "structured_outputs", "truncate_prompt_tokens"), ()),
    }


class VllmFields(Schema):
    """The body of vLLM's request."""

    token_ids: TokenIds | None = None
    sampling_params: dict[str, Any] | None = None
    model: str | None = None
    request_id: str | None = None

    IGNORED: ClassVar = ("priority", "cache_salt")
    ONLY: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "stream": (False,),
        **dict.fromkeys(("features", "kv_transfer_params", "stream_options"), ()),
    }


def read_vllm(body: Mapping[str, Any]) -> ClientCall:
    """Check a request. Raises RequestError naming the field."""
    fields = read_fields(VllmFields, body)
    if not fields.token_ids:
        raise RequestError(f"token_ids is {quote(fields.token_ids)}, must be a list of at least one token id")
    sampling = read_fields(_VllmSampling, fields.sampling_params or {}, "sampling_params.")
    return ClientCall(
        ids=fields.token_ids,
        sampling={
            **{name: getattr(sampling, name) for name in ("temperature", "top_p", "min_p")},
            "top_k": sampling.top_k or None,  # 0 is off
            "stop": stops_of(sampling.stop) or None,
            "stop_token_ids": sampling.stop_token_ids or None,
            "min_new_tokens": sampling.min_tokens,
            "sampling_seed": sampling.seed,
        },
        max_tokens=sampling.max_tokens,
        n=sampling.n or 1,
        model=fields.model,
        request=(fields, sampling),
    )


def write_vllm(call: ClientCall, replies: Sequence[Reply], _model: str) -> dict[str, Any]:
    """Return the body of the reply. A token is named `token_id:ID` in the log-probs, as vLLM does."""
    fields, sampling = call.request
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
                "logprobs": None if sampling.logprobs is None else {"content": content},
                "weight_versions": reply.versions,
            }
        )
    usage = {"prompt_tokens": replies[0].prompt_tokens, "cached_tokens": replies[0].cached_tokens}
    name = fields.request_id or replies[0].id
    return {"request_id": name, "choices": choices, "prompt_logprobs": None, "kv_transfer_params": None, "usage": usage}
