"""Non-finite losses and gradients: locate them and build the error (NUM04)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from furlong.catalogue import diagnosis, find_row
from furlong.core.batch import IntArray, RolloutBatch
from furlong.errors import TrainerError
from furlong.training.ranks import Ranks

SHOWN_SAMPLES = 8  # sample ids in an error


class NotFiniteLossError(TrainerError):
    """The loss of a micro-batch is not finite: `what` is the value, `rows` the samples' rows in the batch."""

    def __init__(self, what: str, rows: IntArray) -> None:
        super().__init__(what, rows)
        self.what, self.rows = what, rows

    def __str__(self) -> str:
        return f"{self.what} in the micro-batch of rows {self.rows.tolist()}"


def first_not_finite(gradients: Iterable[tuple[str, Tensor | None]], ranks: Ranks) -> str:
    """Return the name of the first parameter with a non-finite gradient, on the lowest rank with one. A collective."""
    bad = (name for name, grad in gradients if grad is not None and not bool(torch.isfinite(grad).all()))
    return ranks.first(next(bad, "")) or "the sum over all parameters (each is finite)"


def refused_step(
    batch: RolloutBatch,
    rows: IntArray,
    what: str,
    *,
    keep: Callable[[RolloutBatch], object] | None,
    is_custom_loss: bool,
) -> TrainerError:
    """Build the error NUM04 of a non-finite step, and store its samples with all columns through `keep`.

    what: start of the message, which ends with the sample ids; keep: returns where the samples are stored;
    is_custom_loss: the loss is --custom-loss-function-path.
    """
    refused = batch.select(rows)
    message = f"rollout {batch.rollout_id}: {what} {_shown(batch, rows)}"
    if keep is not None:
        message += f", saved in {keep(refused)}"
    cause = find_row("NUM04").cause
    remedy = "lower --lr or --clip-grad, compute in --bf16 or --fp32, inspect the samples"
    if bad := [name for name, column in refused.columns.items() if not _is_finite(column, refused.loss_masks)]:
        cause = f"The loss received non-finite {', '.join(bad)}."
        remedy = "fix your function that computes them, or what the engine reports"
    elif is_custom_loss:
        cause = f"--custom-loss-function-path returns non-finite values, or: {cause[0].lower()}{cause[1:]}"
    error = diagnosis(
        "NUM04", message, cause=cause,
        remedy=f"{remedy}; --no-check-for-nan-in-loss-and-grad skips and counts such steps",
        evidence={"rollout": batch.rollout_id, "samples": batch.sample_ids[rows].tolist()},
    )  # fmt: skip
    return TrainerError(error.text())


def _shown(batch: RolloutBatch, rows: IntArray) -> str:
    """Return the ids of the first samples in `rows`, and the count of the others."""
    ids = batch.sample_ids[rows].tolist()
    more = f" and {len(ids) - SHOWN_SAMPLES} more" if len(ids) > SHOWN_SAMPLES else ""
    return f"{ids[:SHOWN_SAMPLES]}{more}"


def _is_finite(column_R: NDArray[Any], mask_R: NDArray[Any]) -> bool:
    """Return whether all values of trained tokens are finite."""
    is_trained = mask_R != 0
    return column_R.dtype.kind != "f" or bool(np.isfinite(column_R[is_trained]).all())
