"""No weight sync: nothing serves the trainer's weights (SFT without evaluation, training from a dump)."""

from __future__ import annotations

from furlong.core.weights import SyncReport
from furlong.interfaces import WeightSync


class NoEngines(WeightSync):
    """Implements `interfaces.WeightSync` for a run without engines."""

    async def update_weights(self, version: int) -> SyncReport:
        """Report that nothing was sent."""
        return SyncReport(version, 0, 0, 0.0)
