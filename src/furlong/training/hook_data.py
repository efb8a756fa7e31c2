"""The view of a rollout that advantage and post-process hooks get: a dict of lists, one entry per sample.

Keys are slime's: `tokens, response_lengths, total_lengths, rewards, raw_reward, truncated, sample_indices, rollout_ids,
group_ids, loss_masks, metadata`, and per response token any of `rollout_log_probs,
log_probs, ref_log_probs, teacher_log_probs, advantages, returns` that exist. Per-token entries are float32 tensors that
a hook may replace or change in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from furlong.core.batch import RolloutBatch
from furlong.errors import TrainerError

RolloutDataHook = Callable[[dict[str, Any]], object]

# Columns whose name in a batch differs from slime's.
HOOK_NAMES = {"old_log_probs": "log_probs"}
BATCH_NAMES = {hook: column for column, hook in HOOK_NAMES.items()}
PER_SAMPLE = (
    "tokens",
    "response_lengths",
    "total_lengths",
    "rewards",
    "raw_reward",
    "truncated",
    "sample_indices",
    "rollout_ids",
    "group_ids",
    "metadata",
)


def rollout_data(batch: RolloutBatch) -> dict[str, Any]:
    """Build the dict of lists; tensors in it are copies."""

    def split(array: np.ndarray, starts: np.ndarray, dtype: torch.dtype) -> list[torch.Tensor]:
        return list(torch.from_numpy(array).to(dtype, copy=True).split(np.diff(starts).tolist()))

    data: dict[str, Any] = {
        "tokens": split(batch.tokens, batch.starts, torch.int64),
        "response_lengths": batch.response_lengths.tolist(),
        "total_lengths": batch.lengths.tolist(),
        "rewards": batch.rewards.tolist(),
        "raw_reward": batch.raw_rewards.tolist(),
        "truncated": batch.truncated.tolist(),
        "sample_indices": batch.sample_ids.tolist(),
        "rollout_ids": batch.rollout_ids.tolist(),
        "group_ids": batch.group_ids.tolist(),
        "loss_masks": split(batch.loss_masks, batch.response_starts, torch.float32),
    }
    for name, column in batch.columns.items():
        data[HOOK_NAMES.get(name, name)] = split(column, batch.response_starts, torch.float32)
    if batch.metadata is not None:
        data["metadata"] = list(batch.metadata)
    return data


def apply_hook(batch: RolloutBatch, hook: RolloutDataHook, *, provides: tuple[str, ...] = ()) -> RolloutBatch:
    """Run `hook` on the batch's dict and take its per-token entries and loss masks back.

    `provides` are entries that the hook has to set. Raises TrainerError for one that is missing, or an entry whose
    lengths are not those of the responses.
    """
    data = rollout_data(batch)
    hook(data)
    if missing := [name for name in provides if name not in data]:
        raise TrainerError(f"{_name(hook)} has not set {', '.join(missing)} in rollout_data; it holds {sorted(data)}")
    columns = {
        BATCH_NAMES.get(name, name): _joined(name, entries, batch, hook)
        for name, entries in data.items()
        if name not in (*PER_SAMPLE, "loss_masks")
    }
    masks = (_joined("loss_masks", data["loss_masks"], batch, hook) > 0).astype(np.uint8)
    if bool((masks > batch.loss_masks).any()):
        raise TrainerError(
            f"{_name(hook)} has set loss masks that were 0; the loss is divided by the counts of the masks before, so "
            "a hook may clear masks only. Set them in the generate function"
        )
    return dataclasses.replace(batch, columns=columns, loss_masks=masks)


def _joined(name: str, entries: Any, batch: RolloutBatch, hook: RolloutDataHook) -> np.ndarray:
    tensors = [torch.as_tensor(entry, dtype=torch.float32).cpu() for entry in entries]
    lengths = [tensor.numel() for tensor in tensors]
    if lengths != batch.response_lengths.tolist():
        raise TrainerError(
            f"{_name(hook)} left {name} with lengths {lengths[:4]}..., responses have "
            f"{batch.response_lengths.tolist()[:4]}...; give one value per response token of each sample"
        )
    return torch.cat(tensors).numpy() if tensors else np.zeros(0, np.float32)


def _name(hook: RolloutDataHook) -> str:
    if isinstance(hook, partial):
        return _name(hook.func)
    name: str = getattr(hook, "__qualname__", type(hook).__qualname__)
    module: str = getattr(hook, "__module__", "?")
    loaded = module.removeprefix("furlong_hook_")  # of a file that was named by its path
    return f"{module}.{name}" if loaded == module else f"{loaded.rpartition('_')[0]}.py:{name}"
