"""Megatron-core's distributed optimizer over PyTorch's AdamW or SGD, and its states as whole parameters.

The optimizer steps float32 slices: a rank's parameters lie one after another in a buffer that is split over its
data-parallel ranks without regard to parameter boundaries. `OptimizerState` assembles a parameter's master weight and
moments from those slices, and splits them again, one parameter at a time, so checkpoints do not depend on the layout.
"""

from __future__ import annotations

# Megatron-core's annotations do not match what its functions accept and return.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from furlong.config.sections import MegatronFlags, OptimFlags
from furlong.training.optimizer import MOMENTS

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
        """Return the optimizer of a parameter, None if it is not trained."""
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
