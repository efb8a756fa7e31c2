"""`training.backend_interface.Backend` over Megatron-core: one rank of a model with TP, PP, CP, SP and EP.

All ranks call the same methods in the same order. Ranks with the same data-parallel index receive the same
micro-batches and return the same values; the last pipeline stage computes these and broadcasts them.
"""

from __future__ import annotations

# Megatron-core's annotations do not match what its functions accept and return.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false
import dataclasses
import logging
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers import PreTrainedModel

from furlong.config.checks.engine_checks import attention_problem
from furlong.core.algorithms import Role
from furlong.core.batch import FlopsModel, MicroBatch
from furlong.core.device_memory import MemoryTransfer
from furlong.core.metric import Metrics
from furlong.errors import CheckpointError, ConfigError, TrainerError
from furlong.files.atomic import PendingFiles
from furlong.interfaces import HeadOutput, LossFn, TokenStats
from furlong.models import hf_model as hf
from furlong.models.compiled_layers import MlpRecompute
from furlong.models.fake_quantization import fake_quantize, is_rounded, rounding_of
from furlong.models.hf_config import load_config
from furlong.models.model_facts import forward_flops, is_worth_compiling
from furlong.models.value_head import (
    ValueHead,
    ValueTensors,
    exported,
    new_head,
    value_config,
    with_value_head,
)
from furlong.quantization.scheme import QuantizationScheme
from furlong.training.backend_interface import (
    NotFiniteLossError,
    OptimReport,
    PipelinedBackend,
    RoleModels,
    TrainedModel,
)
from furlong.training.checkpoint import trainer_files
from furlong.training.checkpoint.tensor_reader import TensorReader
from furlong.training.checkpoint.trainer_files import (
    check_roles,
    frozen_roles,
    optimizer_stem,
    step_count,
    step_counts,
    weights_stem,
)
from furlong.training.loss_wrappers import StatsRequest
from furlong.training.megatron import weight_names as names
from furlong.training.megatron.distributed_optimizer import MASTER, ChunkOptimizer
from furlong.training.megatron.model_build import build_chunks, initialize, transformer_config
from furlong.training.megatron.moe_layers import RouterReplay
from furlong.training.megatron.moe_routing import LoadBalancing
from furlong.training.megatron.packed_layer import prepare_layers
from furlong.training.megatron.parallel_layout import Layout
from furlong.training.megatron.pipeline import Pipeline
from furlong.training.megatron.weight_names import Parameter
from furlong.training.megatron_lm import places
from furlong.training.megatron_lm.dist_files import DistReader
from furlong.training.offload import HostOffload
from furlong.training.optimizer import check_moments
from furlong.training.ranks import Ranks
from furlong.training.round_observer import LayerTimes
from furlong.training.settings import (
    CRITIC_FREEZE_FLAG,
    FREEZE_FLAG,
    NOTHING_TRAINED,
    ONLY_TRAIN_FLAG,
    REPLAYED,
    BackendSettings,
    RoleSettings,
    matching_names,
)

logger = logging.getLogger(__name__)

MegatronModel = TrainedModel[list[GPTModel], ChunkOptimizer]


