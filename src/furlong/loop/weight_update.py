"""Weight updates with their metrics and events."""

from __future__ import annotations

from typing import Any

from furlong.core.metric import Metrics, total
from furlong.errors import SyncError
from furlong.interfaces import DeviceSharing, Observer, WeightSync

MAX_NAMES = 64  # of unchanged tensors in an event


class WeightUpdater:
    """Runs weight updates and compares the checksums of each with the previous one.

    Events: `weight_update_started` and `weight_update`, the latter with version, tensors, bytes and seconds.
    `weights_compared` when the checksums of two updates in a row are known, with version, tensors, the number that
    `changed`, and the first names that are `unchanged`. `weight_update_timeout` if engines did not answer in time, with
    the fields of `SyncError.late`.
    """

    def __init__(self, sync: WeightSync, observer: Observer, device_sharing: DeviceSharing) -> None:
        self._sync, self._observer, self._device_sharing = sync, observer, device_sharing
        self._last: dict[str, str] = {}
        self._version = 0

    async def __call__(self, version: int) -> Metrics:
        """Load the trainer's weights into the engines as `version`; return the metrics of the update."""
        await self.finish_verification()
        self._observer.notify("weight_update_started", version=version)
        try:
            async with self._device_sharing.updating_weights():
                report = await self._sync.update_weights(version)
        except SyncError as error:
            if error.late is not None:
                self._observer.notify("weight_update_timeout", **error.late)
            raise
        facts: dict[str, Any] = {
            "version": version,
            "tensors": report.num_tensors,
            "bytes": report.num_bytes,
            "seconds": round(report.seconds, 6),
        }
        self._observer.notify("weight_update", **facts)
        self._version = version
        self._compare(report.checksums)
        metrics = {
            "perf/update_weights_time": total(report.seconds),
            "perf/update_weights_verify_time": total(report.verify_s),
        }
        if report.wire_bytes is not None:
            metrics["perf/update_weights_wire_bytes"] = total(report.wire_bytes)
        return metrics

    async def finish_verification(self) -> None:
        """Wait until the engines' weights are verified. Raises SyncError if some differ."""
        self._compare(await self._sync.finish_verification())

    def _compare(self, checksums: dict[str, str]) -> None:
        """Report what changed since the previous update."""
        if not checksums:
            return
        if self._last:
            same = [name for name, value in checksums.items() if self._last.get(name) == value]
            changed = len(checksums) - len(same)
            facts = {"version": self._version, "tensors": len(checksums), "changed": changed}
            self._observer.notify("weights_compared", **facts, unchanged=same[:MAX_NAMES])
        self._last = checksums
