"""PyTorch profiler and memory recorder around the phases of a training round, and timing of decoder layers.

A profile is a Chrome trace of operators and kernels, `profile/<target>-rank<R>-rollout<N>.json` in the run directory.
A memory snapshot is `profile/memory-rank<R>-rollout<N>.pickle` in the format of pytorch.org/memory_viz; furlong itself
never reads it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from furlong.config.sections import DebugFlags
from furlong.core.tracing import tracer

logger = logging.getLogger(__name__)

TARGET_OF_PHASE = {"actor_train": "train_actor", "log_probs": "train_log_probs", "ref_log_probs": "train_log_probs"}
MEMORY_ENTRIES = 1_000_000  # allocations that the recorder keeps
TIMED_LAYERS = 8  # per model, evenly spaced: a pair of CUDA events costs about 10 us


@dataclass(frozen=True)
class Profiling:
    """Profiles the rollouts that `flags` name, and records allocations from the beginning."""

    folder: Path
    rank: int
    flags: DebugFlags

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
