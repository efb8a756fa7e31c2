"""Random batches, a model of one embedding and one output layer, and one optimizer step of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from furlong.algo.logprob import token_stats
from furlong.algo.policy_loss import PolicyLoss
from furlong.algo.reduce import denominator, loss_weights
from furlong.config.sections import AlgoFlags
from furlong.core.batch import IntArray, MicroBatch, RolloutBatch, pack_micro_batch
from furlong.core.metric import Metrics, merge
from furlong.interfaces import LossFn
from oracles.papers import Response

VOCAB, WIDTH, MAX_LEN = 11, 5, 24


def flags(name: str = "grpo", **values: Any) -> AlgoFlags:
    """The real algorithm section with some flags set."""
    return AlgoFlags(advantage_estimator=name, **values)


def random_batch(
    seed: int,
    *,
    groups: Sequence[int] = (3, 2, 4),
    max_response: int = 6,
    masked: float = 0.25,
    fan_out: bool = False,
    spread: float = 0.6,
) -> RolloutBatch:
    """`groups[g]` samples of prompt g, random lengths and masks; at least one trained token each."""
    rng = np.random.default_rng(seed)
    n = sum(groups)
    prompt_len = rng.integers(1, 4, n)
    response_len = rng.integers(1, max_response + 1, n)
    masks = [(rng.random(k) >= masked).astype(np.uint8) for k in response_len]
    for mask in masks:
        mask[rng.integers(len(mask))] = 1
    total = int(response_len.sum())
    group_ids = np.repeat(np.arange(len(groups)) * 10 + 3, groups)
    rollout_ids = np.arange(n) + 100
    if fan_out and n > 1:
        rollout_ids[1] = rollout_ids[0]
    log_probs = -rng.random(total) * 2 - 0.5
    return RolloutBatch(
        rollout_id=0,
        tokens=rng.integers(0, VOCAB, int((prompt_len + response_len).sum())).astype(np.int32),
        lengths=(prompt_len + response_len).astype(np.int64),
        response_lengths=response_len.astype(np.int64),
        loss_masks=np.concatenate(masks),
        rewards=rng.normal(size=n).astype(np.float32),
        raw_rewards=rng.normal(size=n).astype(np.float32),
        group_ids=group_ids.astype(np.int64),
        rollout_ids=rollout_ids.astype(np.int64),
        sample_ids=np.arange(n, dtype=np.int64),
        truncated=np.zeros(n, dtype=np.uint8),
        columns={
            "advantages": rng.normal(size=total),
            "old_log_probs": log_probs,
            "ref_log_probs": log_probs + rng.normal(size=total) * spread,
            "rollout_log_probs": log_probs + rng.normal(size=total) * spread,
        },
    )


@dataclass
class TinyModel:
    """Logits of a token depend on the token before it and on its position."""

    embed_VD: Tensor
    position_LD: Tensor
    head_VD: Tensor

    @staticmethod
    def random(seed: int) -> TinyModel:
        generator = torch.Generator().manual_seed(seed)
        shapes = ((VOCAB, WIDTH), (MAX_LEN, WIDTH), (VOCAB, WIDTH))
        return TinyModel(*(torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes))

    @property
    def parameters(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.embed_VD, self.position_LD, self.head_VD

    def hidden(self, micro: MicroBatch) -> Tensor:
        before_R = micro.response_pos_R - 1
        return torch.tanh(self.embed_VD[micro.tokens_T[before_R]] + self.position_LD[micro.position_ids_T[before_R]])

    def log_probs(self, micro: MicroBatch) -> Tensor:
        targets_R = micro.tokens_T[micro.response_pos_R]
        return torch.log_softmax(self.hidden(micro) @ self.head_VD.T, -1)[torch.arange(len(targets_R)), targets_R]


def near_model(batch: RolloutBatch, seed: int = 0, *, noise: float = 0.2) -> RolloutBatch:
    """The batch with old, reference and engine log-probs at a small distance from the model's own."""
    live_R = TinyModel.random(seed).log_probs(pack_micro_batch(batch, np.arange(len(batch)))).detach().numpy()
    rng = np.random.default_rng(seed + 1)
    old_R = live_R + rng.normal(size=live_R.shape) * noise
    return batch.with_columns(
        old_log_probs=old_R,
        ref_log_probs=live_R + rng.normal(size=live_R.shape) * noise,
        rollout_log_probs=old_R + rng.normal(size=live_R.shape) * noise,
    )


def in_float64(micro: MicroBatch, weights: np.ndarray, batch: RolloutBatch) -> MicroBatch:
    """The same micro-batch without rounding to float32, so that orders of summation cannot be told apart."""
    starts = batch.response_starts
    index = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in micro.rows])
    columns = {k: torch.from_numpy(np.asarray(v, dtype=np.float64)[index]) for k, v in batch.columns.items()}
    fields = {**vars(micro), "columns": columns, "weight_R": torch.from_numpy(weights.astype(np.float64)[index])}
    return MicroBatch(**{**fields, "mask_R": micro.mask_R.double()})


@dataclass
class StepResult:
    loss: float
    grads: list[Tensor]
    metrics: Metrics


def run_step(
    batch: RolloutBatch,
    settings: AlgoFlags,
    micro_batches: Sequence[IntArray],
    *,
    model_seed: int = 0,
    chunk_size: int = -1,
    loss_fn: LossFn | None = None,
    step_rows: IntArray | None = None,
) -> StepResult:
    """Accumulate loss, gradient and metrics of one optimizer step over the given micro-batches."""
    model = TinyModel.random(model_seed)
    mode, constant_len = denominator(settings, max_response_len=8)
    rows = np.concatenate(micro_batches) if step_rows is None else step_rows
    weights = loss_weights(batch, [rows], mode=mode, constant_len=constant_len)
    fn = loss_fn if loss_fn is not None else PolicyLoss(settings)
    total, parts = 0.0, []
    for micro_rows in micro_batches:
        micro = in_float64(pack_micro_batch(batch, micro_rows, weights), weights, batch)
        stats = token_stats(
            model.hidden(micro),
            model.head_VD,
            micro.tokens_T[micro.response_pos_R],
            temperature=1.0,
            chunk_size=chunk_size,
            entropy=fn.needs_entropy,
            entropy_grad=fn.entropy_grad,
        )
        loss, metrics = fn(micro, stats)
        loss.backward()
        total += loss.item()
        parts.append(metrics)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters]
    return StepResult(total, grads, merge(parts))


def responses_of(batch: RolloutBatch, model: TinyModel) -> list[Response]:
    """The batch as the papers' loops want it, with log-probs of `model` that carry gradient."""
    starts = batch.response_starts
    result: list[Response] = []
    for row in range(len(batch)):
        part = slice(int(starts[row]), int(starts[row + 1]))
        live_R = model.log_probs(pack_micro_batch(batch, [row]))
        result.append(
            Response(
                log_probs=list(live_R),
                old=batch.columns["old_log_probs"][part].tolist(),
                ref=batch.columns["ref_log_probs"][part].tolist(),
                rollout=batch.columns["rollout_log_probs"][part].tolist(),
                mask=batch.loss_masks[part].tolist(),
                reward=float(batch.raw_rewards[row]),
                group=int(batch.group_ids[row]),
                advantages=batch.columns["advantages"][part].tolist(),
            )
        )
    return result
