"""Megatron-core's distributed optimizer over PyTorch's AdamW or SGD, and its states as whole parameters.

The optimizer steps float32 slices: a rank's parameters lie one after another in a buffer that is split over its
data-parallel ranks without regard to parameter boundaries. `OptimizerState` assembles a parameter's master weight and
moments from those slices, and splits them again, one parameter at a time, so checkpoints do not depend on the layout.
"""

from __future__ import annotations

# Megatron-core's annotations do not match what its functions accept and return.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from furlong.config.sections import MegatronFlags, OptimFlags
from furlong.errors import TrainerError
from furlong.training.backend_interface import OptimReport
from furlong.training.offload import OptimizerOffload
from furlong.training.optimizer import MOMENTS, Schedule
from furlong.training.settings import BackendSettings

MASTER = "master"


def data_parallel(
    chunks: Sequence[GPTModel], config: TransformerConfig, dtype: torch.dtype, flags: MegatronFlags
) -> list[Any]:
    """Wrap a rank's chunks of the trained model in DDP, which sums gradients over data-parallel ranks.

    With --overlap-grad-reduce, the reduction starts during the backward pass of the last micro-batch.
    """
    reduction = DistributedDataParallelConfig(
        grad_reduce_in_fp32=not flags.grad_reduce_in_bf16,
        use_distributed_optimizer=True,
        overlap_grad_reduce=flags.overlap_grad_reduce,
    )
    inner: list[Any] = [Float16Module(config, chunk) if dtype == torch.bfloat16 else chunk for chunk in chunks]
    wrapped = [
        DistributedDataParallel(config, reduction, module, disable_bucketing=number > 0)
        for number, module in enumerate(inner)
    ]
    if flags.overlap_grad_reduce:
        waits: list[Any] = [chunk.no_sync for chunk in wrapped]
        wait: Any = waits if len(waits) > 1 else waits[0]
        config.no_sync_func = wait
    return wrapped


def build_optimizer(flags: OptimFlags, chunks: Sequence[Any], dtype: torch.dtype) -> Any:
    """Build the optimizer of a rank's chunks, which steps this rank's slice of their float32 master weights."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=flags.lr,
        min_lr=flags.lr,
        weight_decay=flags.weight_decay,
        adam_beta1=flags.adam_beta1,
        adam_beta2=flags.adam_beta2,
        adam_eps=flags.adam_eps,
        clip_grad=flags.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    optimizer: Any = get_megatron_optimizer(
        config,
        list(chunks),
        config_overrides=get_standard_config_overrides(config),  # norms and biases do not decay
        use_gloo_process_groups=torch.cuda.is_available(),
    )
    for part in parts_of(optimizer):
        for group in part.optimizer.param_groups:  # otherwise applied by Megatron-core's scheduler, which is not used
            group["weight_decay"] = flags.weight_decay * group["wd_mult"]
            group["fused"] = all(parameter.is_cuda for parameter in group["params"])  # one pass over memory
        if flags.optimizer == "sgd":  # Megatron-core accepts Adam only, but uses nothing specific to it
            part.optimizer = _momentum(part.optimizer.param_groups, flags)
    return optimizer


def _momentum(groups: Sequence[dict[str, Any]], flags: OptimFlags) -> torch.optim.SGD:
    """Build SGD over groups of slices, which its constructor refuses: those of float32 parameters are views."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=flags.lr, momentum=0.9, fused=True)
    adams = {"betas", "eps", "amsgrad", "foreach", "maximize", "capturable", "differentiable", "fused"}
    remaining = [{name: value for name, value in group.items() if name not in adams} for group in groups]
    optimizer.param_groups = [optimizer.defaults | group for group in remaining]
    return optimizer


def parts_of(optimizer: Any) -> list[Any]:
    """Return the optimizers of dense parameters and of experts, which have other data-parallel ranks.

    Without those that have no parameters on this rank.
    """
    parts: list[Any] = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    return [part for part in parts if not part.is_stub_optimizer]


