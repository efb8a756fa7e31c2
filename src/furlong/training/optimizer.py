"""AdamW or SGD over float32 master weights, and the learning-rate schedule."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from furlong.config.sections import OptimFlags
from furlong.core.text import abbreviate
from furlong.errors import CheckpointError, ConfigError, TrainerError
from furlong.training.backend_interface import OptimReport
from furlong.training.checkpoint.tensor_reader import TensorReader
from furlong.training.offload import OptimizerOffload
from furlong.training.ranks import Ranks
from furlong.training.settings import NOTHING_TRAINED, Offload
from furlong.training.sharding import Sharding

MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}

logger = logging.getLogger(__name__)


def check_moments(path: Path, names: Iterable[str], kind: Literal["adam", "sgd"]) -> None:
    """Raise CheckpointError if the moments in a checkpoint are of another optimizer. No moments are fine."""
    kinds = {name.rpartition("/")[2] for name in names}
    if kinds and kinds - {"step"} != {*MOMENTS[kind]}:
        raise CheckpointError(
            f"{path} has the optimizer states {', '.join(sorted(kinds))}, which are not those of {kind}; resume "
            "with the --optimizer of the run that saved it, or with --no-load-optim"
        )


def check_state_shapes(saved: Mapping[str, tuple[int, ...]], trained: Mapping[str, tuple[int, ...]]) -> None:
    """Compare optimizer states in a checkpoint, by `PARAMETER/MOMENT`, with the shapes of the trained parameters.

    Raises CheckpointError for states of a parameter that is not trained, or of another shape.
    """
    for key in sorted(saved):
        name, _, moment = key.rpartition("/")
        expected = trained.get(name, "no such trained parameter")
        if name not in trained or (moment != "step" and saved[key] != expected):
            raise CheckpointError(
                f"the optimizer states of the checkpoint do not fit: {key} has shape {saved[key]}, the model has "
                f"{expected}; resume with the model and parameter lists of the run that saved it, or with "
                "--no-load-optim"
            )


class Schedule:
    """Learning rate as a function of the number of steps taken.

    Megatron's schedule: linear from `lr_warmup_init` to `lr` over the warm-up, so its first step uses `lr_warmup_init`;
    then decay by `lr_decay_style` until `lr_decay_iters`, and `min_lr`. `lr_decay_iters` defaults to `total_steps`.
    "WSD" stays at `lr` and decays by `lr_wsd_decay_style` in the last `lr_wsd_decay_iters` steps. A warm-up by
    `lr_warmup_fraction` may end between two steps. Megatron counts samples, which only "inverse-square-root" without
    warm-up depends on: after n steps of `samples_per_step` samples it is lr / sqrt(n samples_per_step). Raises
    ConfigError if neither end is known and the style needs it, or if the warm-up is not shorter than the decay.
    """

    def __init__(self, flags: OptimFlags, *, total_steps: int | None = None, samples_per_step: int = 1) -> None:
        self.flags, self.samples_per_step = flags, samples_per_step
        decay = flags.lr_decay_iters if flags.lr_decay_iters is not None else total_steps
        has_end = flags.lr_decay_style in ("linear", "cosine", "WSD")
        needs_end = has_end or flags.lr_warmup_fraction is not None
        if needs_end and decay is None:
            raise ConfigError(
                f"--lr-decay-style {flags.lr_decay_style} with --lr-warmup-fraction {flags.lr_warmup_fraction} needs "
                "the number of steps, which is unknown; give --lr-decay-iters"
            )
        if flags.lr_warmup_fraction is not None and flags.lr_warmup_iters:
            raise ConfigError(
                f"--lr-warmup-fraction {flags.lr_warmup_fraction} and --lr-warmup-iters {flags.lr_warmup_iters} "
                "are mutually exclusive; give one"
            )
        self.decay_steps = math.inf if decay is None else decay
        fraction = flags.lr_warmup_fraction
        self.warmup_steps = flags.lr_warmup_iters if fraction is None else fraction * self.decay_steps
        if has_end and self.warmup_steps >= self.decay_steps:
            raise ConfigError(
                f"the learning rate warms up over {self.warmup_steps:g} steps and decays until step "
                f"{self.decay_steps:g}; give a shorter --lr-warmup-iters (of a critic, --critic-lr-warmup-iters) or a "
                "longer --lr-decay-iters"
            )

    def lr(self, step: int) -> float:
        """Return the learning rate of the step after `step` steps."""
        flags = self.flags
        if self.warmup_steps and step <= self.warmup_steps:
            return flags.lr_warmup_init + (flags.lr - flags.lr_warmup_init) * step / self.warmup_steps
        if flags.lr_decay_style == "constant":
            return flags.lr
        if step > self.decay_steps:
            return flags.min_lr
        if flags.lr_decay_style == "inverse-square-root":
            warmup_samples = max(self.warmup_steps * self.samples_per_step, 1)
            return max(flags.min_lr, flags.lr * math.sqrt(warmup_samples / max(step * self.samples_per_step, 1)))
        style, start = flags.lr_decay_style, self.warmup_steps
        if style == "WSD":
            style, start = flags.lr_wsd_decay_style, self.decay_steps - (flags.lr_wsd_decay_iters or 0)
            if step <= start:
                return flags.lr
        ratio = (step - start) / (self.decay_steps - start)
        scale = {
            "linear": 1.0 - ratio,
            "cosine": 0.5 * (math.cos(math.pi * ratio) + 1.0),
            "exponential": 2.0 * 0.5**ratio - 1.0,
            "minus_sqrt": 1.0 - math.sqrt(ratio),
        }[style]
        return flags.min_lr + scale * (flags.lr - flags.min_lr)


@dataclass(frozen=True)
class TrainedWeight:
    """A trained parameter with its master weight: a float32 copy, this rank's shard, or the parameter itself."""

    name: str
    parameter: Parameter
    master: Parameter

    @property
    def is_rounded(self) -> bool:
        """Whether the parameter is rounded from a float32 copy."""
        return self.parameter is not self.master and not isinstance(self.parameter, DTensor)

    @property
    def has_decay(self) -> bool:
        """Whether weight decay applies: not to biases, norms and other one-dimensional parameters."""
        return self.master.ndim > 1 and not self.name.endswith("bias")


