"""PyTorch's profiler and memory recorder around the parts of a round.

A profile is a Chrome trace of operators and kernels, `profile/<target>-rank<R>-rollout<N>.json` in the run's folder. A
memory snapshot is `profile/memory-rank<R>-rollout<N>.pickle` in the format of pytorch.org/memory_viz, which shows who
allocated what; furlong itself never reads it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from furlong.core.trace import tracer

logger = logging.getLogger(__name__)

TARGET_OF_PART = {"actor_train": "train_actor", "log_probs": "train_log_probs", "ref_log_probs": "train_log_probs"}
MEMORY_ENTRIES = 1_000_000  # allocations that the recorder keeps


@dataclass(frozen=True)
class Profiling:
    """What to record of which rollouts: `targets` of rollouts in [start, end); memory from the start on.

    targets: "train_overall" (the whole round), "train_actor" (its optimizer steps), "train_log_probs" (its passes
    without gradient). memory_rollouts: after how many rollouts a memory snapshot is written; 0 records none.
    """

    folder: Path
    rank: int = 0
    targets: Collection[str] = ()
    start: int = 0
    end: int = 0
    memory_rollouts: int = 0

    def __post_init__(self) -> None:
        if self.memory_rollouts:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_ENTRIES)  # pyright: ignore[reportPrivateUsage]  documented

    @contextmanager
    def round(self, rollout_id: int) -> Generator[None]:
        """Record a whole round, where asked for."""
        with self._profiled("train_overall", rollout_id), tracer.span("train round", rollout=rollout_id):
            yield
        if self.memory_rollouts and rollout_id + 1 == self.memory_rollouts:
            path = self._path("memory", rollout_id, "pickle")
            torch.cuda.memory._dump_snapshot(str(path))  # pyright: ignore[reportPrivateUsage]  documented
            torch.cuda.memory._record_memory_history(enabled=None)  # pyright: ignore[reportPrivateUsage]  documented
            logger.info("memory snapshot of %d rollouts: %s", self.memory_rollouts, path)

    @contextmanager
    def part(self, name: str, rollout_id: int) -> Generator[None]:
        """Record a part of a round, where asked for."""
        target = TARGET_OF_PART.get(name, "")
        with self._profiled(target, rollout_id, suffix=f"-{name}"), tracer.span(name):
            yield

    @contextmanager
    def _profiled(self, target: str, rollout_id: int, suffix: str = "") -> Generator[None]:
        if target not in self.targets or not self.start <= rollout_id < self.end:
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
