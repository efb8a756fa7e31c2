"""Distillation on the ranks of a test, for both backends and several layouts; each function returns a JSON value."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from backends import backend_settings, fsdp_backend
from critic_cases import FLAGS as PPO
from critic_cases import PACKING, SGD, MegatronBackend, weights
from furlong.algo.policy_loss import PolicyLoss
from furlong.algo.value_loss import ValueLoss
from furlong.config.sections import AlgoFlags, OpdFlags
from furlong.training.megatron.parallel_layout import Layout
from furlong.training.ranks import Ranks
from furlong.training.settings import RoleSettings
from furlong.training.worker import RoleLoss, RoundWorker
from ranks_cases import batch, listed

LOSSES = ("sampled", "topk", "full")
ALGO = AlgoFlags(kl_loss_type="k3", use_kl_loss=True, kl_loss_coef=0.1)


def backend(ranks: Ranks, folder: Path, teacher: str, **how: Any) -> Any:
    kind = how.pop("backend", "fsdp")
    optim = replace(SGD, weight_decay=0.0)
    common: dict[str, Any] = {"optim": optim, "role_folders": {"teacher": folder / teacher}, "temperature": 0.8}
    if how.pop("critic", False):
        common["trained"] = {"critic": RoleSettings(folder / "student", optim)}
    if kind == "fsdp":
        return fsdp_backend(folder / "student", ranks, **common, **how)
    sizes = {"tensor": ranks.tensor, "pipeline": ranks.pipeline, "context": ranks.context}
    layout = Layout(**sizes, sequence_parallel=how.pop("sequence_parallel", False))
    return MegatronBackend(backend_settings(folder / "student", layout=layout, **common, **how), ranks=ranks)


def worker(ranks: Ranks, trained: Any, loss: str, *, algo: AlgoFlags = ALGO, task: float = 1.0) -> RoundWorker:
    opd = OpdFlags(
        use_opd=True, opd_type="trainer", opd_loss=loss, opd_kl_coef=0.7, opd_task_reward_coef=task,
        opd_log_prob_top_k=5 if loss == "topk" else 0,
    )  # fmt: skip
    losses = [RoleLoss("actor", PolicyLoss(algo, opd=opd))]
    if algo.uses_critic:
        losses.insert(0, RoleLoss("critic", ValueLoss(algo.value_clip), weights="value_weights"))
    return RoundWorker(trained, algo=algo, losses=losses, opd=opd, packing=PACKING, ranks=ranks)


def rounds(ranks: Ranks, folder: Path, *, teacher: str = "teacher", save: str = "", **how: Any) -> dict[str, Any]:
    """Metrics of a rollout with each loss, one after the other, and the weights after them."""
    trained = backend(ranks, folder, teacher, **how)
    found = {loss: listed(worker(ranks, trained, loss).train(batch(i))) for i, loss in enumerate(LOSSES)}
    restored = ""
    if save:
        run = worker(ranks, trained, "full")
        (folder / save).mkdir(exist_ok=True)
        run.save(folder / save, is_first=ranks.rank == 0)
        ranks.wait()
        seen = []
        for _ in range(2):
            metrics = listed(run.train(batch(3)))
            seen.append((metrics, weights(trained, "actor")))
            run.load(folder / save)
        restored = "bitwise" if seen[0] == seen[1] else "different"
    return {"rounds": found, "weights": weights(trained, "actor"), "restored": restored}


def same(ranks: Ranks, folder: Path, **how: Any) -> dict[str, Any]:
    """What a teacher that is the policy does to it, alone."""
    trained = backend(ranks, folder, "student", **how)
    before = weights(trained, "actor")
    algo = AlgoFlags(use_kl_loss=False)
    found = {loss: listed(worker(ranks, trained, loss, algo=algo, task=0.0).train(batch(0))) for loss in LOSSES}
    norms = {loss: metrics["train/grad_norm"][0] for loss, metrics in found.items()}
    return {"norms": norms, "is_untouched": weights(trained, "actor") == before}


def ppo(ranks: Ranks, folder: Path, **how: Any) -> dict[str, Any]:
    """A rollout of PPO with a penalty of sampled tokens."""
    trained = backend(ranks, folder, "teacher", critic=True, **how)
    return listed(worker(ranks, trained, "sampled", algo=PPO).train(batch(0)))
