"""Megatron-core's MoE layer: routers with the families' routing rules, which record and replay, and grouped experts.

A pipeline interleaves forward and backward passes of micro-batches, and a layer with activation recomputation runs its
router again in the backward pass. The forward step sets the current micro-batch; in the backward pass a router uses the
oldest one that it has not recomputed yet, since pipelines go backward in forward order.

Legend: T tokens of the micro-batch, in a router those that it sees; t tokens that a router here sees (with padding),
l layers with a router here, L all layers, N experts, K experts per token, R response tokens.
"""

from __future__ import annotations

# Megatron-core's annotations do not match what its functions accept and return.
# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false, reportOptionalOperand=false
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the usual name
from megatron.core import parallel_state
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from furlong.core.batch import MicroBatch
from furlong.core.metric import Metrics, total
from furlong.errors import TrainerError
from furlong.models.router_hooks import check_routes
from furlong.training.megatron.family import RoutingRule
from furlong.training.megatron.moe_routing import (
    AttachLoss,
    LoadBalancing,
    TokenSets,
    choose_experts,
    load_balancing_loss,
    route,
    z_loss,
)
from furlong.training.megatron.packed_layer import PackedMicroBatch
from furlong.training.round_metrics import agreement
from furlong.training.settings import BackendSettings


@dataclass
class RouterPass:
    """The routing of one micro-batch, by layer.

    replayed: experts to use [t, K], -1 where the router chooses. chosen: the router's own choice. counted: rows that
    count for balancing losses and expert biases, None without these. losses: this rank's part of load-balancing and
    z-loss, [2].
    """

    replayed: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    chosen: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    counted: TokenSets | None = None
    losses: dict[int, Tensor] = field(default_factory=dict[int, Tensor])


