"""What the ranks of a test of experts' routing run, with either backend."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.megatron_cases import OPTIM
from tests.ranks_cases import PACKING, SETTINGS, batch

from furlong.algo.loss import PolicyLoss
from furlong.core.batch import MicroBatch, RolloutBatch, micro_batch
from furlong.core.metric import merge
from furlong.models import hf
from furlong.trainers.fsdp import FsdpBackend
from furlong.trainers.megatron.backend import MegatronBackend
from furlong.trainers.megatron.layout import Compute, Layout
from furlong.trainers.ranks import Ranks
from furlong.trainers.worker import split_batch

NUM_EXPERTS = 4  # of the family in tests.models_zoo


def routed_batch(folder: Path) -> RolloutBatch:
    """A batch whose tokens went to experts drawn at random, as no router would choose them."""
    config: Any = hf.load_config(folder)
    drawn, rng = batch(), np.random.default_rng(4)
    shape = (len(drawn.tokens), config.num_hidden_layers)
    experts = rng.permuted(np.tile(np.arange(config.num_experts), (*shape, 1)), axis=-1)
    routes = experts[..., : config.num_experts_per_tok].astype(np.int16)
    routes[drawn.starts[1:] - 1] = -1
    drawn = drawn.with_columns(
        advantages=rng.normal(size=len(drawn.loss_masks)).astype(np.float32),
        old_log_probs=np.full(len(drawn.loss_masks), -3.0, np.float32),
        ref_log_probs=np.full(len(drawn.loss_masks), -3.0, np.float32),
    )
    return dataclasses.replace(drawn, routed_experts=routes)


def built(ranks: Ranks, folder: Path, backend: str, replay: str, recompute: bool, sizes: dict[str, Any]) -> Any:
    how = {"routing_replay": replay, "temperature": 0.9, "optim": OPTIM}
    if backend == "fsdp":
        return FsdpBackend(hf_checkpoint=folder, ranks=ranks, recompute_activations=recompute, **how)
    layout = Layout(ranks.tensor, ranks.pipeline, ranks.context, **sizes)
    compute = Compute("full", "uniform", 1) if recompute else None
    return MegatronBackend(hf_checkpoint=folder, layout=layout, ranks=ranks, compute=compute, **how)


def passed(trained: Any, micros: list[MicroBatch]) -> tuple[list[Any], list[Any]]:
    """Log-probs of all micro-batches, then their gradient accumulated."""
    if isinstance(trained, MegatronBackend):
        return trained.log_probs_of(micros), trained.forward_backward_of(micros, PolicyLoss(SETTINGS))
    return [trained.log_probs(m) for m in micros], [trained.forward_backward(m, PolicyLoss(SETTINGS)) for m in micros]


def replayed(
    ranks: Ranks, folder: Path, *, family: str, backend: str, replay: str, recompute: bool = False, **sizes: Any
) -> dict[str, Any]:
    """Log-probs, losses, gradient norms and agreement with the experts of `routed_batch`.

    "policy": experts are recorded, and a second pass uses the record, in which every expert has become the next one.
    """
    drawn = routed_batch(folder / family)
    trained = built(ranks, folder / family, backend, replay, recompute, sizes)
    if replay == "policy":
        drawn = dataclasses.replace(drawn, routed_experts=None)
    part = split_batch(drawn, settings=SETTINGS, packing=PACKING, num_ranks=ranks.num_data)[ranks.data_rank]
    weights = part.batch.columns["loss_weights"] * part.batch.loss_masks
    log_probs, losses, norms, agreed = [], [], [], []
    for rows_of_micros in part.steps:
        micros = [micro_batch(part.batch, rows, weights) for rows in rows_of_micros]
        if replay == "policy":
            stats, _ = passed(trained, micros)
            moved = [((s.own_routes + 1) % NUM_EXPERTS).to(torch.int16) for s in stats]
            micros = [dataclasses.replace(m, own_routes=own) for m, own in zip(micros, moved, strict=True)]
            trained.optim_step()
        stats, metrics = passed(trained, micros)
        log_probs += [
            [int(row), float(s.log_probs_R[m.seq_of_R == i].sum())]
            for m, s in zip(micros, stats, strict=True)
            for i, row in enumerate(part.batch.sample_ids[m.rows])
        ]
        merged = merge(metrics)
        losses.append([merged["loss"].total, merged["loss"].weight])
        if replay != "policy":
            agreed.append([merged["routing_agreement"].total, merged["routing_agreement"].weight])
        norms.append(trained.optim_step().grad_norm)
    return {"log_probs": log_probs, "losses": losses, "norms": norms, "agreed": agreed, "data_rank": ranks.data_rank}
