"""Megatron-core's distributed optimizer over PyTorch's AdamW or SGD, and what of it is in memory."""

from __future__ import annotations

# Megatron-core's annotations are not what its functions take and return.
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

from furlong.config.sections.optim import OptimFlags
from furlong.training.optimizer import MOMENTS

MASTER = "master"


def data_parallel(
    chunks: Sequence[GPTModel], config: TransformerConfig, dtype: torch.dtype, *, in_float32: bool, overlap: bool
) -> list[Any]:
    """Wrap a rank's parts of the trained model, so that gradients are summed over the ranks of other samples.

    With `overlap` only those of the last micro-batch are sent as they come.
    """
    reduction = DistributedDataParallelConfig(
        grad_reduce_in_fp32=in_float32, use_distributed_optimizer=True, overlap_grad_reduce=overlap
    )
    inner: list[Any] = [Float16Module(config, chunk) if dtype == torch.bfloat16 else chunk for chunk in chunks]
    wrapped = [
        DistributedDataParallel(config, reduction, module, disable_bucketing=number > 0)
        for number, module in enumerate(inner)
    ]
    if overlap:
        waits: list[Any] = [chunk.no_sync for chunk in wrapped]
        wait: Any = waits if len(waits) > 1 else waits[0]
        config.no_sync_func = wait
    return wrapped


def build_optimizer(flags: OptimFlags, chunks: Sequence[Any], dtype: torch.dtype) -> Any:
    """Build the optimizer of a rank's parts, which steps this rank's share of their float32 masters."""
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
        for group in part.optimizer.param_groups:  # its own schedule, which is not used, would apply this
            group["weight_decay"] = flags.weight_decay * group["wd_mult"]
            group["fused"] = all(own.is_cuda for own in group["params"])  # one pass over memory
        if flags.optimizer == "sgd":  # Megatron-core shares out Adam only, but asks of it no more than of any other
            part.optimizer = _momentum(part.optimizer.param_groups, flags)
    return optimizer


def _momentum(groups: Sequence[dict[str, Any]], flags: OptimFlags) -> torch.optim.SGD:
    """SGD over groups of slices, which PyTorch would not take: those of float32 parameters are views."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=flags.lr, momentum=0.9, fused=True)
    adams = {"betas", "eps", "amsgrad", "foreach", "maximize", "capturable", "differentiable", "fused"}
    kept = [{name: value for name, value in group.items() if name not in adams} for group in groups]
    optimizer.param_groups = [optimizer.defaults | group for group in kept]
    return optimizer


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers of dense parameters and of experts; without one that has nothing to step on this rank."""
    parts: list[Any] = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    return [part for part in parts if not part.is_stub_optimizer]


def moments(optimizer: Any) -> Iterator[Tensor]:
    """Every tensor that is kept beside the masters between steps."""
    for part in parts_of(optimizer):
        for kept in part.optimizer.state.values():
            yield from (value for value in kept.values() if isinstance(value, Tensor))


def masters(optimizer: Any) -> Iterator[Tensor]:
    """Every slice that this rank steps: in float32, parts of the parameters themselves."""
    for part in parts_of(optimizer):
        for group in part.optimizer.param_groups:
            yield from group["params"]


def missing_moment_bytes(optimizer: Any) -> list[int]:
    """Bytes of each moment that is not there before the first step."""
    found: list[int] = []
    for part in parts_of(optimizer):
        count = 1 if isinstance(part.optimizer, torch.optim.SGD) else 2
        own = (own for group in part.optimizer.param_groups for own in group["params"])
        found += [each.nbytes for each in own if not part.optimizer.state.get(each) for _ in range(count)]
    return found


class OptimizerState:
    """Masters, moments and step counts by parameter. Every rank calls the methods in the same order.

    kind: which optimizer it is; trained: which tensors of the checkpoint have moments, on whichever rank.
    """

    def __init__(self, optimizer: Any, *, kind: Literal["adam", "sgd"], trained: frozenset[str]) -> None:
        self.kind: Literal["adam", "sgd"] = kind
        self.moments, self.trained = MOMENTS[kind], trained
        # of dense parameters, and of experts, which other ranks share
        parts: list[Any] = getattr(optimizer, "chained_optimizers", None) or [optimizer]
        self._parts = [part for part in parts if getattr(part, "buffers", None)]

    def slices(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Each float32 slice that this rank steps, with its moments and step count; empty before the first step."""
        for part in self._parts:
            for group in part.optimizer.param_groups:
                for own in group["params"]:
                    yield own, part.optimizer.state[own]

    def reset(self) -> None:
        """Forget moments and step counts."""
        for _, kept in self.slices():
            for value in kept.values():
                value.zero_()

    @property
    def step(self) -> float:
        """Steps that Adam has counted on this rank: of all parameters the same, each has a gradient in every step."""
        return max((float(kept["step"]) for _, kept in self.slices() if "step" in kept), default=0.0)

    def set_step(self, step: float) -> None:
        """Let Adam go on counting from `step`, with moments that are put next."""
        for own, kept in self.slices():
            if self.kind == "adam":
                kept["step"] = torch.tensor(step, device=own.device)
            for moment in self.moments:
                kept[moment] = torch.zeros_like(own)

    def whole(self, parameter: Tensor, what: str) -> Tensor:
        """The master or a moment of a parameter of the model, in its shape. A collective of those that share it."""
        part = self._owner(parameter)
        if part is None:
            return parameter.detach()
        found = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        held = self._held(part, parameter, what)
        if held is not None:
            rows, values = held
            found[rows] = values
        if part.data_parallel_group.size() > 1:
            dist.all_reduce(found, group=part.data_parallel_group)
        return found.view(parameter.shape)

    @torch.no_grad()
    def put(self, parameter: Tensor, what: str, whole: Tensor) -> None:
        """Store the master or a moment of a parameter; the parameter itself is the rounding of its master."""
        if what == MASTER:
            parameter.copy_(whole)
        part = self._owner(parameter)
        held = None if part is None else self._held(part, parameter, what)
        if held is not None:
            rows, values = held
            values.copy_(whole.reshape(-1)[rows])

    def is_rounded(self, parameter: Tensor) -> bool:
        """Whether a parameter is the rounding of masters, which this rank has or others do."""
        return parameter.dtype != torch.float32 and self._owner(parameter) is not None

    def write_back(self) -> None:
        """Round this rank's masters into its part of the parameters."""
        for part in self._parts:
            part._copy_main_params_to_model_params()

    def _owner(self, parameter: Tensor) -> Any:
        """The optimizer that steps a parameter; None for one that is not trained."""
        is_there = (part for part in self._parts if any(parameter in b.param_index_map for b in part.buffers))
        return next(is_there, None)

    @staticmethod
    def _held(part: Any, parameter: Tensor, what: str) -> tuple[slice, Tensor] | None:
        """Which elements of a parameter this rank steps, and what it holds of them; None if it has none of either."""
        if parameter not in part.model_param_group_index_map:
            return None
        span = part._get_model_param_range_map(parameter)["param"]
        group, order = part.model_param_group_index_map[parameter]
        own = part.optimizer.param_groups[group]["params"][order]
        held = own if what == MASTER else part.optimizer.state[own].get(what)
        return None if held is None else (slice(span.start, span.end), held.detach().view(-1))
