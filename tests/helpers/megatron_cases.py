"""Functions that the ranks of Megatron tests run, for every backend and layout."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from backends import fsdp_backend, megatron_backend
from furlong.algo.policy_loss import CustomLoss, PolicyLoss
from furlong.config.sections import OptimFlags
from furlong.core.batch import MicroBatch, pack_micro_batch
from furlong.core.metric import Metric, Metrics, merge
from furlong.core.weights import EngineAddress, WeightSource
from furlong.errors import TrainerError
from furlong.inference.embedded import EmbeddedEngine
from furlong.inference.server.http_server import running_server
from furlong.inference.sglang.server import ServerInfo, connected, probe
from furlong.interfaces import TokenStats
from furlong.models import hf_model as hf
from furlong.models.hf_config import load_config
from furlong.models.stored_tensors import open_tensors
from furlong.models.untrained_tensors import is_untrained
from furlong.training.megatron import megatron_compat as compat
from furlong.training.packing import split_batch
from furlong.training.ranks import Ranks
from furlong.weight_sync.remote_sync import RankSync
from furlong.weight_sync.transports.disk import DiskTransport
from ranks_cases import PACKING, SETTINGS, batch, weights
from transport_context import transport_context

compat.prepare()  # before the ranks are forked, so that they inherit the imports
from megatron.core import parallel_state  # noqa: E402

from furlong.training.megatron import weight_names as names  # noqa: E402
from furlong.training.megatron.megatron_backend import MegatronBackend  # noqa: E402
from furlong.training.megatron.parallel_layout import Layout  # noqa: E402

OPTIM = OptimFlags(lr=1e-3, clip_grad=0.5, weight_decay=5.0)  # large, to expose decay of the wrong weights


def two_steps(
    ranks: Ranks,
    folder: Path,
    *,
    family: str,
    save_as: str = "",
    updates_engine: bool = False,
    resume: str | None = None,
    core: str | None = None,
    looks_at_logits: bool = False,
    offloads: bool = True,
    is_offloaded: bool = False,
    **how: Any,
) -> dict[str, Any]:
    """Return log-probs of the policy, losses and gradient norms of two optimizer steps, and the weights after them.

    updates_engine: load the weights into an engine first, and return its checksums. save_as: save a checkpoint between
    the two steps. resume: run only the second step, from that checkpoint; core: from one that Megatron-core saved.
    `how` goes to `_built`.
    """
    start = {} if core is None else {"initial_weights": folder / core, "initial_optimizer": folder / core}
    trained = _built(ranks, folder / family, **how, **start)
    is_megatron = isinstance(trained, MegatronBackend)
    if is_offloaded:  # CPU backends reject this setting
        with trained.optimizer.loaded():
            trained.optimizer._offload = "all"
    loss = CustomLoss(_squares, needs_logits=True) if looks_at_logits else PolicyLoss(SETTINGS)
    if resume is not None:
        trained.load(folder / "half" / resume)
    results: dict[str, Any] = {"losses": [], "norms": [], "log_probs": [], "data_rank": ranks.data_rank}
    results["is_exported_as_loaded"] = _exports(trained, folder / family)
    if updates_engine:
        results["engine_checksums"] = engine_checksums(trained, ranks, folder / family, folder / "engine" / save_as)
    first = int(resume is not None or core is not None)
    assert trained.optimizer.num_steps == first
    for number, (part, rows) in enumerate(steps_of(ranks)[first:], first):
        take_step(trained, part, rows, loss, results)
        results.setdefault("untrained", list(results["log_probs"]))
        if is_offloaded:
            kept = [tensor for own, moments in trained.optimizer.state.slices() for tensor in (own, *moments.values())]
            assert not any(tensor.untyped_storage().size() for tensor in kept)
        elif is_megatron and offloads:
            _offload_and_reload(trained)
        if number == 0 and save_as:
            _save(trained, folder / "half" / save_as, ranks)
    results["weights"] = weights(trained)
    if is_megatron:
        assert ranks.data_rank == parallel_state.get_data_parallel_rank()
        assert ranks.context_rank == parallel_state.get_context_parallel_rank()
    if is_megatron and resume is None and save_as:
        results |= _restored(trained, folder / "whole" / save_as, ranks)
    return results


def _built(
    ranks: Ranks,
    model: Path,
    *,
    backend: str,
    dtype: str = "float32",
    optimizer: str = "adam",
    flags: dict[str, Any] | None = None,
    initial_weights: Path | None = None,
    initial_optimizer: Path | None = None,
    train_only: list[str] | None = None,
    freeze: list[str] | None = None,
    device: str = "cpu",
    compile_layers: Literal["auto", "on", "off"] = "auto",
    **sizes: Any,
) -> Any:
    """Build a backend for a model's folder; `flags` and `sizes` (the layout) are for Megatron-core."""
    shared: dict[str, Any] = {
        "optim": replace(OPTIM, optimizer=optimizer),
        "temperature": 0.9,
        "dtype": getattr(torch, dtype),
        "only_train_params_name_list": train_only,
        "freeze_params_name_list": freeze,
        "device": device,
        "compile_layers": compile_layers,
        "initial_weights": initial_weights,
    }
    if backend == "fsdp":
        return fsdp_backend(model, ranks, **shared)
    layout = Layout(ranks.tensor, ranks.pipeline, ranks.context, **sizes)
    shared |= {"layout": layout, "initial_optimizer": initial_optimizer}
    return megatron_backend(model, ranks, **shared, **(flags or {}))


