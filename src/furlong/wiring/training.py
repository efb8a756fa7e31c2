"""Builds the trainer of one process: backend, loss, hooks, and its transport of weights."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from furlong.algo.policy_loss import PolicyLoss, SftLoss, metrics_only, tis_correction
from furlong.algo.value_loss import ValueLoss
from furlong.config.critic import critic_settings
from furlong.config.facts import frozen_models
from furlong.config.sections import Config
from furlong.core.algorithms import Role
from furlong.core.batch import RolloutBatch
from furlong.core.model_config import read_json
from furlong.core.transports import transport_spec
from furlong.core.user_functions import accepted_keywords
from furlong.diagnosis.self_test import LogProbSelfTest
from furlong.errors import ConfigError
from furlong.files.atomic import atomic_file
from furlong.files.batch_file import save_batch
from furlong.files.checkpoint_folder import check_has_steps, find_foreign_weights, find_initial_weights
from furlong.interfaces import LossFn, SamplingParams, Trainer
from furlong.loop.checkpoints import Checkpoints
from furlong.models.hf_config import load_config, num_experts, num_kv_heads
from furlong.models.quantized_folder import (
    check_qat,
    is_quantized,
    qat_source,
    stored_dtypes,
    trained_scheme,
    trainer_folders,
    training_problem,
    update_problem,
)
from furlong.quantization.fp8 import Fp8Blocks
from furlong.quantization.scheme import QuantizationScheme
from furlong.tracking.run_files import StepFile
from furlong.training.fsdp.backend import FsdpBackend
from furlong.training.hook_adapters import correction_from_hook, loss_from_hook, reducer_from_hook
from furlong.training.local_trainer import LocalTrainer
from furlong.training.megatron.parallel_layout import layout_flag_problems
from furlong.training.megatron_lm.dist_files import is_dist_folder
from furlong.training.megatron_lm.dist_optimizer import optimizer_to_continue
from furlong.training.packing import Packing
from furlong.training.ranks import Ranks
from furlong.training.round_observer import RoundObserver
from furlong.training.settings import BackendSettings, MegatronHooks, RoleSettings
from furlong.training.worker import RoleLoss, RoundHooks, RoundWorker
from furlong.transfer.cuda_allocator import cuda_allocator
from furlong.weight_sync.transports.transport import Transport, TransportContext
from furlong.wiring.context import RunContext

if TYPE_CHECKING:
    from furlong.cluster.ray_trainer import RayTrainer
    from furlong.training.megatron.megatron_backend import MegatronBackend

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingParts:
    """The trainer of a run; `ray_trainer` is the same object if its ranks are on Ray."""

    trainer: Trainer
    ray_trainer: RayTrainer | None = None


def build_trainer(context: RunContext, num_rollout: int) -> Trainer:
    """Build a trainer that runs in this process."""
    return LocalTrainer(build_worker(context, num_rollout, Ranks()))


def build_worker(context: RunContext, num_rollout: int, ranks: Ranks) -> RoundWorker:
    """Build the worker of one rank. With several ranks the default process group must exist."""
    config = context.config
    backend = build_backend(context, num_rollout, ranks)
    return RoundWorker(
        backend,
        algo=config.algo,
        losses=_losses(context),
        opd=config.opd,
        packing=build_packing(config),
        hooks=_round_hooks(context, ranks),
        flops=backend.flops,
        observer=_observer(context, ranks),
        ranks=ranks,
        max_response_len=config.rollout.rollout_max_response_len,
        reset_optimizer=config.optim.reset_optimizer_states,
        records_routes=backend.settings.routing_replay == "policy",
        num_kv_heads=num_kv_heads(context.model_dir),
        num_experts=num_experts(context.model_dir),
    )


def build_backend(context: RunContext, num_rollout: int, ranks: Ranks) -> FsdpBackend | MegatronBackend:
    """Build this rank's part of the model and its optimizer. Raises ConfigError for flags that do not fit the model."""
    cuda_allocator.expand_segments(torch.device(context.device))
    settings, train = _backend_settings(context, num_rollout), context.config.train
    if train.train_backend == "megatron":
        from furlong.training.megatron import megatron_compat as compat

        compat.prepare()  # before anything imports Megatron-core
        from furlong.training.megatron.megatron_backend import MegatronBackend

        return MegatronBackend(settings, ranks=ranks)
    backend = FsdpBackend(settings, ranks=ranks)
    backend.actor.check_micro_batches(is_one_sequence=train.micro_batch_size == 1 and not train.use_dynamic_batch_size)
    return backend


