"""Tracker for SwanLab, an optional dependency."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from furlong.config.sections import TrackFlags
from furlong.tracking.optional_package import finite, import_optional


class SwanlabTracker:
    """Writes one run to `swanlog/` in the run directory, or to SwanLab's servers with --swanlab-mode online.

    Raises ConfigError if swanlab is not installed.
    """

    def __init__(self, flags: TrackFlags, config: Mapping[str, Any], folder: Path) -> None:
        swanlab = import_optional("swanlab", "--use-swanlab")
        self._run: Any = swanlab.init(
            project=flags.tracker_project,
            name=flags.run_name,
            mode=flags.swanlab_mode,
            log_dir=str(folder / "swanlog"),
            config=dict(config),
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record one step, without non-finite values."""
        self._run.log(finite(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