class MasterOptimizer:
    """Optimizer of a model's trainable parameters, with float32 master weights.

    Parameters in half precision have float32 master weights: gradients are accumulated in float32 (`fold_gradients`
    after each backward pass), the master weights are stepped and rounded into the parameters. `num_steps` counts the
    steps taken, without skipped ones.

    For a sharded parameter the master weight is this rank's shard, and `step` is a collective: the norm is global.

    `offload` keeps the moments, or with "all" also the master weights, on the host between steps. They are loaded to
    the device for the step, when no activations exist, so results are bit-identical; stepping on the host would need
    a fast CPU per GPU. `wait` is called before the states are used.
    """

    def __init__(
        self,
        named: list[tuple[str, Parameter]],
        flags: OptimFlags,
        schedule: Schedule,
        sharding: Sharding | None = None,
        *,
        offload: Offload = "nothing",
        wait: Callable[[], None] | None = None,
    ) -> None:
        if not named:
            raise ConfigError(NOTHING_TRAINED)
        self.flags, self.schedule, self.num_steps = flags, schedule, 0
        self.sharding = sharding or Sharding(Ranks(), named[0][1].device)
        self.weights = [TrainedWeight(name, parameter, self._master_weight(parameter)) for name, parameter in named]
        self.optimizer = self._build()
        self._offload: Offload = offload
        self._optimizer_offload = OptimizerOffload(self._offloaded, wait or (lambda: None))

    def _master_weight(self, parameter: Parameter) -> Parameter:
        if isinstance(parameter, DTensor):
            return Parameter(self.sharding.local(parameter))
        if parameter.dtype in (torch.float32, torch.float64):
            return parameter
        return Parameter(parameter.detach().to(torch.float32))

    @property
    def master_weights(self) -> list[Parameter]:
        """The master weights, in the order of the parameters."""
        return [weight.master for weight in self.weights]

    def _build(self) -> torch.optim.Optimizer:
        flags = self.flags
        groups: list[dict[str, Any]] = [
            {"params": members, "weight_decay": flags.weight_decay if has_decay else 0.0}
            for has_decay in (True, False)
            if (members := [weight.master for weight in self.weights if weight.has_decay == has_decay])
        ]
        if flags.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=flags.lr, momentum=0.9, fused=True)
        return torch.optim.AdamW(
            groups, lr=flags.lr, betas=(flags.adam_beta1, flags.adam_beta2), eps=flags.adam_eps, fused=True
        )

    def fold_gradients(self) -> None:
        """Add half-precision and sharded gradients to those of the master weights, and free them."""
        for weight in self.weights:
            parameter, master = weight.parameter, weight.master
            if parameter is not master and parameter.grad is not None:
                grad = self.sharding.local(parameter.grad)
                master.grad = grad.to(master.dtype) if master.grad is None else master.grad.add_(grad)
                parameter.grad = None

    def drop_unfolded(self) -> bool:
        """Discard the gradients of an unfolded backward pass; returns False if they were added to the sums already."""
        if any(weight.parameter is weight.master for weight in self.weights):
            return False
        for weight in self.weights:
            weight.parameter.grad = None
        return True

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the accumulated gradients by parameter; of a sharded parameter, this rank's shard."""
        for weight in self.weights:
            if weight.master.grad is not None:
                yield weight.name, weight.master.grad

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for weight in self.weights:
            weight.parameter.grad = weight.master.grad = None

    def step(self, *, skip_not_finite: bool) -> OptimReport:
        """Clip by the global norm, step, write parameters back, drop the gradients.

        A non-finite gradient norm skips the step if `skip_not_finite`, else raises TrainerError naming the first
        parameter with a non-finite gradient. Weights do not change in either case.
        """
        grads = [grad for _, grad in self.named_gradients()]
        lr = self.schedule.lr(self.num_steps)
        norm = self._norm(grads)
        if not math.isfinite(norm):
            name = self.sharding.ranks.first_not_finite(self.named_gradients())
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
        """Keep offloaded states on the device inside the block. Reentrant."""
        return self._optimizer_offload.loaded()

    def _offloaded(self) -> list[Tensor]:
        if self._offload == "nothing":
            return []
        copies = [weight.master for weight in self.weights if weight.is_rounded] if self._offload == "all" else []
        return [*self.moments(), *copies]

    def moments(self) -> Iterator[Tensor]:
        """Yield every tensor that the optimizer keeps between steps."""
        for states in self.optimizer.state.values():
            yield from (tensor for tensor in states.values() if isinstance(tensor, Tensor))

    def _norm(self, grads: list[Tensor]) -> float:
        device = self.weights[0].master.device
        norm_0 = torch.nn.utils.get_total_norm(grads, foreach=True) if grads else torch.zeros((), device=device)
        if self.sharding.is_sharded:
            norm_0 = self.sharding.sum(norm_0.square()).sqrt()
        return float(norm_0)

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the master weights into the parameters."""
        for weight in self.weights:
            if weight.is_rounded:
                weight.parameter.copy_(weight.master)

    def rounded(self) -> list[Parameter]:
        """Return the parameters that `write_back` can restore from master weights on the device."""
        return [w.parameter for w in self.weights if w.is_rounded] if self._offload != "all" else []

    def unallocated_bytes(self) -> list[int]:
        """Return the bytes of each moment that does not exist yet and will stay on the device between steps."""
        num_moments = 2 if self.flags.optimizer == "adam" else 1
        resident = self.master_weights if self._offload == "nothing" else []
        return [m.nbytes for m in resident if m not in self.optimizer.state for _ in range(num_moments)]

    @property
    def pending_bytes(self) -> int:
        """Bytes that the next backward pass and step will allocate for gradients and moments."""
        return sum(self.unallocated_bytes()) + sum(m.nbytes for m in self.master_weights if m.grad is None)

    def reset(self) -> None:
        """Reset the moments; the schedule continues."""
        with self.loaded():
            self.optimizer.state.clear()

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the moments as (parameter/moment, full tensor). A collective if the parameters are sharded."""
        with self.loaded():
            for weight in self.weights:
                for moment, tensor in sorted(self.optimizer.state.get(weight.master, {}).items()):
                    if tensor is not None:
                        is_shard = isinstance(weight.parameter, DTensor) and moment != "step"
                        full = self.sharding.gather(tensor, weight.parameter.shape) if is_shard else tensor
                        yield f"{weight.name}/{moment}", full

    def restore(self, reader: TensorReader) -> None:
        """Load what `state_tensors` returned. Raises CheckpointError for another optimizer, parameters or shapes.

        Moments of parameters that were not trained before start at zero, with a warning.
        """
        check_moments(reader.path, reader.names, self.flags.optimizer)
        trained = {weight.name: weight for weight in self.weights}
        self.reset()
        with self.loaded():
            self._fill(trained, reader)
        new = sorted(trained.keys() - {name.rpartition("/")[0] for name in reader.names})
        if new and reader.names:
            logger.warning("%s has no moments of %s: they start at zero", reader.path, abbreviate(new))

    def _fill(self, trained: dict[str, TrainedWeight], reader: TensorReader) -> None:
        shapes = {name: tuple(weight.parameter.shape) for name, weight in trained.items()}
        check_state_shapes({key: reader.shape(key) for key in reader.names}, shapes)
        for key in sorted(reader.names, key=reader.place):
            name, _, moment = key.rpartition("/")
            parameter, master = trained[name].parameter, trained[name].master
            is_shard = isinstance(parameter, DTensor) and moment != "step"
            tensor = reader.read(key, self.sharding.rows(len(parameter)) if is_shard else None)
            # torch keeps the step count of fused optimizers on the parameter's device
            self.optimizer.state[master][moment] = tensor.to(master.device)
