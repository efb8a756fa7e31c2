"""A transformers causal language model on packed micro-batches.

It returns hidden states of the positions that predict response tokens. Log-probs are computed from these in chunks
(`algo.logprob`), so that [T, V] logits never exist.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from furlong.core.batch import MicroBatch, sum_rows
from furlong.errors import ConfigError, TrainerError
from furlong.models.compiled_layers import LayerStack
from furlong.models.context_parallel import ContextParallel, TokenShard
from furlong.models.delta_rule import causal_conv, gated_delta_rule
from furlong.models.model_facts import check_family, delta_nets, length_limit, single_sequence_reason
from furlong.models.onednn_caches import bound_onednn_caches
from furlong.models.packed_attention import IMPLEMENTATION, needs_padding, pad_rows, unpad_rows
from furlong.models.packed_layout import PackedLayout, plan_layout
from furlong.models.router_hooks import RouterHooks, RouterRecord, check_routes, rerouted_fraction
from furlong.models.value_head import ValueHead

# Config fields of families that scale logits after the head, which is not supported.
LOGIT_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")

# Config fields of the soft cap on logits; the second is RecurrentGemma's.
SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap")

_onednn: Any = torch.ops.mkldnn

# (hidden states, head weight [V, D], head bias [V], indices of the states among R or None for all) -> outputs
OutputLayer = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, ...]]


@dataclasses.dataclass
class RoutingState:
    """Routing of one pass: whether to replay, and what the routers chose.

    replay: use the micro-batch's `policy_routes` if it has them, otherwise the engine's routes. own_lTK: what the
    routers would have chosen for this rank's tokens; rerouted_R: see `interfaces.TokenStats`.
    """

    replay: bool = False
    own_lTK: Tensor | None = None
    rerouted_R: Tensor | None = None


class _SelectRows(torch.autograd.Function):
    """Select the row of [U, D] that predicts each response token: [R, D]. Gradients of shared rows are summed."""

    @staticmethod
    def forward(ctx: Any, hidden_UD: Tensor, rows_R: Tensor) -> Tensor:
        ctx.num_rows = len(hidden_UD)
        ctx.save_for_backward(rows_R)
        return hidden_UD.index_select(0, rows_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (rows_R,) = ctx.saved_tensors
        return sum_rows(grads[0], rows_R, ctx.num_rows), None


class PackedModel(torch.nn.Module):
    """A transformers model whose forward runs micro-batches.

    A call includes the output layer, so that a sharded model's head is gathered when it is used.

    share_prompts: compute a prompt once for all samples of a micro-batch that start with it. compiled: compile dense
    decoder layers. compute_dtype: of activations, if parameters are stored in another dtype. context: context-parallel
    group; a call returns the results of all its ranks on every rank. is_value_model: the head gives one scalar per
    token. single_sequence_reason: why a micro-batch may have only one sequence, "" if it may have several.

    Raises ConfigError for a model without packed attention, with a head that does more than a linear map and a soft
    cap, without a known base model, or of a family that packed attention would compute incorrectly.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        share_prompts: bool = True,
        compiled: bool = False,
        compute_dtype: torch.dtype | None = None,
        context: ContextParallel | None = None,
    ) -> None:
        super().__init__()
        config = model.config
        if getattr(config, "_attn_implementation", None) != IMPLEMENTATION:
            raise ConfigError(
                f"{type(model).__name__} has attention {getattr(config, '_attn_implementation', None)!r}; load it with "
                "furlong.models.hf_model.load_model, which selects packed attention"
            )
        for name in LOGIT_SCALES:
            if getattr(config, name, 1.0) not in (None, 1.0):
                raise ConfigError(
                    f"{type(model).__name__} scales its logits ({name}={getattr(config, name)}), which is not "
                    "supported; use another model"
                )
        self.model = model
        self.share_prompts = share_prompts
        caps = (getattr(config, name, None) for name in SOFT_CAPS)
        self.softcap: float | None = next((cap for cap in caps if cap), None)
        head = model.get_output_embeddings()
        if not isinstance(getattr(head, "weight", None), Tensor):
            raise ConfigError(f"{type(model).__name__} has no output head; give a causal language model")
        if model.base_model is model:
            raise ConfigError(
                f"{type(model).__name__} has no base model (base_model_prefix {model.base_model_prefix!r} names no "
                "attribute); this model family cannot be trained, use another model"
            )
        check_family(model)
        self.is_value_model = isinstance(head, ValueHead)
        self.single_sequence_reason = single_sequence_reason(model)
        if not self.single_sequence_reason:
            for net in delta_nets(model):
                net.__class__ = _packed_net(type(net))
        self.length_limit = length_limit(config)
        if context is not None:
            context.check(config)
        self.context = context
        use_onednn(model)
        self.layers = LayerStack(model, compiled=compiled, compute_dtype=compute_dtype)
        self.hooks = RouterHooks(model)

    def check_micro_batches(self, *, is_one_sequence: bool) -> None:
        """Raise ConfigError for a family whose sequences cannot be packed, unless each micro-batch is one sequence."""
        if self.single_sequence_reason and not is_one_sequence:
            raise ConfigError(
                f"{type(self.model).__name__} ({self.model.config.model_type}) {self.single_sequence_reason}, so each "
                "micro-batch must be one sequence: give --micro-batch-size 1, without --use-dynamic-batch-size and "
                "--max-tokens-per-gpu. The embedded engine does not support it; SGLang may"
            )

    @property
    def _head(self) -> torch.nn.Linear:
        return cast("torch.nn.Linear", self.model.get_output_embeddings())

    @property
    def head_VD(self) -> Tensor:  # noqa: N802  axes
        """[V, D] weight of the output head; the embedding if tied."""
        return self._head.weight

    @property
    def head_bias_V(self) -> Tensor | None:  # noqa: N802  axes
        """[V] bias of the output head, None without one."""
        return cast("Tensor | None", getattr(self._head, "bias", None))

    def forward(
        self,
        micro: MicroBatch,
        output_layer: OutputLayer,
        *,
        pending_bytes: int = 0,
        head_bytes: int = 0,
        routing: RoutingState | None = None,
    ) -> tuple[Tensor, ...]:
        """Run the model and return the results of `output_layer`.

        For the choice of recomputation on a GPU: `pending_bytes` will be allocated and stay, `head_bytes` are for the
        output layer. `routing` is filled in. Its replay also applies to recomputation in the backward pass, until the
        next forward.
        """
        self.check_micro_batches(is_one_sequence=micro.num_sequences == 1)
        if self.length_limit is not None and micro.num_sequences > 1 and micro.max_seqlen > self.length_limit:
            raise ConfigError(
                f"a sequence of {micro.max_seqlen} tokens shares a micro-batch, and {type(self.model).__name__} "
                f"({self.model.config.model_type}) changes its rotary frequencies beyond {self.length_limit} tokens, "
                "for the whole micro-batch; give --micro-batch-size 1 without --use-dynamic-batch-size, or "
                f"--rollout-max-context-len {self.length_limit}"
            )
        weight, context = self.head_VD, self.context
        padded = needs_padding(weight.device, weight.dtype, self.model.config)
        layout = plan_layout(micro, share_prompts=self.share_prompts, padded=padded)
        tokens, positions = micro.tokens_T, micro.position_ids_T
        if layout.run_U is not None:
            tokens, positions = tokens[layout.run_U], positions[layout.run_U]
        spread: TokenShard | None = None
        rows_R = layout.predict_R
        if context is not None:
            layout = dataclasses.replace(layout, context=context, num_tokens=len(tokens))
            spread = context.shard(rows_R, len(tokens))
            rows_R = rows_R[spread.own_R] - spread.start
            tokens, positions = context.local(tokens), context.local(positions)
        engine_lTK = self._start_routing(micro, layout, routing)
        base: Any = self.model.base_model
        with self.layers.forward(layout, len(tokens), pending_bytes=pending_bytes, head_bytes=head_bytes):
            out = base(input_ids=tokens[None], position_ids=positions[None], use_cache=False, packed=layout)
        if routing is not None and self.hooks.current is not None:
            routing.own_lTK = self.hooks.current.own_lTK()
            if engine_lTK is not None:
                rows = rows_R.to(engine_lTK.device)
                own_lRK = routing.own_lTK.index_select(1, rows_R).to(engine_lTK.device)
                share_R = rerouted_fraction(engine_lTK.index_select(1, rows), own_lRK).to(rows_R.device)
                routing.rerouted_R = share_R if spread is None else spread.gather(share_R)
        hidden_RD = cast("Tensor", _SelectRows.apply(out.last_hidden_state[0], rows_R))
        if spread is None:
            return output_layer(hidden_RD, self.head_VD, self.head_bias_V, None)
        outputs = output_layer(hidden_RD, self.head_VD, self.head_bias_V, spread.own_R)
        return tuple(spread.gather(output) for output in outputs)

    def _start_routing(self, micro: MicroBatch, layout: PackedLayout, routing: RoutingState | None) -> Tensor | None:
        """Set up recording and replay for the next pass; returns the engine's routes of its rows, None without any.

        Raises TrainerError for a replay without recorded routes, or an invalid record.
        """
        if routing is None or not self.hooks:
            self.hooks.current = None
            return None
        engine_lTK = None
        if micro.routed_experts_TLK is not None:
            rows_TLK = micro.routed_experts_TLK
            if layout.run_host_U is not None:
                rows_TLK = rows_TLK[layout.run_host_U]
            if self.context is not None:
                rows_TLK = self.context.local(rows_TLK + 1) - 1  # padded with -1, unknown
            engine_lTK = self.hooks.rows(rows_TLK)
            check_routes(engine_lTK, self.hooks.layers)
        replay_lTK = None
        if routing.replay:
            replay_lTK = engine_lTK if micro.policy_routes is None else micro.policy_routes
            if replay_lTK is None:
                raise TrainerError(
                    "routing replay is on, but the batch has no recorded routes; remove --use-routing-replay and "
                    "--use-rollout-routing-replay"
                )
            replay_lTK = replay_lTK.to(self.head_VD.device)
        self.hooks.current = RouterRecord(replay_lTK)
        return engine_lTK


