"""Functions that the ranks of routing tests run, with either backend."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backends import fsdp_backend, megatron_backend
from furlong.algo.policy_loss import PolicyLoss
from furlong.core.batch import MicroBatch, RolloutBatch, pack_micro_batch
from furlong.core.metric import merge
from furlong.models import hf_model as hf
from furlong.models.hf_config import load_config
from furlong.training.megatron.megatron_backend import MegatronBackend
from furlong.training.megatron.moe_routing import LoadBalancing
from furlong.training.megatron.parallel_layout import Layout
from furlong.training.packing import split_batch
from furlong.training.ranks import Ranks
from megatron_cases import OPTIM
from ranks_cases import PACKING, SETTINGS, batch

NUM_EXPERTS = 4  # of the MoE family in models_zoo


def routed_batch(folder: Path) -> RolloutBatch:
    """Return a batch with random recorded experts, which no router would choose."""
    config: Any = load_config(folder)
    drawn, rng = batch(), np.random.default_rng(4)
    shape = (len(drawn.tokens), config.num_hidden_layers)
    experts = rng.permuted(np.tile(np.arange(NUM_EXPERTS), (*shape, 1)), axis=-1)
    routes = experts[..., : config.num_experts_per_tok].astype(np.int16)
    routes[drawn.starts[1:] - 1] = -1
    drawn = drawn.with_columns(
        advantages=rng.normal(size=len(drawn.loss_masks)).astype(np.float32),
        old_log_probs=np.full(len(drawn.loss_masks), -3.0, np.float32),
        ref_log_probs=np.full(len(drawn.loss_masks), -3.0, np.float32),
    )
    return dataclasses.replace(drawn, routed_experts=routes)


def built(
    ranks: Ranks, folder: Path, backend: str, replay: str, recompute: bool, sizes: dict[str, Any], **more: Any
) -> Any:
    how = {"routing_replay": replay, "temperature": 0.9, "optim": OPTIM, **more}
    if backend == "fsdp":
        return fsdp_backend(folder, ranks, recompute_activations=recompute, **how)
    layout = Layout(ranks.tensor, ranks.pipeline, ranks.context, **sizes)
    return megatron_backend(folder, ranks, layout=layout, recompute_activations=recompute, **how)


def passed(trained: Any, micros: list[MicroBatch]) -> tuple[list[Any], list[Any]]:
    """Return log-probs and training metrics of all micro-batches."""
    if isinstance(trained, MegatronBackend):
        return trained.log_probs_of(micros), trained.forward_backward_of(micros, PolicyLoss(SETTINGS))
    return [trained.log_probs(m) for m in micros], [trained.forward_backward(m, PolicyLoss(SETTINGS)) for m in micros]


def replayed(
    ranks: Ranks, folder: Path, *, family: str, backend: str, replay: str, recompute: bool = False, **sizes: Any
) -> dict[str, Any]:
    """Return log-probs, losses, gradient norms and routing agreement for `routed_batch`.

    "policy": record the policy's experts, and replay them shifted by one in a second pass.
    """
    drawn = routed_batch(folder / family)
    trained = built(ranks, folder / family, backend, replay, recompute, sizes)
    if replay == "policy":
        drawn = dataclasses.replace(drawn, routed_experts=None)
    part = split_batch(drawn, algo=SETTINGS, packing=PACKING, num_ranks=ranks.num_data)[ranks.data_rank]
    weights = part.batch.columns["loss_weights"] * part.batch.loss_masks
    log_probs, losses, norms, agreed = [], [], [], []
    for rows_of_micros in part.steps:
        micros = [pack_micro_batch(part.batch, rows, weights) for rows in rows_of_micros]
        if replay == "policy":
            stats, _ = passed(trained, micros)
            moved = [((s.policy_routes + 1) % NUM_EXPERTS).to(torch.int16) for s in stats]
            micros = [dataclasses.replace(m, policy_routes=own) for m, own in zip(micros, moved, strict=True)]
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


class NoLoss:
    """A loss without gradient, which leaves only the routers' losses."""

    needs_entropy = entropy_grad = needs_logits = False

    def __call__(self, micro: MicroBatch, stats: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return (stats.log_probs_R * 0.0).sum(), {}


def balanced(
    ranks: Ranks, folder: Path, *, family: str, recompute: bool = False, losses: dict[str, Any], **sizes: Any
) -> dict[str, Any]:
    """Return router losses, gradient norms and expert biases of two steps without policy loss."""
    trained = built(
        ranks, folder / family, "megatron", "none", recompute, sizes, balancing=LoadBalancing(**losses)
    )  # fmt: skip
    drawn = batch()
    part = split_batch(drawn, algo=SETTINGS, packing=PACKING, num_ranks=ranks.num_data)[ranks.data_rank]
    losses_of_steps, norms, biases = [], [], []
    for rows_of_micros, (tokens, samples) in zip(part.steps, part.sizes, strict=True):
        micros = [
            dataclasses.replace(pack_micro_batch(part.batch, rows), step_tokens=tokens, step_samples=samples)
            for rows in rows_of_micros
        ]
        merged = merge(trained.forward_backward_of(micros, NoLoss()))
        losses_of_steps.append({name: merged[name].total for name in sorted(merged)})
        norms.append(trained.optim_step().grad_norm)
        biases.append({name: tensor.tolist() for name, tensor in trained.named_weights() if "bias" in name})
    return {"losses": losses_of_steps, "norms": norms, "biases": biases, "data_rank": ranks.data_rank}


def balanced_by_hand(ranks: Ranks, folder: Path, *, family: str, losses: dict[str, Any]) -> dict[str, Any]:
    """Compute the first step of `balanced` from transformers' router logits, with loops as in the papers."""
    how = LoadBalancing(**losses)
    model = hf.load_model(folder / family)
    model.set_attn_implementation("eager")
    part = split_batch(batch(), algo=SETTINGS, packing=PACKING, num_ranks=1)[ranks.rank]
    tokens, samples = part.sizes[0]
    balance = z = torch.zeros(())
    for rows in part.steps[0]:
        of_samples = []
        for row in rows.tolist():
            ids = part.batch.tokens[part.batch.starts[row] : part.batch.starts[row + 1]]
            ids = torch.from_numpy(ids.astype(np.int64))[None]
            of_samples.append(model(input_ids=ids, output_router_logits=True, use_cache=False).router_logits)
        for layer in zip(*of_samples, strict=True):
            sets = [torch.cat(layer)] if how.kind == "aux_loss" else list(layer)
            for logits_TN in sets:
                share = len(logits_TN) / tokens if how.kind == "aux_loss" else 1 / samples
                balance = balance + share * _switch_loss(logits_TN)
            z = z + sum(torch.log(torch.exp(row).sum()) ** 2 for row in torch.cat(layer)) / tokens
    (how.coeff * balance + how.z_coeff * z).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    num_layers = len(of_samples[0])
    return {"losses": [float(balance) / num_layers, float(z) / num_layers], "norm": float(norm)}


def _switch_loss(logits_TN: torch.Tensor, top_k: int = 2) -> torch.Tensor:
    """Return the Switch Transformer's N sum f_i P_i, with f_i the fraction of all choices."""
    probs_TN = logits_TN.softmax(-1)
    loss = torch.zeros(())
    for expert in range(NUM_EXPERTS):
        chosen = sum(expert in row.topk(top_k).indices.tolist() for row in probs_TN)
        loss = loss + chosen / (top_k * len(probs_TN)) * probs_TN[:, expert].mean()
    return NUM_EXPERTS * loss
