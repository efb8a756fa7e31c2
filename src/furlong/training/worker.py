"""Training on one rollout on one rank, independent of the backend.

    1. plan       optimizer steps and their micro-batches
    2. passes     per-token columns of the old policy and other models, if anything reads them
    3. advantages from rewards to tokens, over the whole batch; hooks
    4. steps      for each trained role: forward_backward of each micro-batch, then optim_step
    5. metrics    of the batch, the steps and the clock

Sums run in plan order, so the same batch on the same weights gives bit-identical results.
Axes: N samples, R response tokens.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from furlong.algo.advantage import distilled, token_advantages
from furlong.algo.distillation import reverse_kl
from furlong.algo.log_ratio import kl_estimate
from furlong.algo.passes import needed_passes
from furlong.algo.reduce import step_mean
from furlong.algo.value_loss import explained_variance
from furlong.config.sections import AlgoFlags, OpdFlags
from furlong.core.algorithms import Pass, Read, Role
from furlong.core.batch import FloatArray, FlopsModel, IntArray, MicroBatch, RolloutBatch, pack_micro_batch
from furlong.core.device_memory import MemoryTransfer
from furlong.core.metric import Metrics, maximum, mean, merge, total
from furlong.core.tracing import heartbeat, tracer
from furlong.core.weights import WeightSource
from furlong.errors import CheckpointError, DataError, TrainerError
from furlong.files.atomic import PendingFiles
from furlong.files.checkpoint_folder import read_object
from furlong.interfaces import HeadOutput, LossFn, TokenStats
from furlong.training.backend_interface import (
    Backend,
    MicroBatchTooLargeError,
    NotFiniteLossError,
    OptimReport,
    PipelinedBackend,
)
from furlong.training.hook_adapters import RolloutDataHook, apply_hook
from furlong.training.loss_wrappers import LossRecorder, filled_column
from furlong.training.packing import Packing, RankPart, split_batch
from furlong.training.ranks import Ranks
from furlong.training.round_metrics import Clock, batch_metrics, perf_metrics
from furlong.training.round_observer import RoundObserver
from furlong.training.settings import REPLAYED

logger = logging.getLogger(__name__)

WORKER_STATE = "worker.json"


class SelfTest(Protocol):
    """Compares the trainer's log-probs with the engine's before the first optimizer step (`diagnosis.self_test`)."""

    def due(self, batch: RolloutBatch) -> bool:
        """Return whether this batch is to be compared."""
        ...

    def report(
        self,
        batch: RolloutBatch,
        log_probs_R: FloatArray,
        rerun: Callable[[IntArray], TokenStats] | None,
        quantized: Callable[[IntArray], Tensor | None] | None,
        /,
    ) -> Metrics:
        """Return metrics of the comparison.

        rerun: runs rows again with logits. quantized: log-probs of rows with the engine's quantized values, None if it
        has none. Both are None where they would be collectives.
        """
        ...


@dataclass(frozen=True)
class RoundHooks:
    """Functions called during a round.

    advantages: user function that sets advantages in `hook_adapters.rollout_data`. postprocess: user function of
    (rollout_id, rollout_data), after advantages. dump: gets the batch with all columns before the first step, and after
    the last one with `train_log_probs` and `train_entropy` as well.
    """

    advantages: RolloutDataHook | None = None
    postprocess: Callable[[int, dict[str, Any]], object] | None = None
    dump: Callable[[RolloutBatch], None] | None = None
    self_test: SelfTest | None = None


@dataclass(frozen=True)
class RoleLoss:
    """A model that a round trains, and the loss that it minimizes.

    weights: the column of its token weights. start: the first rollout that trains it. repeats: how often it takes the
    optimizer steps of a rollout.
    """

    role: Role
    loss: LossFn
    weights: str = "loss_weights"
    start: int = 0
    repeats: int = 1

    @property
    def prefix(self) -> str:
        """The prefix of its metrics."""
        return "train/" if self.role == "actor" else f"train/{self.role}-"


class RoundWorker:
    """Trains one rollout batch after another on a backend.

    losses: what a round trains, in order; packing: how samples form steps and micro-batches; flops: for TFLOPS metrics
    and balancing by FLOPs; ranks: this process among the trainer processes; max_response_len: divisor of a loss that
    needs a constant but has no --loss-constant-len; reset_optimizer: drop the moments before each rollout's first step;
    records_routes: always run the log-prob pass and replay its expert choices in the steps; num_kv_heads, num_experts:
    facts about the model for `weights`.

    >>> worker = RoundWorker(backend, algo=flags, losses=[RoleLoss("actor", PolicyLoss(flags))])  # doctest: +SKIP
    >>> worker.train(batch)["train/loss"].value                                                   # doctest: +SKIP
    """

    def __init__(
        self,
        backend: Backend,
        *,
        algo: AlgoFlags,
        losses: Sequence[RoleLoss],
        opd: OpdFlags | None = None,
        packing: Packing | None = None,
        hooks: RoundHooks | None = None,
        flops: FlopsModel | None = None,
        observer: RoundObserver | None = None,
        ranks: Ranks | None = None,
        max_response_len: int | None = None,
        reset_optimizer: bool = False,
        records_routes: bool = False,
        num_kv_heads: int | None = None,
        num_experts: int | None = None,
    ) -> None:
        self.backend, self.algo, self.losses, self.opd = backend, algo, losses, opd or OpdFlags()
        self.packing, self.hooks = packing or Packing(), hooks or RoundHooks()
        self.flops, self.observer, self.ranks = flops, observer or RoundObserver(), ranks or Ranks()
        self._computes_advantages = algo.compute_advantages_and_returns and algo.loss_type != "sft_loss"
        self._max_response_len, self._resets_optimizer = max_response_len, reset_optimizer
        self._records_routes = records_routes
        self._num_kv_heads, self._num_experts = num_kv_heads, num_experts
        # State of this rollout, keyed by the rows of a micro-batch.
        self._recorded_routes: dict[bytes, Tensor] = {}
        self._step_sizes: dict[bytes, tuple[int, int]] = {}  # tokens and samples of the micro-batch's step
        self._teacher_hidden: Tensor | None = None  # [response tokens of the batch, D] on the host
        self._old_version: int | None = None
        self._is_asleep = False

    @property
    def awake(self) -> Backend:
        """Return the backend. Raises TrainerError while it is asleep."""
        if self._is_asleep:
            raise TrainerError(
                "the trainer is asleep: its parameters and optimizer states are in host memory while engines use the "
                "device; call onload first"
            )
        return self.backend

    def weights(self) -> WeightSource:
        """Return the policy's current weights under Hugging Face names. Reading them is a collective."""
        return WeightSource(
            lambda: self.awake.named_weights(),
            is_live=self.backend.weights_are_views,
            num_kv_heads=self._num_kv_heads,
            num_experts=self._num_experts,
        )

    def offload(self) -> MemoryTransfer:
        """Offload the backend to the host; no effect on a CPU. Raises TrainerError if it cannot."""
        moved = MemoryTransfer(0, 0.0) if self._is_on_cpu else self.backend.offload()
        self._is_asleep = True
        if moved.num_bytes:
            logger.info("trainer asleep: %.2f GiB to the host in %.1f s", moved.num_bytes / 2**30, moved.seconds)
        return moved

    def onload(self) -> MemoryTransfer:
        """Reload the backend to its device."""
        moved = MemoryTransfer(0, 0.0) if self._is_on_cpu else self.backend.onload()
        self._is_asleep = False
        if moved.num_bytes:
            logger.info("trainer awake: %.2f GiB to the device, after %.1f s", moved.num_bytes / 2**30, moved.seconds)
        return moved

    @property
    def _is_on_cpu(self) -> bool:
        return torch.device(self.backend.device).type == "cpu"

    def train(self, batch: RolloutBatch) -> Metrics:
        """Run all optimizer steps of one rollout; every rank receives the whole batch."""
        started = time.perf_counter()
        parts = split_batch(
            batch,
            algo=self.algo,
            packing=self.packing,
            num_ranks=self.ranks.num_data,
            max_response_len=self._max_response_len,
            flops=self.flops,
        )
        return self.train_part(parts[self.ranks.data_rank], preprocess_s=time.perf_counter() - started)

    def train_part(self, part: RankPart, *, preprocess_s: float = 0.0) -> Metrics:
        """Run all optimizer steps on this rank's part of a rollout and return its metrics.

        `core.metric.merge` combines the metrics of the ranks. `preprocess_s` is added to the preprocessing time. Raises
        TrainerError while the backend is asleep.
        """
        _ = self.awake
        rollout_id = part.batch.rollout_id
        record = partial(self.observer.phase, rollout_id=rollout_id)
        with self.observer.round(rollout_id):
            return self._train_part(part, Clock({"data_preprocess": preprocess_s}, record))

    def _train_part(self, part: RankPart, clock: Clock) -> Metrics:
        batch, steps = part.batch, part.steps
        self._recorded_routes, self._teacher_hidden = {}, None
        pairs = zip(steps, part.sizes, strict=True)
        self._step_sizes = {rows.tobytes(): sizes for micro_rows, sizes in pairs for rows in micro_rows}
        self.observer.rollout(batch)
        batch = self._with_log_probs(batch, steps, clock)
        with clock.phase("data_preprocess"):
            batch = self._with_advantages(batch)
            if self.hooks.postprocess is not None:
                batch = apply_hook(batch, partial(self.hooks.postprocess, batch.rollout_id))
        if self.hooks.dump is not None:
            self.hooks.dump(batch)
        self.observer.trained_on(batch)
        trained: Metrics = {}
        for each in self._trained_in(batch):
            if self._resets_optimizer:
                self.backend.reset_optimizer(model=each.role)
            with clock.phase(f"{each.role}_train"):
                trained |= self._steps(batch, steps * each.repeats, part.num_rollouts * each.repeats, each)
        for each in self.losses:
            self.observer.end(batch.rollout_id, self.backend.named_weights(model=each.role), each.role)
        interval = self.algo.ref_update_interval
        if interval is not None and (batch.rollout_id + 1) % interval == 0:
            with clock.phase("ref_model_update"):
                self.backend.copy_weights("actor", "ref")
        perf = perf_metrics(batch, clock, self.flops, num_sharers=self.ranks.num_sharers)
        metrics = trained | batch_metrics(batch, self.algo.kl_loss_type) | self._value_metrics(batch) | perf
        if (seconds := self.backend.layer_seconds()) is not None:
            metrics["perf/layers_time"] = maximum(seconds)
        return metrics

    def _value_metrics(self, batch: RolloutBatch) -> Metrics:
        if "values" not in batch.columns or "returns" not in batch.columns:
            return {}
        values, returns = (torch.from_numpy(batch.columns[name]) for name in ("values", "returns"))
        explained = explained_variance(values, returns, torch.from_numpy(batch.loss_masks), reduce=self.ranks.reduce)
        return {} if math.isnan(explained) else {"train/critic-explained_variance": mean(explained)}

    def save(self, folder: Path, *, is_first: bool = True) -> None:
        """Write the backend's state, and on the first rank the state that the next round needs."""
        self.awake.save(folder)
        if is_first:
            (folder / WORKER_STATE).write_text(self._worker_state())

    def snapshot(self, folder: Path, *, is_first: bool = True) -> PendingFiles:
        """Copy what `save` writes on this rank to host memory, as files of `folder` to be written later."""
        files = PendingFiles()
        self.awake.save(folder, files)
        if is_first:
            files.add_text(folder / WORKER_STATE, self._worker_state())
        return files

    def _worker_state(self) -> str:
        return json.dumps({"old_version": self._old_version}) + "\n"

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote. Raises CheckpointError if something is missing or does not have its checksum."""
        if not (folder / WORKER_STATE).is_file():
            raise CheckpointError(f"{folder} has no {WORKER_STATE}; it is incomplete or not a trainer checkpoint")
        self.awake.load(folder)
        state = read_object(folder.parent, f"{folder.name}/{WORKER_STATE}")
        if type(state.get("old_version")) not in (int, type(None)) or "old_version" not in state:
            raise CheckpointError(f"{folder / WORKER_STATE} has no usable old_version; use another --ckpt-step")
        self._old_version = state["old_version"]

    def _trained_in(self, batch: RolloutBatch) -> list[RoleLoss]:
        return [each for each in self.losses if batch.rollout_id >= each.start]

    def _micro(self, batch: RolloutBatch, rows: IntArray, weights: str = "loss_weights") -> MicroBatch:
        heartbeat.beat("micro-batch")
        micro = pack_micro_batch(batch, rows, batch.columns[weights], device=self.backend.device)
        key = rows.tobytes()
        tokens, samples = self._step_sizes.get(key, (0, 0))
        routes = self._recorded_routes.get(key)
        weight_R = micro.weight_R * micro.mask_R  # a hook may have cleared masks after the weights were computed
        hidden = None
        if self._teacher_hidden is not None:
            hidden = self._teacher_hidden[torch.from_numpy(batch.response_positions(rows))]
        return dataclasses.replace(
            micro,
            weight_R=weight_R,
            policy_routes=routes,
            teacher_hidden_RD=hidden,
            step_tokens=tokens,
            step_samples=samples,
        )

    def _with_log_probs(self, batch: RolloutBatch, steps: list[list[IntArray]], clock: Clock) -> RolloutBatch:
        if not self._computes_advantages:
            return batch
        policy = self._old_role(batch)
        reads: dict[Read, bool] = {"routes": self._records_routes, "old_actor": policy != "actor"}
        also: list[Read] = [name for name, is_read in reads.items() if is_read]
        custom = self.hooks.advantages is not None
        num_steps = len(steps) if any(each.role == "actor" for each in self._trained_in(batch)) else 1
        for each in needed_passes(self.algo, num_steps, opd=self.opd, custom_advantages=custom, also=also):
            batch = self._pass(batch, steps, clock, each, policy if each.role == "actor" else each.role)
        if self.algo.keep_old_actor:
            self.backend.copy_weights("actor", "old_actor")
            self._old_version = batch.rollout_id
        return batch

    def _old_role(self, batch: RolloutBatch) -> Role:
        """Return the model that generated the batch, from its tokens' weight versions (n: after n rollouts).

        Raises TrainerError if that is neither the policy nor the model kept from the previous rollout.
        """
        if not self.algo.keep_old_actor:
            return "actor"
        column = batch.columns.get("token_versions")
        if column is None:
            raise TrainerError("--keep-old-actor needs the weight version of each token; the rollout has none")
        versions = {int(v) for v in np.unique(column[batch.loss_masks > 0])}
        if versions <= {batch.rollout_id}:
            return "actor"
        if versions == {self._old_version}:
            return "old_actor"
        raise TrainerError(
            f"rollout {batch.rollout_id} was generated by weight versions {sorted(versions)}, but --keep-old-actor "
            f"keeps versions {self._old_version} and {batch.rollout_id} only; use --update-weights-interval 1 and at "
            "most one rollout in flight ahead of training, or drop --keep-old-actor"
        )

    def _pass(
        self, batch: RolloutBatch, steps: list[list[IntArray]], clock: Clock, each: Pass, role: Role
    ) -> RolloutBatch:
        """Add the column of a pass, run by `role`, over all micro-batches; with what else the run reads of its head.

        Values are copied to the host at the end, so that no micro-batch waits for the one before.
        """
        entropy = self.algo.use_rollout_entropy and "entropy" in each.reads
        parts = defaultdict[str, list[tuple[IntArray, Tensor]]](list)
        with clock.phase(each.phase):
            micro_rows = [rows for step in steps for rows in step]
            all_stats = self._log_probs(batch, micro_rows, role, entropy=entropy, head=self._head_output(each.role))
            for rows, stats in zip(micro_rows, all_stats, strict=True):
                values = {each.column: stats.output_R, "entropy": stats.entropy_R if entropy else None}
                values |= {"teacher_top_ids": stats.top_ids_RK, "teacher_top_log_probs": stats.top_log_probs_RK}
                for name, value in values.items():
                    if value is not None:
                        parts[name].append((rows, value))
                if stats.hidden_RD is not None:
                    self._keep_hidden(batch, rows, stats.hidden_RD)
                if self._records_routes and role in REPLAYED:
                    if stats.policy_routes is None:
                        raise TrainerError(
                            "--use-routing-replay: the backend recorded no expert choices; does the model have experts?"
                        )
                    self._recorded_routes[rows.tobytes()] = stats.policy_routes
            filled: dict[str, NDArray[np.float32 | np.int32]] = {
                name: filled_column(batch, values, rest=0.0) for name, values in parts.items()
            }
            if (ids := filled.get("teacher_top_ids")) is not None:
                filled["teacher_top_ids"] = ids.astype(np.int32)
        return batch.with_columns(**filled)

    def _head_output(self, role: Role) -> HeadOutput:
        if not self.opd.has_teacher_model:
            return ""
        outputs: dict[tuple[str, Role], HeadOutput] = {
            ("topk", "actor"): "top_ids",
            ("topk", "teacher"): "top_log_probs",
            ("full", "teacher"): "hidden",
        }
        return outputs.get((self.opd.opd_loss, role), "")

    def _keep_hidden(self, batch: RolloutBatch, rows: IntArray, hidden_RD: Tensor) -> None:
        if self._teacher_hidden is None:
            num_tokens = int(batch.response_lengths.sum())
            self._teacher_hidden = torch.zeros(num_tokens, hidden_RD.shape[1], dtype=hidden_RD.dtype)
        self._teacher_hidden[torch.from_numpy(batch.response_positions(rows))] = hidden_RD.cpu()

    def _log_probs(
        self, batch: RolloutBatch, micro_rows: list[IntArray], role: Role, *, entropy: bool, head: HeadOutput
    ) -> Iterable[TokenStats]:
        micros = (self._micro(batch, rows) for rows in micro_rows)
        also: dict[str, Any] = {"model": role, "entropy": entropy}
        also |= {"head": head, "top_k": self.opd.opd_log_prob_top_k} if head else {}
        if isinstance(self.backend, PipelinedBackend):
            return self.backend.log_probs_of(list(micros), **also)
        return (self.backend.log_probs(micro, **also) for micro in micros)

    def _with_distillation(self, batch: RolloutBatch, old: FloatArray | None) -> RolloutBatch:
        """Add `opd_reverse_kl`, which advantages are lowered by, for --opd-loss sampled."""
        if not self.opd.use_opd or self.opd.opd_loss != "sampled":
            return batch
        teacher = batch.columns.get("teacher_log_probs")
        if teacher is None or old is None:
            missing = "teacher_log_probs" if teacher is None else "rollout_log_probs"
            raise DataError(
                f"--use-opd: the rollout has no {missing}; with --opd-type sglang the teachers of --opd-teacher-urls, "
                "or your reward function or its post-processing, must set Sample.teacher_log_probs"
            )
        kept_R = torch.from_numpy(batch.loss_masks) > 0
        if (is_aligned := batch.columns.get("teacher_mask")) is not None:
            kept_R &= torch.from_numpy(is_aligned) > 0
        kl_R = reverse_kl(torch.from_numpy(old), torch.from_numpy(teacher), kept_R)
        return batch.with_columns(opd_reverse_kl=kl_R.numpy())

    def _with_advantages(self, batch: RolloutBatch) -> RolloutBatch:
        if not self._computes_advantages:
            return batch
        old = batch.columns.get("rollout_log_probs" if self.algo.use_rollout_logprobs else "old_log_probs")
        ref, values, turns = (batch.columns.get(name) for name in ("ref_log_probs", "values", "turn_rewards"))
        batch = self._with_distillation(batch, old)
        opd_kl = batch.columns.get("opd_reverse_kl")
        opd_kl_R = None if opd_kl is None else torch.from_numpy(opd_kl)
        if self.hooks.advantages is not None:
            kl = np.zeros(len(batch.loss_masks), np.float32)  # as in slime without --kl-coef
            if self.algo.kl_coef and old is not None and ref is not None:
                kl = kl_estimate(torch.from_numpy(old), torch.from_numpy(ref), self.algo.kl_loss_type).numpy()
            provides = ("advantages", "returns") if self.algo.uses_critic else ("advantages",)
            batch = apply_hook(batch.with_columns(kl=kl), self.hooks.advantages, provides=provides)
            advantages_R = distilled(torch.from_numpy(batch.columns["advantages"]), self.opd, opd_kl_R)
            return batch.with_columns(advantages=advantages_R.numpy())
        advantages_R, returns_R = token_advantages(
            self.algo,
            rewards_S=torch.from_numpy(batch.rewards),
            mask_R=torch.from_numpy(batch.loss_masks).float(),
            seq_of_R=torch.from_numpy(np.repeat(np.arange(len(batch)), batch.response_lengths)),
            old_log_probs_R=None if old is None else torch.from_numpy(old),
            ref_log_probs_R=None if ref is None else torch.from_numpy(ref),
            values_R=None if values is None else torch.from_numpy(values),
            turn_rewards_R=None if turns is None else torch.from_numpy(turns),
            opd=self.opd,
            opd_kl_R=opd_kl_R,
            reduce=self.ranks.reduce,
        )
        return batch.with_columns(advantages=advantages_R.numpy(), returns=returns_R.numpy())

    def _steps(
        self, batch: RolloutBatch, steps: list[list[IntArray]], num_rollouts: Sequence[int], trained: RoleLoss
    ) -> Metrics:
        role, prefix, is_policy = trained.role, trained.prefix, trained.role == "actor"
        results: list[Metrics] = []
        skipped, lr = 0, 0.0
        has_log_probs = "old_log_probs" in batch.columns
        test = self.hooks.self_test
        test = test if is_policy and test is not None and test.due(batch) else None
        records_all = is_policy and self.hooks.dump is not None
        recorder = LossRecorder(trained.loss)
        test_metrics: Metrics = {}

        def rerun(rows: IntArray) -> TokenStats:
            with_logits = LossRecorder()
            self.backend.forward_backward(self._micro(batch, rows), with_logits)
            return with_logits.last

        def quantized(rows: IntArray) -> Tensor | None:
            stats = self.backend.quantized_log_probs(self._micro(batch, rows))
            return None if stats is None else stats.log_probs_R

        for index, (micro_rows, count) in enumerate(zip(steps, num_rollouts, strict=True)):
            recorder.keeps_tokens = records_all or (test is not None and index == 0)
            recorder.reports_log_probs = is_policy and not has_log_probs and index == 0
            if is_policy:
                self.backend.begin_step(batch.rollout_id, index)
            parts = self._forward_backward(batch, micro_rows, trained, recorder)
            step_metrics = {k if "/" in k else f"{prefix}{k}": v for k, v in merge(parts).items()}
            gradients = self.backend.named_gradients(model=role)
            self.observer.before_update(batch.rollout_id, index, step_metrics, gradients, role)
            if test is not None and index == 0:
                is_alone = self.ranks.num_data == 1 and not isinstance(self.backend, PipelinedBackend)
                again = (rerun, quantized) if is_alone else (None, None)
                test_metrics = test.report(batch, recorder.log_probs(batch), *again)
            report = self._optim_step(batch, micro_rows, role)
            lr, skipped = report.lr, skipped + bool(report.skipped)
            step_metrics[f"{prefix}global_batch_size"] = mean(count)
            if not report.skipped:
                step_metrics[f"{prefix}grad_norm"] = mean(report.grad_norm)
            results.append(step_metrics)
        if records_all and self.hooks.dump is not None:
            self.hooks.dump(batch.with_columns(**recorder.columns(batch)))
        metrics = step_mean(results, num_ranks=self.ranks.num_data) | test_metrics | {f"{prefix}lr-pg_0": mean(lr)}
        metrics[f"{prefix}num_steps"] = mean(len(steps))
        return metrics | {f"{prefix}skipped_steps": total(skipped / self.ranks.num_data)} if skipped else metrics

    def _forward_backward(
        self, batch: RolloutBatch, micro_rows: list[IntArray], trained: RoleLoss, loss: LossFn
    ) -> list[Metrics]:
        role = trained.role
        parts: list[Metrics] = []
        try:
            if isinstance(self.backend, PipelinedBackend):
                with tracer.span("forward backward", micro_batches=len(micro_rows)):
                    micros = [self._micro(batch, rows, trained.weights) for rows in micro_rows]
                    return self.backend.forward_backward_of(micros, loss, model=role)
            for rows in micro_rows:
                with tracer.span("forward backward", samples=len(rows)):
                    parts += self._run_micro(batch, rows, trained, loss)
            return parts
        except NotFiniteLossError as error:
            raise self._refused(batch, error.rows, f"{error.what}, in the micro-batch of samples", role) from error

    def _run_micro(self, batch: RolloutBatch, rows: IntArray, trained: RoleLoss, loss: LossFn) -> list[Metrics]:
        """Accumulate the gradient of a micro-batch, in halves if it does not fit into memory.

        Losses are divided by the sizes of the whole step, so the halves have the same gradient.
        """
        try:
            micro = self._micro(batch, rows, trained.weights)
            return [self.backend.forward_backward(micro, loss, model=trained.role)]
        except MicroBatchTooLargeError as error:
            if len(rows) < 2 or rows.tobytes() in self._recorded_routes:
                raise
            reason = str(error)
        num_tokens = int(batch.response_lengths[rows].sum())
        what = "out of memory with a micro-batch of %d samples (%d response tokens); running its halves: %s"
        logger.warning(what, len(rows), num_tokens, reason)
        metrics: list[Metrics] = []
        for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            self._step_sizes[half.tobytes()] = self._step_sizes.get(rows.tobytes(), (0, 0))
            metrics += self._run_micro(batch, half, trained, loss)
        return metrics

    def _optim_step(self, batch: RolloutBatch, micro_rows: list[IntArray], role: Role) -> OptimReport:
        try:
            with tracer.span("optimizer step"):
                return self.backend.optim_step(model=role)
        except NotFiniteLossError as error:  # deferred by this rank until all ranks synchronize
            raise self._refused(batch, error.rows, f"{error.what}, in the micro-batch of samples", role) from error
        except TrainerError as error:
            what = f"{error}; losses were finite on this rank, in the step of samples"
            raise self._refused(batch, np.concatenate(micro_rows), what, role) from error

    def _refused(self, batch: RolloutBatch, rows: IntArray, what: str, role: Role) -> TrainerError:
        is_custom_loss = any(each.loss.needs_logits for each in self.losses if each.role == role)
        return self.observer.refused_step(batch, rows, what, is_custom_loss=is_custom_loss)