class RouterReplay:
    """Connects the routers of one model on this rank with the current `RouterPass`.

    is_split: tokens are split over tensor-parallel ranks (SP).
    """

    def __init__(self, chunks: Iterable[Any], settings: BackendSettings, *, recomputes: bool, is_split: bool) -> None:
        self.settings, self.recomputes, self.is_split = settings, recomputes, is_split
        self.balancing = LoadBalancing.of(settings.moe)
        self.is_open = self._recomputes = False
        self._current: RouterPass | None = None
        self._pending: dict[int, deque[RouterPass]] = {}
        routers = [module for chunk in chunks for module in chunk.modules() if hasattr(module, "replay")]
        for router in routers:
            router.replay, router.balancing = self, self.balancing
        self.layers = sorted(router.layer_number - 1 for router in routers)

    @contextmanager
    def opened(self, *, is_training: bool) -> Generator[None]:
        """Let routers look up their pass within the context. is_training: there are backward passes."""
        self.is_open, self._pending = True, {layer: deque() for layer in self.layers}
        self._recomputes = is_training and self.recomputes
        try:
            yield
        finally:
            self.is_open, self._current, self._pending = False, None, {}

    @contextmanager
    def running(self, one: RouterPass) -> Generator[None]:
        """Set the micro-batch of the forward pass within the context."""
        self._current = one
        try:
            yield
        finally:
            self._current = None

    def pass_of(self, layer: int) -> RouterPass | None:
        """Return the current pass of a layer's router, None outside of `opened`."""
        if not self.is_open:
            return None
        if self._current is None:
            if not self._pending[layer]:
                raise TrainerError(
                    f"the router of layer {layer} was recomputed more often than it ran forward; report this bug"
                )
            return self._pending[layer].popleft()
        if self._recomputes:
            self._pending[layer].append(self._current)
        return self._current

    def build_pass(self, micro: MicroBatch, part: PackedMicroBatch) -> RouterPass:
        """Build the pass of a micro-batch. Raises TrainerError for an incomplete record."""
        is_counted = self.balancing.is_on and torch.is_grad_enabled()
        counted = self._counted(micro, part) if is_counted else None
        if not self.settings.replays(micro):
            return RouterPass(counted=counted)
        if micro.policy_routes is not None:
            replayed_ltK = micro.policy_routes
        else:
            assert micro.routed_experts_TLK is not None  # checked by `BackendSettings.replays`
            replayed_ltK = self._engine_rows(micro.routed_experts_TLK, part)
            check_routes(replayed_ltK, self.layers)
            replayed_ltK = self._local_rows(replayed_ltK, 1)
        device = part.tokens.device
        replayed = {n: experts.to(device) for n, experts in zip(self.layers, replayed_ltK, strict=True)}
        return RouterPass(replayed, counted=counted)

    def _counted(self, micro: MicroBatch, part: PackedMicroBatch) -> TokenSets:
        if not micro.step_tokens:
            raise TrainerError(
                "router losses are means over an optimizer step, whose size is not known; this is a bug, report it"
            )
        source = self._local_rows(part.source, 0)
        ends = micro.cu_seqlens_S1[1:].to(source.device, torch.int64)
        sample_t = torch.searchsorted(ends, source.clamp(min=0), right=True)
        if self.balancing.kind == "seq_aux_loss":
            weight_G = torch.full((len(ends),), 1 / micro.step_samples, device=source.device)
        else:
            sample_t = torch.zeros_like(sample_t)
            weight_G = torch.full((1,), len(micro.tokens_T) / micro.step_tokens, device=source.device)
        return TokenSets(sample_t.masked_fill(source < 0, -1), weight_G, micro.step_tokens)

    def _local_rows(self, rows: Tensor, axis: int) -> Tensor:
        if not self.is_split:
            return rows
        return rows.chunk(_tensor_size(), axis)[parallel_state.get_tensor_model_parallel_rank()]

    def _engine_rows(self, routed_experts_TLK: Tensor, part: PackedMicroBatch) -> Tensor:
        """Return the engine's routes for the rows of this context-parallel rank, on the host; -1 for padding."""
        source = part.source.cpu()
        rows_lTK = routed_experts_TLK[:, self.layers].transpose(0, 1)
        rows_ltK = rows_lTK[:, source.clamp(min=0)]
        return rows_ltK.masked_fill((source < 0)[None, :, None], -1)

    def policy_routes(self, one: RouterPass) -> Tensor:
        """Return the routers' choices, int16 [l, t, K] on the host: `MicroBatch.policy_routes` of this rank."""
        if not self.layers:
            return torch.zeros(0, 0, 0, dtype=torch.int16)
        return torch.stack([one.chosen[layer] for layer in self.layers]).to(torch.int16).cpu()

    def agreements(
        self, passes: Sequence[tuple[RouterPass, PackedMicroBatch]], micros: Sequence[MicroBatch]
    ) -> list[Metrics]:
        """Return `routing_agreement` of each micro-batch, equal on all ranks that share it. A collective of those.

        Empty if the engine recorded no routes.
        """
        if any(micro.routed_experts_TLK is None for micro in micros):
            return [{} for _ in micros]
        device = passes[0][1].tokens.device
        counts = [torch.zeros(len(micro.response_pos_R), device=device) for micro in micros]
        for (one, part), micro, count_R in zip(passes, micros, counts, strict=True):
            if self.layers:
                assert micro.routed_experts_TLK is not None
                engine_ltK = self._engine_rows(micro.routed_experts_TLK, part).to(device, torch.int64)
                own_ltK = _gather_rows(torch.stack([one.chosen[layer] for layer in self.layers]), part.tokens.shape[1])
                engine_lrK, own_lrK = engine_ltK[:, part.predict], own_ltK[:, part.predict]
                is_other_lrK = (engine_lrK[..., :, None] != own_lrK[..., None, :]).all(-1)
                count_R[part.response] = is_other_lrK.sum((0, 2)).to(count_R.dtype)
        choices = [one.shape[-1] for one in passes[0][0].chosen.values()]
        together = torch.cat([*counts, torch.tensor([float(sum(choices))], device=device)])
        dist.all_reduce(together, group=parallel_state.get_pipeline_model_parallel_group())
        num_choices = float(together[-1])
        shared = together[:-1]
        dist.all_reduce(shared, group=parallel_state.get_context_parallel_group())
        metrics: list[Metrics] = []
        for micro, count_R in zip(micros, shared.split([len(micro.response_pos_R) for micro in micros]), strict=True):
            assert micro.routed_experts_TLK is not None
            is_known_R = (micro.routed_experts_TLK[micro.host_index().response_pos_R - 1, 0, 0] >= 0).to(device)
            metrics.append(agreement(micro, (count_R / num_choices).masked_fill(~is_known_R, float("nan"))))
        return metrics

    def balancing_metrics(self, passes: Sequence[RouterPass], device: torch.device) -> list[Metrics]:
        """Return the router losses of each micro-batch without coefficients, means over layers. A collective.

        They add up to the losses of the step.
        """
        if not self.balancing.has_loss:
            return [{} for _ in passes]
        empty = torch.zeros(2, device=device)
        losses = torch.stack([sum((value for value in one.losses.values()), empty) for one in passes])
        dist.all_reduce(losses, group=parallel_state.get_tensor_and_context_parallel_group())
        together = torch.cat([losses.flatten(), torch.tensor([float(len(self.layers))], device=device)])
        dist.all_reduce(together, group=parallel_state.get_pipeline_model_parallel_group())
        means = (together[:-1] / together[-1]).view_as(losses).tolist()
        is_on = {
            "load_balancing_loss": self.balancing.kind != "none" and self.balancing.coeff > 0,
            "z_loss": self.balancing.z_coeff > 0,
        }
        return [{name: total(value) for name, value in zip(is_on, row, strict=True) if is_on[name]} for row in means]


def _gather_rows(own_ltK: Tensor, num_rows: int) -> Tensor:
    if own_ltK.shape[1] == num_rows:
        return own_ltK
    parts = [torch.empty_like(own_ltK) for _ in range(_tensor_size())]
    dist.all_gather(parts, own_ltK.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, 1)


def _tensor_size() -> int:
    return parallel_state.get_tensor_model_parallel_world_size()


