"""Functions that the ranks of a test run; each takes (ranks, folder) and returns a JSON value."""

from __future__ import annotations

import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from backends import fsdp_backend
from furlong.algo.policy_loss import PolicyLoss
from furlong.config.sections import AlgoFlags, OptimFlags
from furlong.core.batch import pack_micro_batch
from furlong.core.metric import Metric
from furlong.errors import FurlongError, TrainerError
from furlong.models import hf_model as hf
from furlong.training.checkpoint import trainer_files
from furlong.training.fsdp.backend import FsdpBackend
from furlong.training.packing import Packing, split_batch
from furlong.training.ranks import Ranks
from furlong.training.sharding import Sharding
from furlong.training.worker import RoleLoss, RoundWorker
from models_zoo import family_config, random_batch

SETTINGS = AlgoFlags(
    use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3", normalize_advantages=True, entropy_coef=0.02, eps_clip=0.3
)
PACKING = Packing(global_batch_size=6, max_tokens=40, balance="tokens")
# Twelve samples of very different lengths in four groups; some micro-batches have no trainable token.
SHAPE = {"prompts": [5, 3, 9, 4], "responses": [[6, 2, 19], [4, 7, 1], [12, 3, 5], [2, 2, 30]]}


def tied(family: str) -> Any:
    config = family_config(family.removesuffix("-tied").removesuffix("-untied"))
    if family.endswith("tied"):
        config.tie_word_embeddings = not family.endswith("-untied")
    return config


def write_models(folder: Path, *families: str) -> None:
    for family in families:
        hf.save_model(hf.build_model(tied(family), seed=0), folder / family)


def backend(ranks: Ranks, folder: Path, family: str, *, dtype: str = "float32", **options: Any) -> FsdpBackend:
    optim = OptimFlags(**{"lr": 1e-2, "clip_grad": 0.5, "optimizer": "sgd", **options.pop("optim", {})})
    return fsdp_backend(folder / family, ranks, optim=optim, dtype=getattr(torch, dtype), **options)


def batch(rollout_id: int = 0) -> Any:
    drawn = random_batch(**SHAPE, seed=rollout_id, masked=0.3, rollout_id=rollout_id)
    masks = drawn.loss_masks.copy()
    starts = drawn.response_starts
    masks[starts[3] : starts[6]] = 0  # mask a whole group
    return replace(drawn, loss_masks=masks)


def worker(ranks: Ranks, trained: FsdpBackend) -> RoundWorker:
    return RoundWorker(
        trained, algo=SETTINGS, losses=[RoleLoss("actor", PolicyLoss(SETTINGS))], packing=PACKING, ranks=ranks
    )


def listed(metrics: dict[str, Metric]) -> dict[str, Any]:
    return {name: [m.total, m.weight, m.rule] for name, m in metrics.items() if not name.startswith("perf/")}


