"""Tracker for Trackio, an optional dependency."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from furlong.config.sections import TrackFlags
from furlong.tracking.optional_package import finite, import_optional
from furlong.tracking.sample_tables import COLUMNS, SampleTable


class TrackioTracker:
    """Writes one run to Trackio's database on this machine, in $TRACKIO_DIR; `trackio show` displays it.

    With `is_resumed`, the last run with that name continues. Raises ConfigError if trackio is not installed.
    """

    def __init__(self, flags: TrackFlags, config: Mapping[str, Any], *, is_resumed: bool = False) -> None:
        trackio = import_optional("trackio", "--use-trackio")
        self._trackio: Any = trackio
        self._run: Any = trackio.init(
            project=flags.tracker_project,
            name=flags.run_name,
            config=dict(config),
            resume="allow" if is_resumed else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record one step, without non-finite values."""
        self._run.log(finite(metrics), step=step)

    def log_samples(self, table: SampleTable) -> None:
        """Record a table of samples."""
        self._run.log({table.key: self._trackio.Table(columns=list(COLUMNS), data=table.rows)}, step=table.step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
