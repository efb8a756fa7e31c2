"""The interface of a training backend: what `training.worker` needs of the model on one rank.

`FsdpBackend` and `MegatronBackend` implement it. A backend does not know the algorithm: the loss is passed to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from furlong.core.algorithms import Role
from furlong.core.batch import IntArray, MicroBatch
from furlong.core.device_memory import MemoryTransfer, total_transfer
from furlong.core.metric import Metrics
from furlong.errors import TrainerError
from furlong.files.atomic import PendingFiles
from furlong.interfaces import HeadOutput, LossFn, TokenStats
from furlong.training.offload import HostOffload


class MicroBatchTooLargeError(torch.OutOfMemoryError):
    """A micro-batch does not fit into the device's memory. Nothing of it was accumulated, so a part may be tried."""


class NotFiniteLossError(TrainerError):
    """The loss of a micro-batch is not finite: `what` is the value, `rows` the samples' rows in the batch."""

    def __init__(self, what: str, rows: IntArray) -> None:
        super().__init__(what, rows)
        self.what, self.rows = what, rows

    def __str__(self) -> str:
        return f"{self.what} in the micro-batch of rows {self.rows.tolist()}"


@dataclass(frozen=True)
class OptimReport:
    """The result of one optimizer step. `skipped` is the reason if no step was taken (a non-finite gradient)."""

    grad_norm: float
    lr: float
    skipped: str = ""


class Backend(ABC):
    """Training on one rank. A new training backend implements this class; `training.worker` drives it.

    It has models by role. `model` selects one; the policy is "actor".
    """

    weights_are_views: bool = False
    """Whether `named_weights` is known to yield views of the live parameters rather than copies."""

    @property
    @abstractmethod
    def device(self) -> Any:
        """The torch.device that micro-batches must be on."""

    @abstractmethod
    def log_probs(
        self,
        micro: MicroBatch,
        *,
        model: Role = "actor",
        entropy: bool = False,
        head: HeadOutput = "",
        top_k: int = 0,
    ) -> TokenStats:
        """Compute log-probs, of the critic values, of the response tokens under one of the models, without gradient.

        head: what else to compute; top_k: the number of likeliest tokens.
        """

    def quantized_log_probs(self, micro: MicroBatch) -> TokenStats | None:
        """Compute the policy's log-probs with the values of the engine's quantized weights.

        None if the engine's weights are not quantized, if training already uses these values, and where the backend
        cannot compute it.
        """
        del micro
        return None

    def begin_step(self, rollout_id: int, step: int) -> None:
        """Called before the first pass of optimizer step `step` of a rollout, on every rank."""
        del rollout_id, step

    @abstractmethod
    def forward_backward(self, micro: MicroBatch, loss_fn: LossFn, *, model: Role = "actor") -> Metrics:
        """Accumulate the gradient of `loss_fn` over one micro-batch."""

    @abstractmethod
    def optim_step(self, *, model: Role = "actor") -> OptimReport:
        """Clip gradients, step the optimizer and the schedule, zero the gradients."""

    @abstractmethod
    def reset_optimizer(self, *, model: Role = "actor") -> None:
        """Reset the optimizer's moments; the learning-rate schedule continues."""

    @abstractmethod
    def named_weights(self, *, model: Role = "actor") -> Iterator[tuple[str, Tensor]]:
        """Yield a model's weights under Hugging Face names, in a fixed order."""

    def named_gradients(self, *, model: Role = "actor") -> Iterable[tuple[str, Tensor]]:
        """Yield the accumulated gradients by parameter name; this rank's shard of sharded ones. Empty by default."""
        del model
        return ()

    @abstractmethod
    def copy_weights(self, source: Role, target: Role) -> None:
        """Make the `target` model equal to `source` (reference update, old actor)."""

    @abstractmethod
    def save(self, folder: Path, later: PendingFiles | None = None) -> None:
        """Write weights, optimizers and schedules of all roles, and RNG state; with `later`, only add host copies."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""

    @abstractmethod
    def save_hf(self, folder: Path, *, model: Role = "actor") -> None:
        """Write a folder that transformers can load."""

    def offload(self) -> MemoryTransfer:
        """Move parameters, master weights and moments of all models to host memory and free the device.

        Raises TrainerError by default.
        """
        raise TrainerError(
            f"{type(self).__name__} cannot offload its state to the host; add --no-offload-train if trainer and engine "
            "fit on the device together, or give the engines their own GPUs"
        )

    def onload(self) -> MemoryTransfer:
        """Undo `offload`."""
        return MemoryTransfer(0, 0.0)

    def layer_seconds(self) -> float | None:
        """Return the time spent in the policy's layers on this rank since the last call; None if not measured."""
        return None


