"""PPO on the ranks of a test, for both backends and several layouts; each function returns a JSON value."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from backends import backend_settings, fsdp_backend
from furlong.algo.policy_loss import PolicyLoss
from furlong.algo.value_loss import ValueLoss
from furlong.config.sections import AlgoFlags, OptimFlags
from furlong.training.megatron import megatron_compat as compat
from furlong.training.packing import Packing
from furlong.training.ranks import Ranks
from furlong.training.settings import RoleSettings
from furlong.training.worker import RoleLoss, RoundWorker
from ranks_cases import batch, listed

compat.prepare()  # before the ranks are forked, so that they inherit the imports
from furlong.training.megatron.megatron_backend import MegatronBackend  # noqa: E402
from furlong.training.megatron.parallel_layout import Layout  # noqa: E402

FLAGS = AlgoFlags(
    advantage_estimator="ppo", kl_coef=0.05, gamma=0.99, lambd=0.9, value_clip=0.05, normalize_advantages=True
)
PACKING = Packing(global_batch_size=6, max_tokens=40, balance="tokens")
SGD = OptimFlags(optimizer="sgd", lr=1e-2, clip_grad=0.5)


def backend(ranks: Ranks, folder: Path, model: str, *, dtype: str = "float32", shares: bool = False, **how: Any) -> Any:
    kind, critic = how.pop("backend", "fsdp"), how.pop("critic", model)
    optim = OptimFlags(**{**vars(SGD), **how.pop("optim", {})})
    common: dict[str, Any] = {
        "optim": optim,
        "dtype": getattr(torch, dtype),
        "trained": {"critic": RoleSettings(folder / critic, replace(optim, lr=3 * optim.lr))},
        "shares_device": shares,
    }
    if kind == "fsdp":
        return fsdp_backend(folder / model, ranks, **common, **how)
    sizes = {"tensor": ranks.tensor, "pipeline": ranks.pipeline, "context": ranks.context}
    layout = Layout(**sizes, sequence_parallel=how.pop("sequence_parallel", False))
    return MegatronBackend(backend_settings(folder / model, layout=layout, **common, **how), ranks=ranks)


def worker(ranks: Ranks, trained: Any, *, start: int = 0) -> RoundWorker:
    losses = [
        RoleLoss("critic", ValueLoss(FLAGS.value_clip), weights="value_weights"),
        RoleLoss("actor", PolicyLoss(FLAGS), start=start),
    ]
    return RoundWorker(trained, algo=FLAGS, losses=losses, packing=PACKING, ranks=ranks)


def weights(trained: Any, role: str) -> dict[str, list[float]]:
    """The sum, the sum of absolute values, and a few values of each tensor of a model."""
    found = {}
    for name, tensor in trained.named_weights(model=role):
        flat = tensor.double().flatten()
        found[name] = [float(flat.sum()), float(flat.abs().sum()), *flat[:: max(1, len(flat) // 7)].tolist()]
    return found


def two_rounds(ranks: Ranks, folder: Path, *, model: str, save_as: str = "", **how: Any) -> dict[str, Any]:
    """Metrics of a critic-only rollout and of one that trains both, and the weights after each."""
    trained = backend(ranks, folder, model, **how)
    run = worker(ranks, trained, start=1)
    before = weights(trained, "actor")
    rounds = [listed(run.train(batch(0)))]
    is_untouched = weights(trained, "actor") == before
    restored = ""
    if save_as:
        (folder / save_as).mkdir(exist_ok=True)
        run.save(folder / save_as, is_first=ranks.rank == 0)
        ranks.wait()
    rounds.append(listed(run.train(batch(1))))
    after = {role: weights(trained, role) for role in ("actor", "critic")}
    if save_as:
        run.load(folder / save_as)
        again = listed(run.train(batch(1)))
        same = {role: weights(trained, role) for role in ("actor", "critic")}
        restored = "bitwise" if (again, same) == (rounds[1], after) else "different"
    return {"rounds": rounds, "weights": after, "actor_is_untouched": is_untouched, "restored": restored}