class _OneDnnMatmul(torch.autograd.Function):
    """x @ weight.T + bias for x [rows, in] and weight [out, in]; oneDNN is not faster for the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn._linear_pointwise(x, weight, bias, "none", [], "")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  once_differentiable is untyped
        x, weight = ctx.saved_tensors
        (grad,) = grads
        need_x, need_weight, need_bias = ctx.needs_input_grad
        return (
            _onednn._linear_pointwise(grad, weight.t(), None, "none", [], "") if need_x else None,
            grad.t() @ x if need_weight else None,
            grad.sum(0) if need_bias else None,
        )


class OneDnnLinear(nn.Linear):
    """`nn.Linear` with oneDNN, which is faster than MKL on x86; its parameters must be float32 on the CPU."""

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer to [..., in]."""
        if torch.compiler.is_compiling():  # the compiler chooses its own GEMMs and cannot trace these
            return super().forward(input)
        # 2-D inside: autograd forbids in-place writes to a view that a Function returns, and some families do them.
        rows = cast("Tensor", _OneDnnMatmul.apply(input.reshape(-1, self.in_features), self.weight, self.bias))
        return rows.view(*input.shape[:-1], self.out_features)


def use_onednn(model: nn.Module) -> None:
    """Switch the linear layers of `model` to oneDNN where it is faster: float32 on an x86 CPU."""
    bound_onednn_caches()
    if platform.machine().lower() not in ("x86_64", "amd64") or not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.device.type == "cpu" and module.weight.dtype == torch.float32:
            module.__class__ = OneDnnLinear


