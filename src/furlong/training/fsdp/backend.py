"""Training backend for Hugging Face models on PyTorch FSDP2; one rank on one device.

Precision: float32 computes and steps in float32. With bfloat16, forward and backward use bfloat16 parameters, gradients
are accumulated in float32, and the optimizer steps float32 master weights, which are rounded into the parameters.
Autocast would convert every weight in every forward pass, and its parameters could not be loaded into an engine
directly. With several ranks each stores only its shard of the master weights (`training.sharding`).

Collectives: with several ranks every rank calls the same methods in the same order with the same arguments, except for
the contents of micro-batches, and iterates `named_weights` to the end. An error on one rank is raised on all.

Each role's model is a separate module; trained ones have an optimizer.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor
from transformers import PreTrainedModel

from furlong.algo.distillation import TeacherHead, target_stats
from furlong.algo.logprob import stats_from_logits, token_stats
from furlong.algo.policy_loss import column
from furlong.core.algorithms import Role
from furlong.core.batch import FlopsModel, MicroBatch
from furlong.core.device_memory import MemoryTransfer
from furlong.core.metric import Metrics
from furlong.errors import ConfigError, TrainerError
from furlong.files.atomic import PendingFiles
from furlong.files.checkpoint_folder import dist_with_fsdp
from furlong.interfaces import HeadOutput, LossFn, TokenStats
from furlong.models import hf_model as hf
from furlong.models.fake_quantization import quantized_values, round_model
from furlong.models.model_facts import chunk_rows, forward_flops, is_worth_compiling, logits_bytes
from furlong.models.packed_model import PackedModel, RoutingState
from furlong.models.value_head import ValueHead, exported, load_value_model, values, with_value_head
from furlong.training.backend_interface import (
    Backend,
    MicroBatchTooLargeError,
    NotFiniteLossError,
    OptimReport,
    RoleModels,
    TrainedModel,
)
from furlong.training.checkpoint import trainer_files
from furlong.training.checkpoint.tensor_reader import TensorReader
from furlong.training.checkpoint.trainer_files import (
    check_roles,
    frozen_roles,
    is_optimizer,
    optimizer_stem,
    step_count,
    step_counts,
    weights_stem,
)
from furlong.training.loss_wrappers import HEAD_OUTPUTS, StatsRequest
from furlong.training.megatron_lm.dist_files import is_dist_folder
from furlong.training.offload import HostOffload
from furlong.training.optimizer import MOMENTS, MasterOptimizer, Schedule
from furlong.training.ranks import Ranks
from furlong.training.round_metrics import agreement
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
from furlong.training.sharding import Prepare, Sharding, reshard, tensors_of

logger = logging.getLogger(__name__)

FsdpModel = TrainedModel[PackedModel, MasterOptimizer]


class FsdpBackend(Backend):
    """Implements `training.backend_interface.Backend` over a Hugging Face folder.

    ranks: this process among the trainer processes, whose process group exists. share_prompts: run a prompt once for
    all samples of a micro-batch that start with it.
    """

    def __init__(self, settings: BackendSettings, *, ranks: Ranks | None = None, share_prompts: bool = True) -> None:
        self.settings, self._share_prompts = settings, share_prompts
        self.ranks = ranks or Ranks()
        self.sharding = Sharding(self.ranks, settings.device)
        self._compiles = settings.compile_layers
        self._models = RoleModels[PackedModel, MasterOptimizer](
            {"ref": settings.hf_checkpoint, **settings.role_folders},
            load=lambda role, folder: self._load(folder, prepare=_freeze, role=role),
            new=self._like_actor,
            offload=self._offload,
            onload=_onload,
            shares_device=settings.shares_device,
        )
        start = settings.initial_weights or settings.hf_checkpoint
        self._models.add("actor", self._load_trained("actor", RoleSettings(start, settings.optim)))
        for role, each in settings.trained.items():
            self._models.use()
            self._models.add(role, self._load_trained(role, each))
        # Loaded now and not at first use: transformers sets PyTorch's default dtype while loading, which would affect
        # the engine's thread once it generates.
        for role in settings.role_folders:
            self._models.use()
            _ = self._models[role]
        self._models.use("actor")
        self._pass_bytes = self.sharding.working_bytes(self.actor, settings.dtype)
        layers: Any = self.actor.model.base_model.layers if self.sharding.is_sharded else ()
        self._layer_times = LayerTimes(layers, settings.device)
        self._not_finite: NotFiniteLossError | None = None
        self._teacher_head: tuple[Tensor, Tensor | None] | None = None  # weight and bias, while they are used

    @property
    def actor(self) -> PackedModel:
        """The policy."""
        return self._models["actor"].module

    @property
    def optimizer(self) -> MasterOptimizer:
        """The policy's optimizer."""
        return self._models.optimizer("actor")

    def _load_trained(self, role: Role, start: RoleSettings) -> FsdpModel:
        settings, host = self.settings, HostOffload()
        if role == "critic":
            packed = self._load_critic(start)
        else:
            packed = self._load(start.folder, prepare=self._prepare, is_trained=True)
        logger.info("loaded weights from %s%s", start.folder, "" if role == "actor" else f" into the {role}")
        samples_per_step = settings.train.global_batch_size or 1
        optimizer = MasterOptimizer(
            [(name, p) for name, p in packed.model.named_parameters() if p.requires_grad],
            start.optim,
            Schedule(start.optim, total_steps=settings.total_steps, samples_per_step=samples_per_step),
            self.sharding,
            offload=settings.offload,
            wait=host.wait_for_deferred,
        )
        return TrainedModel(packed, optimizer, host)

    def _load_critic(self, start: RoleSettings) -> PackedModel:
        folder = start.folder
        if is_dist_folder(folder):
            raise ConfigError(dist_with_fsdp("--critic-load", folder, self.settings.hf_checkpoint))
        settings = self.settings
        is_checkpoint = (folder / trainer_files.META).exists()
        packed = self.sharding.load(
            settings.hf_checkpoint if is_checkpoint else folder,
            dtype=settings.dtype,
            is_trained=True,
            prepare=partial(self._prepare_critic, freeze=start.freeze),
            pack=self._pack,
            read=partial(load_value_model, seed=settings.train.seed),
        )
        if not is_checkpoint:
            return packed
        model, meta = packed.model, trainer_files.read_meta(folder)
        if weights_stem("critic") in meta["files"]:
            _load_weights(folder, meta, weights_stem("critic"), model, self.sharding)
            return packed
        head_module: Any = model.get_output_embeddings()
        head = {id(parameter) for parameter in head_module.parameters()}
        body = {name: tensor for name, tensor in hf.named_tensors(model) if id(tensor) not in head}
        heads = frozenset(name for name, tensor in hf.named_tensors(model) if id(tensor) in head)
        with _reader(folder, meta, weights_stem("actor"), model) as reader:
            reader.copy_into(body, self.sharding, ignored=heads)
        return packed

    def _prepare_critic(self, model: PreTrainedModel, *, freeze: Sequence[str] | None) -> None:
        if not isinstance(model.get_output_embeddings(), ValueHead):  # built on the meta device
            with_value_head(model)
        self._recompute_layers(model)
        choose_trained(model, freeze=freeze, freeze_flag=CRITIC_FREEZE_FLAG)

    def _prepare(self, model: PreTrainedModel) -> None:
        self._recompute_layers(model)
        train = self.settings.train
        choose_trained(model, train_only=train.only_train_params_name_list, freeze=train.freeze_params_name_list)

    def _recompute_layers(self, model: PreTrainedModel) -> None:
        if self.settings.train.recompute_activations:
            # transformers < 5.20 has only the older name
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            for module in model.modules():  # but not their submodules: some routers are random in training mode
                module.training = getattr(module, "gradient_checkpointing", False) is True

    def _load(self, folder: Path, *, prepare: Prepare, is_trained: bool = False, role: Role = "actor") -> PackedModel:
        if is_dist_folder(folder):
            flag = "--load" if is_trained else "--opd-teacher-load" if role == "teacher" else "--ref-load"
            raise ConfigError(dist_with_fsdp(flag, folder, self.settings.hf_checkpoint))
        is_checkpoint = (folder / trainer_files.META).exists()
        source, dtype = self.settings.hf_checkpoint if is_checkpoint else folder, self.settings.dtype
        pack = partial(self._pack, is_rounded=role != "teacher")
        packed = self.sharding.load(source, dtype=dtype, is_trained=is_trained, prepare=prepare, pack=pack)
        if is_checkpoint:
            meta = trainer_files.read_meta(folder)
            _load_weights(folder, meta, weights_stem("actor"), packed.model, self.sharding)
        return packed

    def _pack(self, model: PreTrainedModel, *, is_rounded: bool = True) -> PackedModel:
        if self._compiles is None:
            size = sum(p.numel() for p in model.parameters())
            self._compiles = is_worth_compiling(size, self.device, self.settings.dtype)
        packed = PackedModel(
            model,
            share_prompts=self._share_prompts,
            compiled=self._compiles,
            compute_dtype=self.settings.dtype,
            context=self.sharding.context,
        )
        if is_rounded and (scheme := self.settings.fake_quantization) is not None:
            round_model(model, scheme)
        return packed

    @property
    def device(self) -> torch.device:
        """The device that micro-batches must be on."""
        return self.settings.device

    @property
    def flops(self) -> FlopsModel:
        """Forward FLOPs per sequence, for balancing and TFLOPS metrics."""
        return forward_flops(self.actor.model)

    def log_probs(
        self,
        micro: MicroBatch,
        *,
        model: Role = "actor",
        entropy: bool = False,
        head: HeadOutput = "",
        top_k: int = 0,
    ) -> TokenStats:
        """Compute log-probs (and entropies) of the response tokens under one of the models, without gradient.

        Raises TrainerError for a model that does not exist in this run.
        """
        self._models.use(model)
        packed = self._models[model].module
        routing = self._routing(micro) if model in REPLAYED else None
        with torch.no_grad():
            stats = self._stats(model, micro, routing, StatsRequest(entropy, head=head, top_k=top_k))
        reshard(packed)
        if head == "hidden" and self._teacher_head is None:
            self._teacher_head = self._head_of(packed)
        if routing is None or routing.own_lTK is None or self.settings.routing_replay != "policy":
            return stats
        return dataclasses.replace(stats, policy_routes=routing.own_lTK.cpu())

    def quantized_log_probs(self, micro: MicroBatch) -> TokenStats | None:
        """Compute log-probs with the engine's quantized values, on one rank; see the base class."""
        settings = self.settings
        if settings.engine_quantization is None or settings.int4_qat or self.sharding.is_sharded:
            return None
        with quantized_values(self.actor.model, settings.engine_quantization):
            return self.log_probs(micro)

    def _routing(self, micro: MicroBatch) -> RoutingState | None:
        if not self.actor.hooks or (self.settings.routing_replay == "none" and micro.routed_experts_TLK is None):
            return None
        return RoutingState(replay=self.settings.replays(micro))

    def forward_backward(self, micro: MicroBatch, loss_fn: LossFn, *, model: Role = "actor") -> Metrics:
        """Accumulate the gradient of `loss_fn` over one micro-batch.

        Raises NotFiniteLossError for a non-finite loss. With `check_finite` off such a micro-batch is not accumulated
        and its step is skipped. With several ranks the error is deferred to `optim_step`, where it is raised on all.

        If the GPU runs out of memory, the micro-batch runs again with more recomputation, as long as that is possible.
        Then MicroBatchTooLargeError is raised, with nothing accumulated. With several ranks this is a TrainerError,
        because the others are already in their next collective.
        """
        while True:
            try:
                return self._forward_backward(micro, loss_fn, model)
            except torch.OutOfMemoryError as error:
                if self.sharding.is_sharded:
                    raise TrainerError(
                        f"rank {self.ranks.rank} ran out of memory with {len(micro.tokens_T)} tokens: {error}. Lower "
                        "--max-tokens-per-gpu, or set --recompute-activations"
                    ) from error
                if not self._models.optimizer(model).drop_unfolded():
                    raise
                if not self._models[model].module.layers.save_memory():
                    raise MicroBatchTooLargeError(str(error)) from error
                reason = str(error)
            torch.cuda.empty_cache()
            logger.warning("out of memory; running the micro-batch again with more recomputation: %s", reason)

    def _forward_backward(self, micro: MicroBatch, loss_fn: LossFn, role: Role) -> Metrics:
        self._models.use(role)
        optimizer = self._models.optimizer(role)
        routing = self._routing(micro) if role in REPLAYED else None
        stats = self._stats(role, micro, routing, StatsRequest.of(loss_fn))
        loss, metrics = loss_fn(micro, stats)
        metrics |= agreement(micro, stats.rerouted_R)
        value = float(loss.detach())
        is_finite = math.isfinite(value)
        if not is_finite:
            error = NotFiniteLossError(f"loss {value}{self._first_bad(role, stats)}", micro.rows)
            if self.settings.check_finite and not self.sharding.is_sharded:
                raise error
            self._not_finite = self._not_finite or error
        if self.sharding.is_sharded and not (is_finite and loss.requires_grad):
            # the other ranks wait for this rank in the collectives of the backward pass
            loss = (stats.output_R * 0.0).sum()
        elif not is_finite or not loss.requires_grad:
            return metrics
        loss.backward()
        optimizer.fold_gradients()
        return metrics

    def optim_step(self, *, model: Role = "actor") -> OptimReport:
        """Clip, step, advance the schedule, zero the gradients.

        A non-finite loss or gradient on any rank raises TrainerError on all ranks, or skips the step on all ranks if
        `check_finite` is off.
        """
        error, self._not_finite = self._not_finite, None
        self._models.use(model)
        optimizer = self._models.optimizer(model)
        if reason := self.ranks.first(str(error or "")):
            optimizer.zero_grad()
            if self.settings.check_finite:
                raise error or TrainerError(reason)
            return OptimReport(math.nan, optimizer.schedule.lr(optimizer.num_steps), reason)
        return optimizer.step(skip_not_finite=not self.settings.check_finite)

    def offload(self) -> MemoryTransfer:
        """Move all state that persists between steps to pinned host memory and free the device. Not a collective.

        Gradients are dropped, and so are parameters rounded from master weights: `onload` rounds them again. Until
        then, only `onload` may be called.
        """
        self._teacher_head = None
        return self._models.offload()

    def _offload(self, model: FsdpModel) -> MemoryTransfer:
        optimizer = model.optimizer
        if optimizer is None:
            return model.host.offload(self._parts(model))
        optimizer.zero_grad()
        return model.host.offload(
            self._parts(model),
            deferred=optimizer.moments(),
            discarded=optimizer.rounded(),
            reserve=optimizer.unallocated_bytes(),
        )

    def onload(self) -> MemoryTransfer:
        """Undo `offload`. The moments may still be copied on return; the optimizers wait for them."""
        return self._models.onload()

    def _parts(self, model: FsdpModel) -> Iterator[Tensor]:
        """Yield persistent tensors, except moments and parameters that can be rounded from master weights."""
        optimizer = model.optimizer
        rounded = {id(parameter) for parameter in optimizer.rounded()} if optimizer is not None else set[int]()
        reshard(model.module)
        tensors = (tensor for _, tensor in tensors_of(model.module.model) if id(tensor) not in rounded)
        yield from map(self.sharding.local, tensors)
        if optimizer is not None:
            yield from optimizer.master_weights

    def layer_seconds(self) -> float | None:
        """Return the time spent in the policy's layers since the last call; None with one rank."""
        return self._layer_times.take()

    def reset_optimizer(self, *, model: Role = "actor") -> None:
        """Reset the optimizer's moments; the learning-rate schedule continues."""
        self._models.use(model)
        self._models.optimizer(model).reset()

    def named_weights(self, *, model: Role = "actor") -> Iterator[tuple[str, Tensor]]:
        """Yield a model under the names of a Hugging Face checkpoint, in a fixed order, tied tensors once.

        With several ranks a collective: all ranks iterate to the end, and each receives every full tensor in the
        training dtype on its device, gathered one at a time. With one rank the tensors are views of live parameters.
        """
        self._models.use(model)
        module, is_sharded = self._models[model].module.model, self.sharding.is_sharded
        is_live = not is_sharded
        for name, tensor in hf.named_tensors(module):
            is_cast = is_sharded and isinstance(tensor, torch.nn.Parameter) and name not in self.sharding.uncast
            whole = self.sharding.full(tensor, dtype=self.settings.dtype if is_cast else tensor.dtype)
            for known, part in hf.on_disk(module, name, whole):
                is_live = is_live and part is whole
                yield known, part
        self.weights_are_views = is_live

    def named_gradients(self, *, model: Role = "actor") -> Iterator[tuple[str, Tensor]]:
        """Yield the accumulated gradients by parameter; of a sharded parameter, this rank's shard."""
        return self._models.optimizer(model).named_gradients()

    def copy_weights(self, source: Role, target: Role) -> None:
        """Make the frozen model `target` equal to `source`. Raises TrainerError if `target` is trained."""
        origin, copied = self._models.source_and_target(source, target)
        self._models.use(source, target)
        self.sharding.copy(origin.model, copied.model)

    def _like_actor(self) -> PackedModel:
        if not self.sharding.is_sharded:
            model = copy.deepcopy(self.actor.model)
            _freeze(model)
            return self._pack(model.eval())
        folder, dtype = self.settings.hf_checkpoint, self.settings.dtype
        return self.sharding.build(folder, dtype=dtype, is_trained=False, prepare=_freeze, pack=self._pack)

    def save(self, folder: Path, later: PendingFiles | None = None) -> None:
        """Write weights, moments, schedule and random states (files: `training.checkpoint.trainer_files`).

        With `later`, only copy them to host memory.
        """
        sharding = self.sharding

        def weights(role: Role) -> Iterator[tuple[str, Tensor]]:
            self._models.use(role)  # when the files of the model are written
            model, optimizer = self._models[role].module.model, self._models[role].optimizer
            if optimizer is None:
                yield from _whole(model, dict(hf.named_tensors(model)), sharding)
                return
            with optimizer.loaded():
                yield from _whole(model, _trained_tensors(model, optimizer, sharding), sharding)

        tensors: dict[str, Iterator[tuple[str, Tensor]]] = {}
        for role in self._models.trained():
            tensors[weights_stem(role)] = weights(role)
            if not self.settings.checkpoint.no_save_optim:
                tensors[optimizer_stem(role)] = _moments(self._models[role].module.model, self._models.optimizer(role))
        tensors |= {weights_stem(role): weights(role) for role in self._models.diverged()}
        steps: dict[Role, int] = {role: self._models.optimizer(role).num_steps for role in self._models.trained()}
        trainer_files.save(folder, tensors, sharding.ranks, meta=step_counts(steps), later=later)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote with any number of ranks; bit-identical with the same number.

        Raises CheckpointError on all ranks if the checkpoint is incomplete, of another model, or unreadable on one.
        """
        for role in self._models.trained():
            reshard(self._models[role].module)
        with self.ranks.agreed():
            meta = trainer_files.read_meta(folder)
            check_roles(folder, meta, self._models.trained())
            for role in self._models.trained():
                self._models.use(role)
                self._load_role(folder, meta, role)
        for role in frozen_roles(meta):
            self.copy_weights("actor", role)  # also what checkpoints do not contain, such as rotary frequencies
            with self.ranks.agreed():
                _load_weights(folder, meta, weights_stem(role), self._models[role].module.model, self.sharding)
        if not self.settings.checkpoint.no_load_rng:
            with self.ranks.agreed():
                trainer_files.restore_random(folder, meta, self.ranks)

    def _load_role(self, folder: Path, meta: dict[str, Any], role: Role) -> None:
        model, optimizer = self._models[role].module.model, self._models.optimizer(role)
        with optimizer.loaded():
            with _reader(folder, meta, weights_stem(role), model) as reader:
                reader.copy_into(_trained_tensors(model, optimizer, self.sharding), self.sharding)
            optimizer.write_back()
        optimizer.zero_grad()
        optimizer.reset()
        optimizer.num_steps = step_count(meta, role)
        if self.settings.checkpoint.no_load_optim:
            return
        if meta["has_optimizer"]:
            with _reader(folder, meta, optimizer_stem(role), model) as reader:
                optimizer.restore(reader)
        else:
            logger.warning("%s was saved without optimizer states (--no-save-optim); moments start at zero", folder)

    def save_hf(self, folder: Path, *, model: Role = "actor") -> None:
        """Write a folder that transformers can load, with tokenizer and generation config of `hf_checkpoint`."""
        companions, dtype = self.settings.hf_checkpoint, self.settings.dtype
        tensors, module = self.named_weights(model=model), self._models[model].module.model
        if model == "critic":
            tensors = exported(tensors)
        trainer_files.write_model(folder, lambda: module, tensors, self.ranks, dtype=dtype, companions=companions)

    def _stats(self, role: Role, micro: MicroBatch, routing: RoutingState | None, request: StatsRequest) -> TokenStats:
        packed, optimizer = self._models[role].module, self._models[role].optimizer or self.optimizer
        targets_R, temperature = micro.tokens_T[micro.response_pos_R], self.settings.temperature
        on_cpu = self.device.type == "cpu"

        def output_layer(
            hidden_RD: Tensor, head_VD: Tensor, bias_V: Tensor | None, local_R: Tensor | None
        ) -> tuple[Tensor, ...]:
            if request.logits:
                logits_RV = F.linear(hidden_RD, head_VD, bias_V)
                if packed.softcap is not None:
                    logits_RV = packed.softcap * torch.tanh(logits_RV / packed.softcap)
                return (logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32)) / temperature,)
            if packed.is_value_model:
                return (values(hidden_RD, head_VD, bias_V),)
            if request.head in ("top_ids", "top_log_probs", "teacher_kl"):
                return self._target_stats(micro, request, hidden_RD, head_VD, bias_V, local_R, packed.softcap)
            stats = token_stats(
                hidden_RD,
                head_VD,
                targets_R if local_R is None else targets_R[local_R],
                temperature=temperature,
                chunk_size=chunk_rows(self.settings.train.log_probs_chunk_size, len(head_VD), on_cpu=on_cpu),
                entropy=request.entropy,
                entropy_grad=request.entropy_grad,
                bias_V=bias_V,
                softcap=packed.softcap,
            )
            hidden = (hidden_RD,) if request.head == "hidden" else ()
            return (stats.log_probs_R, *(() if stats.entropy_R is None else (stats.entropy_R,)), *hidden)

        # logits and their gradient; the gradient of the weight in two dtypes
        head_bytes = 0 if packed.is_value_model else 2 * logits_bytes(on_cpu=on_cpu) + 6 * packed.head_VD.numel()
        pending_bytes = optimizer.pending_bytes + self._pass_bytes
        outputs = packed(micro, output_layer, pending_bytes=pending_bytes, head_bytes=head_bytes, routing=routing)
        rerouted_R = None if routing is None else routing.rerouted_R
        if packed.is_value_model:
            return TokenStats(outputs[0].new_empty(0), values_R=outputs[0])
        if not request.logits:
            names = ["log_probs_R", *(["entropy_R"] if request.entropy else []), HEAD_OUTPUTS.get(request.head, "")]
            return TokenStats(**dict(zip(names, outputs, strict=False)), rerouted_R=rerouted_R)
        logits_RV = outputs[0]
        options = {"entropy": request.entropy, "entropy_grad": request.entropy_grad}
        stats = stats_from_logits(logits_RV, targets_R, temperature=1.0, **options)
        return TokenStats(stats.log_probs_R, stats.entropy_R, logits_RV, rerouted_R=rerouted_R)

    def _target_stats(
        self,
        micro: MicroBatch,
        request: StatsRequest,
        hidden_RD: Tensor,
        head_VD: Tensor,
        bias_V: Tensor | None,
        local_R: Tensor | None,
        softcap: float | None,
    ) -> tuple[Tensor, ...]:
        targets_RM, teacher = micro.tokens_T[micro.response_pos_R][:, None], None
        if request.head == "top_log_probs":
            targets_RM = torch.cat([targets_RM, column(micro, "teacher_top_ids").long()], 1)
        if request.head == "teacher_kl":
            teacher_RD = micro.teacher_hidden_RD
            assert teacher_RD is not None  # the teacher's pass came first
            assert self._teacher_head is not None
            teacher_RD = teacher_RD.to(self.device)
            teacher = TeacherHead(teacher_RD if local_R is None else teacher_RD[local_R], *self._teacher_head)
        chunk_size, on_cpu = self.settings.train.log_probs_chunk_size, self.device.type == "cpu"
        stats = target_stats(
            hidden_RD,
            head_VD,
            targets_RM if local_R is None else targets_RM[local_R],
            temperature=self.settings.temperature,
            chunk_size=chunk_rows(chunk_size, (1 + (teacher is not None)) * len(head_VD), on_cpu=on_cpu),
            entropy=request.entropy,
            entropy_grad=request.entropy_grad,
            bias_V=bias_V,
            softcap=softcap,
            teacher=teacher,
            top_k=request.top_k if request.head == "top_ids" else 0,
        )
        also = {"top_ids": stats.top_ids_RK, "top_log_probs": stats.log_probs_RM[:, 1:], "teacher_kl": stats.kl_R}
        outputs = (stats.log_probs_RM[:, 0], stats.entropy_R, also[request.head])
        return tuple(output for output in outputs if output is not None)

    def _head_of(self, packed: PackedModel) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the teacher's head for the policy's tokens; with several ranks a collective.

        Models of one tokenizer may have different numbers of rows beyond its tokens.
        """
        num_rows = self.actor.head_VD.shape[0]

        def whole(tensor: Tensor) -> Tensor:
            tensor = self.sharding.full(tensor, dtype=self.settings.dtype)[:num_rows]
            return tensor.clone() if self.settings.shares_device else tensor  # the model leaves before its head is used

        bias_V = packed.head_bias_V
        return whole(packed.head_VD), None if bias_V is None else whole(bias_V)

    def _first_bad(self, role: Role, stats: TokenStats) -> str:
        for name, tensor in self._models[role].module.model.named_parameters():
            if not bool(torch.isfinite(self.sharding.local(tensor)).all()):
                return f"; parameter {name} is not finite"
        bad, what = int((~torch.isfinite(stats.output_R)).sum()), "log-probs" if stats.values_R is None else "values"
        return f"; all parameters are finite, {bad} of {len(stats.output_R)} {what} are not"