def weights(trained: FsdpBackend) -> dict[str, list[float]]:
    """Return the sum, the sum of absolute values, and a few values of each tensor."""
    found = {}
    for name, tensor in trained.named_weights():
        flat = tensor.double().flatten()
        found[name] = [float(flat.sum()), float(flat.abs().sum()), *flat[:: max(1, len(flat) // 7)].tolist()]
    return found


def train(ranks: Ranks, folder: Path, *, family: str, rollouts: int = 2, **options: Any) -> dict[str, Any]:
    """Train with all loss terms, and return the metrics of each rollout and the final weights."""
    trained = backend(ranks, folder, family, **options)
    run = worker(ranks, trained)
    metrics = [listed(run.train(batch(i))) for i in range(rollouts)]
    assert all(math.isfinite(total) for part in metrics for total, _, _ in part.values())
    return {"metrics": metrics, "weights": weights(trained)}


def leave_together(ranks: Ranks, folder: Path, *, family: str) -> dict[str, list[str]]:
    """Return the gloo threads of this process, which has two groups, before and after it leaves them."""
    train(ranks, folder, family=family, rollouts=1)
    dist.new_group(backend="gloo")
    before = gloo_threads()
    ranks.leave()
    torch.distributed.distributed_c10d.ProcessGroupGloo._device = None  # kept by `ranks_zoo._SharedGloo`
    return {"before": before, "after": gloo_threads()}


def gloo_threads() -> list[str]:
    """Return the gloo threads of this process."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


def together(ranks: Ranks, folder: Path, *, cases: dict[str, dict[str, Any]], **common: Any) -> dict[str, Any]:
    """Run functions of this module one by one in the same processes, and return their results by case name."""
    found: dict[str, Any] = {}
    for name, case in cases.items():
        sys.stderr.write(f"{name}\n")
        own = {axis: case.get(axis, 1) for axis in ("replicate", "context")}
        rest = {field: value for field, value in case.items() if field not in {*own, "function"}}
        function = globals()[case.get("function", "train")]
        found[name] = function(replace(ranks, **own), folder, **common, **rest)
    return found


def micro(ranks: Ranks, advantage: float = 1.0) -> Any:
    """Return one micro-batch of this rank, with the same advantage for all tokens."""
    part = split_batch(batch(), algo=SETTINGS, packing=PACKING, num_ranks=ranks.num_data)[ranks.data_rank]
    drawn = pack_micro_batch(part.batch, part.steps[0][0], part.batch.columns["loss_weights"])
    return drawn.with_columns(advantages=torch.full_like(drawn.weight_R, advantage))


def one_bad_rank(ranks: Ranks, folder: Path, *, family: str) -> dict[str, Any]:
    """Produce a NaN loss on the last rank only: all ranks raise an error, or skip the step."""
    loss, bad = PolicyLoss(AlgoFlags()), math.nan if ranks.rank == ranks.world_size - 1 else 1.0
    strict = backend(ranks, folder, family)
    strict.forward_backward(micro(ranks, bad), loss)
    strict.forward_backward(micro(ranks), loss)
    try:
        strict.optim_step()
        message = "no error"
    except TrainerError as error:
        message = str(error)
    lenient = backend(ranks, folder, family, check_finite=False)
    before = weights(lenient)
    lenient.forward_backward(micro(ranks, bad), loss)
    skipped = lenient.optim_step().skipped
    unchanged = weights(lenient) == before
    lenient.forward_backward(micro(ranks), loss)
    return {"message": message, "skipped": skipped, "unchanged": unchanged, "next": lenient.optim_step().grad_norm}


def one_bad_gradient(ranks: Ranks, folder: Path, *, family: str) -> dict[str, Any]:
    """Produce an infinite gradient in the first rank's shard of one parameter, and return the error."""
    trained = backend(ranks, folder, family)
    trained.forward_backward(micro(ranks), PolicyLoss(AlgoFlags()))
    if ranks.rank == 0:
        trained.optimizer.master_weights[1].grad[0] = math.inf
    try:
        trained.optim_step()
    except TrainerError as error:
        return {"message": str(error)}
    return {"message": "no error"}


def frozen_models(ranks: Ranks, folder: Path, *, family: str) -> dict[str, Any]:
    """Compare log-probs of the reference and of a policy copy before and after a step."""
    trained, part = backend(ranks, folder, family), micro(ranks)

    def log_probs(model: Any) -> list[float]:
        return trained.log_probs(part, model=model).log_probs_R.tolist()

    start = log_probs("actor")
    trained.copy_weights("actor", "old_actor")
    trained.forward_backward(part, PolicyLoss(AlgoFlags()))
    trained.optim_step()
    moved = log_probs("actor")
    kept = [log_probs("ref") == start, log_probs("old_actor") == start, moved != start]
    trained.copy_weights("actor", "ref")
    return {"kept": kept, "refreshed": log_probs("ref") == moved}


def save_half(ranks: Ranks, folder: Path, *, family: str, to: str, file_bytes: int, **options: Any) -> dict[str, Any]:
    """Train, save halfway into several files, continue, and return the final weights."""
    trained = backend(ranks, folder, family, **options)
    trainer_files.FILE_BYTES = file_bytes
    run = worker(ranks, trained)
    run.train(batch(0))
    trained.copy_weights("actor", "old_actor")
    (folder / to).mkdir(exist_ok=True)
    ranks.wait()
    trained.save(folder / to)
    trained.save_hf(folder / f"{to}-hf")
    drawn = float(torch.rand(()))
    run.train(batch(1))
    return {"weights": weights(trained), "drawn": drawn, "files": sorted(p.name for p in (folder / to).iterdir())}


def resume_half(ranks: Ranks, folder: Path, *, family: str, of: str, **options: Any) -> dict[str, Any]:
    """Resume from the checkpoint of `save_half`, and return the final weights."""
    trained = backend(ranks, folder, family, **options)
    trained.load(folder / of)
    drawn = float(torch.rand(()))
    exported = {
        n: t for part in sorted((folder / f"{of}-hf").glob("*.safetensors")) for n, t in load_file(part).items()
    }
    same = all(torch.equal(tensor, exported[name]) for name, tensor in trained.named_weights())
    reloaded = hf.load_model(folder / f"{of}-hf", dtype=trained.settings.dtype)
    same = same and len(list(reloaded.parameters())) == len(list(trained.actor.model.parameters()))
    old = (
        trained.log_probs(micro(ranks), model="old_actor").log_probs_R.sum()
        - trained.log_probs(micro(ranks)).log_probs_R.sum()
    )
    worker(ranks, trained).train(batch(1))
    return {"weights": weights(trained), "drawn": drawn, "same": same, "old": float(old.abs())}


def damaged_half(ranks: Ranks, folder: Path, *, family: str, of: str, **options: Any) -> dict[str, Any]:
    """Return the error for a checkpoint of `save_half` with a damaged file that only the last rank reads."""
    damaged = folder / f"{of}-damaged"
    if ranks.rank == ranks.world_size - 1:
        shutil.copytree(folder / of, damaged)
        (damaged / f"trainer_rng_{ranks.rank}.safetensors").write_bytes(b"cut off")
    trained = backend(ranks, folder, family, **options)
    ranks.wait()
    try:
        trained.load(damaged)
    except FurlongError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": ""}


def wrong_context(ranks: Ranks, folder: Path, *, family: str) -> dict[str, Any]:
    """Return the error for a model whose heads cannot be split over two CP ranks."""
    sharding = Sharding(replace(ranks, context=2), torch.device("cpu"))
    config = tied(family)
    config.num_attention_heads, config.num_key_value_heads = 3, 1
    try:
        sharding.context.check(config)
    except FurlongError as error:
        return {"error": str(error)}
    return {"error": f"none for {folder}"}


def resident(trained: Any) -> list[torch.Tensor]:
    """Every tensor of an FSDP rank that persists between steps."""
    parts = [tensor for model in trained._models.built().values() for tensor in trained._parts(model)]
    return [*parts, *trained.optimizer.rounded(), *trained.optimizer.moments()]


def sleep_between(ranks: Ranks, folder: Path, *, family: str, **options: Any) -> dict[str, Any]:
    """Train on two rollouts, with all states offloaded and reloaded in between."""
    trained = backend(ranks, folder, family, **options)
    run = worker(ranks, trained)
    run.train(batch(0))
    kept = resident(trained)
    moved = trained.offload()
    empty = all(tensor.untyped_storage().size() == 0 for tensor in kept)
    trained.onload()
    metrics = listed(run.train(batch(1)))
    return {"metrics": [metrics], "weights": weights(trained), "bytes": moved.num_bytes, "empty": empty}


def missing_weights(ranks: Ranks, folder: Path, *, family: str) -> dict[str, Any]:
    """Return the error for a model folder that only the first rank reports as invalid."""
    try:
        backend(ranks, folder, family)
    except FurlongError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": ""}
