"""What Megatron-core's distributed optimizer holds, as whole parameters of this rank's part of the model.

The optimizer steps float32 slices: the parameters of a rank lie one after the other in a buffer that is cut over its
data-parallel ranks without regard to where a parameter begins. Here a parameter's master and moments are put together
from those slices, or cut into them, one parameter at a time, so that what is stored says nothing of the layout.
"""

from __future__ import annotations

# Megatron-core's annotations are not what its functions take and return.
# pyright: reportAttributeAccessIssue=false
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from furlong.training.optimizer import MOMENTS

MASTER = "master"


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
