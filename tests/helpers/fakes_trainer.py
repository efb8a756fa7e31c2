"""A minimal training backend with one logit table, whose results can be computed by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from furlong.algo.logprob import stats_from_logits
from furlong.core.algorithms import Role
from furlong.core.batch import MicroBatch
from furlong.core.metric import Metrics
from furlong.core.weights import host_copy
from furlong.errors import CheckpointError, TrainerError
from furlong.files.atomic import PendingFiles
from furlong.interfaces import LossFn, TokenStats
from furlong.training.backend_interface import Backend, OptimReport


class FakeBackend(Backend):
    """A training backend whose policy is a table of logits indexed by the previous token, trained with plain SGD."""

    weights_are_views = True
    device = torch.device("cpu")

    def __init__(self, *, vocab: int = 40, lr: float = 0.1, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lr, self.num_steps = lr, 0
        self.table_VV = torch.randn(vocab, vocab, generator=generator).requires_grad_(True)
        self.frozen: dict[str, Tensor] = {"ref": self.table_VV.detach().clone()}
        self.calls: list[str] = []

    def _stats(self, table_VV: Tensor, micro: MicroBatch, *, entropy: bool, entropy_grad: bool = False) -> TokenStats:
        logits_RV = table_VV[micro.tokens_T[micro.response_pos_R - 1]]
        targets_R = micro.tokens_T[micro.response_pos_R]
        stats = stats_from_logits(logits_RV, targets_R, temperature=1.0, entropy=entropy, entropy_grad=entropy_grad)
        return TokenStats(stats.log_probs_R, stats.entropy_R, logits_RV)

    def log_probs(self, micro: MicroBatch, *, model: Role = "actor", entropy: bool = False) -> TokenStats:
        self.calls.append(f"log_probs:{model}")
        if model != "actor" and model not in self.frozen:
            raise TrainerError(f"there is no model {model!r}")
        table = self.table_VV if model == "actor" else self.frozen[model]
        stats = self._stats(table.detach(), micro, entropy=entropy)
        return TokenStats(stats.log_probs_R, stats.entropy_R)

    def forward_backward(self, micro: MicroBatch, loss_fn: LossFn, *, model: Role = "actor") -> Metrics:
        self.calls.append("forward_backward")
        stats = self._stats(self.table_VV, micro, entropy=loss_fn.needs_entropy, entropy_grad=loss_fn.entropy_grad)
        loss, metrics = loss_fn(micro, stats)
        if loss.requires_grad:
            loss.backward()
        return metrics

    def optim_step(self, *, model: Role = "actor") -> OptimReport:
        self.calls.append("optim_step")
        grad = self.table_VV.grad
        norm = 0.0 if grad is None else float(grad.norm())
        if not math.isfinite(norm):
            raise TrainerError(f"gradient norm {norm}")
        if grad is not None:
            with torch.no_grad():
                self.table_VV -= self.lr * grad
        self.table_VV.grad = None
        self.num_steps += 1
        return OptimReport(norm, self.lr)

    def reset_optimizer(self, *, model: Role = "actor") -> None:
        self.calls.append("reset_optimizer")

    def named_weights(self, *, model: Role = "actor") -> Iterator[tuple[str, Tensor]]:
        yield "table", self.table_VV.detach()

    def copy_weights(self, source: Role, target: Role) -> None:
        self.calls.append(f"copy:{source}->{target}")
        if target == "actor" or target == source:
            raise TrainerError(f"copy_weights({source!r}, {target!r})")
        self.frozen[target] = (self.table_VV if source == "actor" else self.frozen[source]).detach().clone()

    def save(self, folder: Path, later: PendingFiles | None = None) -> None:
        files = PendingFiles() if later is None else later
        tensors = {"actor": self.table_VV, **self.frozen}
        files.add_tensors(folder / "fake.safetensors", {name: host_copy(tensor) for name, tensor in tensors.items()})
        files.add_text(folder / "fake.json", json.dumps({"num_steps": self.num_steps}))
        if later is None:
            files.write()

    def load(self, folder: Path) -> None:
        if not (folder / "fake.json").is_file():
            raise CheckpointError(f"{folder} is no checkpoint")
        self.num_steps = json.loads((folder / "fake.json").read_text())["num_steps"]
        tensors = load_file(folder / "fake.safetensors")
        with torch.no_grad():
            self.table_VV.copy_(tensors.pop("actor"))
        self.frozen = tensors

    def save_hf(self, folder: Path, *, model: Role = "actor") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"table": self.table_VV.detach()}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
