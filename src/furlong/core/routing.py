"""The experts that the tokens of a mixture of experts went to: their shape, and their form on the wire.

A record is an array [rows, L, K] of expert numbers: row i is what token i of a sample was sent to in each of the
model's L layers. A token's row decides how the token after it was predicted, so the last token of a sample has none. In
layers without experts the numbers mean nothing. -1 stands for "not recorded".
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from furlong.errors import DataError

Routes = NDArray[np.int16]

UNKNOWN_EXPERT = -1
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")


@dataclass(frozen=True)
class RoutingShape:
    """How a model sends tokens to experts: `num_layers` of the model, those without experts too."""

    num_layers: int
    top_k: int
    num_experts: int

    @staticmethod
    def of(config: Mapping[str, Any]) -> RoutingShape | None:
        """Read a config.json; None for a model without experts, or one that does not say how many layers it has."""
        text: Mapping[str, Any] = config.get("text_config") or config
        experts = next((int(text[name]) for name in NUM_EXPERTS if text.get(name)), 0)
        top_k = next((int(text[name]) for name in TOP_K if text.get(name)), 0)
        layers = int(text.get("num_hidden_layers") or 0)
        return RoutingShape(layers, top_k, experts) if layers and experts and top_k else None

    def checked(self, routes: Any, what: str) -> Routes:
        """Return a record as int16. Raises DataError naming `what` if it is none of this model."""
        array = np.asarray(routes)
        if array.dtype.kind not in "iu" or array.ndim != 3 or array.shape[1:] != (self.num_layers, self.top_k):
            raise DataError(
                f"{what} has routed experts of shape {array.shape} and type {array.dtype}; this model has integers "
                f"[tokens - 1, {self.num_layers} layers, {self.top_k} experts a token]"
            )
        if array.size and (int(array.min()) < UNKNOWN_EXPERT or int(array.max()) >= self.num_experts):
            raise DataError(
                f"{what} was routed to experts {int(array.min())} to {int(array.max())}; this model has 0 to "
                f"{self.num_experts - 1}: the engine serves another model"
            )
        return array.astype(np.int16)


def text_from_routes(routes: Routes) -> str:
    """SGLang's form: base64 of int32 numbers."""
    return base64.b64encode(np.ascontiguousarray(routes, np.int32).tobytes()).decode("ascii")


def routes_from_text(text: str, shape: RoutingShape, what: str) -> Routes:
    """Inverse of `text_from_routes`. Raises DataError naming `what`."""
    try:
        flat = np.frombuffer(base64.b64decode(text, validate=True), np.int32)
    except (binascii.Error, ValueError, TypeError) as error:
        raise DataError(f"{what} has routed experts that are no base64 of int32: {error}") from error
    width = shape.num_layers * shape.top_k
    if flat.size % width:
        raise DataError(
            f"{what} has {flat.size} routed experts, which is no multiple of {shape.num_layers} layers x {shape.top_k} "
            "experts a token: the engine serves another model"
        )
    return shape.checked(flat.reshape(-1, shape.num_layers, shape.top_k), what)


def json_from_routes(routes: Any) -> dict[str, Any]:
    """A record as plain data."""
    array = np.ascontiguousarray(routes, np.int16)
    return {"shape": list(array.shape), "int16": base64.b64encode(array.tobytes()).decode("ascii")}


def routes_from_json(data: Mapping[str, Any]) -> Routes:
    """Inverse of `json_from_routes`."""
    return np.frombuffer(base64.b64decode(data["int16"]), np.int16).reshape(data["shape"]).copy()


def extend_routes(known: Any, routes: Any) -> Any:
    """A record with the rows that a longer one has more of.

    Rows that are known stay: they are those with which the tokens after them were sampled. A later pass over the same
    tokens, with other weights perhaps, may have routed them otherwise.
    """
    if routes is None or known is None:
        return known if routes is None else routes
    return known if len(routes) <= len(known) else np.concatenate([known, routes[len(known) :]])
