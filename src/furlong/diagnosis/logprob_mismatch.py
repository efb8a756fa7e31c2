"""Attributes the log-prob gap between engine and trainer on each token to one cause.

Axes: R trained response tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Cause = Literal["stale_version", "retokenisation", "sampling_transform", "flat", "routing", "numerics"]
CAUSES: tuple[Cause, ...] = ("stale_version", "retokenisation", "sampling_transform", "flat", "routing", "numerics")
FLOOR = 1e-4  # smaller gaps are float noise and ignored
EXPLAINED = 0.2  # a transform explains a gap if at most this part of it remains
FLAT_TOKENS = 8  # at least; no policy finds that many equally likely
TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0)  # that the engine may have sampled with

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Attribution:
    """Shares of the total gap by cause, which sum to 1 (empty without a gap), and the transform that explains one."""

    shares: Mapping[Cause, float]
    transform: str = ""


def attribute(
    engine_R: Floats,
    trainer_R: Floats,
    *,
    is_stale_R: Flags | None = None,
    is_retokenised_R: Flags | None = None,
    is_rerouted_R: Flags | None = None,
    transformed_R: Mapping[str, Floats] | None = None,
) -> Attribution:
    """Attribute each token's gap to the first cause that applies, in the order of `CAUSES`.

    A token is stale if older weights sampled it, retokenised if the engine may have had other ids for its text or
    context, and rerouted if trainer and engine chose different experts. `transformed_R` has the trainer's log-probs
    under other sampling parameters: the closest one applies if it explains most of the remaining gap. Log-probs are
    flat if all tokens have the same. The rest is numerics: precision and kernels.
    """
    gap_R = np.abs(engine_R - trainer_R)
    gap_R = np.where(gap_R < FLOOR, 0.0, gap_R)
    if not (total := float(gap_R.sum())):
        return Attribution({})
    none_R = np.zeros(len(gap_R), np.bool_)
    left_R = np.ones(len(gap_R), np.bool_)
    shares: dict[Cause, float] = {}

    def take(cause: Cause, which_R: Flags) -> None:
        nonlocal left_R
        shares[cause] = float(gap_R[which_R & left_R].sum()) / total
        left_R = left_R & ~which_R

    take("stale_version", none_R if is_stale_R is None else is_stale_R)
    take("retokenisation", none_R if is_retokenised_R is None else is_retokenised_R)
    name, is_transformed_R = _best_transform(engine_R, gap_R, left_R, transformed_R or {})
    take("sampling_transform", is_transformed_R)
    take("flat", ~none_R if len(engine_R) >= FLAT_TOKENS and np.ptp(engine_R) < FLOOR else none_R)
    take("routing", none_R if is_rerouted_R is None else is_rerouted_R)
    take("numerics", ~none_R)
    return Attribution(shares, name)


def _best_transform(
    engine_R: Floats, gap_R: Floats, left_R: Flags, transformed_R: Mapping[str, Floats]
) -> tuple[str, Flags]:
    """Return the transform closest to the engine on the remaining tokens, and the tokens that it explains."""
    before = float(gap_R[left_R].sum())
    best, name = EXPLAINED * before, ""
    for candidate, values_R in transformed_R.items():
        rest = float(np.abs(engine_R - values_R)[left_R].sum())
        if rest < best:
            best, name = rest, candidate
    if not name:
        return "", np.zeros(len(gap_R), np.bool_)
    return name, np.abs(engine_R - transformed_R[name]) <= EXPLAINED * gap_R


def transforms(
    logits_RV: Tensor, tokens_R: Tensor, *, temperature: float, top_p: float = 1.0, top_k: int = -1, min_p: float = 0.0
) -> dict[str, Floats]:
    """Compute log-probs of `tokens_R` under other sampling parameters, by name of the transform.

    These are other temperatures, and the distribution after top-k, top-p and min-p if enabled (a token outside of it
    keeps its plain log-prob). `logits_RV` are the trainer's, divided by `temperature`.
    """
    logits_RV = logits_RV.double()
    index_R1 = tokens_R[:, None]
    transformed: dict[str, Floats] = {}
    for other in TEMPERATURES:
        if abs(other - temperature) > 1e-6:
            scaled_RV = (logits_RV * (temperature / other)).log_softmax(-1)
            transformed[f"temperature {other:g}"] = scaled_RV.gather(1, index_R1)[:, 0].cpu().numpy()
    if top_p < 1 or top_k > 0 or min_p > 0:
        plain_RV = logits_RV.log_softmax(-1)
        kept_RV = _kept(plain_RV.exp(), top_p=top_p, top_k=top_k, min_p=min_p)
        cut_R = plain_RV.masked_fill(~kept_RV, -torch.inf).log_softmax(-1).gather(1, index_R1)[:, 0]
        is_in_R = kept_RV.gather(1, index_R1)[:, 0]
        transformed["after top-p, top-k, min-p"] = (
            torch.where(is_in_R, cut_R, plain_RV.gather(1, index_R1)[:, 0]).cpu().numpy()
        )
    return transformed


def _kept(probs_RV: Tensor, *, top_p: float, top_k: int, min_p: float) -> Tensor:
    """Return which tokens the filters keep, [R, V]."""
    ordered_RV, order_RV = probs_RV.sort(-1, descending=True)
    kept_RV = (ordered_RV.cumsum(-1) - ordered_RV) < top_p
    if top_k > 0:
        kept_RV[:, top_k:] = False
    kept_RV &= ordered_RV >= min_p * ordered_RV[:, :1]
    return torch.zeros_like(kept_RV).scatter(1, order_RV, kept_RV)
