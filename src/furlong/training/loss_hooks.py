"""Loss hooks with slime's signatures, as the trainer calls them.

slime hands over lists with one entry per sample, furlong keeps response tokens packed, [R]; these adapters split and
join. What a hook reduces is scaled here to a share of the optimizer step, so losses of micro-batches still add up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from furlong.algo.loss import CustomCorrection, CustomLoss, PgReducer
from furlong.core.batch import MicroBatch
from furlong.core.metric import Metrics, total
from furlong.errors import TrainerError
from furlong.interfaces import TokenStats
from furlong.training.hook_data import HOOK_NAMES


def split_by_sample(values_R: Tensor, micro: MicroBatch) -> list[Tensor]:
    """Views of each sample's response tokens, in packing order."""
    return list(values_R.split(response_lengths(micro)))


def response_lengths(micro: MicroBatch) -> list[int]:
    """Number of response tokens of each sample."""
    return torch.bincount(micro.seq_of_R, minlength=micro.num_sequences).tolist()


def total_lengths(micro: MicroBatch) -> list[int]:
    """Number of tokens of each sample."""
    return micro.cu_seqlens_S1.diff().tolist()


def correction_from_hook(function: Callable[..., Any], args: Any) -> CustomCorrection:
    """Adapt `fn(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths)`.

    It returns (pg_loss [R], loss masks as a list, metrics of per-token tensors or lists of them).
    """

    def correct(
        micro: MicroBatch, *, pg_loss_R: Tensor, train_log_probs_R: Tensor
    ) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        answer = function(
            args,
            pg_loss=pg_loss_R,
            train_log_probs=split_by_sample(train_log_probs_R, micro),
            rollout_log_probs=split_by_sample(micro.columns["rollout_log_probs"], micro),
            loss_masks=split_by_sample(micro.mask_R, micro),
            total_lengths=total_lengths(micro),
            response_lengths=response_lengths(micro),
        )
        if not isinstance(answer, tuple) or len(answer) != 3:
            raise TrainerError(
                f"--custom-tis-function-path returned {type(answer).__name__}; it must return (pg_loss, masks, metrics)"
            )
        loss, masks, metrics = answer
        joined = {name: _joined(value) for name, value in metrics.items()}
        for name, value in (("pg_loss", loss), ("masks", _joined(masks)), *joined.items()):
            if value.shape != pg_loss_R.shape:
                raise TrainerError(
                    f"--custom-tis-function-path: {name} has shape {tuple(value.shape)}, expected one value per "
                    f"response token, {tuple(pg_loss_R.shape)}"
                )
        return loss, _joined(masks), joined

    return correct


def reducer_from_hook(
    function: Callable[..., Callable[[Tensor], Tensor]], *, per_token: bool, rollouts_per_step: int
) -> PgReducer:
    """Adapt `fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> reduce(tensor) -> scalar`.

    As in slime the scalar is a sum over samples, divided here by the step's rollouts, or over tokens, by its tokens.
    """

    def reduce(pg_R: Tensor, micro: MicroBatch) -> Tensor:
        masks = split_by_sample(micro.mask_R, micro)
        scalar = function(total_lengths(micro), response_lengths(micro), masks, per_token)(pg_R)
        if per_token:  # every weight that is not 0 is 1 / tokens of the step
            return scalar * (micro.weight_R.max() if len(micro.weight_R) else 0.0)
        return scalar / rollouts_per_step

    return reduce


def loss_from_hook(function: Callable[..., Any], args: Any) -> CustomLoss:
    """Adapt `fn(args, batch, logits, sum_of_sample_mean) -> (loss, metrics)` of --custom-loss-function-path.

    `logits` is float32 [R, V], row r predicting response token r, already divided by the temperature, and
    `batch["tokens"]` [R] are those tokens. The rest of `batch` is lists, one entry per sample, under slime's names:
    `unconcat_tokens`, `loss_masks`, `response_lengths`, `total_lengths`, and the log-probs and advantages that there
    are. `log_probs` are the old policy's: without a pass of their own the live ones, detached. With
    --use-rollout-logprobs `rollout_log_probs` are the old ones. `sum_of_sample_mean(x [R])` is the aggregation of the
    run, a share of the step's loss. Metrics are such shares, too: those of micro-batches and ranks add up.
    """

    def loss(micro: MicroBatch, stats: TokenStats) -> tuple[Tensor, Metrics]:
        if stats.logits_RV is None:
            raise TrainerError("the backend gave a custom loss no logits")
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
        if not isinstance(result, tuple) or len(result) != 2:
            raise TrainerError(
                f"--custom-loss-function-path returned {type(result).__name__}; it must return (loss, metrics)"
            )
        value, metrics = result
        for name, number in (("the loss", value), *metrics.items()):
            if isinstance(number, Tensor) and number.numel() != 1:
                raise TrainerError(
                    f"--custom-loss-function-path returned {name} of shape {tuple(number.shape)}; loss and metrics are "
                    "one number each: sum_of_sample_mean(values) makes one of a value per response token"
                )
        numbers = {name: number.detach() if isinstance(number, Tensor) else number for name, number in metrics.items()}
        return value, {name: total(float(number)) for name, number in numbers.items()}

    return CustomLoss(loss, needs_logits=True)


def _joined(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.cat(list(value))