class MegatronBackend(PipelinedBackend):
    """One rank's model chunks and optimizers by role. The default process group exists.

    Raises ConfigError for settings that are not supported on the device.
    """

    def __init__(self, settings: BackendSettings, *, ranks: Ranks) -> None:
        _check(settings)
        self.settings, self.ranks = settings, ranks
        self._router_replays: dict[Role, RouterReplay] = {}
        self.hf: Any = load_config(settings.hf_checkpoint)
        self._value_hf = value_config(self.hf)
        self.layout = Layout.of(settings.train, settings.megatron, self.hf.num_hidden_layers)
        self.balancing = LoadBalancing.of(settings.moe)
        initialize(self.layout, settings.train.seed)
        if settings.hooks.initialized is not None:
            settings.hooks.initialized()
        self.config = self._model_config()
        self._pipeline = Pipeline(self.layout, settings, ties_head=self.hf.tie_word_embeddings)
        whole = settings.hf_checkpoint
        self._models = RoleModels[list[GPTModel], ChunkOptimizer](
            {"ref": whole, **settings.role_folders},
            load=self._load_frozen,
            new=lambda: self._load_frozen("ref", whole),
            offload=self._offload,
            onload=_onload,
            shares_device=settings.shares_device,
        )
        start = RoleSettings(settings.initial_weights or whole, settings.optim)
        self._models.add("actor", self._load_trained("actor", start))
        for role, each in settings.trained.items():
            self._models.use()
            self._models.add(role, self._load_trained(role, each))
        self._models.use("actor")
        timed = self.actor if ranks.world_size > 1 else []
        self._layer_times = LayerTimes([layer for c in timed for layer in c.decoder.layers], settings.device)
        if settings.initial_optimizer is not None:
            with self.optimizer.loaded():
                self.optimizer.num_steps = places.load_optimizer(
                    self.actor, settings.initial_optimizer, self.optimizer.state, ranks
                )
        self._not_finite: NotFiniteLossError | None = None

    # -- the model

    def _model_config(self) -> TransformerConfig:
        settings = self.settings
        config = transformer_config(self.hf, self.layout, settings.dtype, settings.train, settings.megatron)
        config.moe_router_bias_update_rate = self.balancing.bias_rate
        if settings.moe.moe_grouped_gemm is not None:
            config.moe_grouped_gemm = settings.moe.moe_grouped_gemm
        return config

    def _hf_of(self, role: Role) -> Any:
        return self._value_hf if role == "critic" else self.hf

    def _load(self, folder: Path, role: Role = "actor", config: TransformerConfig | None = None) -> list[GPTModel]:
        chunks = build_chunks(config or self.config, self._hf_of(role), self.settings.hooks.provider)
        if role == "critic" and chunks[-1].post_process:
            put_value_head(chunks[-1], seed=self.settings.train.seed)
        with self.ranks.agreed():
            stem: Role = (
                "critic" if role == "critic" else "actor"
            )  # a frozen model starts as the policy of a checkpoint
            fill(chunks, folder, self._hf_of(role), stem, seed=self.settings.train.seed)
        compiled = self.settings.compile_layers
        if compiled is None:
            size = sum(p.numel() for chunk in chunks for p in chunk.parameters()) * self.layout.tensor
            compiled = is_worth_compiling(size, self.device, self.settings.dtype)
        for chunk in chunks:
            chunk.train(self.config.recompute_granularity is not None)  # otherwise Megatron-core recomputes nothing
            if chunk.post_process:
                # the head is applied to response tokens only
                chunk.output_layer.forward = lambda hidden, **_: (hidden, None)
            self._pipeline.recompute[chunk] = prepare_layers(chunk, compiled=compiled)
        if role != "teacher" and (scheme := self.settings.fake_quantization) is not None:
            round_chunks(chunks, self.hf, scheme)
        return chunks

    @property
    def actor(self) -> list[GPTModel]:
        """The policy's chunks."""
        return self._models["actor"].module

    @property
    def optimizer(self) -> ChunkOptimizer:
        """The policy's optimizer."""
        return self._models.optimizer("actor")

    def _load_trained(self, role: Role, start: RoleSettings) -> MegatronModel:
        settings, train, host = self.settings, self.settings.train, HostOffload()
        # --overlap-grad-reduce keeps a model's functions in its config
        config = self.config if role == "actor" else self._model_config()
        chunks = self._load(start.folder, role, config)
        only, freeze, flag = train.only_train_params_name_list, train.freeze_params_name_list, FREEZE_FLAG
        if role != "actor":  # these lists name the policy's parameters
            only, freeze, flag = None, start.freeze, CRITIC_FREEZE_FLAG
        trained = set_trainable(chunks, self._hf_of(role), only=only, freeze=freeze, freeze_flag=flag)
        settings = dataclasses.replace(settings, optim=start.optim)
        optimizer = ChunkOptimizer(settings, chunks, config, trained, wait=host.wait_for_deferred)
        return TrainedModel(chunks, optimizer, host)

    def _load_frozen(self, role: Role, folder: Path) -> list[GPTModel]:
        return [chunk.requires_grad_(False) for chunk in self._load(folder, role)]

    @property
    def recompute(self) -> MlpRecompute:
        """The choice of MLPs to recompute in the backward pass, of this rank's first chunk."""
        return self._pipeline.recompute[self.actor[0]]

    @property
    def device(self) -> torch.device:
        """The device of micro-batches."""
        return self.settings.device

    @property
    def flops(self) -> FlopsModel:
        """Forward FLOPs of a sequence, for balancing and for tflops metrics."""
        return forward_flops(hf.build_empty(self.settings.hf_checkpoint, dtype=self.settings.dtype))

    # -- forward and backward

    def log_probs(
        self,
        micro: MicroBatch,
        *,
        model: Role = "actor",
        entropy: bool = False,
        head: HeadOutput = "",
        top_k: int = 0,
    ) -> TokenStats:
        """Log-probs (and entropies) of the response tokens under one of the models, without gradient."""
        return self.log_probs_of([micro], model=model, entropy=entropy, head=head, top_k=top_k)[0]

    def forward_backward(self, micro: MicroBatch, loss_fn: LossFn, *, model: Role = "actor") -> Metrics:
        """Accumulate the gradient of `loss_fn` over one micro-batch."""
        return self.forward_backward_of([micro], loss_fn, model=model)[0]

    def log_probs_of(
        self,
        micros: Sequence[MicroBatch],
        *,
        model: Role = "actor",
        entropy: bool = False,
        head: HeadOutput = "",
        top_k: int = 0,
    ) -> list[TokenStats]:
        """`log_probs` of several micro-batches, which the pipeline overlaps."""
        outputs: list[TokenStats] = []

        def keep(micro: MicroBatch, stats: TokenStats) -> Tensor:
            del micro
            if stats.hidden_RD is not None:  # of a whole rollout, too much for the device
                stats = dataclasses.replace(stats, hidden_RD=stats.hidden_RD.cpu())
            outputs.append(stats)
            return torch.zeros((), device=self.settings.device)

        self._models.use(model)
        chunks = self._models[model].module
        if self.settings.hooks.before_log_probs is not None:
            self.settings.hooks.before_log_probs(list(chunks), "" if model in REPLAYED else f"{model}_")
        replay = self._router_replay(model, micros)
        request = StatsRequest(entropy, head=head, top_k=top_k)
        with torch.no_grad():
            passes = self._pipeline.run(chunks, micros, keep, request, forward_only=True, replay=replay)
            if head == "hidden":
                self._pipeline.keep_teacher_head(chunks[-1])
        last = outputs or [None] * len(micros)  # the other stages have none
        stats = [
            self._pipeline.from_last_stage(micro, stats, request, is_value=model == "critic")
            for micro, stats in zip(micros, last, strict=True)
        ]
        if replay is None or self.settings.routing_replay != "policy":
            return stats
        return [
            dataclasses.replace(one, policy_routes=replay.policy_routes(routing))
            for one, (routing, _) in zip(stats, passes, strict=True)
        ]

    def _router_replay(self, role: Role, micros: Sequence[MicroBatch]) -> RouterReplay | None:
        is_used = (
            self.settings.routing_replay != "none" or micros[0].routed_experts_TLK is not None or self.balancing.is_on
        )
        if not is_used or role not in REPLAYED or not self.config.num_moe_experts:
            return None
        if role not in self._router_replays:
            self._router_replays[role] = RouterReplay(
                self._models[role].module,
                self.settings,
                recomputes=self.config.recompute_granularity is not None,
                is_split=self.layout.sequence_parallel,
            )
        return self._router_replays[role]

    def begin_step(self, rollout_id: int, step: int) -> None:
        """Call the user's hook with this rank's chunks, the optimizer and its schedule; gradients are zero."""
        if self.settings.hooks.before_step is not None:
            optimizer = self.optimizer
            optimizer.zero_grad()
            chunks = list(optimizer.chunks)
            self.settings.hooks.before_step(rollout_id, step, chunks, optimizer.optimizer, optimizer.schedule)

    def forward_backward_of(
        self, micros: Sequence[MicroBatch], loss_fn: LossFn, *, model: Role = "actor"
    ) -> list[Metrics]:
        """`forward_backward` of several micro-batches, which the pipeline overlaps."""
        metrics: list[Metrics] = []

        def loss_of(micro: MicroBatch, stats: TokenStats) -> Tensor:
            loss, values = loss_fn(micro, stats)
            metrics.append(values)
            value = float(loss.detach())
            if not math.isfinite(value):
                error = NotFiniteLossError(f"loss {value}", micro.rows)
                self._not_finite = self._not_finite or error
                loss = (stats.output_R * 0.0).nan_to_num().sum()
            return loss

        self._models.use(model)
        optimizer = self._models.optimizer(model)
        optimizer.begin_accumulation()
        replay = self._router_replay(model, micros)
        passes = self._pipeline.run(
            optimizer.chunks, micros, loss_of, StatsRequest.of(loss_fn), forward_only=False, replay=replay
        )
        shared = self._pipeline.broadcast_metrics(metrics)
        if replay is None:
            return shared
        agreements = replay.agreements(passes, micros)
        losses = replay.balancing_metrics([one for one, _ in passes], self.settings.device)
        return [values | agreed | lost for values, agreed, lost in zip(shared, agreements, losses, strict=True)]

    # -- the optimizer

    def optim_step(self, *, model: Role = "actor") -> OptimReport:
        """Clip, step, advance the schedule. A non-finite loss or gradient on one rank counts on all ranks."""
        self._models.use(model)
        optimizer = self._models.optimizer(model)
        error, self._not_finite = self._not_finite, None
        reason = self.ranks.first(str(error or ""))
        report = optimizer.step(
            reason,
            check_finite=self.settings.check_finite,
            first_not_finite=partial(self._first_not_finite, model),
        )
        if reason and self.settings.check_finite:
            raise error or TrainerError(reason)
        return report

    def _first_not_finite(self, role: Role) -> str:
        pairs = names.parameters_with_local(self._models[role].module, self._hf_of(role))
        return self.ranks.first_not_finite((each.theirs[0], getattr(local, "main_grad", None)) for each, local in pairs)

    def reset_optimizer(self, *, model: Role = "actor") -> None:
        """Reset the optimizer's moments; the learning-rate schedule continues."""
        self._models.use(model)
        self._models.optimizer(model).reset()

    def layer_seconds(self) -> float | None:
        """Return the time spent in the policy's layers since the last call; None with one rank."""
        return self._layer_times.take()

    # -- leaving the device

    def offload(self) -> MemoryTransfer:
        """Move all states between steps to pinned host memory and release device memory.

        Parameters that are rounded from master weights are discarded, and rounded again by `onload`, which must be the
        next call.
        """
        self._pipeline.teacher_head = None
        return self._models.offload()

    def _offload(self, model: MegatronModel) -> MemoryTransfer:
        optimizer = model.optimizer
        if optimizer is None:
            return model.host.offload(self._parts(model))
        gradients = optimizer.gradients() if optimizer.is_fresh else ()
        return model.host.offload(
            self._parts(model),
            deferred=optimizer.state.moments(),
            discarded=[*_rounded(model), *gradients],
            reserve=optimizer.missing_moment_bytes(),
        )

    def onload(self) -> MemoryTransfer:
        """Undo `offload`. A collective, as each data-parallel rank rounds its slice of the parameters.

        Moments may still be copying afterwards; the optimizers wait for them.
        """
        return self._models.onload()

    def _parts(self, model: MegatronModel) -> Iterator[Tensor]:
        """Yield tensors that exist between steps, except moments and parameters rounded from master weights."""
        rounded = {id(parameter) for parameter in _rounded(model)}
        for chunk in model.module:
            yield from (parameter for parameter in chunk.parameters() if id(parameter) not in rounded)
            yield from chunk.buffers()
        if model.optimizer is not None:
            yield from model.optimizer.state.master_weights()
            if not model.optimizer.is_fresh:
                yield from model.optimizer.gradients()

    # -- checkpoints

    def save(self, folder: Path, later: PendingFiles | None = None) -> None:
        """Write weights, moments, schedule and random states, independent of the layout.

        The files have whole tensors under Hugging Face names, as those of --train-backend fsdp. Saving gathers one
        tensor at a time on all ranks. With `later`, add the files there instead of writing them.
        """
        tensors: dict[str, Iterator[tuple[str, Tensor]]] = {}
        for role in self._models.trained():
            tensors[weights_stem(role)] = self._exported(role)
            if not self.settings.checkpoint.no_save_optim:
                tensors[optimizer_stem(role)] = self._named_moments(role)
        tensors |= {weights_stem(role): self._exported(role) for role in self._models.diverged()}
        steps: dict[Role, int] = {role: self._models.optimizer(role).num_steps for role in self._models.trained()}
        meta = step_counts(steps) | {"layout": dataclasses.asdict(self.layout)}
        trainer_files.save(folder, tensors, self.ranks, meta=meta, later=later)

    def _exported(self, role: Role) -> Iterator[tuple[str, Tensor]]:
        self._models.use(role)
        chunks, optimizer = self._models[role].module, self._models[role].optimizer
        if optimizer is None:
            yield from names.export(chunks, self._hf_of(role))
            return
        with optimizer.loaded():
            yield from names.export(chunks, self._hf_of(role), value_of=partial(optimizer.state.whole, kind=MASTER))

    def _named_moments(self, role: Role) -> Iterator[tuple[str, Tensor]]:
        chunks, optimizer = self._models[role].module, self._models.optimizer(role)
        state = optimizer.state
        with optimizer.loaded():
            for moment in state.moment_names:
                value_of = partial(state.whole, kind=moment)
                for name, tensor in names.export(chunks, self._hf_of(role), value_of=value_of):
                    if name in state.trained:
                        yield f"{name}/{moment}", tensor
            if state.kind != "adam":
                return
            step = torch.tensor(state.step)
            dist.all_reduce(step, dist.ReduceOp.MAX)  # a rank may have no slice
            for name in sorted(state.trained):
                yield f"{name}/step", step.clone()

    def load(self, folder: Path) -> None:
        """Restore a checkpoint of any layout or of --train-backend fsdp; with the same layout, bitwise.

        Raises CheckpointError on all ranks if it is incomplete, of another model, or unreadable on one rank.
        """
        with self.ranks.agreed():
            meta = trainer_files.read_meta(folder)
            check_roles(folder, meta, self._models.trained())
        for role in self._models.trained():
            self._models.use(role)
            with self.ranks.agreed():
                self._load_role(folder, meta, role)
        for role in frozen_roles(meta):
            frozen = self._models.replaced(role).module
            with self.ranks.agreed(), trainer_files.reader(folder, meta, weights_stem(role)) as reader:
                names.load(frozen, self.hf, reader)
        if not self.settings.checkpoint.no_load_rng:
            with self.ranks.agreed():
                trainer_files.restore_random(folder, meta, self.ranks)

    def _load_role(self, folder: Path, meta: Mapping[str, Any], role: Role) -> None:
        chunks, optimizer = self._models[role].module, self._models.optimizer(role)
        with optimizer.loaded(), trainer_files.reader(folder, meta, weights_stem(role)) as reader:
            names.load(chunks, self._hf_of(role), reader, put=partial(optimizer.state.put, kind=MASTER))
            optimizer.state.reset()
            optimizer.num_steps = step_count(meta, role)
            if self.settings.checkpoint.no_load_optim:
                return
            if meta["has_optimizer"]:
                self._load_moments(folder, meta, role, reader)
            else:
                logger.warning("%s has no optimizer states; moments start at zero", folder)

    def _load_moments(self, folder: Path, meta: Mapping[str, Any], role: Role, weights: TensorReader) -> None:
        state = self._models.optimizer(role).state
        with trainer_files.reader(folder, meta, optimizer_stem(role)) as reader:
            check_moments(reader.path, reader.names, state.kind)
            if not reader.names:  # saved before the first step
                return
            if differing := {name.rpartition("/")[0] for name in reader.names} ^ state.trained:
                raise CheckpointError(
                    f"{folder} was saved by a run that trained other parameters: {', '.join(sorted(differing)[:3])} "
                    "are trained in only one of the two runs; resume with the same lists of parameters, or with "
                    "--no-load-optim"
                )
            steps = {float(reader.read(name)) for name in reader.names if name.endswith("/step")}
            if len(steps) > 1:
                raise CheckpointError(
                    f"{folder} has parameters with different step counts, "
                    f"{', '.join(f'{n:g}' for n in sorted(steps))}; --train-backend megatron has one count for all: "
                    "resume with fsdp, or with --no-load-optim"
                )
            state.set_step(steps.pop() if steps else 0.0)
            for moment in state.moment_names:
                moments = _MomentReader(reader, moment, weights)
                chunks = self._models[role].module
                names.load(chunks, self._hf_of(role), moments, put=partial(state.put, kind=moment))

    def save_hf(self, folder: Path, *, model: Role = "actor") -> None:
        """Write a Hugging Face folder, with tokenizer and generation config of the original."""
        whole, dtype = self.settings.hf_checkpoint, self.settings.dtype

        def build() -> PreTrainedModel:
            built = hf.build_empty(whole, dtype=dtype)
            if model == "critic":
                with_value_head(built)
            return built

        tensors = self.named_weights(model=model)
        tensors = exported(tensors) if model == "critic" else tensors
        trainer_files.write_model(folder, build, tensors, self.ranks, dtype=dtype, companions=whole)

    # -- other models

    def named_weights(self, *, model: Role = "actor") -> Iterator[tuple[str, Tensor]]:
        """Yield a model's whole tensors under Hugging Face names, on every rank. A collective."""
        self._models.use(model)
        yield from names.export(self._models[model].module, self._hf_of(model))

    def copy_weights(self, source: Role, target: Role) -> None:
        """Make the frozen model `target` equal to `source`. Raises TrainerError if `target` is trained."""
        origin, copied = self._models.source_and_target(source, target)
        self._models.use(source, target)
        pairs = zip(names.local_tensors(copied).values(), names.local_tensors(origin).values(), strict=True)
        with torch.no_grad():
            for to, value in pairs:
                to.copy_(value)


