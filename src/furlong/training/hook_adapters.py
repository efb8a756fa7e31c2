"""Adapters of user functions with slime's signatures: data hooks before the steps, and loss hooks.

slime passes lists with one entry per sample, while furlong packs tokens; the adapters split and join.

Data hooks receive a dict of lists. Keys are slime's: `tokens, response_lengths, total_lengths, rewards, raw_reward,
truncated, sample_indices, rollout_ids, group_ids, loss_masks, metadata`, and per response token those of
`rollout_log_probs, log_probs, ref_log_probs, teacher_log_probs, advantages, returns` that exist. Per-token entries are
float32 tensors that a hook may replace or modify in place.

Values reduced by a loss hook are scaled to their share of the optimizer step, so that micro-batch losses add up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from furlong.algo.policy_loss import CustomCorrection, CustomLoss, PgReducer
from furlong.core.batch import MicroBatch, RolloutBatch
from furlong.core.metric import Metrics, total
from furlong.core.text import shortened
from furlong.core.user_code import with_hook_errors
from furlong.errors import TrainerError
from furlong.interfaces import TokenStats

TIS, LOSS = "--custom-tis-function-path", "--custom-loss-function-path"
REDUCER = "--custom-pg-loss-reducer-function-path"
RolloutDataHook = Callable[[dict[str, Any]], object]

# Batch columns with another name in slime.
HOOK_NAMES = {"old_log_probs": "log_probs"}
BATCH_NAMES = {hook: column for column, hook in HOOK_NAMES.items()}
# slime's keys with one entry per sample, which a hook cannot replace.
PER_SAMPLE: Mapping[str, Callable[[RolloutBatch], list[Any]]] = {
    "tokens": lambda batch: _split(batch.tokens, batch.starts, torch.int64),
    "response_lengths": lambda batch: batch.response_lengths.tolist(),
    "total_lengths": lambda batch: batch.lengths.tolist(),
    "rewards": lambda batch: batch.rewards.tolist(),
    "raw_reward": lambda batch: batch.raw_rewards.tolist(),
    "truncated": lambda batch: batch.truncated.tolist(),
    "sample_indices": lambda batch: batch.sample_ids.tolist(),
    "rollout_ids": lambda batch: batch.rollout_ids.tolist(),
    "group_ids": lambda batch: batch.group_ids.tolist(),
}


def _split(array: np.ndarray, starts: np.ndarray, dtype: torch.dtype) -> list[Tensor]:
    return list(torch.from_numpy(array).to(dtype, copy=True).split(np.diff(starts).tolist()))


def rollout_data(batch: RolloutBatch) -> dict[str, Any]:
    """Build the dict of lists; tensors in it are copies."""
    data: dict[str, Any] = {name: read(batch) for name, read in PER_SAMPLE.items()}
    for name, column in {"loss_masks": batch.loss_masks, **batch.columns}.items():
        data[HOOK_NAMES.get(name, name)] = _split(column, batch.response_starts, torch.float32)
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
        BATCH_NAMES.get(name, name): _packed(name, entries, batch, hook)
        for name, entries in data.items()
        if name not in (*PER_SAMPLE, "metadata", "loss_masks")
    }
    masks = (_packed("loss_masks", data["loss_masks"], batch, hook) > 0).astype(np.uint8)
    if bool((masks > batch.loss_masks).any()):
        raise TrainerError(
            f"{_name(hook)} set loss masks that were 0; the loss denominator was computed from the previous masks, so "
            "a hook may only clear masks. Set them in the generate function"
        )
    return dataclasses.replace(batch, columns=columns, loss_masks=masks)


def _packed(name: str, entries: Any, batch: RolloutBatch, hook: RolloutDataHook) -> np.ndarray:
    known = batch.columns.get(BATCH_NAMES.get(name, name))
    shape = (-1,) if known is None else (-1, *known.shape[1:])
    tensors = [torch.as_tensor(entry, dtype=torch.float32).cpu().reshape(shape) for entry in entries]
    lengths = [len(tensor) for tensor in tensors]
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


def split_by_sample(values_R: Tensor, micro: MicroBatch) -> list[Tensor]:
    """Return views of each sample's response tokens, in packing order."""
    return list(values_R.split(response_lengths(micro)))


def response_lengths(micro: MicroBatch) -> list[int]:
    """Return the number of response tokens of each sample."""
    return micro.host_index().response_lengths_S.tolist()


def total_lengths(micro: MicroBatch) -> list[int]:
    """Return the number of tokens of each sample."""
    return np.diff(micro.host_index().cu_seqlens_S1).tolist()


def correction_from_hook(function: Callable[..., Any], args: Any) -> CustomCorrection:
    """Adapt `fn(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths)`.

    The function returns (pg_loss [R], list of loss masks, metrics as per-token tensors or lists of them).
    """

    def correct(
        micro: MicroBatch, *, pg_loss_R: Tensor, train_log_probs_R: Tensor
    ) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        result = function(
            args,
            pg_loss=pg_loss_R,
            train_log_probs=split_by_sample(train_log_probs_R, micro),
            rollout_log_probs=split_by_sample(micro.columns["rollout_log_probs"], micro),
            loss_masks=split_by_sample(micro.mask_R, micro),
            total_lengths=total_lengths(micro),
            response_lengths=response_lengths(micro),
        )
        loss, masks, metrics = _returned(result, TIS, pg_loss=Tensor, masks=object, metrics=dict)
        masks = _joined(masks, f"{TIS}: masks")
        joined = {name: _joined(value, f"{TIS}: {name}") for name, value in metrics.items()}
        for name, value in (("pg_loss", loss), ("masks", masks), *joined.items()):
            if value.shape != pg_loss_R.shape:
                raise TrainerError(
                    f"{TIS}: {name} has shape {tuple(value.shape)}, expected one value per response token, "
                    f"{tuple(pg_loss_R.shape)}"
                )
        return loss, masks, joined

    return correct