def _backend_settings(context: RunContext, num_rollout: int) -> BackendSettings:
    config, checkpoint = context.config, context.config.checkpoint
    if checkpoint.load is not None:
        check_has_steps("--load", checkpoint.load, "--ckpt-step", checkpoint.ckpt_step)
    start = find_initial_weights(checkpoint.load, step=checkpoint.ckpt_step, finetune=checkpoint.finetune)
    initial_optimizer = None
    if config.train.train_backend == "megatron":
        model = load_config(context.model_dir).to_dict()
        if problems := list(layout_flag_problems(config.train, config.megatron, model)):
            raise ConfigError("\n".join(problems))
        if start is not None and is_dist_folder(start) and not checkpoint.finetune:
            initial_optimizer = optimizer_to_continue(
                start, loads_states=not checkpoint.no_load_optim, start=config.data.start_rollout_id
            )
    frozen = _frozen_folders(config)
    if start is None and (not config.algo.uses_reference or is_quantized(context.model_dir)):
        start = frozen.get("ref")  # as in slime; a checkpoint of --load replaces these weights
    if not config.algo.uses_reference:
        frozen.pop("ref", None)
    trained: dict[Role, RoleSettings] = {}
    total_steps = num_rollout * (config.train.num_steps_per_rollout or 1) or None
    if config.algo.uses_critic:
        flags = critic_settings(config)
        folder = _critic_folder(flags.load, context.model_dir) if flags.load is not None else start or context.model_dir
        optim = flags.optim
        if total_steps is not None and optim.lr_decay_iters is None:
            optim = dataclasses.replace(optim, lr_decay_iters=total_steps * config.algo.critic_steps_per_rollout)
        trained["critic"] = RoleSettings(folder, optim, config.algo.critic_freeze_params_name_list)
    _check_quantized(context)
    scheme = None
    if is_quantized(context.model_dir):
        scheme = trained_scheme(context.model_dir, load_config(context.model_dir))
    if (source := qat_source(flag=config.train.int4_qat)) is not None:
        check_qat(source, context.model_dir, scheme)
    if source is not None and scheme is not None:
        logger.info(
            "quantization-aware training: %d weights are rounded as the engines' (%s)",
            len(scheme.names), scheme.form.description
        )  # fmt: skip
    return BackendSettings(
        hf_checkpoint=context.model_dir,
        initial_weights=start,
        initial_optimizer=initial_optimizer,
        role_folders=frozen,
        trained=trained,
        shares_device=bool(trained) and shares_device(context),
        dtype=context.dtype,
        device=torch.device(context.device),
        temperature=config.rollout.rollout_temperature if config.algo.loss_type != "sft_loss" else 1.0,
        total_steps=total_steps,
        check_finite=config.fault.check_for_nan_in_loss_and_grad,
        engine_quantization=None if scheme is None or scheme.is_fixed else scheme,
        int4_qat=source is not None,
        train=config.train,
        optim=config.optim,
        moe=config.moe,
        megatron=config.megatron,
        checkpoint=checkpoint,
        hooks=_megatron_hooks(context),
    )


def shares_device(context: RunContext) -> bool:
    """Whether policy and critic take turns on the device; a CPU has no other memory to move them to."""
    return context.device == "cuda" and bool(context.config.cluster.offload_train)


def _check_quantized(context: RunContext) -> None:
    if context.config.checkpoint.dequantize:
        return
    folders = trainer_folders(context.config, context.model_dir)
    for flag, folder in folders.items():
        if (folder / "config.json").is_file():
            problem = training_problem(flag, folder, read_json(folder / "config.json"), stored_dtypes(folder))
            if problem is not None:
                raise ConfigError(problem)


def _megatron_hooks(context: RunContext) -> MegatronHooks:
    hooks, args = context.hooks, context.args
    provider, before = hooks.custom_model_provider, hooks.custom_megatron_before_log_prob_hook
    start, step = hooks.custom_megatron_init, hooks.custom_megatron_before_train_step_hook

    def provide(**stages: Any) -> Any:
        assert provider is not None
        return provider(**{name: stages[name] for name in accepted_keywords(provider, tuple(stages))})

    return MegatronHooks(
        initialized=None if start is None else partial(start, args),
        provider=None if provider is None else provide,
        before_log_probs=None if before is None else partial(before, args),
        before_step=None if step is None else partial(step, args),
    )