def _check(settings: BackendSettings) -> None:
    device, dtype = settings.device.type, settings.dtype
    if dtype == torch.float64:
        raise ConfigError("--train-backend megatron does not support float64; use --bf16 or --fp32")
    if problem := attention_problem(settings.train, settings.megatron, device, str(dtype).removeprefix("torch.")):
        raise ConfigError(problem)


def _onload(model: MegatronModel) -> MemoryTransfer:
    started = time.perf_counter()
    moved = model.host.reload()
    if model.optimizer is not None and _rounded(model):
        model.optimizer.round_parameters()
    return MemoryTransfer(moved.num_bytes, time.perf_counter() - started)


def _rounded(model: MegatronModel) -> list[Tensor]:
    """Return the parameters that are rounded from master weights on the ranks' devices."""
    optimizer = model.optimizer
    if optimizer is None:
        return []
    return [each for chunk in model.module for each in chunk.parameters() if optimizer.is_rounded(each)]


# -- a rank's model chunks: weights, trained parameters, rounding


def put_value_head(chunk: GPTModel, *, seed: int) -> None:
    """Replace the output layer of the last chunk by a new scalar head, the same on all tensor-parallel ranks."""
    like = next(chunk.parameters())
    head = ValueHead(chunk.config.hidden_size, device=like.device, dtype=like.dtype)
    with torch.no_grad():
        for parameter, value in zip((head.weight, head.bias), new_head(head.in_features, seed), strict=True):
            parameter.copy_(value)
    chunk.output_layer = head


