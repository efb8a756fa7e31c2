"""Hashes of every stage of a step, to find the first value that differs between two runs (--debug-determinism).

One row per stage, in execution order; `docs/reference/run-folder.md` documents the file format:

    data         ids of groups and samples, in order
    rollout      tokens, masks, rewards and the engine's log-probs, as received
    log_probs    log-probs of the response tokens from the trainer's models
    advantages   and all other columns that a loss reads
    loss         of each optimizer step, before the step
    gradients    of each optimizer step, before clipping, by parameter
    parameters   after the last optimizer step of the rollout
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from furlong.core.batch import RolloutBatch
from furlong.core.metric import Metrics, values
from furlong.core.weights import checksum

Record = Callable[[int, Mapping[str, Any]], object]
LOG_PROBS = ("old_log_probs", "ref_log_probs", "teacher_log_probs", "entropy")


class Digests:
    """Passes one row per stage to `record(step, row)`. Steps count from 1."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._seen: set[str] = set()

    def rollout(self, batch: RolloutBatch) -> None:
        """Hash this rank's part of the batch as the rollout produced it."""
        step = batch.rollout_id + 1
        ids = {"group_ids": batch.group_ids.tolist(), "sample_ids": batch.sample_ids.tolist()}
        self._record(step, {"stage": "data", "values": ids})
        self._seen = {"loss_weights", *batch.columns} - {*LOG_PROBS}
        hashes = {
            "tokens": _of_samples(batch.tokens, batch.starts),
            "loss_masks": _of_samples(batch.loss_masks, batch.response_starts),
            "rewards": _of_array(batch.rewards),
            "raw_rewards": _of_array(batch.raw_rewards),
        }
        hashes |= self._columns(batch, sorted(self._seen & batch.columns.keys()))
        self._record(step, {"stage": "rollout", "values": hashes})

    def trained_on(self, batch: RolloutBatch) -> None:
        """Hash the columns that were added before the first optimizer step."""
        step = batch.rollout_id + 1
        log_probs = [name for name in LOG_PROBS if name in batch.columns]
        self._record(step, {"stage": "log_probs", "values": self._columns(batch, log_probs)})
        rest = sorted(batch.columns.keys() - self._seen - {*log_probs})
        self._record(step, {"stage": "advantages", "values": self._columns(batch, rest)})

    def before_update(
        self, rollout_id: int, index: int, metrics: Metrics, gradients: Iterable[tuple[str, Tensor]]
    ) -> None:
        """Hash the loss metrics and gradients of optimizer step `index`, before the step."""
        self._record(rollout_id + 1, {"stage": "loss", "at": index, "values": values(metrics)})
        hashes = {name: _of_tensor(tensor) for name, tensor in gradients}
        self._record(rollout_id + 1, {"stage": "gradients", "at": index, "values": hashes})

    def end(self, rollout_id: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Hash the parameters after the last optimizer step."""
        hashes = {name: _of_tensor(tensor) for name, tensor in weights}
        self._record(rollout_id + 1, {"stage": "parameters", "values": hashes})

    def _columns(self, batch: RolloutBatch, names: Iterable[str]) -> dict[str, Any]:
        return {name: _of_samples(batch.columns[name], batch.response_starts) for name in names}


def _of_array(array: NDArray[Any]) -> dict[str, Any]:
    digest: dict[str, Any] = {"hash": xxhash.xxh3_64_hexdigest(array.tobytes())}
    if array.dtype.kind == "f":
        digest["norm"] = _finite(float(np.linalg.norm(array.astype(np.float64))))
    return digest


def _of_samples(array: NDArray[Any], starts: NDArray[np.int64]) -> dict[str, Any]:
    """Hash a packed column as a whole, and each sample's part with eight hex digits."""
    bounds = zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    return _of_array(array) | {"samples": "".join(xxhash.xxh32_hexdigest(array[a:b].tobytes()) for a, b in bounds)}


def _of_tensor(tensor: Tensor) -> dict[str, Any]:
    local: Tensor = getattr(tensor, "to_local", lambda: tensor)()  # this rank's shard
    norm = float(torch.linalg.vector_norm(local.detach().to(torch.float64)))
    return {"hash": checksum(local)[:16], "norm": _finite(norm)}


def _finite(number: float) -> float | str:
    """Return the number, or its name if JSON cannot represent it."""
    return number if np.isfinite(number) else str(number)