def _frozen_folders(config: Config) -> dict[Role, Path]:
    folders: dict[Role, Path] = {}
    for model in frozen_models(config):
        check_has_steps(model.flag, model.load, model.step_flag, model.step)
        foreign = find_foreign_weights(Path(model.load), step=model.step)
        if foreign is None:
            checkpoint = Checkpoints(load_dir=Path(model.load), load_step=model.step, flag=model.flag).find()
            assert checkpoint is not None  # validated
            foreign = checkpoint / "trainer"
        folders[model.role] = foreign
    return folders


def _critic_folder(load: str, policy: Path) -> Path:
    """Return the Hugging Face folder or the checkpoint of --critic-load, for the tokens of the model `policy`."""
    foreign = find_foreign_weights(Path(load), step=None)
    if foreign is not None:
        configs = [folder / "config.json" for folder in (foreign, policy)]
        size, needed = (int(read_json(path).get("vocab_size") or 0) if path.is_file() else 0 for path in configs)
        if 0 < size < needed:
            raise ConfigError(
                f"--critic-load {load} has a vocabulary of {size}, the policy {needed}; a critic reads the "
                "policy's tokens: give a model with the same tokenizer"
            )
        return foreign
    checkpoint = Checkpoints(load_dir=Path(load), flag="--critic-load").find()
    assert checkpoint is not None  # a missing one is an error
    return checkpoint / "trainer"


def build_transport(context: RunContext, device_types: Sequence[str], ranks: Ranks) -> Transport:
    """Build one trainer rank's transport to engines on devices of these types. Called on all ranks at once."""
    config, after_write = context.config, context.hooks.custom_update_weight_post_write
    on_gpu = context.device == "cuda" and all(kind == "cuda" for kind in device_types)
    spec = transport_spec(config.sync.update_weight_transport, mode=config.sync.update_weight_mode, on_gpu=on_gpu)
    module, _, name = spec.implementation.partition(":")
    implementation: type[Transport] = getattr(importlib.import_module(module), name)
    return implementation(
        TransportContext(
            config.sync,
            model_dir=context.model_dir,
            run_dir=context.folder,
            on_gpu=on_gpu,
            rank=ranks.rank,
            world_size=ranks.world_size,
            verbose=bool(config.debug.debug_weight_sync),
            after_write=None if after_write is None else partial(after_write, context.args),
        )
    )


def engine_scheme(context: RunContext) -> QuantizationScheme | None:
    """Return how the engines store the weights that are trained; None if they are not quantized.

    Raises ConfigError for a format that weight updates cannot be sent in, or that SGLang cannot load this way.
    """
    scheme, transport = trained_scheme(context.model_dir, load_config(context.model_dir)), context.config.sync
    if scheme is None:
        return None
    if (problem := update_problem(context.model_dir, scheme)) is not None:
        raise ConfigError(problem)
    is_rearranged = context.config.cluster.engine == "sglang" and not isinstance(scheme.form, Fp8Blocks)
    if is_rearranged and transport.update_weight_transport != "ipc":
        raise ConfigError(
            f"--update-weight-transport {transport.update_weight_transport} with {context.model_dir}, which is "
            f"{scheme.form.description}: SGLang rearranges such weights when it starts and loads them again only "
            "by ipc; share the trainer's GPUs (--colocate), or use FP8 in blocks (`furlong convert hf-to-fp8`)"
        )
    return scheme


def build_sizes(config: Config, num_ranks: int) -> Ranks:
    """Return the parallel sizes of `num_ranks` trainer processes, as rank 0."""
    train = config.train
    return Ranks(
        world_size=num_ranks,
        replicate=train.dp_replicate_size,
        context=train.context_parallel_size,
        tensor=train.tensor_model_parallel_size,
        pipeline=train.pipeline_model_parallel_size,
    )


