"""No weight sync: nothing serves the trainer's weights (SFT without evaluation, training from a dump)."""

from __future__ import annotations

from furlong.core.weights import SyncReport


class NoEngines:
    """Implements `ports.WeightSync` for a run without engines."""

    async def publish(self, version: int) -> SyncReport:
        """Report that nothing was sent."""
        return SyncReport(version, 0, 0, 0.0)
