"""Losses and gradients that are nan or infinite: where they are, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from furlong.core.batch import IntArray, RolloutBatch
from furlong.core.catalogue import Diagnosis
from furlong.errors import TrainerError
from furlong.training.ranks import Ranks

SHOWN_SAMPLES = 8  # in an error


class NotFiniteLossError(TrainerError):
    """A micro-batch whose loss is not finite; `rows` are its samples' rows in the batch, `what` says which value."""

    def __init__(self, what: str, rows: IntArray) -> None:
        super().__init__(what, rows)
        self.what, self.rows = what, rows

    def __str__(self) -> str:
        return f"{self.what} in the micro-batch of rows {self.rows.tolist()}"


def first_not_finite(gradients: Iterable[tuple[str, Tensor | None]], ranks: Ranks) -> str:
    """Name the first parameter whose gradient is not finite, on the lowest rank that has one. A collective."""
    bad = (name for name, grad in gradients if grad is not None and not bool(torch.isfinite(grad).all()))
    return ranks.first(next(bad, "")) or "the sum over all parameters (each is finite)"


def refused_step(
    batch: RolloutBatch,
    rows: IntArray,
    found: str,
    *,
    keep: Callable[[RolloutBatch], object] | None,
    is_own_loss: bool,
) -> TrainerError:
    """The error NUM04 of a step that is not finite. Its samples, with all columns, are kept for a second look.

    found: what it was, up to which samples it was found in; keep: returns where it has put them; is_own_loss: the loss
    is a function of the user's.
    """
    refused = batch.select(rows)
    found = f"rollout {batch.rollout_id}: {found} {_shown(batch, rows)}"
    if keep is not None:
        found += f", kept in {keep(refused)}"
    cause = (
        "A learning rate that is too high, activations that overflow in float16 or FP8, or a sample or a chat "
        "template that does not fit the model."
    )
    remedy = "lower --lr or --clip-grad, compute in --bf16 or --fp32, look at the samples"
    if bad := [name for name, column in refused.columns.items() if not _is_finite(column, refused.loss_masks)]:
        cause = f"The loss was given {', '.join(bad)} that are not finite."
        remedy = "correct the function of yours that makes them, or what the engine reports"
    elif is_own_loss:
        cause = f"Values of --custom-loss-function-path, or: {cause[0].lower()}{cause[1:]}"
    diagnosis = Diagnosis(
        "NUM04", found, cause, f"{remedy}; --no-check-for-nan-in-loss-and-grad skips and counts such steps",
        evidence={"rollout": batch.rollout_id, "samples": batch.sample_ids[rows].tolist()},
    )  # fmt: skip
    return TrainerError(diagnosis.text())


def _shown(batch: RolloutBatch, rows: IntArray) -> str:
    """The ids of a few of the samples in `rows`, and how many more there are."""
    ids = batch.sample_ids[rows].tolist()
    more = f" and {len(ids) - SHOWN_SAMPLES} more" if len(ids) > SHOWN_SAMPLES else ""
    return f"{ids[:SHOWN_SAMPLES]}{more}"


def _is_finite(column_R: NDArray[Any], mask_R: NDArray[Any]) -> bool:
    """Whether a column's values of trained tokens are all finite."""
    is_trained = mask_R != 0
    return column_R.dtype.kind != "f" or bool(np.isfinite(column_R[is_trained]).all())
