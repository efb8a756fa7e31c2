"""AdamW or SGD over float32 master weights, with a learning-rate schedule in optimizer steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from furlong.config.sections.optim import OptimFlags
from furlong.core.text import abbreviate
from furlong.errors import CheckpointError, ConfigError, TrainerError
from furlong.interfaces import OptimReport
from furlong.training.checkpoint.tensor_files import TensorReader
from furlong.training.not_finite import first_not_finite
from furlong.training.offload import OptimizerOffload
from furlong.training.ranks import Ranks
from furlong.training.settings import Offload
from furlong.training.sharding import Sharding

MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}

logger = logging.getLogger(__name__)


def check_moments(reader: TensorReader, kind: Literal["adam", "sgd"]) -> None:
    """Raise CheckpointError for moments that are not those of such an optimizer; there may be none."""
    kinds = {name.rpartition("/")[2] for name in reader.names}
    if kinds and kinds - {"step"} != {*MOMENTS[kind]}:
        raise CheckpointError(
            f"{reader.path} has {', '.join(sorted(kinds))} of its optimizer, not those of {kind}; resume with the "
            "--optimizer that it was saved with, or with --no-load-optim"
        )


class Schedule:
    """Learning rate as a function of the steps already taken.

    Linear from `lr_warmup_init` to `lr` over the warm-up, so the first step of a warm-up is taken at `lr_warmup_init`;
    then by `lr_decay_style` down to `min_lr` at `lr_decay_iters`, and `min_lr` after it. `total_steps` stands in for
    `lr_decay_iters` where that is not set. Raises ConfigError if neither is known and the style needs it, or if the
    warm-up is no shorter than the decay.
    """

    def __init__(self, flags: OptimFlags, *, total_steps: int | None = None) -> None:
        self.flags = flags
        decay = flags.lr_decay_iters if flags.lr_decay_iters is not None else total_steps
        needs_end = flags.lr_decay_style in ("linear", "cosine") or flags.lr_warmup_fraction is not None
        if needs_end and decay is None:
            raise ConfigError(
                f"--lr-decay-style {flags.lr_decay_style} with --lr-warmup-fraction {flags.lr_warmup_fraction} needs "
                "to know its end; give --lr-decay-iters"
            )
        if flags.lr_warmup_fraction is not None and flags.lr_warmup_iters:
            raise ConfigError(
                f"--lr-warmup-fraction {flags.lr_warmup_fraction} and --lr-warmup-iters {flags.lr_warmup_iters} "
                "exclude each other; give one"
            )
        self.decay_steps = decay or 0
        fraction = flags.lr_warmup_fraction
        self.warmup_steps = flags.lr_warmup_iters if fraction is None else int(fraction * self.decay_steps)
        if flags.lr_decay_style in ("linear", "cosine") and self.warmup_steps >= self.decay_steps:
            raise ConfigError(
                f"the learning rate warms up over {self.warmup_steps} steps and decays until step {self.decay_steps}; "
                "give a shorter --lr-warmup-iters or a longer --lr-decay-iters"
            )

    def lr(self, step: int) -> float:
        """Learning rate of the optimizer step after `step` steps."""
        flags = self.flags
        if self.warmup_steps and step <= self.warmup_steps:
            return flags.lr_warmup_init + (flags.lr - flags.lr_warmup_init) * step / self.warmup_steps
        if flags.lr_decay_style == "constant":
            return flags.lr
        if flags.lr_decay_style == "inverse-square-root":
            return max(flags.min_lr, flags.lr * math.sqrt(max(self.warmup_steps, 1) / max(step, 1)))
        if step > self.decay_steps:
            return flags.min_lr
        ratio = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        left = 1.0 - ratio if flags.lr_decay_style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)
        return flags.min_lr + left * (flags.lr - flags.min_lr)


class MasterOptimizer:
    """Steps the trainable parameters of a model.

    Parameters in half precision get float32 masters: gradients are added up in float32 (`fold_gradients` after every
    backward pass), the masters are stepped, and the parameters are their rounding. Weight decay is left out for biases,
    norms and everything else with one dimension. `num_steps` counts steps taken; skipped ones do not advance it.

    Of a sharded parameter, the master is this rank's part itself, and `step` is a collective: the norm is global.

    `offload` keeps the moments on the host between steps, or `all`, which are the masters, too, where they are not the
    parameters. They come to the device whole for a step, when there are no activations, and the step is the same to the
    bit; stepping on the host would take a fast CPU for every GPU.
    """

    def __init__(
        self,
        named: list[tuple[str, torch.nn.Parameter]],
        flags: OptimFlags,
        schedule: Schedule,
        sharding: Sharding | None = None,
        *,
        offload: Offload = "nothing",
        wait: Callable[[], None] | None = None,
    ) -> None:
        if not named:
            raise ConfigError("no parameter is trained; check --only-train-params-name-list, --freeze-params-name-list")
        self.names = [name for name, _ in named]
        self.params = [parameter for _, parameter in named]
        self.flags, self.schedule, self.num_steps = flags, schedule, 0
        self.sharding = sharding or Sharding(Ranks(), self.params[0].device)
        self.masters = [self._master(p) for p in self.params]
        self.optimizer = self._build()
        self._offload: Offload = offload
        self._optimizer_offload = OptimizerOffload(self._offloaded, wait or (lambda: None))

    def _master(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        if isinstance(parameter, DTensor):
            return torch.nn.Parameter(self.sharding.local(parameter))
        if parameter.dtype in (torch.float32, torch.float64):
            return parameter
        return torch.nn.Parameter(parameter.detach().to(torch.float32))

    def _build(self) -> torch.optim.Optimizer:
        flags = self.flags
        is_plain = [m.ndim <= 1 or name.endswith("bias") for name, m in zip(self.names, self.masters, strict=True)]
        decayed, plain = (
            [m for m, is_one in zip(self.masters, is_plain, strict=True) if is_one is wanted]
            for wanted in (False, True)
        )
        groups: list[dict[str, Any]] = [
            {"params": members, "weight_decay": decay}
            for members, decay in ((decayed, flags.weight_decay), (plain, 0.0))
            if members
        ]
        if flags.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=flags.lr, momentum=0.9, fused=True)
        return torch.optim.AdamW(
            groups, lr=flags.lr, betas=(flags.adam_beta1, flags.adam_beta2), eps=flags.adam_eps, fused=True
        )

    def fold_gradients(self) -> None:
        """Add half-precision and sharded gradients to those of the masters, and free them."""
        for parameter, master in zip(self.params, self.masters, strict=True):
            if parameter is not master and parameter.grad is not None:
                grad = self.sharding.local(parameter.grad)
                master.grad = grad.to(master.dtype) if master.grad is None else master.grad.add_(grad)
                parameter.grad = None

    def drop_unfolded(self) -> bool:
        """Undo a backward pass that was not folded; returns False if it cannot be, its sums being in the masters."""
        if any(parameter is master for parameter, master in zip(self.params, self.masters, strict=True)):
            return False
        for parameter in self.params:
            parameter.grad = None
        return True

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for tensor in (*self.params, *self.masters):
            tensor.grad = None

    def step(self, *, skip_not_finite: bool) -> OptimReport:
        """Clip by the global norm, step, write parameters back, drop the gradients.

        A gradient norm that is not finite skips the step if `skip_not_finite`, else raises TrainerError naming the
        first parameter with such a gradient. Nothing changes in either case.
        """
        grads = [m.grad for m in self.masters if m.grad is not None]
        lr = self.schedule.lr(self.num_steps)
        norm = self._norm(grads)
        if not math.isfinite(norm):
            gradients = ((name, master.grad) for name, master in zip(self.names, self.masters, strict=True))
            name = first_not_finite(gradients, self.sharding.ranks)
            self.zero_grad()
            reason = f"gradient norm {norm}, first in {name}"
            if not skip_not_finite:
                raise TrainerError(f"optimizer step {self.num_steps}: {reason}")
            return OptimReport(norm, lr, reason)
        clip = self.flags.clip_grad
        if clip > 0.0 and norm > clip:
            for grad in grads:
                grad.mul_(clip / (norm + 1e-6))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with self.loaded():
            self.optimizer.step()
            self.write_back()
        self.zero_grad()
        self.num_steps += 1
        if self.flags.use_stateless_adam:
            self.reset()
        return OptimReport(norm, lr)

    def loaded(self) -> AbstractContextManager[None]:
        """Have on the device inside what `offload` keeps on the host; also within another such context."""
        return self._optimizer_offload.loaded()

    def _offloaded(self) -> list[Tensor]:
        if self._offload == "nothing":
            return []
        own = zip(self.params, self.masters, strict=True)
        masters = [m for p, m in own if p is not m and not isinstance(p, DTensor)] if self._offload == "all" else []
        return [*self.moments(), *masters]

    def moments(self) -> Iterator[Tensor]:
        """Every tensor that the optimizer keeps between steps."""
        for kept in self.optimizer.state.values():
            yield from (tensor for tensor in kept.values() if isinstance(tensor, Tensor))

    def _norm(self, grads: list[Tensor]) -> float:
        """Global norm of the gradients over all ranks that hold parts of them."""
        norm_0 = torch.nn.utils.get_total_norm(grads, foreach=True) if grads else torch.zeros((), device=self._device)
        if self.sharding.is_sharded:
            norm_0 = self.sharding.sum(norm_0.square()).sqrt()
        return float(norm_0)

    @property
    def _device(self) -> torch.device:
        return self.masters[0].device

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the parameters."""
        for parameter, master in zip(self.params, self.masters, strict=True):
            if parameter is not master and not isinstance(parameter, DTensor):
                parameter.copy_(master)

    def rounded(self) -> list[torch.nn.Parameter]:
        """The parameters that `write_back` makes of masters which are on the device."""
        if self._offload == "all":
            return []
        own = zip(self.params, self.masters, strict=True)
        return [p for p, master in own if p is not master and not isinstance(p, DTensor)]

    def coming_bytes(self) -> list[int]:
        """Bytes of each moment that is not there yet, and will be on the device between steps."""
        num_moments = 2 if self.flags.optimizer == "adam" else 1
        coming = self.masters if self._offload == "nothing" else []
        return [m.nbytes for m in coming if m not in self.optimizer.state for _ in range(num_moments)]

    @property
    def pending_bytes(self) -> int:
        """Memory that the next backward pass and step will take for gradients and moments that are not there yet."""
        return sum(self.coming_bytes()) + sum(m.nbytes for m in self.masters if m.grad is None)

    def reset(self) -> None:
        """Forget the moments; the schedule goes on."""
        with self.loaded():
            self.optimizer.state.clear()

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the moments as (parameter/moment, whole tensor). A collective if the parameters are sharded."""
        with self.loaded():
            for name, parameter, master in zip(self.names, self.params, self.masters, strict=True):
                for moment, tensor in sorted(self.optimizer.state.get(master, {}).items()):
                    if tensor is not None:
                        is_part = isinstance(parameter, DTensor) and moment != "step"
                        yield f"{name}/{moment}", self.sharding.gather(tensor, parameter.shape) if is_part else tensor

    def restore(self, reader: TensorReader) -> None:
        """Put back what `state_tensors` gave. Raises CheckpointError for another optimizer, parameters or shapes.

        Moments of parameters that were not trained before begin at zero, which the log says.
        """
        check_moments(reader, self.flags.optimizer)
        trained = {n: (p, m) for n, p, m in zip(self.names, self.params, self.masters, strict=True)}
        self.reset()
        with self.loaded():
            self._fill(trained, reader)
        new = sorted(trained.keys() - {name.rpartition("/")[0] for name in reader.names})
        if new and reader.names:
            logger.warning("%s has no moments of %s: they begin at zero", reader.path, abbreviate(new))

    def _fill(self, trained: dict[str, tuple[torch.nn.Parameter, torch.nn.Parameter]], reader: TensorReader) -> None:
        for key in sorted(reader.names):
            name, _, moment = key.rpartition("/")
            want = tuple(trained[name][0].shape) if name in trained else "no such trained parameter"
            if name not in trained or (moment != "step" and reader.shape(key) != want):
                raise CheckpointError(
                    f"the optimizer state of the checkpoint does not fit: {key} {reader.shape(key)}, the model has "
                    f"{want}; resume with the model and the parameter lists of the run that saved it"
                )
            parameter, master = trained[name]
            is_part = isinstance(parameter, DTensor) and moment != "step"
            tensor = reader.read(key, self.sharding.rows(len(parameter)) if is_part else None)
            # torch keeps the step count of the fused optimizers beside the parameter
            self.optimizer.state[master][moment] = tensor.to(master.device)
