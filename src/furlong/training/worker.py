"""One rollout on one rank, the same for every backend.

    1. plan       optimizer steps, and the micro-batches of each
    2. log-probs  under the old policy and the reference, only where something reads them
    3. advantages from rewards to tokens, over the whole batch; hooks
    4. steps      for each: micro-batches -> forward_backward, then optim_step
    5. metrics    of the batch, the steps and the clock

Sums run in the order of the plan, so the same batch on the same weights gives the same bits.
Axes: N samples, R response tokens.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from furlong.algo.algorithm_rules import needs, token_advantages
from furlong.algo.reduce import step_mean
from furlong.algo.settings import Settings
from furlong.core.batch import FloatArray, FlopsModel, IntArray, MicroBatch, RolloutBatch, pack_micro_batch
from furlong.core.heartbeat import heartbeat
from furlong.core.metric import Metrics, maximum, mean, merge, total
from furlong.core.pending_files import PendingFiles
from furlong.core.trace import tracer
from furlong.core.weights import WeightSource
from furlong.errors import CheckpointError, TrainerError
from furlong.interfaces import Backend, LossFn, MemoryTransfer, PipelinedBackend, Role, TokenStats
from furlong.training.batch_split import Packing, RankPart, split_batch
from furlong.training.hook_data import RolloutDataHook, apply_hook
from furlong.training.loss_wrappers import Heard, Seen, WithLogProbs
from furlong.training.not_finite import NotFiniteLossError, refused_step
from furlong.training.profiling import Profiling
from furlong.training.ranks import Ranks
from furlong.training.round_metrics import Clock, batch_metrics, perf_metrics
from furlong.training.settings import RoundSettings

logger = logging.getLogger(__name__)

WORKER_STATE = "worker.json"


class Watch(Protocol):
    """Looks at every stage of a step and changes nothing (`training.digests`)."""

    def rollout(self, batch: RolloutBatch) -> None:
        """This rank's part of a rollout, as it came."""
        ...

    def trained_on(self, batch: RolloutBatch) -> None:
        """The same with all columns, before the first optimizer step."""
        ...

    def before_update(
        self, rollout_id: int, index: int, metrics: Metrics, gradients: Iterable[tuple[str, Tensor]]
    ) -> None:
        """The loss metrics and the gradients that optimizer step `index` is about to use."""
        ...

    def end(self, rollout_id: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """The weights after the rollout's last optimizer step."""
        ...


class SelfTest(Protocol):
    """Compares the trainer's log-probs with the engine's before the first optimizer step (`diagnosis.self_test`)."""

    def due(self, batch: RolloutBatch) -> bool:
        """Whether it wants to see this batch."""
        ...

    def report(
        self, batch: RolloutBatch, log_probs_R: FloatArray, look: Callable[[IntArray], TokenStats] | None
    ) -> Metrics:
        """Metrics of the comparison; `look` runs rows again with logits, None where ranks would have to agree on it."""
        ...


@dataclass(frozen=True)
class Hooks:
    """User code on the training rank. `advantages` takes `rollout_data` (see there), `postprocess` (rollout_id, it).

    `dump` gets the batch with all columns before the first step, `refused` the samples of a step that is not finite;
    it returns where it has put them.
    """

    advantages: RolloutDataHook | None = None
    postprocess: Callable[[int, dict[str, Any]], object] | None = None
    dump: Callable[[RolloutBatch], None] | None = None
    watch: Watch | None = None
    self_test: SelfTest | None = None
    refused: Callable[[RolloutBatch], object] | None = None


class RoundWorker:
    """Trains one rollout batch after the other on a backend.

    settings: the algorithm section; rounds: what else happens in a rollout; loss: what is minimized; packing: how
    samples become steps and micro-batches; flops: for tflops metrics and balancing by FLOPs; profiling: what to record
    of which rollouts; ranks: which part of the samples is this rank's; num_kv_heads, num_experts: of the model, for
    `weights`.

    >>> worker = RoundWorker(backend, settings=flags, loss=PolicyLoss(flags))     # doctest: +SKIP
    >>> worker.train(batch)["train/loss"].value                                   # doctest: +SKIP
    """

    def __init__(
        self,
        backend: Backend,
        *,
        settings: Settings,
        loss: LossFn,
        rounds: RoundSettings | None = None,
        packing: Packing | None = None,
        hooks: Hooks | None = None,
        flops: FlopsModel | None = None,
        profiling: Profiling | None = None,
        ranks: Ranks | None = None,
        num_kv_heads: int | None = None,
        num_experts: int | None = None,
    ) -> None:
        self.backend, self.settings, self.loss = backend, settings, loss
        self.rounds, self.packing, self.hooks = rounds or RoundSettings(), packing or Packing(), hooks or Hooks()
        self.flops, self.profiling, self.ranks = flops, profiling, ranks or Ranks()
        self._num_kv_heads, self._num_experts = num_kv_heads, num_experts
        # of this rollout, by the rows of a micro-batch: its own routes; tokens and samples of its step
        self._policy_routes: dict[bytes, Tensor] = {}
        self._sizes: dict[bytes, tuple[int, int]] = {}
        self._old_version: int | None = None
        self._is_asleep = False

    @property
    def awake(self) -> Backend:
        """The backend, to work with. Raises TrainerError while it is off its device."""
        if self._is_asleep:
            raise TrainerError(
                "the trainer is asleep: its parameters and optimizer states are in host memory while engines have the "
                "device; call wake first"
            )
        return self.backend

    def weights(self) -> WeightSource:
        """The policy's current weights under Hugging Face names; with several ranks, reading them is collective."""
        return WeightSource(
            lambda: self.awake.named_weights(),
            is_live=self.backend.weights_are_views,
            num_kv_heads=self._num_kv_heads,
            num_experts=self._num_experts,
        )

    def offload(self) -> MemoryTransfer:
        """Move the backend's state to host memory; a no-op on CPUs. Raises TrainerError if the backend cannot."""
        moved = MemoryTransfer(0, 0.0) if self._is_on_cpu else self.backend.offload()
        self._is_asleep = True
        if moved.num_bytes:
            logger.info("trainer asleep: %.2f GiB to the host in %.1f s", moved.num_bytes / 2**30, moved.seconds)
        return moved

    def onload(self) -> MemoryTransfer:
        """Undo `offload`."""
        moved = MemoryTransfer(0, 0.0) if self._is_on_cpu else self.backend.onload()
        self._is_asleep = False
        if moved.num_bytes:
            logger.info("trainer awake: %.2f GiB to the device, after %.1f s", moved.num_bytes / 2**30, moved.seconds)
        return moved

    @property
    def _is_on_cpu(self) -> bool:
        return torch.device(self.backend.device).type == "cpu"

    def train(self, batch: RolloutBatch) -> Metrics:
        """Run all optimizer steps of one whole rollout; every rank is given the same batch."""
        started = time.perf_counter()
        parts = split_batch(
            batch,
            settings=self.settings,
            packing=self.packing,
            num_ranks=self.ranks.num_data,
            max_response_len=self.rounds.max_response_len,
            flops=self.flops,
        )
        return self.train_part(parts[self.ranks.data_rank], preprocess_s=time.perf_counter() - started)

    def train_part(self, part: RankPart, *, preprocess_s: float = 0.0) -> Metrics:
        """Run all optimizer steps on this rank's part; returns its metrics under their final names.

        Metrics of the ranks merge (`core.metric.merge`) into those of the rollout. `preprocess_s`: already spent.
        Raises TrainerError while the backend is asleep.
        """
        _ = self.awake
        if self.profiling is None:
            return self._train_part(part, Clock({"data_preprocess": preprocess_s}))
        rollout_id = part.batch.rollout_id
        record = partial(self.profiling.part, rollout_id=rollout_id)
        with self.profiling.round(rollout_id):
            return self._train_part(part, Clock({"data_preprocess": preprocess_s}, record))

    def _train_part(self, part: RankPart, clock: Clock) -> Metrics:
        batch, steps = part.batch, part.steps
        self._policy_routes = {}
        pairs = zip(steps, part.sizes, strict=True)
        self._sizes = {rows.tobytes(): sizes for micro_rows, sizes in pairs for rows in micro_rows}
        watch = self.hooks.watch
        if watch is not None:
            watch.rollout(batch)
        batch = self._with_log_probs(batch, steps, clock)
        with clock.part("data_preprocess"):
            batch = self._with_advantages(batch)
            if self.hooks.postprocess is not None:
                batch = apply_hook(batch, partial(self.hooks.postprocess, batch.rollout_id))
        if self.hooks.dump is not None:
            self.hooks.dump(batch)
        if watch is not None:
            watch.trained_on(batch)
        if self.rounds.reset_optimizer_states:
            self.backend.reset_optimizer()
        with clock.part("actor_train"):
            trained = self._steps(batch, steps, part.num_rollouts)
        if watch is not None:
            watch.end(batch.rollout_id, self.backend.named_weights())
        interval = self.rounds.ref_update_interval
        if interval is not None and (batch.rollout_id + 1) % interval == 0:
            with clock.part("ref_model_update"):
                self.backend.copy_weights("actor", "ref")
        perf = perf_metrics(batch, clock, self.flops, num_sharers=self.ranks.num_sharers)
        metrics = trained | batch_metrics(batch, self.settings) | perf
        if (seconds := self.backend.layer_seconds()) is not None:
            metrics["perf/layers_time"] = maximum(seconds)
        return metrics

    def save(self, folder: Path, *, is_first: bool = True) -> None:
        """Write the backend's state, and of one rank (`is_first`) what the next round has to know of this one."""
        self.awake.save(folder)
        if is_first:
            (folder / WORKER_STATE).write_text(self._own_state())

    def snapshot(self, folder: Path, *, is_first: bool = True) -> PendingFiles:
        """Copy what `save` writes of this rank, as files of `folder` that can be written later."""
        files = PendingFiles()
        self.awake.save(folder, files)
        if is_first:
            files.add_text(folder / WORKER_STATE, self._own_state())
        return files

    def _own_state(self) -> str:
        return json.dumps({"old_version": self._old_version}) + "\n"

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote. Raises CheckpointError if something is missing."""
        path = folder / WORKER_STATE
        if not path.is_file():
            raise CheckpointError(f"{folder} has no {WORKER_STATE}; it is incomplete or no trainer checkpoint")
        self.awake.load(folder)
        self._old_version = json.loads(path.read_text())["old_version"]

    def _micro(self, batch: RolloutBatch, rows: IntArray) -> MicroBatch:
        heartbeat.beat("micro-batch")
        micro = pack_micro_batch(batch, rows, batch.columns["loss_weights"], device=self.backend.device)
        key = rows.tobytes()
        tokens, samples = self._sizes.get(key, (0, 0))
        routes = self._policy_routes.get(key)
        weight_R = micro.weight_R * micro.mask_R  # a hook may have cleared masks since the weights were made
        return dataclasses.replace(
            micro, weight_R=weight_R, policy_routes=routes, step_tokens=tokens, step_samples=samples
        )

    def _with_log_probs(self, batch: RolloutBatch, steps: list[list[IntArray]], clock: Clock) -> RolloutBatch:
        """Add the log-prob columns that the round needs: reference, then old policy."""
        if not self.rounds.compute_advantages:
            return batch
        wanted = needs(self.settings, len(steps), own_advantages=self.hooks.advantages is not None)
        if wanted.ref_log_probs:
            batch = self._pass(batch, steps, clock, "ref", "ref_log_probs")
        old = self._old_role(batch)
        if wanted.old_log_probs or old != "actor" or self.rounds.use_rollout_entropy or self.rounds.records_routes:
            batch = self._pass(batch, steps, clock, old, "old_log_probs", entropy=self.rounds.use_rollout_entropy)
        if self.rounds.keep_old_actor:
            self.backend.copy_weights("actor", "old_actor")
            self._old_version = batch.rollout_id
        return batch

    def _old_role(self, batch: RolloutBatch) -> Role:
        """Which model generated the batch, by the weight versions of its tokens (version n: after n rollouts).

        Raises TrainerError if that is neither the policy nor the one kept from the rollout before.
        """
        if not self.rounds.keep_old_actor:
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
            f"holds versions {self._old_version} and {batch.rollout_id} only; use --update-weights-interval 1 and at "
            "most one rollout ahead, or drop --keep-old-actor"
        )

    def _pass(
        self,
        batch: RolloutBatch,
        steps: list[list[IntArray]],
        clock: Clock,
        role: Role,
        column: str,
        *,
        entropy: bool = False,
    ) -> RolloutBatch:
        """Fill one column (and `entropy`) by a forward pass without gradient over all micro-batches."""
        part = "ref_log_probs" if role == "ref" else "log_probs"
        num_tokens = int(batch.response_lengths.sum())
        filled = {column: np.zeros(num_tokens, np.float32)}
        if entropy:
            filled["entropy"] = np.zeros(num_tokens, np.float32)
        with clock.part(part):
            micro_rows = [rows for step in steps for rows in step]
            for rows, stats in zip(micro_rows, self._log_probs(batch, micro_rows, role, entropy=entropy), strict=True):
                where = batch.response_positions(rows)
                filled[column][where] = stats.log_probs_R.float().cpu().numpy()
                if entropy and stats.entropy_R is not None:
                    filled["entropy"][where] = stats.entropy_R.float().cpu().numpy()
                if self.rounds.records_routes and role != "ref":
                    self._policy_routes[rows.tobytes()] = _recorded(stats)
        return batch.with_columns(**filled)

    def _log_probs(
        self, batch: RolloutBatch, micro_rows: list[IntArray], role: Role, *, entropy: bool
    ) -> Iterable[TokenStats]:
        if isinstance(self.backend, PipelinedBackend):
            micros = [self._micro(batch, rows) for rows in micro_rows]
            return self.backend.log_probs_of(micros, model=role, entropy=entropy)
        return (self.backend.log_probs(self._micro(batch, rows), model=role, entropy=entropy) for rows in micro_rows)

    def _with_advantages(self, batch: RolloutBatch) -> RolloutBatch:
        if not self.rounds.compute_advantages:
            return batch
        if self.hooks.advantages is not None:
            return apply_hook(batch, self.hooks.advantages, provides=("advantages",))
        old = batch.columns.get("rollout_log_probs" if self.settings.use_rollout_logprobs else "old_log_probs")
        ref = batch.columns.get("ref_log_probs")
        advantages_R = token_advantages(
            self.settings,
            rewards_S=torch.from_numpy(batch.rewards),
            mask_R=torch.from_numpy(batch.loss_masks).float(),
            seq_of_R=torch.from_numpy(np.repeat(np.arange(len(batch)), batch.response_lengths)),
            old_log_probs_R=None if old is None else torch.from_numpy(old),
            ref_log_probs_R=None if ref is None else torch.from_numpy(ref),
            reduce=self.ranks.reduce,
        )
        return batch.with_columns(advantages=advantages_R.numpy(), returns=advantages_R.numpy())

    def _steps(self, batch: RolloutBatch, steps: list[list[IntArray]], num_rollouts: Sequence[int]) -> Metrics:
        """Take the optimizer steps; metrics are averaged over them, the learning rate is the last one's."""
        results: list[Metrics] = []
        skipped, lr = 0, 0.0
        measured = "old_log_probs" in batch.columns
        test = self.hooks.self_test
        heard = Heard(self.loss) if test is not None and test.due(batch) else None
        tested: Metrics = {}
        for index, (micro_rows, count) in enumerate(zip(steps, num_rollouts, strict=True)):
            loss = self.loss if heard is None or index > 0 else heard
            loss = loss if measured or index > 0 else WithLogProbs(loss)
            parts = self._forward_backward(batch, micro_rows, loss)
            own = {k if "/" in k else f"train/{k}": v for k, v in merge(parts).items()}
            if self.hooks.watch is not None:
                self.hooks.watch.before_update(batch.rollout_id, index, own, self.backend.named_gradients())
            if test is not None and heard is not None and index == 0:
                is_alone = self.ranks.num_data == 1 and not isinstance(self.backend, PipelinedBackend)
                look = partial(self._seen, batch) if is_alone else None
                tested = test.report(batch, heard.log_probs(batch), look)
            report = self._optim_step(batch, micro_rows)
            lr, skipped = report.lr, skipped + bool(report.skipped)
            own["train/global_batch_size"] = mean(count)
            if not report.skipped:
                own["train/grad_norm"] = mean(report.grad_norm)
            results.append(own)
        metrics = step_mean(results, num_ranks=self.ranks.num_data) | tested | {"train/lr-pg_0": mean(lr)}
        return metrics | {"train/skipped_steps": total(skipped / self.ranks.num_data)} if skipped else metrics

    def _seen(self, batch: RolloutBatch, rows: IntArray) -> TokenStats:
        """Run these samples once more, with logits and without a gradient."""
        seen = Seen()
        self.backend.forward_backward(self._micro(batch, rows), seen)
        return seen.stats

    def _forward_backward(self, batch: RolloutBatch, micro_rows: list[IntArray], loss: LossFn) -> list[Metrics]:
        """Accumulate the gradient of one optimizer step; metrics of each micro-batch."""
        parts: list[Metrics] = []
        try:
            if isinstance(self.backend, PipelinedBackend):
                with tracer.span("forward backward", micro_batches=len(micro_rows)):
                    return self.backend.forward_backward_of([self._micro(batch, r) for r in micro_rows], loss)
            for rows in micro_rows:
                with tracer.span("forward backward", samples=len(rows)):
                    parts.append(self.backend.forward_backward(self._micro(batch, rows), loss))
            return parts
        except NotFiniteLossError as error:
            raise self._refused(batch, error.rows, f"{error.what}, in the micro-batch of samples") from error

    def _optim_step(self, batch: RolloutBatch, micro_rows: list[IntArray]) -> Any:
        try:
            with tracer.span("optimizer step"):
                return self.backend.optim_step()
        except NotFiniteLossError as error:  # found by this rank, and kept until all ranks met
            raise self._refused(batch, error.rows, f"{error.what}, in the micro-batch of samples") from error
        except TrainerError as error:
            found = f"{error}; losses were finite here, of samples"
            raise self._refused(batch, np.concatenate(micro_rows), found) from error

    def _refused(self, batch: RolloutBatch, rows: IntArray, found: str) -> TrainerError:
        return refused_step(batch, rows, found, keep=self.hooks.refused, is_own_loss=self.loss.needs_logits)


def _recorded(stats: TokenStats) -> Tensor:
    if stats.policy_routes is None:
        raise TrainerError("--use-routing-replay: the backend recorded no routing; does the model have experts?")
    return stats.policy_routes