def _exports(trained: Any, model: Path) -> bool:
    """Return whether the exported weights equal those of a model's folder."""
    exported = dict(trained.named_weights())
    with open_tensors(model) as stored:
        config = load_config(model)
        is_same = exported.keys() == {name for name in stored.names if not is_untrained(name, config)}
        return is_same and all(torch.equal(tensor.cpu(), stored.read(name)) for name, tensor in exported.items())


def each_layout(ranks: Ranks, folder: Path, *, layouts: dict[str, dict[str, Any]], **args: Any) -> dict[str, Any]:
    """Run `two_steps` with several layouts, in the same processes."""
    results: dict[str, Any] = {}
    for name, layout in layouts.items():
        sys.stderr.write(f"{name}\n")
        own = {axis: layout.get(axis, 1) for axis in ("tensor", "pipeline", "context")}
        rest = {field: value for field, value in layout.items() if field not in own}
        results[name] = two_steps(replace(ranks, **own), folder, **{"backend": "megatron", **args, **rest})
        parallel_state.destroy_model_parallel()  # a process has one layout at a time
    return results


def each_family(
    ranks: Ranks, folder: Path, *, families: list[str], dtypes: list[str], **args: Any
) -> dict[str, dict[str, Any]]:
    """Return losses and gradient norms of `two_steps` with both backends, for several families."""
    results: dict[str, dict[str, Any]] = {}
    for family in families:
        for dtype in dtypes:
            for backend in ("fsdp", "megatron"):
                seen = two_steps(ranks, folder, family=family, backend=backend, dtype=dtype, offloads=False, **args)
                kept = ("losses", "norms", "is_exported_as_loaded")
                results[f"{backend} {family} {dtype}"] = {name: seen[name] for name in kept}
    return results


def steps_of(ranks: Ranks) -> list[tuple[Any, Any]]:
    """Return this rank's samples and their rows by micro-batch, for each optimizer step."""
    drawn = batch()
    drawn = drawn.with_columns(
        advantages=torch.randn(len(drawn.loss_masks), generator=torch.Generator().manual_seed(0)).numpy(),
        old_log_probs=torch.full((len(drawn.loss_masks),), -3.0).numpy(),
        ref_log_probs=torch.full((len(drawn.loss_masks),), -3.0).numpy(),
    )
    part = split_batch(drawn, algo=SETTINGS, packing=PACKING, num_ranks=ranks.num_data)[ranks.data_rank]
    return [(part.batch, rows) for rows in part.steps]


