"""Publishes weights and says what came of it: metrics for the step, an event for the run's story."""

from __future__ import annotations

from typing import Any

from furlong.core.metric import Metrics, total
from furlong.errors import SyncError
from furlong.interfaces import DeviceSharing, Observer, WeightSync

NAMED = 64  # unchanged tensors that an event names


class WeightUpdater:
    """Calls the weight sync and compares each publication with the one before it.

    The event `publication` has version, tensors, bytes and seconds. `weights_compared` follows when checksums are
    known, if those of the publication before are: version, tensors, `changed`: how many are other than there, and
    `unchanged`: names of the first that are not. A publication that ends because engines did not answer in time leaves
    `publication_timeout`, with what `SyncError.late` has.
    """

    def __init__(self, sync: WeightSync, observer: Observer, device_sharing: DeviceSharing) -> None:
        self._sync, self._observer, self._device_sharing = sync, observer, device_sharing
        self._last: dict[str, str] = {}
        self._version = 0

    async def __call__(self, version: int) -> Metrics:
        """Publish the trainer's weights as `version`; returns the metrics of it."""
        await self.finish_verification()
        self._observer.notify("publishing", version=version)
        try:
            async with self._device_sharing.updating_weights():
                report = await self._sync.update_weights(version)
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
        self._observer.notify("publication", **facts)
        self._version = version
        self._compare(report.checksums)
        found = {
            "perf/update_weights_time": total(report.seconds),
            "perf/update_weights_verify_time": total(report.verify_s),
        }
        if report.wire_bytes is not None:
            found["perf/update_weights_wire_bytes"] = total(report.wire_bytes)
        return found

    async def finish_verification(self) -> None:
        """Wait until the engines are known to have what was published. Raises SyncError if one has something else."""
        self._compare(await self._sync.finish_verification())

    def _compare(self, checksums: dict[str, str]) -> None:
        """Say what changed since the publication before."""
        if not checksums:
            return
        if self._last:
            same = [name for name, value in checksums.items() if self._last.get(name) == value]
            changed = len(checksums) - len(same)
            facts = {"version": self._version, "tensors": len(checksums), "changed": changed}
            self._observer.notify("weights_compared", **facts, unchanged=same[:NAMED])
        self._last = checksums