def fill(chunks: list[GPTModel], folder: Path, hf: Any, role: Role = "actor", *, seed: int = 0) -> None:
    """Load this rank's model chunks from a checkpoint of `save`, of Megatron-LM, or from a Hugging Face folder."""
    with places.open_source(folder, role) as source:
        if isinstance(source, DistReader):
            places.load(chunks, source)
        elif role == "critic" and "lm_head.bias" not in source.names:  # not a critic of a checkpoint
            names.load(chunks, hf, ValueTensors(folder, source, hf.hidden_size, seed=seed))
        else:
            names.load(chunks, hf, source)
    logger.info("loaded weights from %s%s", folder, "" if role == "actor" else f" into the {role}")


def set_trainable(
    chunks: Sequence[GPTModel],
    hf: Any,
    *,
    only: Sequence[str] | None = None,
    freeze: Sequence[str] | None = None,
    freeze_flag: str = FREEZE_FLAG,
) -> frozenset[str]:
    """Set `requires_grad` of a rank's model chunks; returns the Hugging Face names of the trained tensors.

    Expressions are searched in Megatron's name in the whole model (`decoder.layers.7.mlp.linear_fc1.weight`) and in the
    Hugging Face names. Raises ConfigError for an expression that matches nothing, or only some of the tensors that are
    one parameter in Megatron-core.
    """
    pairs = (pair for pair in names.parameters_with_local(chunks, hf) if pair[0].rule.is_trained)
    every, local = zip(*pairs, strict=True)
    selected = _matching(every, only, ONLY_TRAIN_FLAG) if only else set(range(len(every)))
    trained = selected - (_matching(every, freeze, freeze_flag) if freeze else set[int]())
    if not trained:
        raise ConfigError(NOTHING_TRAINED)
    for number, tensor in enumerate(local):
        if tensor is not None:
            tensor.requires_grad_(number in trained)
    head: Any = dict(chunks[-1].named_parameters()).get("output_layer.weight")
    if hf.tie_word_embeddings and head is not None:  # the last stage's copy of the embedding, which comes first
        head.requires_grad_(0 in trained)
    return frozenset(name for number in trained for name in every[number].theirs)