def reducer_from_hook(
    function: Callable[..., Callable[[Tensor], Tensor]], *, per_token: bool, rollouts_per_step: int
) -> PgReducer:
    """Adapt `fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> reduce(tensor) -> scalar`.

    As in slime the scalar is a sum over samples or tokens; it is divided here by the step's rollouts or tokens.
    """

    def reduce(pg_R: Tensor, micro: MicroBatch) -> Tensor:
        masks = split_by_sample(micro.mask_R, micro)
        reducer = function(total_lengths(micro), response_lengths(micro), masks, per_token)
        scalar: Any = None
        if callable(reducer):  # pyright: ignore[reportUnnecessaryComparison]
            scalar = with_hook_errors(reducer, f"the function that {REDUCER} returned")(pg_R)
        if not isinstance(scalar, Tensor) or scalar.numel() != 1:
            what = f"a function that returns {shortened(scalar)}" if callable(reducer) else shortened(reducer)
            raise TrainerError(f"{REDUCER} returned {what}; it must return a function from a tensor to a scalar tensor")
        if per_token:  # every non-zero weight is 1 / tokens of the step
            return scalar * (micro.weight_R.max() if len(micro.weight_R) else 0.0)
        return scalar / rollouts_per_step

    return reduce


def loss_from_hook(function: Callable[..., Any], args: Any) -> CustomLoss:
    """Adapt `fn(args, batch, logits, sum_of_sample_mean) -> (loss, metrics)` of --custom-loss-function-path.

    `logits` is float32 [R, V], already divided by the temperature; row r predicts response token r, `batch["tokens"]`
    [R]. The other entries of `batch` are lists with one entry per sample under slime's names: `unconcat_tokens`,
    `loss_masks`, `response_lengths`, `total_lengths`, and available log-probs and advantages. `log_probs` are the old
    policy's; without a log-prob pass they are the live ones, detached. With --use-rollout-logprobs the old ones are
    `rollout_log_probs`. `sum_of_sample_mean(x [R])` aggregates like the run's loss, to a share of the step's loss.
    Metrics must be such shares, too, which add up over micro-batches and ranks.
    """

    def loss(micro: MicroBatch, stats: TokenStats) -> tuple[Tensor, Metrics]:
        if stats.logits_RV is None:
            raise TrainerError("the backend returned no logits for a custom loss")
        columns = dict(micro.columns)
        if not args.use_rollout_logprobs:
            columns.setdefault("old_log_probs", stats.log_probs_R.detach())
        batch: dict[str, Any] = {
            **{HOOK_NAMES.get(name, name): split_by_sample(column, micro) for name, column in columns.items()},
            "tokens": micro.tokens_T[micro.response_pos_R],
            "unconcat_tokens": list(micro.tokens_T.split(total_lengths(micro))),
            "loss_masks": split_by_sample(micro.mask_R, micro),
            "response_lengths": response_lengths(micro),
            "total_lengths": total_lengths(micro),
        }
        result = function(args, batch, stats.logits_RV, lambda x_R: (x_R * micro.weight_R).sum())
        value, metrics = _returned(result, LOSS, loss=Tensor, metrics=dict)
        for name, number in (("the loss", value), *metrics.items()):
            if isinstance(number, Tensor) and number.numel() != 1:
                raise TrainerError(
                    f"{LOSS} returned {name} of shape {tuple(number.shape)}; loss and metrics "
                    "must be scalars: sum_of_sample_mean(values) reduces values per response token"
                )
        numbers = {name: number.detach() if isinstance(number, Tensor) else number for name, number in metrics.items()}
        try:
            return value, {name: total(float(number)) for name, number in numbers.items()}
        except (TypeError, ValueError, OverflowError) as error:
            raise TrainerError(f"{LOSS} returned a metric that is not a number: {error}") from error

    return CustomLoss(loss, needs_logits=True)


def _returned(result: Any, flag: str, **parts: type) -> tuple[Any, ...]:
    values: tuple[Any, ...] = result if isinstance(result, tuple) else ()
    if len(values) != len(parts) or not all(map(isinstance, values, parts.values())):
        kinds = {Tensor: "a tensor", dict: "a dict", object: "a tensor or a list of tensors"}
        raise TrainerError(
            f"{flag} returned {shortened(result)}; it must return ({', '.join(parts)}): "
            + ", ".join(kinds[kind] for kind in parts.values())
        )
    return values


def _joined(value: Any, name: str) -> Tensor:
    try:
        return value if isinstance(value, Tensor) else torch.cat(list(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise TrainerError(f"{name} is {shortened(value)}; return a tensor, or a list of one per sample") from error
