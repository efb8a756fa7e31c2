"""What the ranks of a Megatron test run: one function for every backend and layout."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tests.ranks_cases import PACKING, SETTINGS, batch, weights

from furlong.algo.loss import PolicyLoss
from furlong.config.sections.machine import OptimFlags
from furlong.core.batch import micro_batch
from furlong.core.metric import merge
from furlong.errors import CheckpointError
from furlong.models.shards import open_tensors
from furlong.trainers.fsdp import FsdpBackend
from furlong.trainers.megatron import compat
from furlong.trainers.ranks import Ranks
from furlong.trainers.worker import split_batch

compat.prepare()  # before the ranks are forked, which then have it all imported
from megatron.core import parallel_state  # noqa: E402

from furlong.trainers.megatron.backend import MegatronBackend  # noqa: E402
from furlong.trainers.megatron.layout import Layout  # noqa: E402

OPTIM = OptimFlags(lr=1e-3, clip_grad=0.5, weight_decay=5.0)  # so that a weight that should not decay shows


def two_steps(
    ranks: Ranks,
    folder: Path,
    *,
    family: str,
    backend: str,
    dtype: str = "float32",
    **sizes: Any,
) -> dict[str, Any]:
    """Log-probs of the policy, losses and gradient norms of two optimizer steps, and the weights after them."""
    layout = Layout(ranks.tensor, ranks.pipeline, ranks.context, **sizes)
    is_megatron = backend == "megatron"
    trained = (
        _megatron(folder / family, ranks, layout, getattr(torch, dtype)) if is_megatron else _fsdp(folder / family)
    )
    with open_tensors(folder / family) as stored:
        exported = dict(trained.named_weights())
        is_same = exported.keys() == stored.names
        is_same = is_same and all(torch.equal(tensor, stored.read(name)) for name, tensor in exported.items())
    drawn = batch()
    drawn = drawn.with_columns(
        advantages=torch.randn(len(drawn.loss_masks), generator=torch.Generator().manual_seed(0)).numpy(),
        old_log_probs=torch.full((len(drawn.loss_masks),), -3.0).numpy(),
        ref_log_probs=torch.full((len(drawn.loss_masks),), -3.0).numpy(),
    )
    part = split_batch(drawn, settings=SETTINGS, packing=PACKING, num_ranks=ranks.num_data)[ranks.data_rank]
    losses, norms, log_probs = [], [], []
    for rows_of_micros in part.steps:
        micros = [
            micro_batch(part.batch, rows, part.batch.columns["loss_weights"] * part.batch.loss_masks)
            for rows in rows_of_micros
        ]
        if is_megatron:
            stats = trained.log_probs_of(micros, entropy=True)
            metrics = trained.forward_backward_of(micros, PolicyLoss(SETTINGS))
        else:
            stats = [trained.log_probs(micro, entropy=True) for micro in micros]
            metrics = [trained.forward_backward(micro, PolicyLoss(SETTINGS)) for micro in micros]
        log_probs += [
            [int(row), float(s.log_probs_R[m.seq_of_R == i].sum()), float(s.entropy_R[m.seq_of_R == i].sum())]
            for m, s in zip(micros, stats, strict=True)
            for i, row in enumerate(part.batch.sample_ids[m.rows])
        ]
        merged = merge(metrics)["loss"]
        losses.append([merged.total, merged.weight])
        norms.append(trained.optim_step().grad_norm)
    found = {"losses": losses, "norms": norms, "log_probs": log_probs, "weights": weights(trained)}
    if is_megatron:
        assert ranks.data_rank == parallel_state.get_data_parallel_rank()
        assert ranks.context_rank == parallel_state.get_context_parallel_rank()
        name = f"{family}-{ranks.world_size}-{'-'.join(map(str, asdict(layout).values()))}-{dtype}"
        found |= _continued(trained, folder / name, ranks)
    return found | {"data_rank": ranks.data_rank, "is_exported_as_loaded": is_same}


def _continued(trained: Any, folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Whether a checkpoint brings back what was changed since; what is said of one of another layout."""
    if ranks.rank == 0:
        folder.mkdir()
    ranks.wait()
    trained.copy_weights("actor", "ref")
    trained.save(folder)
    trained.save_hf(folder / "hf")
    before = {name: tensor.clone() for name, tensor in trained._tensors()}
    with torch.no_grad():
        for _, tensor in trained._tensors():
            tensor.zero_()
    trained.load(folder)
    is_restored = all(torch.equal(before[name], tensor) for name, tensor in trained._tensors())
    trained.layout = replace(trained.layout, tensor=7)
    try:
        trained.load(folder)
        refused = "not refused"
    except CheckpointError as error:
        refused = str(error)
    return {"is_restored": is_restored, "has_ref": any(name.startswith("ref.") for name in before), "refused": refused}


def _fsdp(folder: Path) -> Any:
    return FsdpBackend(hf_checkpoint=folder, optim=OPTIM, temperature=0.9)


def _megatron(folder: Path, ranks: Ranks, layout: Layout, dtype: torch.dtype) -> Any:
    return MegatronBackend(hf_checkpoint=folder, optim=OPTIM, layout=layout, ranks=ranks, dtype=dtype, temperature=0.9)
