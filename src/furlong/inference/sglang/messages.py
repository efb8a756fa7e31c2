"""One generation in SGLang's protocol: the body that asks for it, and the `Completion` that its answer is read as."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from furlong.core.routing import Routes, RoutingShape, routes_from_text
from furlong.core.sample import UNKNOWN_VERSION
from furlong.errors import DataError, EngineError
from furlong.inference.sglang.in_flight import Flight
from furlong.interfaces import Completion, SamplingParams


class TextTokenizer(Protocol):
    """What reading an answer needs of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `token_ids`."""
        ...


def body_of(flight: Flight) -> dict[str, Any]:
    """What is sent for a request, but for its `rid`, which each attempt has of its own."""
    body: dict[str, Any] = {
        "input_ids": flight.prompt,
        "sampling_params": sampling_json(flight.params),
        "return_logprob": True,
        "stream": False,
    }
    if flight.params.return_routed_experts:
        body["return_routed_experts"] = True
    return body


def prefix_body(body: dict[str, Any]) -> dict[str, Any]:
    """What has a server compute and cache the prompt of `body`, without its answer."""
    return {"input_ids": body["input_ids"], "sampling_params": {"max_new_tokens": 0}, "stream": False}


def cached_tokens(reply: Any) -> int:
    """Tokens of the prompt that the server did not have to compute for this answer; 0 if it does not say."""
    try:
        return int(reply["meta_info"]["cached_tokens"])
    except (KeyError, TypeError, ValueError):
        return 0


def sampling_json(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as SGLang names them."""
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
    """Reads answers. `tokenizer` makes the text where there is none; `routing` is how the model goes to its experts."""

    tokenizer: TextTokenizer | None = None
    routing: RoutingShape | None = None

    def completion(self, flight: Flight, reply: Any, *, newest: int | None, seconds: float) -> Completion:
        """Check and translate an answer. Raises EngineError for one that cannot be trained on.

        `newest` is the last version of the weights that a server which may have answered was given, None if unknown.
        """
        try:
            meta = reply["meta_info"]
            rows = meta.get("output_token_logprobs") or []
            tokens, log_probs = [row[1] for row in rows], [row[0] for row in rows]
            reason = meta["finish_reason"]["type"]
            label = str(meta["weight_version"])
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            what = f"without {error}" if isinstance(error, KeyError) else f"what is no generation, {str(reply)[:200]!r}"
            raise EngineError(
                f"{flight.where} answered {what}; furlong speaks the protocol of SGLang 0.5.16"
            ) from error
        given = reply.get("output_ids")
        if given is not None and list(given) != tokens:
            raise EngineError(
                f"{flight.where} answered {len(given)} tokens with log-probs of {len(tokens)} others; "
                "they must be the same"
            )
        if len(tokens) > flight.params.max_new_tokens:
            raise EngineError(
                f"{flight.where} answered {len(tokens)} tokens, {flight.params.max_new_tokens} at most were asked for; "
                "furlong speaks the protocol of SGLang 0.5.16"
            )
        if reason not in ("stop", "length", "abort"):
            raise EngineError(f"{flight.where} answered with finish_reason {reason!r}")
        if not _is_finite(log_probs):
            raise EngineError(f"{flight.where} answered a log-prob that is no finite number; its weights are broken")
        _check_version(flight, label, newest)
        text = reply.get("text") or ""
        if not text and self.tokenizer is not None:
            text = self.tokenizer.decode(tokens, skip_special_tokens=flight.params.skip_special_tokens)
        return Completion(
            tokens=tokens,
            log_probs=log_probs,
            versions=_versions(flight, meta, label, len(tokens)),
            finish_reason=reason,
            text=text,
            cached_tokens=cached_tokens(reply) if flight.cached_tokens is None else flight.cached_tokens,
            latency_s=seconds,
            routed_experts=self._routes(flight, meta, len(tokens), is_aborted=reason == "abort")
            if flight.params.return_routed_experts
            else None,
        )

    def _routes(self, flight: Flight, meta: dict[str, Any], num_tokens: int, *, is_aborted: bool) -> Routes | None:
        """Read where the tokens went. Raises EngineError if the server does not say, or not for all of them.

        A request that was aborted may know less; what continues it tells the rest.
        """
        text = meta.get("routed_experts")
        if self.routing is None:
            raise EngineError("routed experts were asked for, but this client was not told the model's routing")
        if text is None:
            if is_aborted:
                return None
            raise EngineError(
                f"{flight.where} answered without routed_experts; start the server with "
                "--enable-return-routed-experts. A router in front of it must hand that field on"
            )
        try:
            routes = routes_from_text(text, self.routing, flight.where)
        except DataError as error:
            raise EngineError(str(error)) from error
        wanted = len(flight.prompt) + num_tokens - 1
        if len(routes) != wanted and not (is_aborted and len(routes) < wanted):
            raise EngineError(
                f"{flight.where} answered routed experts of {len(routes)} tokens for {len(flight.prompt)} + "
                f"{num_tokens} tokens; all but the last have some, {wanted}"
            )
        return routes


def abort_reason(reply: Any) -> str:
    """What a server says of an abort that nobody asked for."""
    return str(reply["meta_info"]["finish_reason"].get("message", "no reason given"))


def _is_finite(values: list[Any]) -> bool:
    """Whether all of these are finite numbers, by their sum, which is a tenth of the work of looking at each."""
    try:
        return math.isfinite(sum(values))
    except TypeError:  # null
        return False


def _check_version(flight: Flight, label: str, newest: int | None) -> None:
    if flight.version is None or newest is None or flight.version <= _number(label) <= newest:
        return
    assert flight.server is not None
    raise EngineError(
        f"{flight.server.url} answered with weight version {label!r}, but it was given {flight.version} .. {newest}: "
        "it was restarted, or somebody else updates it; nothing of this answer is used"
    )


def _number(label: str) -> int:
    """The version that a label names; labels that are no numbers are of weights that nobody published."""
    return int(label) if label.isdigit() else UNKNOWN_VERSION


def _versions(flight: Flight, meta: dict[str, Any], label: str, count: int) -> list[int]:
    per_token = meta.get("token_versions")
    if per_token is not None and len(per_token) == count:
        return [int(version) for version in per_token]
    return [_number(label) if flight.version is None else flight.version] * count
