"""Builds the trainer: backend, losses, hooks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from furlong.algo.loss import PolicyLoss, SftLoss, observed, tis_correction
from furlong.algo.packing import Balance
from furlong.config.sections import CheckpointFlags, Config
from furlong.core.batch import RolloutBatch
from furlong.core.batch_file import save_batch
from furlong.core.checkpoint_folder import find_foreign_weights, find_initial_weights
from furlong.core.cuda_allocator import cuda_allocator
from furlong.diagnosis.self_test import SelfTest
from furlong.errors import ConfigError
from furlong.interfaces import LossFn, Role, SamplingParams, Trainer
from furlong.loop.checkpoints import Checkpoints
from furlong.models import hf_model as hf
from furlong.tracking.jsonl import StepFile
from furlong.training.batch_split import Packing
from furlong.training.checkpoint.dist_files import is_dist_folder
from furlong.training.checkpoint.dist_optimizer import optimizer_to_continue
from furlong.training.digests import Digests
from furlong.training.fsdp.backend import FsdpBackend
from furlong.training.local_trainer import LocalTrainer
from furlong.training.loss_hooks import correction_from_hook, loss_from_hook, reducer_from_hook
from furlong.training.megatron.parallel_layout import Compute, Layout, given_problems
from furlong.training.profiling import Profiling
from furlong.training.ranks import Ranks
from furlong.training.router_balance import Balancing
from furlong.training.routing_replay import Replay
from furlong.training.settings import BackendSettings, FsdpSettings, MegatronSettings, Offload, RoundSettings
from furlong.training.worker import Hooks, RoundWorker
from furlong.wiring.shared import Shared

if TYPE_CHECKING:
    from furlong.training.megatron.megatron_backend import MegatronBackend


def build_trainer(shared: Shared, num_rollout: int) -> Trainer:
    """Build the trainer of this process."""
    return LocalTrainer(build_worker(shared, num_rollout, Ranks()))


def build_worker(shared: Shared, num_rollout: int, ranks: Ranks) -> RoundWorker:
    """Build what trains on one rank; where there are several, the default process group is there already."""
    config, hooks, args = shared.config, shared.hooks, shared.args
    algo, rollout = config.algo, config.rollout
    backend = build_backend(shared, num_rollout, ranks)
    return RoundWorker(
        backend,
        settings=algo,
        loss=_loss(shared),
        packing=build_packing(config),
        hooks=Hooks(
            advantages=None
            if hooks.custom_advantage_function is None
            else partial(hooks.custom_advantage_function, args),
            postprocess=None
            if hooks.rollout_data_postprocess is None
            else partial(hooks.rollout_data_postprocess, args),
            dump=_train_dump(shared, ranks.rank),
            watch=_digests(shared, ranks),
            self_test=_self_test(config),
            refused=partial(_keep_refused, shared.folder, ranks),
        ),
        rounds=RoundSettings(
            compute_advantages=algo.compute_advantages_and_returns and algo.loss_type != "sft_loss",
            max_response_len=rollout.rollout_max_response_len,
            ref_update_interval=algo.ref_update_interval,
            reset_optimizer_states=config.optim.reset_optimizer_states,
            keep_old_actor=algo.keep_old_actor,
            use_rollout_entropy=algo.use_rollout_entropy,
            records_routes=_replay(config) == "policy",
        ),
        flops=backend.flops,
        profiling=_profiling(shared, ranks),
        ranks=ranks,
        num_kv_heads=hf.num_kv_heads(shared.model_dir),
        num_experts=hf.num_experts(shared.model_dir),
    )


def build_backend(shared: Shared, num_rollout: int, ranks: Ranks) -> FsdpBackend | MegatronBackend:
    """Build the model and its optimizer, or this rank's part of them."""
    cuda_allocator.expand_segments(torch.device(shared.device))
    settings = _backend_settings(shared, num_rollout)
    if shared.config.train.train_backend == "megatron":
        return _megatron(shared, settings, ranks)
    train = shared.config.train
    backend = FsdpBackend(settings, FsdpSettings(recompute_activations=train.recompute_activations), ranks=ranks)
    backend.actor.check_micro_batches(is_one_sequence=train.micro_batch_size == 1 and not train.use_dynamic_batch_size)
    return backend