def take_step(trained: Any, part: Any, rows_of_micros: Any, loss: Any, results: dict[str, Any]) -> None:
    """Take one optimizer step and append its results to `found`."""
    weights_R = part.columns["loss_weights"] * part.loss_masks
    micros = [pack_micro_batch(part, rows, weights_R, device=trained.device) for rows in rows_of_micros]
    if isinstance(trained, MegatronBackend):
        stats = trained.log_probs_of(micros, entropy=True)
        metrics = trained.forward_backward_of(micros, loss)
        groups = [group for chunk in trained.optimizer.chunks for group in chunk.bucket_groups]
        sent = [group.grad_reduce_handle is not None for group in groups]
        is_overlapping = (
            trained.optimizer.chunks[0].ddp_config.overlap_grad_reduce and results["norms"]
        )  # overlap starts after the first step
        assert all(sent) if is_overlapping else not any(sent)
    else:
        stats = [trained.log_probs(micro, entropy=True) for micro in micros]
        metrics = [trained.forward_backward(micro, loss) for micro in micros]
    results["log_probs"] += [
        [int(row), *s.log_probs_R[m.seq_of_R == i].tolist(), *s.entropy_R[m.seq_of_R == i].tolist()]
        for m, s in zip(micros, stats, strict=True)
        for i, row in enumerate(part.sample_ids[m.rows])
    ]
    merged = merge(metrics)["loss"]
    results["losses"].append([merged.total, merged.weight])
    results["norms"].append(trained.optim_step().grad_norm)


def _save(trained: Any, folder: Path, ranks: Ranks) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    ranks.wait()
    trained.save(folder)


