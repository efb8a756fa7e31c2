"""Time weight updates by stage; shared by `weight_sync.py` and `switch.py`."""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest import mock

from furlong.core.tracing import tracer
from furlong.core.weights import NamedTensor, SyncReport, WeightSource
from furlong.weight_sync.remote_sync import RemoteSync
from furlong.weight_sync.verification import WeightVerifier
from furlong.weight_sync.weight_record import WeightRecord

Verification = Literal["off", "before", "during"]
VERIFICATIONS: tuple[Verification, ...] = ("off", "before", "during")

STAGES = {  # span names of `core.tracing`, and their labels
    "read bucket": "read tensors, including recording",
    "start checksums": "launch the trainer's checksums (part of read)",
    "finish checksums": "wait for the trainer's checksums",
    "pack bucket": "pack buckets",
    "allocate buffer": "allocate buffers (part of pack)",
    "describe buffer": "create IPC handles (part of pack)",
    "broadcast bucket": "broadcast buckets",
    "engines load bucket": "server receives and loads",
    "engine's checksums": "server's checksums",
}


@dataclass(frozen=True)
class Series:
    """Weight updates of one kind, without the first. `stages`: seconds per stage and update; stages may overlap."""

    way: str
    verify: Verification
    reports: list[SyncReport]
    later_s: list[float]
    stages: dict[str, float]

    @property
    def median(self) -> float:
        """Median seconds per weight update."""
        return statistics.median(report.seconds for report in self.reports)

    @property
    def verify_share(self) -> float:
        """Share of the update time that this process spends on verification or waits for it, overlapped or not."""
        return statistics.median(report.verify_s / report.seconds for report in self.reports)

    def show(self) -> None:
        """Print the medians and stages."""
        num_bytes = self.reports[0].num_bytes
        later = f", verified {statistics.median(self.later_s):.4f} s later" if self.verify == "during" else ""
        print(
            f"{self.way:5s} verification {self.verify:6s}: median {self.median:.4f} s  "
            f"{num_bytes / self.median / 1e9:.2f} GB/s  verify {self.verify_share:.1%}{later}"
        )
        show_stages(self.stages)

    def figures(self) -> dict[str, object]:
        """Return the values for the JSON file."""
        return {
            "seconds": self.median, "verify_share": self.verify_share, "num_bytes": self.reports[0].num_bytes,
            "stages": self.stages,
        }  # fmt: skip


async def time_updates(
    sync: RemoteSync, change: Callable[[], None], way: str, rounds: int, verify: Verification, *, shows: bool = True
) -> Series:
    """Update weights `rounds` times after one warm-up; `verify="during"` needs a `sync` that verifies while serving."""
    reports: list[SyncReport] = []
    later_s: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        without_verification() if verify == "off" else contextlib.nullcontext(),
    ):
        for version in range(rounds + 1):
            change()
            if version == 1:
                tracer.start(Path(folder), "benchmark")
            reports.append(await sync.update_weights(version + 1))
            started = time.perf_counter()
            await sync.finish_verification()
            later_s.append(time.perf_counter() - started)
            if shows:
                report = reports[-1]
                print(
                    f"{way:5s} {version or 'first'!s:>5s} {report.seconds:8.4f} s  verify {report.verify_s:7.4f} s  "
                    f"{report.num_tensors} tensors, {report.num_bytes / 1e9:.3f} GB",
                    flush=True,
                )
        tracer.stop()
        stages = stages_of(spans_of(Path(folder)), rounds, sum(report.seconds for report in reports[1:]))
    await sync.close()
    return Series(way, verify, reports[1:], later_s[1:], stages)


@contextlib.contextmanager
def without_verification() -> Generator[None]:
    """Disable recording and verification, which furlong has no setting for."""

    def count(self: WeightRecord, source: WeightSource) -> WeightSource:
        def read() -> Iterator[NamedTensor]:
            for name, tensor in source.open():
                self.num_tensors += 1
                self.num_bytes += tensor.nbytes
                yield name, tensor
            self.is_read = True

        return WeightSource(read, is_live=source.is_live)

    async def skip(self: WeightVerifier, servers: Sequence[object], sent: WeightRecord, version: int) -> str:
        del self, servers, sent, version
        return "not verified"

    with mock.patch.object(WeightRecord, "recording", count), mock.patch.object(WeightVerifier, "check", skip):
        yield


async def traced(sync: RemoteSync, version: int) -> tuple[SyncReport, dict[str, float], dict[str, list[float]]]:
    """Update weights once; return the report, seconds per stage, and per stage the seconds of each bucket."""
    with tempfile.TemporaryDirectory() as folder:
        tracer.start(Path(folder), "benchmark")
        try:
            report = await sync.update_weights(version)
        finally:
            tracer.stop()
        spans = spans_of(Path(folder))
    parts = {name: [(end - begin) / 1e6 for begin, end in sorted(spans[name])] for name in STAGES if name in spans}
    return report, stages_of(spans, 1, report.seconds), parts


def show_stages(stages: dict[str, float]) -> None:
    """Print the seconds of each stage."""
    for name, seconds in stages.items():
        print(f"      {seconds:8.4f} s  {STAGES.get(name, name)}", flush=True)


def stages_of(spans: dict[str, list[tuple[float, float]]], rounds: int, total_s: float) -> dict[str, float]:
    """Return the seconds per weight update covered by each kind of span; `rest`: by none."""
    result = {name: covered(spans[name]) / 1e6 / rounds for name in STAGES if name in spans}
    anything = covered([span for name in result for span in spans[name]]) / 1e6
    return result | {"rest": max(total_s - anything, 0.0) / rounds}


def spans_of(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Return the intervals in microseconds of each kind of span, from the traces in a folder."""
    spans: dict[str, list[tuple[float, float]]] = {}
    begun: dict[str, float] = {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event["ph"] == "X":
                spans.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
            elif event["ph"] == "b":
                begun[event["id"]] = event["ts"]
            elif event["ph"] == "e":
                spans.setdefault(event["name"], []).append((begun.pop(event["id"]), event["ts"]))
    return spans


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    length, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        length += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return length


def cost_of_verification(measured: Sequence[Series], step_s: float | None) -> Iterator[str]:
    """Yield lines with the cost of verification relative to none, for each transport of this run."""
    without = {series.way: series.median for series in measured if series.verify == "off"}
    for series in measured:
        if series.verify == "off" or series.way not in without:
            continue
        cost = series.median - without[series.way]
        line = f"{series.way}: verification ({series.verify}) costs {cost:+.4f} s"
        line += f", {cost / series.median:.1%} of a weight update"
        yield line if step_s is None else f"{line}, {cost / step_s:.3%} of a {step_s:g} s step"
