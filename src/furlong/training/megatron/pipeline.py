"""Run micro-batches through the pipeline stages of a model, and compute log-probs on the last one.

Megatron-core's schedule calls the model chunks of each rank; the last stage applies the output layer to the response
tokens and sends the results to the other stages.
"""

from __future__ import annotations

# Megatron-core's annotations do not match what its functions accept and return.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from furlong.algo.distillation import TeacherHead, target_stats
from furlong.algo.logprob import stats_from_logits, token_stats
from furlong.algo.policy_loss import column
from furlong.core.batch import MicroBatch
from furlong.core.metric import Metric, Metrics
from furlong.interfaces import TokenStats
from furlong.models.compiled_layers import MlpRecompute
from furlong.models.model_facts import chunk_rows, logits_bytes
from furlong.models.value_head import ValueHead, values
from furlong.training.loss_wrappers import HEAD_OUTPUTS, StatsRequest
from furlong.training.megatron.moe_layers import RouterPass, RouterReplay
from furlong.training.megatron.packed_layer import PackedMicroBatch, pack
from furlong.training.megatron.parallel_layout import Layout
from furlong.training.megatron.vocab_parallel_head import (
    GatherTokens,
    gathered_logits,
    vocab_parallel_token_stats,
    vocab_shard,
)
from furlong.training.ranks import broadcast_json
from furlong.training.settings import BackendSettings