def _onload(model: FsdpModel) -> MemoryTransfer:
    started = time.perf_counter()
    moved = model.host.reload()
    if model.optimizer is not None and model.optimizer.rounded():
        model.optimizer.write_back()
    return MemoryTransfer(moved.num_bytes, time.perf_counter() - started)


def _freeze(model: PreTrainedModel) -> None:
    model.requires_grad_(False)


def choose_trained(
    model: PreTrainedModel,
    *,
    train_only: Sequence[str] | None = None,
    freeze: Sequence[str] | None = None,
    freeze_flag: str = FREEZE_FLAG,
) -> None:
    """Set `requires_grad` by regular expressions searched in parameter names: `train_only` first, then `freeze`.

    Raises ConfigError for an expression that does not compile or matches no parameter, or if none is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    trained = matching_names(names, train_only, ONLY_TRAIN_FLAG) if train_only else set(names)
    frozen = matching_names(names, freeze, freeze_flag) if freeze else set[str]()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained and name not in frozen)
    if not trained - frozen:
        raise ConfigError(NOTHING_TRAINED)


# -- checkpoints, under Hugging Face names and shapes; with several ranks every function is a collective


def _load_weights(folder: Path, meta: dict[str, Any], stem: str, model: PreTrainedModel, sharding: Sharding) -> None:
    with _reader(folder, meta, stem, model) as reader:
        reader.copy_into(dict(hf.named_tensors(model)), sharding)


def _trained_tensors(model: PreTrainedModel, optimizer: MasterOptimizer, sharding: Sharding) -> dict[str, Tensor]:
    """Return a trained model's tensors by name, master weights instead of parameters if they are separate."""
    separate = {} if sharding.is_sharded else {weight.name: weight.master for weight in optimizer.weights}
    return {name: separate.get(name, tensor) for name, tensor in hf.named_tensors(model)}