class OptimizerState:
    """Master weights, moments and step counts by parameter. Every rank calls the methods in the same order.

    trained: names of the checkpoint's tensors that have moments, on any rank.
    """

    def __init__(self, optimizer: Any, *, kind: Literal["adam", "sgd"], trained: frozenset[str]) -> None:
        self.kind: Literal["adam", "sgd"] = kind
        self.moment_names, self.trained = MOMENTS[kind], trained
        self._parts = parts_of(optimizer)

    def moments(self) -> Iterator[Tensor]:
        """Yield the optimizer states on this rank other than master weights."""
        for part in self._parts:
            for state in part.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def master_weights(self) -> Iterator[Tensor]:
        """Yield the slices of master weights on this rank: for float32 parameters, views of them."""
        for part in self._parts:
            for group in part.optimizer.param_groups:
                yield from group["params"]

    def missing_moment_bytes(self) -> list[int]:
        """Return the size of each moment that is not yet allocated, as before the first step."""
        states = (
            (each, part.optimizer.state)
            for part in self._parts
            for group in part.optimizer.param_groups
            for each in group["params"]
        )
        return [each.nbytes for each, state in states if not state.get(each) for _ in self.moment_names]

    def slices(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Yield each float32 slice of this rank with its moments and step count; {} before the first step."""
        for part in self._parts:
            for group in part.optimizer.param_groups:
                for each in group["params"]:
                    yield each, part.optimizer.state[each]

    def reset(self) -> None:
        """Set moments and step counts to zero."""
        for _, state in self.slices():
            for value in state.values():
                value.zero_()

    @property
    def step(self) -> float:
        """Adam's step count on this rank, the same for all parameters."""
        return max((float(state["step"]) for _, state in self.slices() if "step" in state), default=0.0)

    def set_step(self, step: float) -> None:
        """Set Adam's step count and allocate moments, which are `put` next."""
        for each, state in self.slices():
            if self.kind == "adam":
                state["step"] = torch.tensor(step, device=each.device)
            for moment in self.moment_names:
                state[moment] = torch.zeros_like(each)

    def whole(self, parameter: Tensor, kind: str) -> Tensor:
        """Return a master weight or moment, in the parameter's shape. A collective of its data-parallel ranks."""
        part = self._owner(parameter)
        if part is None:
            return parameter.detach()
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        local = self._local_slice(part, parameter, kind)
        if local is not None:
            rows, values = local
            whole[rows] = values
        if part.data_parallel_group.size() > 1:
            dist.all_reduce(whole, group=part.data_parallel_group)
        return whole.view(parameter.shape)

    @torch.no_grad()
    def put(self, parameter: Tensor, whole: Tensor, *, kind: str) -> None:
        """Store a master weight or moment of a parameter; a master weight is also rounded into the parameter."""
        if kind == MASTER:
            parameter.copy_(whole)
        part = self._owner(parameter)
        local = None if part is None else self._local_slice(part, parameter, kind)
        if local is not None:
            rows, values = local
            values.copy_(whole.reshape(-1)[rows])

    def is_rounded(self, parameter: Tensor) -> bool:
        """Whether a parameter is rounded from master weights, on this rank or others."""
        return parameter.dtype != torch.float32 and self._owner(parameter) is not None

    def write_back(self) -> None:
        """Round this rank's master weights into its slice of the parameters."""
        for part in self._parts:
            part._copy_main_params_to_model_params()

    def _owner(self, parameter: Tensor) -> Any:
        is_there = (part for part in self._parts if any(parameter in b.param_index_map for b in part.buffers))
        return next(is_there, None)

    @staticmethod
    def _local_slice(part: Any, parameter: Tensor, kind: str) -> tuple[slice, Tensor] | None:
        """Return the elements of a parameter that this rank steps and their state; None without either."""
        if parameter not in part.model_param_group_index_map:
            return None
        span = part._get_model_param_range_map(parameter)["param"]
        group, order = part.model_param_group_index_map[parameter]
        master = part.optimizer.param_groups[group]["params"][order]
        state = master if kind == MASTER else part.optimizer.state[master].get(kind)
        return None if state is None else (slice(span.start, span.end), state.detach().view(-1))


class ChunkOptimizer:
    """The optimizer of a rank's model chunks, with its schedule and the chunks wrapped in DDP.

    trained: Hugging Face names of the trained tensors. wait: called before the states are used. num_steps counts the
    steps taken. is_fresh: no gradient is accumulated.
    """

    def __init__(
        self,
        settings: BackendSettings,
        chunks: Sequence[GPTModel],
        config: TransformerConfig,
        trained: frozenset[str],
        *,
        wait: Callable[[], None],
    ) -> None:
        optim, dtype = settings.optim, settings.dtype
        self.optim, self._dtype, self._offload = optim, dtype, settings.offload
        self.chunks = data_parallel(chunks, config, dtype, settings.megatron)
        self._overlaps = settings.megatron.overlap_grad_reduce
        self.schedule = Schedule(
            optim, total_steps=settings.total_steps, samples_per_step=settings.train.global_batch_size or 1
        )
        self.optimizer = build_optimizer(optim, self.chunks, dtype)
        self.state = OptimizerState(self.optimizer, kind=optim.optimizer, trained=trained)
        self._host = OptimizerOffload(self._kept_on_host, wait)
        self.loaded = self._host.loaded
        self.num_steps, self.is_fresh = 0, True

    def _kept_on_host(self) -> list[Tensor]:
        if self._offload == "nothing":
            return []
        has_masters = self._offload == "all" and self._dtype == torch.bfloat16
        return [*self.state.moments(), *(self.state.master_weights() if has_masters else ())]

    def zero_grad(self) -> None:
        """Set all gradients to zero."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def begin_accumulation(self) -> None:
        """Zero the gradients before the first backward pass of a step."""
        if self._overlaps and not self.is_fresh:
            raise TrainerError("--overlap-grad-reduce: gradients of this step are being reduced; remove the flag")
        if self.is_fresh:
            self.zero_grad()
            self.is_fresh = False

    def step(self, reason: str, *, check_finite: bool, first_not_finite: Callable[[], str]) -> OptimReport:
        """Clip, step, advance the schedule; skipped for a `reason`, which all ranks pass, or a non-finite gradient.

        Raises TrainerError for a non-finite gradient if `check_finite`, with the parameter that `first_not_finite`
        names.
        """
        lr = self.schedule.lr(self.num_steps)
        self.is_fresh = True
        if not reason or self._overlaps:  # started reductions must complete
            finalize_model_grads(self.chunks, None)  # summed over ranks: token weights include the denominator
        if not reason:
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
            reason = "" if math.isfinite(norm) else f"gradient norm {norm}, first in {first_not_finite()}"
            if reason and check_finite:
                raise TrainerError(f"optimizer step {self.num_steps}: {reason}")
        if reason:
            return OptimReport(math.nan, lr, reason)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with self.loaded():
            _, norm, _ = self.optimizer.step()
        self.num_steps += 1
        if self.optim.use_stateless_adam:
            self.reset()
        return OptimReport(float(norm), lr)

    def reset(self) -> None:
        """Reset the moments; the schedule continues."""
        with self.loaded():
            self.state.reset()

    def gradients(self) -> Iterator[Tensor]:
        """Yield the gradient buffers, which are free between steps."""
        for chunk in self.chunks:
            yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))

    def missing_moment_bytes(self) -> list[int]:
        """Return the size of each moment that will be allocated and stay on the device between steps."""
        return self.state.missing_moment_bytes() if self._offload == "nothing" else []

    def is_rounded(self, parameter: Tensor) -> bool:
        """Whether a parameter is rounded from master weights that stay on the device."""
        return self._dtype == torch.bfloat16 and self._offload != "all" and self.state.is_rounded(parameter)

    def round_parameters(self) -> None:
        """Round the parameters from master weights. A collective: each data-parallel rank rounds its slice."""
        self.state.write_back()
        for chunk in self.chunks:
            chunk.start_param_sync()  # gather the slices of the data-parallel ranks