def _matching(every: Sequence[Parameter], patterns: Sequence[str], flag: str) -> set[int]:
    all_names = [name for parameter in every for name in (*parameter.theirs, _name(parameter))]
    matched = matching_names(all_names, patterns, flag)
    indices: set[int] = set()
    for number, parameter in enumerate(every):
        named = [name for name in parameter.theirs if name in matched]
        if _name(parameter) in matched or len(named) == len(parameter.theirs):
            indices.add(number)
        elif named:
            raise ConfigError(
                f"{flag} matches {', '.join(named)} but not {', '.join(sorted({*parameter.theirs} - {*named}))}, which "
                f"are one parameter in Megatron-core, {_name(parameter)}; match all of them or none"
            )
    return indices


def _name(parameter: Parameter) -> str:
    name, theirs = parameter.ours, parameter.theirs[0]
    if layer := re.search(r"\.layers\.(\d+)\.", theirs):
        name = re.sub(r"^decoder\.layers\.\d+\.", f"decoder.layers.{layer[1]}.", name)
    if parameter.expert is not None:
        name = re.sub(r"\.local_experts\.\d+\.", f".local_experts.{parameter.expert}.", name)
    return name


def round_chunks(chunks: Sequence[GPTModel], hf: Any, scheme: QuantizationScheme) -> None:
    """Make this rank's model chunks compute with the engine's INT4 values. Raises ConfigError as `round_model` does."""
    rounding = rounding_of(scheme)
    for parameter, local in names.parameters_with_local(chunks, hf):
        if local is None or not is_rounded(parameter.ours, parameter.theirs, local.shape[-1], scheme):
            continue
        if parameter.rule.join in ("packed", "packed_gate_up"):
            raise ConfigError(
                f"--int4-qat: {parameter.ours} is the transpose of the folder's tensors; remove --int4-qat, or use "
                "--train-backend fsdp"
            )
        owner, _, attribute = parameter.ours.rpartition(".")
        fake_quantize(chunks[parameter.chunk].get_submodule(owner), attribute, rounding)


class _MomentReader:
    """Reads one moment under the names of the weights; for frozen tensors the weight, which has the same shape."""

    def __init__(self, reader: TensorReader, moment: str, weights: TensorReader) -> None:
        self._reader, self._suffix, self._weights = reader, f"/{moment}", weights

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._weights.names)

    def read(self, name: str) -> Tensor:
        moment = name + self._suffix
        return self._reader.read(moment) if moment in self._reader.names else self._weights.read(name)
