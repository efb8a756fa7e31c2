"""Messages of SGLang's /generate: building the request body and parsing the answer into a `Completion`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from furlong.core.routing import Routes, RoutingShape, routes_from_text
from furlong.core.sample import UNKNOWN_VERSION
from furlong.errors import DataError, EngineError
from furlong.inference.sglang.in_flight import InFlightRequest
from furlong.interfaces import Completion, SamplingParams, TextTokenizer


def request_body(request: InFlightRequest) -> dict[str, Any]:
    """The body of a request without its `rid`, which changes with each attempt."""
    body: dict[str, Any] = {
        "input_ids": request.prompt,
        "sampling_params": sampling_json(request.params),
        "return_logprob": True,
        "stream": False,
    }
    if request.params.return_routed_experts:
        body["return_routed_experts"] = True
    return body


def prefix_body(body: dict[str, Any]) -> dict[str, Any]:
    """The body that makes a server compute and cache the prompt of `body` without generating."""
    return {"input_ids": body["input_ids"], "sampling_params": {"max_new_tokens": 0}, "stream": False}


def cached_tokens(reply: Any) -> int:
    """Prompt tokens that the server took from its cache; 0 if it does not report them."""
    try:
        return int(reply["meta_info"]["cached_tokens"])
    except (KeyError, TypeError, ValueError):
        return 0


def sampling_json(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters under SGLang's names."""
    values: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "min_new_tokens": params.min_new_tokens,
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": params.skip_special_tokens,
        "no_stop_trim": params.no_stop_trim,
    }
    if params.stop:
        values["stop"] = list(params.stop)
    if params.stop_token_ids:
        values["stop_token_ids"] = list(params.stop_token_ids)
    if params.sampling_seed is not None:
        values["sampling_seed"] = params.sampling_seed
    return values


@dataclass(frozen=True)
class AnswerReader:
    """Parses answers. `tokenizer` decodes text that the server leaves out; `routing` is the model's expert routing."""

    tokenizer: TextTokenizer | None = None
    routing: RoutingShape | None = None

    def completion(self, request: InFlightRequest, reply: Any, *, newest: int | None, seconds: float) -> Completion:
        """Validate and convert an answer. Raises EngineError for one that cannot be trained on.

        `newest` is the last weight version given to any server that may have answered; None if unknown.
        """
        try:
            meta = reply["meta_info"]
            rows = meta.get("output_token_logprobs") or []
            tokens, log_probs = [row[1] for row in rows], [row[0] for row in rows]
            reason = meta["finish_reason"]["type"]
            label = str(meta["weight_version"])
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            what = f"without {error}" if isinstance(error, KeyError) else f"with something else: {str(reply)[:200]!r}"
            raise EngineError(
                f"{request.where} answered {what}; furlong expects the protocol of SGLang 0.5.16"
            ) from error
        output_ids = reply.get("output_ids")
        if output_ids is not None and list(output_ids) != tokens:
            raise EngineError(
                f"{request.where} answered {len(output_ids)} tokens, but log-probs of {len(tokens)} other "
                "ones; they must be the same"
            )
        if len(tokens) > request.params.max_new_tokens:
            raise EngineError(
                f"{request.where} answered {len(tokens)} tokens, but max_new_tokens was "
                f"{request.params.max_new_tokens}; furlong expects the protocol of SGLang 0.5.16"
            )
        if reason not in ("stop", "length", "abort"):
            raise EngineError(f"{request.where} answered with finish_reason {reason!r}")
        if not _is_finite(log_probs):
            raise EngineError(f"{request.where} answered a log-prob that is not finite; its weights are broken")
        _check_version(request, label, newest)
        text = reply.get("text") or ""
        if not text and self.tokenizer is not None:
            text = self.tokenizer.decode(tokens, skip_special_tokens=request.params.skip_special_tokens)
        return Completion(
            tokens=tokens,
            log_probs=log_probs,
            versions=_versions(request, meta, label, len(tokens)),
            finish_reason=reason,
            text=text,
            cached_tokens=cached_tokens(reply) if request.cached_tokens is None else request.cached_tokens,
            latency_s=seconds,
            routed_experts=self._routes(request, meta, len(tokens), is_aborted=reason == "abort")
            if request.params.return_routed_experts
            else None,
        )

    def _routes(
        self, request: InFlightRequest, meta: dict[str, Any], num_tokens: int, *, is_aborted: bool
    ) -> Routes | None:
        """Parse the routed experts. Raises EngineError if they are missing for some tokens.

        An aborted request may lack some; the request that continues it reports them.
        """
        text = meta.get("routed_experts")
        if self.routing is None:
            raise EngineError("the request asks for routed experts, but this HttpEngine was built without `routing`")
        if text is None:
            if is_aborted:
                return None
            raise EngineError(
                f"{request.where} answered without routed_experts; start the server with "
                "--enable-return-routed-experts. A router in front of it must pass that field through"
            )
        try:
            routes = routes_from_text(text, self.routing, request.where)
        except DataError as error:
            raise EngineError(str(error)) from error
        expected = len(request.prompt) + num_tokens - 1
        if len(routes) != expected and not (is_aborted and len(routes) < expected):
            raise EngineError(
                f"{request.where} answered routed experts of {len(routes)} tokens; expected {expected}, for all but "
                f"the last of {len(request.prompt)} + {num_tokens} tokens"
            )
        return routes


def abort_reason(reply: Any) -> str:
    """The server's reason for an abort that was not requested."""
    return str(reply["meta_info"]["finish_reason"].get("message", "no reason given"))


def _is_finite(values: list[Any]) -> bool:
    """Whether all values are finite numbers; the sum is ten times faster than testing each."""
    try:
        return math.isfinite(sum(values))
    except TypeError:  # null
        return False


def _check_version(request: InFlightRequest, label: str, newest: int | None) -> None:
    if request.version is None or newest is None or request.version <= _number(label) <= newest:
        return
    assert request.server is not None
    raise EngineError(
        f"{request.server.url} answered with weight version {label!r}, but it was given {request.version} .. {newest}: "
        "it was restarted, or another program updates it; the answer is discarded"
    )


def _number(label: str) -> int:
    """The version number of a label; UNKNOWN_VERSION for a label that furlong did not assign."""
    return int(label) if label.isdigit() else UNKNOWN_VERSION


def _versions(request: InFlightRequest, meta: dict[str, Any], label: str, count: int) -> list[int]:
    per_token = meta.get("token_versions")
    if per_token is not None and len(per_token) == count:
        return [int(version) for version in per_token]
    return [_number(label) if request.version is None else request.version] * count