# -- gated delta nets (Qwen3-Next, Qwen3.5, OLMo Hybrid; arXiv:2412.06464) over packed sequences
#
# Such a layer has a causal convolution and a recurrent state, which would leak from a sequence into the next one of the
# row. Both get the offsets of the sequences here, and each sequence starts from an empty state (`delta_rule`).
# Projections and the gated norm run on the tokens of the micro-batch. A prompt that samples share is projected once,
# and its convolution and states are computed for each sample.
#
# U tokens that are run, P positions of the sequences, D width of the model, H heads of values, E width of keys, F width
# of values, C channels of the convolution: queries, keys and values.


@cache
def _packed_net(kind: type[nn.Module]) -> type[nn.Module]:

    @torch.compiler.disable  # shapes differ in every micro-batch
    def forward(self: Any, hidden_states: Tensor, *_: Any, packed: PackedLayout | None = None, **__: Any) -> Tensor:
        if packed is None or hidden_states.shape[0] != 1:
            raise TrainerError(
                f"{kind.__name__} received no layout of the packed sequences, so their states would mix; this is a bug "
                "in furlong, or the installed transformers no longer passes arguments to this layer: report it"
            )
        return _mix(self, hidden_states[0], packed)[None]

    return type(kind.__name__, (kind,), {"forward": forward})