def _whole(model: PreTrainedModel, tensors: dict[str, Tensor], sharding: Sharding) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        yield from hf.on_disk(model, name, sharding.full(tensor))


def _moments(model: PreTrainedModel, optimizer: MasterOptimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the moments under the same names; a parameter's step count once for each of its checkpoint tensors."""
    forms = {name: hf.disk_rows(model, name, parameter) for name, parameter in hf.named_tensors(model)}
    for key, tensor in optimizer.state_tensors():
        name, _, moment = key.rpartition("/")
        if moment == "step":
            yield from ((f"{piece}/step", tensor.clone()) for row in forms[name].pieces for piece in row)
        else:
            yield from ((f"{n}/{moment}", part) for n, part in hf.on_disk(model, name, tensor))


@contextmanager
def _reader(folder: Path, meta: dict[str, Any], stem: str, model: PreTrainedModel) -> Generator[TensorReader]:
    moments = ("step", *chain(*MOMENTS.values()))
    suffixes = [f"/{moment}" for moment in moments] if is_optimizer(stem) else [""]
    with trainer_files.reader(folder, meta, stem) as reader:
        for name, tensor in hf.named_tensors(model):
            form = hf.disk_rows(model, name, tensor)
            for suffix in suffixes:
                reader.join(name, form, suffix=suffix)
        yield reader
