"""Rollout data for advantage and post-process hooks: a dict of lists with one entry per sample.

Keys are slime's: `tokens, response_lengths, total_lengths, rewards, raw_reward, truncated, sample_indices, rollout_ids,
group_ids, loss_masks, metadata`, and per response token those of `rollout_log_probs, log_probs, ref_log_probs,
teacher_log_probs, advantages, returns` that exist. Per-token entries are float32 tensors that a hook may replace or
modify in place.
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

# Batch columns with another name in slime.
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
    """Run `hook` on the batch's dict and return the batch with its per-token entries and loss masks.

    `provides`: entries that the hook must set. Raises TrainerError if one is missing, or if the lengths of an entry
    differ from the responses.
    """
    data = rollout_data(batch)
    hook(data)
    if missing := [name for name in provides if name not in data]:
        raise TrainerError(f"{_name(hook)} did not set {', '.join(missing)}; rollout_data has {sorted(data)}")
    columns = {
        BATCH_NAMES.get(name, name): _joined(name, entries, batch, hook)
        for name, entries in data.items()
        if name not in (*PER_SAMPLE, "loss_masks")
    }
    masks = (_joined("loss_masks", data["loss_masks"], batch, hook) > 0).astype(np.uint8)
    if bool((masks > batch.loss_masks).any()):
        raise TrainerError(
            f"{_name(hook)} set loss masks that were 0; the loss denominator was computed from the previous masks, so "
            "a hook may only clear masks. Set them in the generate function"
        )
    return dataclasses.replace(batch, columns=columns, loss_masks=masks)


def _joined(name: str, entries: Any, batch: RolloutBatch, hook: RolloutDataHook) -> np.ndarray:
    tensors = [torch.as_tensor(entry, dtype=torch.float32).cpu() for entry in entries]
    lengths = [tensor.numel() for tensor in tensors]
    if lengths != batch.response_lengths.tolist():
        raise TrainerError(
            f"{_name(hook)} set {name} with lengths {lengths[:4]}..., but responses have "
            f"{batch.response_lengths.tolist()[:4]}...; give one value per response token of each sample"
        )
    return torch.cat(tensors).numpy() if tensors else np.zeros(0, np.float32)


def _name(hook: RolloutDataHook) -> str:
    if isinstance(hook, partial):
        return _name(hook.func)
    name: str = getattr(hook, "__qualname__", type(hook).__qualname__)
    module: str = getattr(hook, "__module__", "?")
    loaded = module.removeprefix("furlong_hook_")  # the module of a file loaded by path
    return f"{module}.{name}" if loaded == module else f"{loaded.rpartition('_')[0]}.py:{name}"