class Pipeline:
    """The pipeline of a model on one rank, which also applies the output layer.

    ties_head: the output layer is the embedding. recompute: by model chunk, the choice of MLPs to recompute in the
    backward pass.
    """

    def __init__(self, layout: Layout, settings: BackendSettings, *, ties_head: bool) -> None:
        self.layout, self.settings, self.ties_head = layout, settings, ties_head
        self.device, self.on_cpu = settings.device, settings.device.type == "cpu"
        self.recompute: dict[GPTModel, MlpRecompute] = {}
        self.teacher_head: Tensor | None = None  # this rank's rows, while they are used

    def run(
        self,
        chunks: Sequence[Any],
        micros: Sequence[MicroBatch],
        loss_of: Callable[[MicroBatch, TokenStats], Tensor],
        request: StatsRequest,
        *,
        forward_only: bool,
        replay: RouterReplay | None,
    ) -> list[tuple[RouterPass, PackedMicroBatch]]:
        """Run micro-batches through the stages; the last one calls `loss_of` for each, in order.

        `loss_of` receives the response tokens' statistics (`request`) and returns the loss to differentiate.
        Returns the routers' passes, which are empty without a `replay`, and the packed micro-batches.
        """
        context = parallel_state.get_context_parallel_world_size()
        rank = parallel_state.get_context_parallel_rank()
        num_real = len(micros)
        if self.layout.virtual > 1:  # the interleaved schedule needs a multiple of the number of stages
            micros = [*micros, *[_filler(self.device)] * (-len(micros) % self.layout.pipeline)]
        packed = [pack(m, align=self.layout.align(), context=context, context_rank=rank) for m in micros]
        work = list(zip(packed, micros, range(len(micros)), strict=True))
        passes = [RouterPass() if replay is None or i >= num_real else replay.build_pass(m, p) for p, m, i in work]
        forwards = itertools.count()

        anchor = torch.zeros((), dtype=self.settings.dtype, device=self.device, requires_grad=not forward_only)

        def step(iterator: Iterator[tuple[PackedMicroBatch, MicroBatch, int]], model: Any) -> tuple[Tensor, Any]:
            part, micro, number = next(iterator)
            routing = nullcontext() if replay is None else replay.running(passes[number])
            with routing, self._choosing_recompute(model, part, next(forwards)):
                hidden = model(part.tokens, None, None, packed_seq_params=part.params)
            if not forward_only and not hidden.requires_grad:
                hidden = hidden + anchor  # a stage without trained parameters needs a gradient, too

            def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                stats = self._stats(model, output, part, micro, request)
                value = loss_of(micro, stats) if number < num_real else output.sum() * 0.0
                return value, torch.ones((), dtype=torch.int, device=self.device), {}

            return hidden, loss

        with nullcontext() if replay is None else replay.opened(is_training=not forward_only):
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[iter(work) for _ in chunks],
                model=list(chunks),
                num_microbatches=len(micros),
                seq_length=max(part.tokens.shape[1] for part in packed),
                micro_batch_size=1,
                forward_only=forward_only,
            )
        return list(zip(passes, packed, strict=True))[:num_real]

    def _choosing_recompute(self, model: Any, part: PackedMicroBatch, number: int) -> AbstractContextManager[None]:
        """Choose the MLPs to recompute for one forward pass. number: index of the forward pass within the step."""
        plain = _unwrapped(model)
        head_bytes = 0
        if plain.post_process and not is_value_model(plain):
            head_bytes = 2 * logits_bytes(on_cpu=self.on_cpu) + 6 * self._head_of(plain).numel()
        passes = max(self.layout.passes_in_flight(parallel_state.get_pipeline_model_parallel_rank()) - number, 1)
        num_tokens = part.tokens.shape[1]
        return self.recompute[plain].choose(self.device, num_tokens, head_bytes=head_bytes, passes=passes)

    def _head_of(self, model: GPTModel) -> Tensor:
        weight = model.shared_embedding_or_output_weight() if self.ties_head else model.output_layer.weight
        return cast("Tensor", weight)

    def _stats(
        self, model: Any, output: Tensor, part: PackedMicroBatch, micro: MicroBatch, request: StatsRequest
    ) -> TokenStats:
        """Return log-probs of all response tokens from the last stage's hidden states, [1, T of this rank, D]."""
        plain = _unwrapped(model)
        hidden_TD = output[0].to(self.settings.dtype)  # Megatron-core returns bfloat16 as float32
        if is_value_model(plain):
            return self._values(plain.output_layer, hidden_TD, part, micro)
        if self.layout.sequence_parallel:
            hidden_TD = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_TD, tensor_parallel_output_grad=True
            )
        else:
            hidden_TD = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_TD)
        weight = self._head_of(plain)
        group = parallel_state.get_tensor_model_parallel_group()
        hidden_RD, targets_R = hidden_TD.index_select(0, part.predict), part.targets_R[part.response]
        also = {"entropy": request.entropy, "entropy_grad": request.entropy_grad}
        if request.logits:
            logits_RV = gathered_logits(hidden_RD, weight, group=group, temperature=self.settings.temperature)
            logits_RV = self._gather(logits_RV, part, micro)
            stats = stats_from_logits(logits_RV, part.targets_R, temperature=1.0, **also)
            return TokenStats(stats.log_probs_R, stats.entropy_R, logits_RV)
        num_logits = (1 + (request.head == "teacher_kl")) * len(weight)
        options: dict[str, Any] = {
            "temperature": self.settings.temperature,
            "chunk_size": chunk_rows(self.settings.train.log_probs_chunk_size, num_logits, on_cpu=self.on_cpu),
            **also,
        }
        if request.head in ("top_ids", "top_log_probs", "teacher_kl"):
            return self._target_stats(hidden_RD, weight, targets_R, part, micro, request, options)
        if group.size() == 1 and len(hidden_RD):
            stats = token_stats(hidden_RD, weight, targets_R, **options)
        else:
            first = group.rank() * len(weight)
            stats = vocab_parallel_token_stats(hidden_RD, weight, targets_R, first_token=first, group=group, **options)
        entropy_R = None if stats.entropy_R is None else self._gather(stats.entropy_R, part, micro)
        whole_RD = self._gather(hidden_RD.detach(), part, micro) if request.head == "hidden" else None
        return TokenStats(self._gather(stats.log_probs_R, part, micro), entropy_R, hidden_RD=whole_RD)

    def _target_stats(
        self,
        hidden_RD: Tensor,
        weight: Tensor,
        targets_R: Tensor,
        part: PackedMicroBatch,
        micro: MicroBatch,
        request: StatsRequest,
        options: dict[str, Any],
    ) -> TokenStats:
        """Return the statistics of tokens and what the head computes for distillation, from this rank's vocabulary."""
        targets_RM, teacher = targets_R[:, None], None
        if request.head == "top_log_probs":
            targets_RM = torch.cat([targets_RM, column(micro, "teacher_top_ids").long()[part.response]], 1)
        if request.head == "teacher_kl":
            assert micro.teacher_hidden_RD is not None  # the teacher's pass came first
            assert self.teacher_head is not None
            teacher = TeacherHead(micro.teacher_hidden_RD.to(self.device)[part.response], self.teacher_head)
        group = parallel_state.get_tensor_model_parallel_group()
        top_k = request.top_k if request.head == "top_ids" else 0
        shard = vocab_shard(len(weight), group)
        stats = target_stats(hidden_RD, weight, targets_RM, teacher=teacher, top_k=top_k, shard=shard, **options)
        also = {"top_ids": stats.top_ids_RK, "top_log_probs": stats.log_probs_RM[:, 1:], "teacher_kl": stats.kl_R}
        found = {"log_probs_R": stats.log_probs_RM[:, 0], "entropy_R": stats.entropy_R}
        found |= {HEAD_OUTPUTS[request.head]: also[request.head]}
        gathered = {name: None if each is None else self._gather(each, part, micro) for name, each in found.items()}
        return TokenStats(**cast("dict[str, Any]", gathered))

    def keep_teacher_head(self, chunk: GPTModel) -> None:
        """Keep the output layer of the teacher's last chunk on the device, which the model itself may leave."""
        plain = _unwrapped(chunk)
        if self.teacher_head is None and plain.post_process:
            weight = self._head_of(plain).detach()
            self.teacher_head = weight.clone() if self.settings.shares_device else weight

    def _values(
        self, head: torch.nn.Linear, hidden_TD: Tensor, part: PackedMicroBatch, micro: MicroBatch
    ) -> TokenStats:
        """Return the values of all response tokens.

        Every tensor-parallel rank has the whole head and computes the same values of all tokens. So the gradients of
        head and hidden states are the same on each, and are not summed over these ranks.
        """
        if self.layout.sequence_parallel:
            hidden_TD = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_TD, tensor_parallel_output_grad=False
            )
        values_R = values(hidden_TD.index_select(0, part.predict), head.weight, head.bias)
        return TokenStats(values_R.new_empty(0), values_R=self._gather(values_R, part, micro))

    def _gather(self, tokens: Tensor, part: PackedMicroBatch, micro: MicroBatch) -> Tensor:
        if self.layout.context == 1:
            return tokens
        group = parallel_state.get_context_parallel_group()
        return cast("Tensor", GatherTokens.apply(tokens, part.response, len(micro.response_pos_R), group))

    def from_last_stage(
        self, micro: MicroBatch, stats: TokenStats | None, request: StatsRequest, *, is_value: bool
    ) -> TokenStats:
        """Broadcast the last stage's log-probs and entropies, or values, to the other stages.

        What is read by the last stage only stays there.
        """
        entropy = request.entropy
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() == 1:
            assert stats is not None
            return stats
        shape = (2 if entropy else 1, len(micro.response_pos_R))
        rows = torch.zeros(shape, device=self.device)
        if stats is not None:
            rows[0] = stats.output_R
            if entropy and stats.entropy_R is not None:
                rows[1] = stats.entropy_R
        dist.broadcast(rows, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
        if is_value:
            return TokenStats(rows.new_empty(0), values_R=rows[0])
        shared = TokenStats(rows[0], rows[1] if entropy else None)
        return shared if stats is None else replace(stats, log_probs_R=shared.log_probs_R, entropy_R=shared.entropy_R)

    def broadcast_metrics(self, metrics: list[Metrics]) -> list[Metrics]:
        """Broadcast the last stage's metrics to the other stages, as JSON."""
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() == 1:
            return metrics
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        rows = [{name: [m.total, m.weight, m.rule] for name, m in one.items()} for one in metrics]
        rows = broadcast_json(rows, source, group=group, device=self.device)
        return [{name: Metric(*values) for name, values in row.items()} for row in rows]


def _filler(device: torch.device) -> MicroBatch:
    """Return a micro-batch of two tokens without response, which adds nothing to the gradient."""
    tokens = torch.zeros(2, dtype=torch.int64, device=device)
    nothing = torch.zeros(0, device=device)
    return MicroBatch(
        tokens_T=tokens,
        position_ids_T=torch.arange(2, device=device),
        cu_seqlens_S1=torch.tensor([0, 2], dtype=torch.int32, device=device),
        max_seqlen=2,
        response_pos_R=tokens[:0],
        seq_of_R=tokens[:0],
        mask_R=nothing,
        weight_R=nothing,
        rows=np.zeros(0, np.int64),
    )


def is_value_model(model: GPTModel) -> bool:
    """Return whether this chunk has a scalar head."""
    return isinstance(getattr(model, "output_layer", None), ValueHead)


def _unwrapped(model: Any) -> GPTModel:
    while not isinstance(model, GPTModel):
        model = model.module
    return model
