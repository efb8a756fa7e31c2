"""Measure how memory and descriptors of a run's processes grow with its steps.

`ProcessSampler` samples the processes of a run, and `Growth` is the result for one kind of process: driver, engine,
router, reward worker or other.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

MIB = 1 << 20
WINDOWS = 40  # of the usages of a process; the median of each is one point
# Measured steps of a process from which a slope is judged. Recorded soaks that were cut short, with and without a leak
# added, were judged right from 1,800 on for memory (2 KB per step), and from 739 on for descriptors (one in 200 steps).
MEMORY_STEPS, DESCRIPTOR_STEPS = 1800, 750
MEMORY_LIMIT = 1.0  # MB per 1,000 steps; with a lower quartile below half of it, a rise that passes looks like a leak
KINDS = ("driver", "engine", "router", "reward worker", "other")
NEEDED = ("driver", "engine")  # of which a soak says if they were not judged


@dataclass(frozen=True)
class Usage:
    """What a process used after a step of the run, memory in MiB.

    allocated_mb: What the driver has from malloc; None for other processes.
    """

    kind: str
    process: str  # id and start time, as ids are used again
    step: int
    rss_mb: float
    descriptors: int
    allocated_mb: float | None = None

    @property
    def memory_mb(self) -> float:
        """Allocated memory if it is known: resident memory rises and falls by more than a leak of a soak."""
        return self.rss_mb if self.allocated_mb is None else self.allocated_mb


@dataclass(frozen=True)
class Growth:
    """Growth of one kind of process, per 1,000 steps. None: no process lived long enough after its warm-up."""

    kind: str
    processes: int
    steps: int  # measured, of all processes
    memory_mb: float  # median of the last usage of each process
    descriptors: float
    memory_slope: float | None
    memory_quartiles: tuple[float, float] | None
    descriptor_slope: float | None
    descriptor_quartiles: tuple[float, float] | None

    @property
    def problems(self) -> list[str]:
        """What is wrong, as text."""
        found: list[str] = []
        low = self.memory_quartiles[0] if self.memory_quartiles else 0.0
        if self.memory_slope is not None and self.memory_slope >= MEMORY_LIMIT and low >= MEMORY_LIMIT / 2:
            found.append(f"{self.kind}: memory grows by {self.memory_slope:.2f} MB per 1,000 steps")
        if self.descriptor_slope is not None and self.descriptor_quartiles and self.descriptor_quartiles[0] > 0:
            found.append(f"{self.kind}: descriptors grow by {self.descriptor_slope:.2f} per 1,000 steps")
        return found

    @property
    def not_judged(self) -> list[str]:
        """What the soak was too short to judge, as text."""
        few = [
            f"{what} (no process has {least:,} measured steps)"
            for what, slope, least in (
                ("memory", self.memory_slope, MEMORY_STEPS),
                ("descriptors", self.descriptor_slope, DESCRIPTOR_STEPS),
            )
            if slope is None and self.kind in NEEDED
        ]
        return [f"{self.kind}: not judged: {' and '.join(few)}; use a larger --minutes"] if few else []


class ProcessSampler:
    """Samples a driver and its descendants. allocated: folder in which `soak_hooks` records what drivers have."""

    def __init__(self, allocated: Path) -> None:
        self._allocated = allocated
        self._kinds: dict[str, str] = {}
        self.usages: list[Usage] = []

    def processes(self, driver: psutil.Process) -> list[tuple[str, psutil.Process]]:
        """Return the living processes of a run with their kinds."""
        try:
            everyone = [driver, *driver.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        living: list[tuple[str, psutil.Process]] = []
        for process in everyone:
            try:
                if process.status() != psutil.STATUS_ZOMBIE:
                    living.append((self._kind(process, driver), process))
            except psutil.NoSuchProcess:
                continue
        return living

    def sample(self, driver: psutil.Process, step: int) -> None:
        """Record what each process uses after a step."""
        for kind, process in self.processes(driver):
            try:
                rss, descriptors = process.memory_info().rss, process.num_fds()
            except psutil.NoSuchProcess:
                continue
            record = self._allocated / str(process.pid)
            allocated = int(record.read_text()) / MIB if kind == "driver" and record.exists() else None
            self.usages.append(Usage(kind, identity(process), step, rss / MIB, descriptors, allocated))

    def _kind(self, process: psutil.Process, driver: psutil.Process) -> str:
        name = identity(process)
        if name not in self._kinds:
            kind = "driver" if process == driver else kind_of(process.cmdline())
            if kind == "other":
                return kind  # it may not have executed its program yet
            self._kinds[name] = kind
        return self._kinds[name]


def identity(process: psutil.Process) -> str:
    """Return the id and start time of a process."""
    return f"{process.pid}@{process.create_time():.2f}"


def kind_of(command: Sequence[str]) -> str:
    """Return the kind of a helper process from its command line."""
    words = " ".join(command)
    for mark, kind in (("furlong serve", "engine"), ("sandbox_worker", "reward worker"), ("router", "router")):
        if mark in words and not words.partition(" ")[2].startswith("-c import ctypes"):
            return kind
    return "other"


def growth(usages: Iterable[Usage], *, warm_up: int) -> list[Growth]:
    """Return the growth of each kind of process.

    The first `warm_up` steps of each process do not count, nor does the first half of the rest: memory that caches and
    allocators retain grows until they are full, a leak grows on. The slope is the median of the slopes of pairs of
    points of one process that are at least half of its measured steps apart (Theil-Sen): single peaks, a step of the
    allocator and a few restarts do not move it.
    """
    by_process: defaultdict[tuple[str, str], list[Usage]] = defaultdict(list)
    for usage in usages:
        by_process[usage.kind, usage.process].append(usage)
    return [
        _growth_of(kind, [points for (each, _), points in by_process.items() if each == kind], warm_up)
        for kind in KINDS
        if any(each == kind for each, _ in by_process)
    ]


def _growth_of(kind: str, processes: list[list[Usage]], warm_up: int) -> Growth:
    halves = [half for points in processes if (half := second_half(points, warm_up))]
    memory, memory_quartiles = _slope(halves, "memory_mb", MEMORY_STEPS)
    descriptors, descriptor_quartiles = _slope(halves, "descriptors", DESCRIPTOR_STEPS)
    return Growth(
        kind,
        len(processes),
        sum(points[-1].step - points[0].step for points in halves),
        statistics.median(points[-1].memory_mb for points in processes),
        statistics.median(points[-1].descriptors for points in processes),
        memory,
        memory_quartiles,
        descriptors,
        descriptor_quartiles,
    )


def _slope(halves: list[list[Usage]], what: str, least: int) -> tuple[float | None, tuple[float, float] | None]:
    long = [points for points in halves if points[-1].step - points[0].step >= least]
    slopes = far_slopes([[(usage.step, getattr(usage, what)) for usage in points] for points in long])
    if not len(slopes):
        return None, None
    low, median, high = (float(each) for each in np.quantile(slopes, (0.25, 0.5, 0.75)))
    return median, (low, high)


def second_half(points: Sequence[Usage], warm_up: int) -> list[Usage]:
    """Return the usages in the second half of the steps after the first `warm_up`."""
    first, last = points[0].step + warm_up, points[-1].step
    return [usage for usage in points if usage.step >= first + max(last - first, 0) / 2]


def far_slopes(series: Iterable[Sequence[tuple[float, float]]]) -> np.ndarray:
    """Return the slopes, per 1,000 steps, of all pairs of windows of a series that are half of its length apart."""
    slopes: list[np.ndarray] = [np.empty(0)]
    for points in series:
        windows = np.array_split(np.array(points, dtype=np.float64).reshape(-1, 2), min(len(points), WINDOWS))
        steps, values = np.array([np.median(window, axis=0) for window in windows]).T
        apart = steps[None, :] - steps[:, None]
        is_far = apart >= max((steps[-1] - steps[0]) / 2, 1)
        slopes.append(1000 * (values[None, :] - values[:, None])[is_far] / apart[is_far])
    return np.concatenate(slopes)


def growth_table(rows: Iterable[Growth]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [
        "| process | number | steps measured | MB | MB per 1,000 steps (quartiles) | descriptors | "
        "descriptors per 1,000 steps |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        memory, descriptors = "not judged", "not judged"
        if row.memory_slope is not None and row.memory_quartiles is not None:
            low, high = row.memory_quartiles
            memory = f"{row.memory_slope:.2f} ({low:.2f} to {high:.2f})"
        if row.descriptor_slope is not None:
            descriptors = f"{row.descriptor_slope:.2f}"
        lines.append(
            f"| {row.kind} | {row.processes} | {row.steps:,} | {row.memory_mb:,.0f} | {memory} | "
            f"{row.descriptors:g} | {descriptors} |"
        )
    return lines
