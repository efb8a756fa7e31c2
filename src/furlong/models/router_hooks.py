"""Record and replay the expert choices of a transformers model's routers.

A router calls top-k over all experts and computes its gating weights from the selected scores: in its forward, or, for
some families before transformers 5.13, in the method `route_tokens_to_experts` of the layer around it. `RouterHooks`
overrides that call: in a replay it returns the recorded experts and their scores, so the gating weights, and their
gradient to the router, are computed by the family's own code (softmax before or after top-k, sigmoid with a bias). A
router that does not use top-k is an error.

Legend: T rows that the routers see, E experts, K experts per token, l layers with a router.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from furlong.errors import ConfigError, TrainerError

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_OF_LAYER = "route_tokens_to_experts"


@dataclass
class RouterRecord:
    """The routing of one forward pass.

    replay_lTK: experts to use, -1 where the router chooses; None if it chooses everywhere. own: the routers' choices by
    layer.
    """

    replay_lTK: Tensor | None = None
    own: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def own_lTK(self) -> Tensor:  # noqa: N802  axes
        """Return the routers' own choices as int16, stacked by layer."""
        return torch.stack([self.own[number].to(torch.int16) for number in sorted(self.own)])


class RouterHooks:
    """Hooks on every router of a model, in layer order; `layers` are the layers' indices in the model.

    While `current` is set, forward passes record into it and replay from it, also during recomputation in a backward
    pass. Raises ConfigError for a router outside of a numbered layer.
    """

    def __init__(self, model: nn.Module) -> None:
        self.current: RouterRecord | None = None
        self.layers: list[int] = []
        self.top_k = self.num_experts = 0
        inside = "-"  # name of the last router: a layer that chooses has another module with "Router" in its name
        for name, module in model.named_modules():
            if not _is_router(module) or name.startswith(f"{inside}."):
                continue
            inside = name
            match = _LAYER.search(f".{name}")
            if match is None:
                raise ConfigError(
                    f"router {name} is not in a numbered layer; its choices cannot be recorded, use another model"
                )
            router: Any = module
            router.__class__ = _hooked(type(router))
            router.__dict__["hooks"], router.__dict__["hook_number"] = self, len(self.layers)
            self.layers.append(int(match[1]))
            self.top_k, self.num_experts = router.top_k, _num_experts(router) or 0

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copied model gets its own hooks."""

    def __bool__(self) -> bool:
        return bool(self.layers)

    def rows(self, routed_experts_TLK: Tensor) -> Tensor:
        """Select the routes of these routers' layers: [l, T, K]."""
        return routed_experts_TLK[:, self.layers].transpose(0, 1).contiguous()

    def route(self, router: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the router's method that chooses, recording and replaying its choice."""
        record, number = self.current, router.hook_number
        if record is None:
            return run(router, *args, **kwargs)
        replay_TK = None if record.replay_lTK is None else record.replay_lTK[number]
        with _TopKOverride(router.top_k, self.num_experts, replay_TK) as choice:
            result = run(router, *args, **kwargs)
        parts: tuple[Any, ...] = result if isinstance(result, tuple) else (None,)
        # the method of a layer returns experts and weights; a router's forward logits, weights and experts
        chosen = parts[0] if _method_of(type(router)) == _OF_LAYER else parts[-1]
        if choice.own is None or chosen is not choice.chosen:
            raise TrainerError(
                f"{type(router).__name__} does not choose experts by top-k over all experts, so its routing cannot be "
                "recorded or replayed; give --no-log-routing-agreement, and remove --use-routing-replay "
                "and --use-rollout-routing-replay"
            )
        record.own[number] = choice.own.detach()
        return result


class _TopKOverride(TorchFunctionMode):
    """Overrides the top-k over all experts within the context."""

    def __init__(self, top_k: int, num_experts: int, replay_TK: Tensor | None) -> None:
        super().__init__()
        self.top_k, self.num_experts, self.replay_TK = top_k, num_experts, replay_TK
        self.own: Tensor | None = None
        self.chosen: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in (torch.topk, Tensor.topk):
            return result
        scores_TE: Tensor = args[0] if args else kwargs["input"]
        k = args[1] if len(args) > 1 else kwargs["k"]
        if k != self.top_k or scores_TE.shape[1:] != (self.num_experts,):
            return result  # top-k over groups of experts
        self.own = self.chosen = result[1]
        if self.replay_TK is None:
            return result
        if len(self.replay_TK) != len(scores_TE):
            raise TrainerError(
                f"{len(self.replay_TK)} recorded rows for a router with {len(scores_TE)} rows; this is a bug, report it"
            )
        replay_TK = self.replay_TK.to(scores_TE.device, torch.int64)
        self.chosen = torch.where(replay_TK < 0, result[1], replay_TK)
        return torch.return_types.topk((scores_TE.gather(1, self.chosen), self.chosen))  # type: ignore[attr-defined]


def _is_router(module: nn.Module) -> bool:
    return _method_of(type(module)) is not None and all(
        isinstance(size, int) for size in (getattr(module, "top_k", None), _num_experts(module))
    )


def _num_experts(module: Any) -> int | None:
    return getattr(module, "num_experts", getattr(module, "n_routed_experts", None))


@cache
def _method_of(kind: type[nn.Module]) -> str | None:
    choose = getattr(kind, _OF_LAYER, None)
    if choose is not None and list(inspect.signature(choose).parameters) == ["self", "router_logits"]:
        return _OF_LAYER
    return "forward" if "Router" in kind.__name__ else None


@cache
def _hooked(kind: type[nn.Module]) -> type[nn.Module]:
    if hasattr(kind, "hook_number"):
        return kind
    method = _method_of(kind)
    assert method is not None
    plain = getattr(kind, method)

    @functools.wraps(plain)
    def choose(self: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(self, *args, **kwargs) if self.hooks is None else self.hooks.route(self, plain, *args, **kwargs)

    return type(kind.__name__, (kind,), {method: choose, "hooks": None, "hook_number": 0})


def rerouted_fraction(engine_lTK: Tensor, own_lTK: Tensor) -> Tensor:
    """Return the fraction of the engine's choices that the model would not make, over all layers: float32 [T].

    nan where unknown. The order of a token's experts does not matter.
    """
    engine_lTK, own_lTK = engine_lTK.to(torch.int64), own_lTK.to(engine_lTK.device, torch.int64)
    is_other_lTK = (engine_lTK[..., :, None] != own_lTK[..., None, :]).all(-1)
    share_T = is_other_lTK.float().mean((0, 2))
    return share_T.masked_fill((engine_lTK < 0).any(2).any(0), float("nan"))


MIN_ROWS = 64  # tokens that a router does not send to one expert by chance


def check_routes(record_lTK: Tensor, layers: Sequence[int]) -> None:
    """Raise TrainerError for rows that were never filled in: all 0, which names an expert twice.

    With one expert per token, a layer whose rows are all 0 is refused if it has at least `MIN_ROWS` of them.
    """
    if record_lTK.shape[-1] == 1 and record_lTK.shape[1] >= MIN_ROWS:
        is_empty_l = (record_lTK <= 0).all(-1).all(-1) & (record_lTK == 0).any(-1).any(-1)
        if bool(is_empty_l.any()):
            layer = int(is_empty_l.nonzero()[0])
            raise TrainerError(
                f"the engine's record sends all of {record_lTK.shape[1]} tokens to expert 0 in layer {layers[layer]}. "
                "The record is incomplete; check whether this layer has experts in the engine's model"
            )
    ordered = record_lTK.sort(-1).values
    is_twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if bool(is_twice.any()):
        layer, row = (int(i) for i in is_twice.any(-1).nonzero()[0])
        raise TrainerError(
            f"the engine's record names an expert twice for one token: {record_lTK[layer, row].tolist()} in layer "
            f"{layers[layer]}. The record is incomplete; check whether this layer has experts in the engine's model"
        )