def _mix(net: Any, x_UD: Tensor, packed: PackedLayout) -> Tensor:
    """Run a gated delta net on the tokens of a micro-batch: [U, D]."""
    mixed_UC, gate_UG, strength_UH, step_UH = _projected(net, x_UD)
    is_spread = packed.run_U is not None
    rows = torch.cat([mixed_UC, strength_UH, step_UH], dim=-1)
    rows = pad_rows(rows, packed) if is_spread else rows
    sizes = [each.shape[-1] for each in (mixed_UC, strength_UH, step_UH)]
    mixed, strength, step = rows.split(sizes, dim=-1)
    sequences = packed.sequences
    mixed = causal_conv(mixed, net.conv1d.weight[:, 0], sequences)
    query, key, value = mixed.split([net.key_dim, net.key_dim, net.value_dim], dim=-1)
    query, key = (
        each.unflatten(-1, (-1, net.head_k_dim)).repeat_interleave(net.num_v_heads // net.num_k_heads, dim=1)
        for each in (query, key)
    )
    beta = strength.sigmoid() * (2.0 if getattr(net, "allow_neg_eigval", False) else 1.0)
    decay = -net.A_log.float().exp() * F.softplus(step.float() + net.dt_bias)
    value = value.unflatten(-1, (-1, net.head_v_dim))
    out = gated_delta_rule(query, key, value, decay, beta, sequences).flatten(1)
    out = unpad_rows(out, packed) if is_spread else out
    norm, project = (net.norm, net.out_proj) if hasattr(net, "norm") else (net.o_norm, net.o_proj)
    normed = norm(out.reshape(-1, net.head_v_dim), gate_UG.reshape(-1, net.head_v_dim))
    return project(normed.view(len(x_UD), -1))


def _projected(net: Any, x_UD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys and values [U, C], gates of the output [U, H * F], and strengths and steps [U, H]."""
    if hasattr(net, "in_proj_qkvz"):  # Qwen3-Next orders the rows by key head
        parts = net.fix_query_key_value_ordering(net.in_proj_qkvz(x_UD)[None], net.in_proj_ba(x_UD)[None])
        query, key, value, gate, strength, step = (each[0].flatten(1) for each in parts)
        return torch.cat([query, key, value], dim=-1), gate, strength, step
    if hasattr(net, "in_proj_qkv"):
        return net.in_proj_qkv(x_UD), net.in_proj_z(x_UD), net.in_proj_b(x_UD), net.in_proj_a(x_UD)
    mixed_UC = torch.cat([net.q_proj(x_UD), net.k_proj(x_UD), net.v_proj(x_UD)], dim=-1)
    return mixed_UC, net.g_proj(x_UD), net.b_proj(x_UD), net.a_proj(x_UD)