class MoeRouter(TopKRouter):
    """Routes tokens by `rule`. `expert_bias` stays in float32 when the model is cast."""

    def __init__(self, *args: Any, rule: RoutingRule, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rule = rule
        self.replay: RouterReplay | None = None
        self.balancing = LoadBalancing()

    @property
    def layer(self) -> int:
        """Index of its layer in the whole model."""
        assert self.layer_number is not None  # set when the layer is built
        return self.layer_number - 1

    def routing(self, logits: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return the weights of all experts, zero where not chosen, and the mask of chosen ones, both [T, N]."""
        logits_TN = logits.flatten(0, -2)
        current = None if self.replay is None else self.replay.pass_of(self.layer)
        chosen_TK = None if current is None else self._choose(current, logits_TN)
        chosen_TK, weights_TK = route(logits_TN, self.rule, self.expert_bias, chosen_TK)
        is_chosen_TN = torch.zeros_like(logits_TN, dtype=torch.bool).scatter(1, chosen_TK, True)
        if current is not None and current.counted is not None and torch.is_grad_enabled():
            self._apply_expert_bias(is_chosen_TN & (current.counted.set_T >= 0)[:, None])
            if self.balancing.has_loss:
                weights_TK = AttachLoss.apply(weights_TK, self._balancing_loss(current, current.counted, logits_TN))
        return torch.zeros_like(logits_TN).scatter(1, chosen_TK, weights_TK), is_chosen_TN

    def _choose(self, current: RouterPass, logits_TN: Tensor) -> Tensor:
        layer = self.layer
        with torch.no_grad():
            own_TK = choose_experts(logits_TN, self.rule, self.expert_bias)
        current.chosen[layer] = own_TK
        if layer not in current.replayed:
            return own_TK
        replayed_TK = current.replayed[layer].to(torch.int64)
        return torch.where(replayed_TK < 0, own_TK, replayed_TK)

    def _balancing_loss(self, current: RouterPass, counted: TokenSets, logits_TN: Tensor) -> Tensor:
        loss = logits_TN.new_zeros(())
        parts = [loss, loss]
        balancing = self.balancing
        if balancing.kind != "none" and balancing.coeff > 0:
            is_sigmoid = self.rule.scores == "sigmoid"
            parts[0] = load_balancing_loss(
                logits_TN, counted, top_k=self.rule.top_k, is_sigmoid=is_sigmoid, reduce=self._sum_over_ranks
            )
        if balancing.z_coeff > 0:
            parts[1] = z_loss(logits_TN, counted)
        current.losses[self.layer] = torch.stack([part.detach().float() for part in parts])
        return balancing.coeff * parts[0] + balancing.z_coeff * parts[1]

    def _sum_over_ranks(self, counts: Tensor) -> Tensor:
        dist.all_reduce(counts, group=self.tp_cp_group)
        return counts

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        exact = self.expert_bias
        super()._apply(fn, recurse)
        if exact is not None:
            self.expert_bias = exact.to(self.expert_bias.device)
        return self


class Experts(SequentialMLP):
    """The experts of a rank as one grouped GEMM in bfloat16, with the parameters of SequentialMLP."""

    def forward(self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor) -> Any:
        """Run each expert on its tokens, which are sorted by expert; outputs are weighted by routing probabilities."""
        x, probs_T1 = permuted_local_hidden_states, permuted_probs.unsqueeze(-1)
        if parallel_state.get_expert_tensor_parallel_world_size() > 1:
            return super().forward(x, tokens_per_expert, permuted_probs)
        counts = tokens_per_expert.tolist()
        gate, up = self._linear("linear_fc1", x, counts).chunk(2, dim=-1)
        hidden = (gated_activation(gate, up, self.config) * probs_T1).to(x.dtype)
        return self._linear("linear_fc2", hidden, counts, probs_T1), None

    def _linear(self, name: str, x: Tensor, counts: list[int], weight_T1: Tensor | None = None) -> Tensor:
        layers: list[Any] = [getattr(expert, name) for expert in self.local_experts]
        sizes = torch.tensor(counts, device=x.device)
        if self.config.moe_grouped_gemm and len(x):
            weights = torch.stack([layer.weight for layer in layers]).transpose(1, 2)
            out = F.grouped_mm(x, weights, offs=sizes.cumsum(0).to(torch.int32))
        else:
            parts = zip(layers, x.split(counts), strict=True)
            out = torch.cat([F.linear(part, layer.weight) for layer, part in parts])
        if layers[0].bias is None:
            return out
        bias = torch.stack([layer.bias for layer in layers]).repeat_interleave(sizes, dim=0)
        return out + (bias if weight_T1 is None else (bias * weight_T1).to(out.dtype))


def gated_activation(gate: Tensor, up: Tensor, config: TransformerConfig) -> Tensor:
    """Gated activation of Megatron-core's MLP: SwiGLU, for gpt-oss clamped and with an offset of the linear part."""
    if (limit := config.activation_func_clamp_value) is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return config.activation_func(gate) * (up + config.glu_linear_offset)
