"""Megatron-core's distributed optimizer over PyTorch's AdamW or SGD, and what of it is in memory."""

from __future__ import annotations

# Megatron-core's annotations are not what its functions take and return.
# pyright: reportArgumentType=false
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from furlong.config.sections.optim import OptimFlags


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


def coming_bytes(optimizer: Any) -> list[int]:
    """Bytes of each moment that is not there before the first step."""
    found: list[int] = []
    for part in parts_of(optimizer):
        count = 1 if isinstance(part.optimizer, torch.optim.SGD) else 2
        own = (own for group in part.optimizer.param_groups for own in group["params"])
        found += [each.nbytes for each in own if not part.optimizer.state.get(each) for _ in range(count)]
    return found