def _megatron(shared: Shared, settings: BackendSettings, ranks: Ranks) -> MegatronBackend:
    """Build the backend on Megatron-core. Raises ConfigError for flags and a model that do not fit."""
    from furlong.training.megatron import megatron_compat as compat

    compat.prepare()  # before anything of Megatron-core is imported elsewhere
    from furlong.training.megatron.megatron_backend import MegatronBackend

    config = shared.config
    model = hf.load_config(settings.hf_checkpoint).to_dict()
    if problems := list(given_problems(config.train, config.megatron, model)):
        raise ConfigError("\n".join(problems))
    flags, start, first_optimizer = config.checkpoint, settings.first_weights, None
    if start is not None and is_dist_folder(start) and not flags.finetune:
        first_optimizer = optimizer_to_continue(
            start, wanted=not flags.no_load_optim, start=config.data.start_rollout_id
        )
    own = MegatronSettings(
        layout=Layout.of(config.train, config.megatron, model["num_hidden_layers"]),
        first_optimizer=first_optimizer,
        seed=config.train.seed,
        compute=Compute.of(config.train, config.megatron),
        reduce_in_float32=not config.megatron.grad_reduce_in_bf16,
        overlap_reduce=config.megatron.overlap_grad_reduce,
        balancing=_balancing(config),
        grouped_gemm=config.moe.moe_grouped_gemm,
    )
    return MegatronBackend(settings, own, ranks=ranks)


def _backend_settings(shared: Shared, num_rollout: int) -> BackendSettings:
    config = shared.config
    train, checkpoint = config.train, config.checkpoint
    return BackendSettings(
        hf_checkpoint=shared.model_dir,
        first_weights=_first_weights(checkpoint),
        role_folders=_role_folders(checkpoint),
        dtype=shared.dtype,
        device=torch.device(shared.device),
        temperature=config.rollout.rollout_temperature if config.algo.loss_type != "sft_loss" else 1.0,
        log_probs_chunk_size=train.log_probs_chunk_size,
        compile_layers={"auto": None, "on": True, "off": False}[train.compile_layers],
        routing_replay=_replay(config),
        check_finite=config.fault.check_for_nan_in_loss_and_grad,
        optim=config.optim,
        total_steps=num_rollout * (train.num_steps_per_rollout or 1) or None,
        train_only=train.only_train_params_name_list,
        freeze=train.freeze_params_name_list,
        offload_optimizer=_offload(config),
        save_optimizer=not checkpoint.no_save_optim,
        load_optimizer=not checkpoint.no_load_optim,
        load_random=not checkpoint.no_load_rng,
    )


def _balancing(config: Config) -> Balancing:
    moe = config.moe
    return Balancing(
        kind=moe.moe_router_load_balancing_type,
        coeff=moe.moe_aux_loss_coeff,
        z_coeff=moe.moe_z_loss_coeff or 0.0,
        bias_rate=moe.moe_router_bias_update_rate if moe.moe_router_enable_expert_bias else 0.0,
    )


def _replay(config: Config) -> Replay:
    """Whose choice of experts is trained with."""
    if config.moe.use_rollout_routing_replay:
        return "rollout"
    return "policy" if config.moe.use_routing_replay else "none"


def _offload(config: Config) -> Offload:
    """What of the optimizer is on the host between steps."""
    if config.optim.optimizer_cpu_offload:
        return "all"
    return "moments" if config.optim.offload_optimizer_states else "nothing"


def build_sizes(config: Config, num_ranks: int) -> Ranks:
    """How trainer processes share the model and their samples, as the first of them."""
    train = config.train
    return Ranks(
        world_size=num_ranks,
        replicate=train.dp_replicate_size,
        context=train.context_parallel_size,
        tensor=train.tensor_model_parallel_size,
        pipeline=train.pipeline_model_parallel_size,
    )


def _digests(shared: Shared, ranks: Ranks) -> Digests | None:
    """Hashes of every stage, in a file of the run's folder; every rank but the first has its own."""
    if not shared.config.debug.debug_determinism:
        return None
    name = "determinism.jsonl" if ranks.rank == 0 else f"determinism.rank{ranks.rank}.jsonl"
    file = StepFile(shared.folder / name)
    shared.files.append(file)
    return Digests(file.append)


