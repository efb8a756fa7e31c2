"""The routing of tokens to experts in a mixture of experts: shape, validation and serialization.

Routes are an array [rows, L, K] of expert indices: row i has the experts of token i of a sample in each of the model's
L layers. Row i predicted token i + 1, so the last token has no row. Values of layers without experts are meaningless.
-1 means unknown.
"""

from __future__ import annotations

import base64
import binascii
import math
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
    """The routing dimensions of a model. `num_layers` includes layers without experts."""

    num_layers: int
    top_k: int
    num_experts: int

    @staticmethod
    def of(config: Mapping[str, Any]) -> RoutingShape | None:
        """Read a config.json; None for a model without experts, or if the number of layers is missing."""
        text: Mapping[str, Any] = config.get("text_config") or config
        experts = next((int(text[name]) for name in NUM_EXPERTS if text.get(name)), 0)
        top_k = next((int(text[name]) for name in TOP_K if text.get(name)), 0)
        layers = int(text.get("num_hidden_layers") or 0)
        return RoutingShape(layers, top_k, experts) if layers and experts and top_k else None

    def checked(self, routes: Any, what: str) -> Routes:
        """Return routes [rows, L, K] as int16; rows of L K numbers are reshaped.

        Raises DataError that starts with `what` if they do not fit this model.
        """
        array = np.asarray(routes)
        if array.ndim == 2 and array.shape[1] == self.num_layers * self.top_k:
            array = array.reshape(-1, self.num_layers, self.top_k)
        if array.dtype.kind not in "iu" or array.ndim != 3 or array.shape[1:] != (self.num_layers, self.top_k):
            raise DataError(
                f"{what} has routed experts of shape {array.shape} and type {array.dtype}; this model has integers "
                f"[tokens - 1, {self.num_layers} layers, {self.top_k} experts per token]"
            )
        if array.size and (int(array.min()) < UNKNOWN_EXPERT or int(array.max()) >= self.num_experts):
            raise DataError(
                f"{what} was routed to experts {int(array.min())} to {int(array.max())}; this model has 0 to "
                f"{self.num_experts - 1}: the engine serves another model"
            )
        return array.astype(np.int16)


def text_from_routes(routes: Routes) -> str:
    """Serialize routes in SGLang's format: base64 of int32."""
    return base64.b64encode(np.ascontiguousarray(routes, np.int32).tobytes()).decode("ascii")


def _decoded(text: Any, what: str) -> NDArray[np.int32]:
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), np.int32)
    except (binascii.Error, ValueError, TypeError) as error:
        raise DataError(f"{what} has routed experts that are not base64 of int32: {error}") from error


def routes_from_text(text: str, shape: RoutingShape, what: str) -> Routes:
    """Inverse of `text_from_routes`. Raises DataError naming `what`."""
    flat = _decoded(text, what)
    width = shape.num_layers * shape.top_k
    if flat.size % width:
        raise DataError(
            f"{what} has {flat.size} routed experts, not a multiple of {shape.num_layers} layers x {shape.top_k} "
            "experts per token: the engine serves another model"
        )
    return shape.checked(flat.reshape(-1, shape.num_layers, shape.top_k), what)


def routes_from_meta(meta_info: Mapping[str, Any], num_tokens: int, known: Any) -> NDArray[np.int32] | None:
    """Decode `routed_experts` of an SGLang reply about `num_tokens` tokens, prompt included; None if it has none.

    Returns one row per token but the last, [num_tokens - 1, L K]: the reply does not say how many layers there are. Its
    rows begin at `routed_experts_start_len`; those before are `known`. Raises DataError if rows are missing.
    """
    text = meta_info.get("routed_experts")
    if text is None:
        return None
    flat, start = _decoded(text, "meta_info"), int(meta_info.get("routed_experts_start_len") or 0)
    num_rows, num_known = num_tokens - 1 - start, 0 if known is None else len(known)
    if not 0 <= start <= num_known or num_rows <= 0 or not flat.size or flat.size % num_rows:
        raise DataError(
            f"meta_info has {flat.size} routed experts from token {start} on, but the sample has {num_tokens} tokens "
            f"and experts for {num_known} before; pass the meta_info of the reply whose tokens are appended"
        )
    rows = flat.reshape(num_rows, -1)
    if start == 0:
        return rows
    before = np.asarray(known)[:start].reshape(start, -1)
    if before.shape[1] != rows.shape[1]:
        raise DataError(
            f"meta_info has {rows.shape[1]} routed experts per token, the tokens before have {before.shape[1]}: the "
            "engine serves another model"
        )
    return np.concatenate([before.astype(np.int32), rows])


def json_from_array(values: Any, dtype: str) -> dict[str, Any]:
    """Serialize routes, and other arrays of samples, as JSON-able data: the shape, and base64 under the dtype."""
    array = np.ascontiguousarray(values, dtype)
    return {"shape": list(array.shape), dtype: base64.b64encode(array.tobytes()).decode("ascii")}


def array_from_json(data: Mapping[str, Any]) -> NDArray[Any]:
    """Inverse of `json_from_array`."""
    (dtype,) = data.keys() - {"shape"}
    return np.frombuffer(base64.b64decode(data[dtype]), dtype).reshape(data["shape"]).copy()


def extend_routes(known: Any, routes: Any) -> Any:
    """Append the rows of `routes` that `known` does not have yet.

    Known rows are kept: they are the routing that the next tokens were sampled with, while a later pass over the same
    tokens, perhaps with other weights, may route differently. Raises DataError for rows of another size.
    """
    if routes is None or known is None:
        return known if routes is None else routes
    if len(routes) <= len(known):
        return known
    new, known = np.asarray(routes)[len(known) :], np.asarray(known)
    shape = max(new.shape[1:], known.shape[1:], key=len)  # rows of SGLang's replies are flat
    if math.prod(new.shape[1:]) != math.prod(known.shape[1:]):
        raise DataError(
            f"a token was routed to {new.shape[1:]} [layers, experts per token], tokens before it to "
            f"{known.shape[1:]}: the engine serves another model"
        )
    return np.concatenate([known.reshape(-1, *shape), new.reshape(-1, *shape)])