def saved_bytes(ranks: Ranks, folder: Path, *, family: str, ways: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the bytes kept for the backward pass and the gradient norm, for several flags."""
    ((part, rows), *_) = steps_of(ranks)
    micro = pack_micro_batch(part, rows[0], part.columns["loss_weights"] * part.loss_masks)
    kept: list[int] = []
    before_loss: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    def loss(micro: MicroBatch, stats: TokenStats) -> tuple[Tensor, Metrics]:
        before_loss.append(sum(kept))
        return PolicyLoss(SETTINGS)(micro, stats)

    results: dict[str, Any] = {}
    for way, how in ways.items():
        trained = megatron_backend(folder / family, ranks, optim=OPTIM, **how)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            trained.forward_backward(micro, CustomLoss(loss, needs_entropy=True, entropy_grad=True))
        results[way] = [before_loss[-1], trained.optim_step().grad_norm]
    return results


def _squares(micro: MicroBatch, stats: TokenStats) -> tuple[Tensor, Metrics]:
    """Return the policy loss plus the mean squared logit of each token."""
    assert stats.logits_RV is not None
    loss, metrics = PolicyLoss(replace(SETTINGS, entropy_coef=0.0))(micro, stats)
    more = (stats.logits_RV.square().mean(-1) * micro.weight_R).sum()
    return loss + more, metrics | {"loss": Metric(float((loss + more).detach()), metrics["loss"].weight)}


def _offload_and_reload(trained: Any) -> None:
    """Check that offloading releases memory, and that reloading restores all states."""

    def rounded_parameters() -> list[Any]:
        return [each for chunk in trained.actor for each in chunk.parameters() if trained.optimizer.is_rounded(each)]

    def resident() -> list[Any]:
        models = trained._models.built().values()
        parts = [tensor for model in models for tensor in trained._parts(model)]
        return [*parts, *rounded_parameters(), *trained.optimizer.state.moments()]

    kept = [*resident(), *trained.optimizer.gradients()]
    before = [tensor.clone() for tensor in resident()]
    whole, rounded = (_storages(tensors) for tensors in (resident(), rounded_parameters()))
    has_masters = trained.settings.dtype == torch.bfloat16 and trained.settings.offload != "all"
    assert bool(rounded) == has_masters
    moved = trained.offload().num_bytes
    assert moved == sum(whole.values()) - sum(rounded.values())
    assert not any(tensor.untyped_storage().size() for tensor in kept)
    assert trained.onload().num_bytes == moved
    assert all(torch.equal(a, b) for a, b in zip(before, resident(), strict=True))
    assert not any(tensor.any() for tensor in trained.optimizer.gradients())


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of the distinct storages of tensors."""
    return {each.data_ptr(): each.nbytes() for each in (tensor.untyped_storage() for tensor in tensors)}


def _restored(trained: Any, folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Return whether a checkpoint restores all states bitwise after they were changed."""
    trained.copy_weights("actor", "ref")
    _save(trained, folder, ranks)
    trained.save_hf(folder / "hf")
    with trained.optimizer.loaded(), torch.no_grad():
        before = {name: tensor.clone() for name, tensor in _all(trained)}
        for _, tensor in _all(trained):
            tensor.zero_()
    trained.load(folder)
    with trained.optimizer.loaded():
        is_restored = all(torch.equal(before[name], tensor) for name, tensor in _all(trained))
    return {"is_restored": is_restored, "has_ref": any(name.startswith("ref.") for name in before)}


def _all(trained: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for role in ("actor", "ref"):
        for number, chunk in enumerate(trained._models[role].module):
            for name, tensor in names.checkpoint_tensors(chunk):
                yield f"{role}.{number}.{name}", tensor
    for number, (own, kept) in enumerate(trained.optimizer.state.slices()):
        yield f"{number}.master", own
        assert kept.keys() in ({"step", "exp_avg", "exp_avg_sq"}, {"momentum_buffer"})
        for name, tensor in kept.items():
            yield f"{number}.{name}", tensor


def not_finite(ranks: Ranks, folder: Path, *, family: str, **sizes: Any) -> dict[str, Any]:
    """Return the error for a non-finite gradient in the last layer, and the gradient norm of the next step."""
    layout = Layout(ranks.tensor, ranks.pipeline, ranks.context, **sizes)
    how: dict[str, Any] = {"optim": OPTIM, "layout": layout, "temperature": 0.9}
    trained = megatron_backend(folder / family, ranks, **how)
    errors: list[str] = []
    results: dict[str, Any] = {"losses": [], "norms": [], "log_probs": []}
    (part, rows), *_ = steps_of(ranks)
    micros = [pack_micro_batch(part, each, part.columns["loss_weights"] * part.loss_masks) for each in rows]
    trained.forward_backward_of(micros, PolicyLoss(SETTINGS))
    for parameter, own in names.parameters_with_local(trained.actor, trained.hf):
        if own is not None and parameter.theirs[0] == "model.layers.1.mlp.down_proj.weight":
            own.main_grad[0, 0] = float("inf")
    try:
        trained.optim_step()
    except TrainerError as error:
        errors.append(str(error))
    take_step(trained, part, rows, PolicyLoss(SETTINGS), results)
    return {"errors": errors, "norms": results["norms"]}


def engine_checksums(trained: Any, ranks: Ranks, model: Path, scratch: Path) -> dict[str, str]:
    """Update an embedded engine of rank 0 with different weights over HTTP, and return its checksums."""
    weights = WeightSource(trained.named_weights)
    transport = DiskTransport(transport_context(1 << 14, folder=scratch, model_dir=model))
    sync = RankSync(lambda: weights, transport, connect=connected, rank=ranks.rank, world_size=ranks.world_size)
    if ranks.rank:
        asyncio.run(sync.send_weights([], 1))
        return {}
    config = load_config(model)
    other = {name: torch.full_like(tensor, 0.5) for name, tensor in hf.build_model(config, seed=9).state_dict().items()}

    async def serve_and_update() -> dict[str, str]:
        engine = EmbeddedEngine(config=config, state_dict=other, dtype=torch.float32, num_slots=2)
        async with running_server(engine) as url:
            info = ServerInfo.read(await asyncio.to_thread(probe, url, api_key=None))
            address = EngineAddress(url, dataclasses.asdict(info))
            await sync.send_weights([address], 1)
            async with connected([address]) as (server,):
                loaded, _ = await server.checksums()
        await engine.close()
        await sync.close_sync()
        return loaded

    return asyncio.run(serve_and_update())
