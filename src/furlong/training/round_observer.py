"""What is recorded of training rounds: profiles, traces, hashes of every stage, and the samples of non-finite steps.

A profile is a Chrome trace of operators and kernels, `profile/<target>-rank<R>-rollout<N>.json` in the run directory.
A memory snapshot is `profile/memory-rank<R>-rollout<N>.pickle` in the format of pytorch.org/memory_viz; furlong itself
never reads it.

Hashes of the stages of a step find the first value that differs between two runs (--debug-determinism). One row per
stage, in execution order; `docs/reference/run-folder.md` documents the file format:

    data         ids of groups and samples, in order
    rollout      tokens, masks, rewards and the engine's log-probs, as received
    log_probs    log-probs of the response tokens from the trainer's models
    advantages   and all other columns that a loss reads
    loss         of each optimizer step, before the step
    gradients    of each optimizer step, before clipping, by parameter
    parameters   after the last optimizer step of the rollout

Those of a critic are `critic loss`, `critic gradients` and `critic parameters`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn

from furlong.catalogue import diagnosis, find_row
from furlong.config.sections import DebugFlags
from furlong.core.algorithms import Role
from furlong.core.batch import IntArray, RolloutBatch
from furlong.core.metric import Metrics, values
from furlong.core.tracing import tracer
from furlong.core.weights import checksum
from furlong.errors import TrainerError

logger = logging.getLogger(__name__)

TARGET_OF_PHASE = {"actor_train": "train_actor", "log_probs": "train_log_probs", "ref_log_probs": "train_log_probs"}
MEMORY_ENTRIES = 1_000_000  # allocations that the recorder keeps
TIMED_LAYERS = 8  # per model, evenly spaced: a pair of CUDA events costs about 10 us
SHOWN_SAMPLES = 8  # sample ids in an error
LOG_PROBS = ("old_log_probs", "ref_log_probs", "teacher_log_probs", "entropy", "values")


@dataclass
class RoundObserver:
    """Observes the rounds of one rank; without arguments it records nothing.

    folder: of profiles, which `flags` ask for. record: gets (step, row) of each stage's hashes, with steps from 1.
    keep_refused: stores the samples of a non-finite step and returns where.
    """

    folder: Path = Path("profile")
    rank: int = 0
    flags: DebugFlags = field(default_factory=DebugFlags)
    record: Callable[[int, Mapping[str, Any]], object] | None = None
    keep_refused: Callable[[RolloutBatch], object] | None = None
    _hashed: set[str] = field(default_factory=set[str])  # columns of this rollout

    def __post_init__(self) -> None:
        if self.flags.record_memory_history:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_ENTRIES)  # pyright: ignore[reportPrivateUsage]  documented

    @contextmanager
    def round(self, rollout_id: int) -> Generator[None]:
        """Record a whole round if requested."""
        with self._profiled("train_overall", rollout_id), tracer.span("train round", rollout=rollout_id):
            yield
        flags = self.flags
        if flags.record_memory_history and rollout_id + 1 == flags.memory_snapshot_num_steps:
            path = self._path("memory", rollout_id, "pickle")
            torch.cuda.memory._dump_snapshot(str(path))  # pyright: ignore[reportPrivateUsage]  documented
            torch.cuda.memory._record_memory_history(enabled=None)  # pyright: ignore[reportPrivateUsage]  documented
            logger.info("memory snapshot of %d rollouts: %s", flags.memory_snapshot_num_steps, path)

    @contextmanager
    def phase(self, name: str, rollout_id: int) -> Generator[None]:
        """Record a phase of a round if requested."""
        target = TARGET_OF_PHASE.get(name, "")
        with self._profiled(target, rollout_id, suffix=f"-{name}"), tracer.span(name):
            yield

    @contextmanager
    def _profiled(self, target: str, rollout_id: int, suffix: str = "") -> Generator[None]:
        flags = self.flags
        is_due = flags.use_pytorch_profiler and flags.profile_step_start <= rollout_id < flags.profile_step_end
        if not is_due or target not in flags.profile_target:
            yield
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
            yield
        path = self._path(target + suffix, rollout_id, "json")
        profile.export_chrome_trace(str(path))
        logger.info("profile of %s in rollout %d: %s", target, rollout_id, path)

    def _path(self, name: str, rollout_id: int, ending: str) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / f"{name}-rank{self.rank}-rollout{rollout_id}.{ending}"

    def rollout(self, batch: RolloutBatch) -> None:
        """Hash this rank's part of the batch as the rollout produced it."""
        if self.record is None:
            return
        ids = {"group_ids": batch.group_ids.tolist(), "sample_ids": batch.sample_ids.tolist()}
        self.record(batch.rollout_id + 1, {"stage": "data", "values": ids})
        self._hashed = {"loss_weights", *batch.columns} - {*LOG_PROBS}
        hashes = {
            "tokens": _of_samples(batch.tokens, batch.starts),
            "loss_masks": _of_samples(batch.loss_masks, batch.response_starts),
            "rewards": _of_array(batch.rewards),
            "raw_rewards": _of_array(batch.raw_rewards),
        }
        hashes |= _of_columns(batch, sorted(self._hashed & batch.columns.keys()))
        self.record(batch.rollout_id + 1, {"stage": "rollout", "values": hashes})

    def trained_on(self, batch: RolloutBatch) -> None:
        """Hash the columns that were added before the first optimizer step."""
        if self.record is None:
            return
        log_probs = [name for name in LOG_PROBS if name in batch.columns]
        rest = sorted(batch.columns.keys() - self._hashed - {*log_probs})
        for stage, names in (("log_probs", log_probs), ("advantages", rest)):
            self.record(batch.rollout_id + 1, {"stage": stage, "values": _of_columns(batch, names)})

    def before_update(
        self, rollout_id: int, index: int, metrics: Metrics, gradients: Iterable[tuple[str, Tensor]], role: Role
    ) -> None:
        """Hash the loss metrics and gradients of optimizer step `index`, before the step."""
        if self.record is not None:
            loss, sums = (_stage_of(role, stage) for stage in ("loss", "gradients"))
            self.record(rollout_id + 1, {"stage": loss, "at": index, "values": values(metrics)})
            self.record(rollout_id + 1, {"stage": sums, "at": index, "values": _of_tensors(gradients)})

    def end(self, rollout_id: int, weights: Iterable[tuple[str, Tensor]], role: Role) -> None:
        """Hash the parameters of a trained model after its last optimizer step."""
        if self.record is not None:
            self.record(rollout_id + 1, {"stage": _stage_of(role, "parameters"), "values": _of_tensors(weights)})

    def refused_step(self, batch: RolloutBatch, rows: IntArray, what: str, *, is_custom_loss: bool) -> TrainerError:
        """Build the error NUM04 of a non-finite step, and store its samples with all columns.

        what: start of the message, which ends with the sample ids. is_custom_loss: of --custom-loss-function-path.
        """
        refused, ids = batch.select(rows), batch.sample_ids[rows].tolist()
        more = f" and {len(ids) - SHOWN_SAMPLES} more" if len(ids) > SHOWN_SAMPLES else ""
        message = f"rollout {batch.rollout_id}: {what} {ids[:SHOWN_SAMPLES]}{more}"
        if self.keep_refused is not None:
            message += f", saved in {self.keep_refused(refused)}"
        cause = find_row("NUM04").cause
        remedy = "lower --lr or --clip-grad, compute in --bf16 or --fp32, inspect the samples"
        trained = refused.loss_masks != 0
        floats = {name: column for name, column in refused.columns.items() if column.dtype.kind == "f"}
        if bad := [name for name, column in floats.items() if not bool(np.isfinite(column[trained]).all())]:
            cause = f"The loss received non-finite {', '.join(bad)}."
            remedy = "fix your function that computes them, or what the engine reports"
        elif is_custom_loss and "all parameters are finite, 0 of" in what:
            cause = "--custom-loss-function-path computes it from finite log-probs, such as by a logarithm of 0."
            remedy = "fix the function"
        elif is_custom_loss:
            cause = f"--custom-loss-function-path returns non-finite values, or: {cause[0].lower()}{cause[1:]}"
            remedy = f"check the function; {remedy}"
        error = diagnosis(
            "NUM04", message, cause=cause,
            remedy=f"{remedy}; --no-check-for-nan-in-loss-and-grad skips and counts such steps",
            evidence={"rollout": batch.rollout_id, "samples": ids},
        )  # fmt: skip
        return TrainerError(error.text())