class PipelinedBackend(Backend):
    """A backend that processes several micro-batches at once and takes all those of an optimizer step together."""

    @abstractmethod
    def log_probs_of(
        self,
        micros: Sequence[MicroBatch],
        *,
        model: Role = "actor",
        entropy: bool = False,
        head: HeadOutput = "",
        top_k: int = 0,
    ) -> list[TokenStats]:
        """Run `log_probs` on each micro-batch; results in the same order."""

    @abstractmethod
    def forward_backward_of(
        self, micros: Sequence[MicroBatch], loss_fn: LossFn, *, model: Role = "actor"
    ) -> list[Metrics]:
        """Run `forward_backward` on each micro-batch; results in the same order."""


M = TypeVar("M")
Opt = TypeVar("Opt")


@dataclass
class TrainedModel(Generic[M, Opt]):
    """A model of the run: its module, and its optimizer with schedule and sharding, None for a frozen model.

    host: its memory while it is off the device. is_diverged: the weights of this frozen model are no longer those of
    its folder, so checkpoints contain them.
    """

    module: M
    optimizer: Opt | None = None
    host: HostOffload = field(default_factory=HostOffload)
    is_diverged: bool = False


class RoleModels(Generic[M, Opt]):
    """The models of a run by role. Frozen ones are built on first use.

    folders: of frozen models. load: builds one from a folder. new: builds one whose weights the caller replaces.
    offload, onload: move one between device and host. shares_device: only models that are in use are on the device.
    """

    def __init__(
        self,
        folders: Mapping[Role, Path],
        *,
        load: Callable[[Role, Path], M],
        new: Callable[[], M],
        offload: Callable[[TrainedModel[M, Opt]], MemoryTransfer],
        onload: Callable[[TrainedModel[M, Opt]], MemoryTransfer],
        shares_device: bool = False,
    ) -> None:
        self._of: dict[Role, TrainedModel[M, Opt]] = {}
        self._folders, self._load, self._new = folders, load, new
        self._offload, self._onload, self._shares_device = offload, onload, shares_device
        self._away = set[Role]()  # models in host memory

    def add(self, role: Role, model: TrainedModel[M, Opt]) -> None:
        """Add a trained model."""
        self._of[role] = model

    def offload(self) -> MemoryTransfer:
        """Move all models to host memory."""
        return self._send(set())

    def onload(self) -> MemoryTransfer:
        """Undo `offload`, for the policy only if models share the device."""
        return self._bring(["actor"] if self._shares_device else [*self._of])

    def use(self, *roles: Role) -> None:
        """Bring these models to the device, and the others to the host, if models share the device."""
        if not self._shares_device:
            return
        for role in roles:
            _ = self[role]
        self._send({*roles})
        self._bring(roles)

    def _send(self, kept: set[Role]) -> MemoryTransfer:
        sent: list[Role] = [role for role in self._of if role not in kept | self._away]
        self._away.update(sent)
        with torch.inference_mode(False):  # an engine may ask for the weights in inference mode
            return total_transfer([self._offload(self._of[role]) for role in sent])

    def _bring(self, roles: Sequence[Role]) -> MemoryTransfer:
        back: list[Role] = [role for role in reversed(roles) if role in self._away]
        self._away.difference_update(back)
        with torch.inference_mode(False):
            return total_transfer([self._onload(self._of[role]) for role in back])

    def __getitem__(self, role: Role) -> TrainedModel[M, Opt]:
        """Return a model. Raises TrainerError for a role that this run does not have."""
        if role not in self._of:
            if role not in self._folders:
                raise TrainerError(f"this run has no model {role!r}, only {sorted({*self._folders, *self._of})}")
            self._of[role] = TrainedModel(self._load(role, self._folders[role]))
        return self._of[role]

    def built(self) -> dict[Role, TrainedModel[M, Opt]]:
        """Return the models that are built, by role."""
        return dict(self._of)

    def trained(self) -> dict[Role, TrainedModel[M, Opt]]:
        """Return the models with an optimizer, by role."""
        return {role: model for role, model in self._of.items() if model.optimizer is not None}

    def optimizer(self, role: Role) -> Opt:
        """Return a model's optimizer. Raises TrainerError for a frozen model."""
        if (optimizer := self[role].optimizer) is None:
            raise TrainerError(
                f"the model {role!r} is frozen: it has no optimizer; trained are {sorted(self.trained())}"
            )
        return optimizer

    def diverged(self) -> list[Role]:
        """Return the frozen models whose weights are no longer those of their folder."""
        return sorted(role for role, model in self._of.items() if model.is_diverged)

    def replaced(self, role: Role) -> TrainedModel[M, Opt]:
        """Return the frozen model `role`, whose weights the caller replaces."""
        if role not in self._of:
            self._of[role] = TrainedModel(self._new())
        self._of[role].is_diverged = True
        return self._of[role]

    def source_and_target(self, source: Role, target: Role) -> tuple[M, M]:
        """Return the modules of a copy. Raises TrainerError unless `target` is a frozen model other than `source`."""
        if target in self.trained() or target == source:
            raise TrainerError(f"copy_weights({source!r}, {target!r}): only a frozen model can be replaced, by another")
        return self[source].module, self.replaced(target).module