def _profiling(shared: Shared, ranks: Ranks) -> Profiling | None:
    debug = shared.config.debug
    if not (debug.use_pytorch_profiler or debug.record_memory_history or debug.trace):
        return None
    return Profiling(
        folder=shared.folder / "profile",
        rank=ranks.rank,
        targets=debug.profile_target if debug.use_pytorch_profiler else (),
        start=debug.profile_step_start,
        end=debug.profile_step_end,
        memory_rollouts=debug.memory_snapshot_num_steps if debug.record_memory_history else 0,
    )


def build_packing(config: Config) -> Packing:
    """How samples become steps and micro-batches; the driver of several ranks needs it, too."""
    train = config.train
    max_tokens = train.max_tokens_per_gpu
    balance: Balance = "flops" if train.balance_by_flops else "tokens" if train.balance_data else "none"
    return Packing(
        global_batch_size=train.global_batch_size,
        max_tokens=max_tokens * train.context_parallel_size if train.use_dynamic_batch_size and max_tokens else None,
        micro_batch_size=train.micro_batch_size,
        balance=balance,
    )


def _first_weights(flags: CheckpointFlags) -> Path | None:
    return find_initial_weights(flags.load, step=flags.ckpt_step, finetune=flags.finetune)


def _role_folders(flags: CheckpointFlags) -> dict[Role, Path]:
    """Say where the reference is, if not in --hf-checkpoint: a Hugging Face folder, or a checkpoint."""
    if flags.ref_load is None:
        return {}
    folder = Path(flags.ref_load)
    foreign = find_foreign_weights(folder, step=flags.ref_ckpt_step)
    if foreign is not None:
        return {"ref": foreign}
    found = Checkpoints(load_dir=folder, load_step=flags.ref_ckpt_step, flag="--ref-load").find()
    assert found is not None  # it is refused otherwise
    return {"ref": found / "trainer"}


def _loss(shared: Shared) -> LossFn:
    config, hooks = shared.config, shared.hooks
    if config.algo.loss_type == "sft_loss":
        return SftLoss()
    if config.algo.loss_type == "custom_loss":
        assert hooks.custom_loss_function is not None  # validate has seen to it
        return loss_from_hook(hooks.custom_loss_function, shared.args)
    correction = reducer = None
    if hooks.custom_tis_function is not None:
        correction = correction_from_hook(hooks.custom_tis_function, shared.args)
    if config.algo.get_mismatch_metrics and not config.algo.use_tis:
        correction = observed(correction or tis_correction(config.algo))
    if hooks.custom_pg_loss_reducer_function is not None:
        reducer = reducer_from_hook(
            hooks.custom_pg_loss_reducer_function,
            per_token=config.algo.calculate_per_token_loss,
            rollouts_per_step=config.train.global_batch_size or 1,
        )
    return PolicyLoss(config.algo, correction=correction, pg_reducer=reducer)


def _self_test(config: Config) -> SelfTest | None:
    """The comparison of engine and trainer on the first batches, which knows how the engine was asked to sample."""
    if config.fault.skip_self_test:
        return None
    rollout = config.rollout
    return SelfTest(
        SamplingParams(
            temperature=rollout.rollout_temperature,
            top_p=rollout.rollout_top_p,
            top_k=rollout.rollout_top_k,
            min_p=rollout.rollout_min_p,
        ),
        replays_routing=config.moe.use_rollout_routing_replay,
    )


def _keep_refused(folder: Path, ranks: Ranks, batch: RolloutBatch) -> Path:
    """Write the samples of a refused step into the run's folder; `core.batch_file.load_batch` reads them."""
    rank = f"_{ranks.rank}" if ranks.world_size > 1 else ""
    path = folder / f"refused_{batch.rollout_id}{rank}.safetensors"
    save_batch(path, batch)
    return path


def _train_dump(shared: Shared, rank: int) -> Callable[[RolloutBatch], None] | None:
    template = shared.config.debug.save_debug_train_data
    if template is None:
        return None

    def dump(batch: RolloutBatch) -> None:
        path = Path(template.replace("{rollout_id}", str(batch.rollout_id)).replace("{rank}", str(rank)))
        path.parent.mkdir(parents=True, exist_ok=True)
        save_batch(path, batch)

    return dump