def build_packing(config: Config) -> Packing:
    """Return how samples form steps and micro-batches. Also used by the driver of several ranks."""
    train = config.train
    max_tokens = train.max_tokens_per_gpu
    return Packing(
        global_batch_size=train.global_batch_size,
        max_tokens=max_tokens * train.context_parallel_size if train.use_dynamic_batch_size and max_tokens else None,
        micro_batch_size=train.micro_batch_size,
        balance="flops" if train.balance_by_flops else "tokens" if train.balance_data else "none",
    )


def _losses(context: RunContext) -> list[RoleLoss]:
    algo = context.config.algo
    if not algo.uses_critic:
        return [RoleLoss("actor", _loss(context))]
    repeats = algo.critic_steps_per_rollout
    critic = RoleLoss("critic", ValueLoss(algo.value_clip), weights="value_weights", repeats=repeats)
    return [critic, RoleLoss("actor", _loss(context), start=algo.num_critic_only_steps)]


def _loss(context: RunContext) -> LossFn:
    config, hooks = context.config, context.hooks
    if config.algo.loss_type == "sft_loss":
        return SftLoss()
    if config.algo.loss_type == "custom_loss":
        assert hooks.custom_loss_function is not None  # validated
        return loss_from_hook(hooks.custom_loss_function, context.args)
    correction = reducer = None
    if hooks.custom_tis_function is not None:
        correction = correction_from_hook(hooks.custom_tis_function, context.args)
    if config.algo.get_mismatch_metrics and not config.algo.use_tis:
        correction = metrics_only(correction or tis_correction(config.algo))
    if hooks.custom_pg_loss_reducer_function is not None:
        reducer = reducer_from_hook(
            hooks.custom_pg_loss_reducer_function,
            per_token=config.algo.calculate_per_token_loss,
            rollouts_per_step=config.train.global_batch_size or 1,
        )
    return PolicyLoss(config.algo, opd=config.opd, correction=correction, pg_reducer=reducer)


def _round_hooks(context: RunContext, ranks: Ranks) -> RoundHooks:
    hooks, args = context.hooks, context.args
    advantages, postprocess = hooks.custom_advantage_function, hooks.rollout_data_postprocess
    return RoundHooks(
        advantages=None if advantages is None else partial(advantages, args),
        postprocess=None if postprocess is None else partial(postprocess, args),
        dump=_train_dump(context, ranks.rank),
        self_test=_self_test(context),
    )


def _train_dump(context: RunContext, rank: int) -> Callable[[RolloutBatch], None] | None:
    template = context.config.debug.save_debug_train_data
    if template is None:
        return None

    def dump(batch: RolloutBatch) -> None:
        path = Path(template.replace("{rollout_id}", str(batch.rollout_id)).replace("{rank}", str(rank)))
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary:  # the values of the training pass are added to a batch that is there
            save_batch(temporary, batch)

    return dump


def _observer(context: RunContext, ranks: Ranks) -> RoundObserver:
    debug, record = context.config.debug, None
    if debug.debug_determinism:  # one file per rank
        name = "determinism.jsonl" if ranks.rank == 0 else f"determinism.rank{ranks.rank}.jsonl"
        context.files.append(file := StepFile(context.folder / name))
        record = file.append
    keep_refused = partial(_save_refused, context.folder, ranks)
    return RoundObserver(context.folder / "profile", ranks.rank, debug, record=record, keep_refused=keep_refused)


def _self_test(context: RunContext) -> LogProbSelfTest | None:
    config = context.config
    if config.fault.skip_self_test:
        return None
    rollout = config.rollout
    return LogProbSelfTest(
        SamplingParams(
            temperature=rollout.rollout_temperature,
            top_p=rollout.rollout_top_p,
            top_k=rollout.rollout_top_k,
            min_p=rollout.rollout_min_p,
        ),
        replays_routing=config.moe.use_rollout_routing_replay,
        is_bfloat16=context.dtype == torch.bfloat16 and config.cluster.embedded_dtype != "float32",
    )


def _save_refused(folder: Path, ranks: Ranks, batch: RolloutBatch) -> Path:
    rank = f"_{ranks.rank}" if ranks.world_size > 1 else ""
    path = folder / f"refused_{batch.rollout_id}{rank}.safetensors"
    save_batch(path, batch)
    return path


def seed_everything(seed: int) -> None:
    """Seed the global random generators, which hooks may use; checkpoints contain their states."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
