"""Publishes weights and says what came of it: metrics for the step, an event for the run's story."""

from __future__ import annotations

from typing import Any

from furlong.core.metric import Metrics, total
from furlong.errors import SyncError
from furlong.ports import Observer, Residency, SettledSync, WeightSync

NAMED = 64  # unchanged tensors that an event names


class Publisher:
    """Calls the weight sync and compares each publication with the one before it.

    The event `publication` has version, tensors, bytes and seconds, and, where checksums are known, `changed`: how many
    tensors are other than in the publication before, and `unchanged`: names of the first that are not. One that ends
    because engines did not answer in time leaves `publication_timeout`, with what `SyncError.late` has.
    """

    def __init__(self, sync: WeightSync, observer: Observer, residency: Residency) -> None:
        self._sync, self._observer, self._residency = sync, observer, residency
        self._last: dict[str, str] = {}

    async def __call__(self, version: int) -> Metrics:
        """Publish the trainer's weights as `version`; returns the metrics of it."""
        self._observer.notify("publishing", version=version)
        try:
            async with self._residency.publishing():
                report = await self._sync.publish(version=version)
        except SyncError as error:
            if error.late is not None:
                self._observer.notify("publication_timeout", **error.late)
            raise
        facts: dict[str, Any] = {
            "version": version,
            "tensors": report.num_tensors,
            "bytes": report.num_bytes,
            "seconds": round(report.seconds, 6),
        }
        if self._last and report.checksums:
            same = [name for name, value in report.checksums.items() if self._last.get(name) == value]
            facts |= {"changed": len(report.checksums) - len(same), "unchanged": same[:NAMED]}
        self._last = report.checksums
        self._observer.notify("publication", **facts)
        found = {
            "perf/update_weights_time": total(report.seconds),
            "perf/update_weights_verify_time": total(report.verify_s),
        }
        if report.wire_bytes is not None:
            found["perf/update_weights_wire_bytes"] = total(report.wire_bytes)
        return found

    async def settle(self) -> None:
        """Wait until the engines are known to have what was published. Raises SyncError if one has something else."""
        if isinstance(self._sync, SettledSync):
            await self._sync.settle()