def _stage_of(role: Role, stage: str) -> str:
    return stage if role == "actor" else f"{role} {stage}"


def _of_array(array: NDArray[Any]) -> dict[str, Any]:
    digest: dict[str, Any] = {"hash": xxhash.xxh3_64_hexdigest(array.tobytes())}
    if array.dtype.kind == "f":
        digest["norm"] = _finite(float(np.linalg.norm(array.astype(np.float64))))
    return digest


def _of_samples(array: NDArray[Any], starts: NDArray[np.int64]) -> dict[str, Any]:
    """Hash a packed column as a whole, and each sample's part with eight hex digits."""
    bounds = zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    return _of_array(array) | {"samples": "".join(xxhash.xxh32_hexdigest(array[a:b].tobytes()) for a, b in bounds)}


def _of_columns(batch: RolloutBatch, names: Iterable[str]) -> dict[str, Any]:
    return {name: _of_samples(batch.columns[name], batch.response_starts) for name in names}


def _of_tensors(named: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    hashes: dict[str, Any] = {}
    for name, tensor in named:
        local: Tensor = getattr(tensor, "to_local", lambda tensor=tensor: tensor)()  # this rank's shard
        norm = float(torch.linalg.vector_norm(local.detach().to(torch.float64)))
        hashes[name] = {"hash": checksum(local)[:16], "norm": _finite(norm)}
    return hashes


def _finite(number: float) -> float | str:
    return number if np.isfinite(number) else str(number)  # JSON has no nan


class LayerTimes:
    """Time the forward passes of some decoder layers of this rank, with CUDA events or the clock.

    Ranks of one model wait for each other in every layer, so wall time cannot tell which rank is slow; the time between
    the all-gather of a layer's parameters and its end can. Create it after sharding: its hooks must run inside those
    that gather and free parameters. Collectives inside layers (context, tensor, expert parallel) are included, so the
    ranks that share them show equal times. Without layers nothing is timed.
    """

    def __init__(self, layers: Sequence[nn.Module], device: torch.device) -> None:
        timed = layers[:: -(-len(layers) // TIMED_LAYERS)] if layers else []
        self._on_gpu = device.type == "cuda"
        self._scale = len(layers) / len(timed) if timed else 0.0
        self._started: Any = None
        self._spans: list[tuple[Any, Any]] = []
        for layer in timed:
            layer.register_forward_pre_hook(self._start)
            layer.register_forward_hook(self._end, prepend=True)

    def _start(self, *_: Any) -> None:
        self._started = self._now()

    def _end(self, *_: Any) -> None:
        if self._started is not None:  # recomputation may start a layer without finishing it
            self._spans.append((self._started, self._now()))
        self._started = None

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> float | None:
        """Return the seconds of all layers' forward passes since the last call, extrapolated from the timed layers."""
        if not self._scale:
            return None
        spans, self._spans, self._started = self._spans, [], None
        if self._on_gpu:
            torch.cuda.synchronize()
            return self._scale * sum(start.elapsed_time(end) for start, end in spans) / 1e3
        return self._scale * sum(end - start for start, end in spans)
