"""The routers of a transformers model: what they choose is seen, and can be chosen for them.

A router's forward chooses experts by a top-k over all of them and makes its gating weights of the values found there.
`RouterHooks` answers that one call: with a record the values are those of the recorded experts, so the gating weights,
and their gradient to the router, are computed by the family's own code, whatever that is (softmax before or after the
choice, sigmoids with a bias). A router that chooses in another way is an error and not left alone.

Legend: T rows that the routers see, E experts, K experts a token, l layers that have a router.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from furlong.errors import ConfigError, TrainerError

_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass
class RouterRecord:
    """One forward pass, and what its routers did.

    replay_lTK: experts to use, -1 where the router chooses; None: it chooses everywhere. `own_lTK`: what the routers
    would have chosen. `logits`: whether their logits [T, E] are wanted, by layer, with their gradient.
    """

    replay_lTK: Tensor | None = None
    keeps_logits: bool = False
    own: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    logits: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def own_lTK(self) -> Tensor:  # noqa: N802  axes
        """int16, layer after layer."""
        return torch.stack([self.own[number].to(torch.int16) for number in sorted(self.own)])


class RouterHooks:
    """Every router of a model, in the order of the layers; `layers` are these layers' numbers in the model.

    While `current` is set, forward passes record there, and use what is given there: also those that are run again in a
    backward pass. Raises ConfigError for a model with experts in which no router is found.
    """

    def __init__(self, model: nn.Module) -> None:
        self.current: RouterRecord | None = None
        self.layers: list[int] = []
        self.top_k = self.num_experts = 0
        for name, module in model.named_modules():
            if not _is_router(module):
                continue
            found = _LAYER.search(f".{name}")
            if found is None:
                raise ConfigError(f"the router {name} is in no numbered layer; its choices cannot be recorded")
            router: Any = module
            router.__class__ = _hooked(type(router))
            router.__dict__["hooks"], router.__dict__["hook_number"] = self, len(self.layers)
            self.layers.append(int(found[1]))
            self.top_k, self.num_experts = router.top_k, router.num_experts

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Of a model that is copied; the copy gets a tap of its own."""

    def __bool__(self) -> bool:
        return bool(self.layers)

    def rows(self, routed_experts_TLK: Tensor) -> Tensor:
        """The record of these routers' layers: [l, T, K]."""
        return routed_experts_TLK[:, self.layers].transpose(0, 1).contiguous()

    def route(self, router: Any, run: Callable[[], Any]) -> Any:
        """Run a router's own forward, with its choice taken from the record."""
        now, number = self.current, router.hook_number
        if now is None:
            return run()
        replay_TK = None if now.replay_lTK is None else now.replay_lTK[number]
        with _TopKOverride(router.top_k, router.num_experts, replay_TK) as choice:
            result = run()
        chosen = result[-1] if isinstance(result, tuple) else None
        if choice.own is None or chosen is not choice.chosen:
            raise TrainerError(
                f"{type(router).__name__} does not choose its experts by a top-k over all of them, so its routing can "
                "be neither recorded nor replayed; give --no-log-routing-agreement, and remove --use-routing-replay "
                "and --use-rollout-routing-replay"
            )
        now.own[number] = choice.own.detach()
        if now.keeps_logits:
            now.logits[number] = result[0]
        return result


class _TopKOverride(TorchFunctionMode):
    """Answers the top-k over all experts that is called inside."""

    def __init__(self, top_k: int, num_experts: int, replay_TK: Tensor | None) -> None:
        super().__init__()
        self.top_k, self.num_experts, self.replay_TK = top_k, num_experts, replay_TK
        self.own: Tensor | None = None
        self.chosen: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func not in (torch.topk, Tensor.topk):
            return found
        scores_TE: Tensor = args[0] if args else kwargs["input"]
        k = args[1] if len(args) > 1 else kwargs["k"]
        if k != self.top_k or scores_TE.shape[1:] != (self.num_experts,):
            return found  # over groups of experts
        self.own = self.chosen = found[1]
        if self.replay_TK is None:
            return found
        if len(self.replay_TK) != len(scores_TE):
            raise TrainerError(
                f"a record of {len(self.replay_TK)} rows for a router that has {len(scores_TE)}; this is a bug"
            )
        replay_TK = self.replay_TK.to(scores_TE.device, torch.int64)
        self.chosen = torch.where(replay_TK < 0, found[1], replay_TK)
        return torch.return_types.topk((scores_TE.gather(1, self.chosen), self.chosen))  # type: ignore[attr-defined]


def _is_router(module: nn.Module) -> bool:
    sizes = (getattr(module, "top_k", None), getattr(module, "num_experts", None))
    return "Router" in type(module).__name__ and all(isinstance(size, int) for size in sizes)


@cache
def _hooked(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a router whose forward goes through its tap."""
    if hasattr(kind, "hook_number"):
        return kind
    plain = kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = partial(plain, self, *args, **kwargs)
        return run() if self.hooks is None else self.hooks.route(self, run)

    return type(kind.__name__, (kind,), {"forward": forward, "hooks": None, "hook_number": 0})


def rerouted_fraction(engine_lTK: Tensor, own_lTK: Tensor) -> Tensor:
    """Share of the engine's choices that are not among the model's own, by row, over all layers; nan where unknown.

    float32 [T]. The order of a token's experts does not matter.
    """
    engine_lTK, own_lTK = engine_lTK.to(torch.int64), own_lTK.to(engine_lTK.device, torch.int64)
    is_other_lTK = (engine_lTK[..., :, None] != own_lTK[..., None, :]).all(-1)
    share_T = is_other_lTK.float().mean((0, 2))
    return share_T.masked_fill((engine_lTK < 0).any(2).any(0), float("nan"))


def check_routes(record_lTK: Tensor, layers: Sequence[int]) -> None:
    """Raise TrainerError for a row that names an expert twice, which no router does: a row that was never filled in."""
    ordered = record_lTK.sort(-1).values
    is_twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if bool(is_twice.any()):
        layer, row = (int(i) for i in is_twice.any(-1).nonzero()[0])
        raise TrainerError(
            f"the engine says that a token went to the experts {record_lTK[layer, row].tolist()} in layer "
            f"{layers[layer]}: one of them twice; its record is incomplete. Is this layer without experts there?"
        )
