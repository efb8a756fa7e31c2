"""Tracker for SwanLab, an optional dependency."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from furlong.config.sections import TrackFlags
from furlong.tracking.optional_package import finite, import_optional
from furlong.tracking.sample_tables import SampleTable


class SwanlabTracker:
    """Writes one run to `swanlog/` in the run directory, or to SwanLab's servers with --swanlab-mode online.

    Raises ConfigError if swanlab is not installed.
    """

    def __init__(self, flags: TrackFlags, config: Mapping[str, Any], folder: Path) -> None:
        swanlab = import_optional("swanlab", "--use-swanlab")
        self._text: Any = swanlab.Text
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

    def log_samples(self, table: SampleTable) -> None:
        """Record samples as texts: SwanLab has no tables."""
        texts = [
            self._text(
                f"{prompt}\n---\n{response}", caption=f"sample {sample}, reward {reward}, {status}, label {label}"
            )
            for _, _, sample, reward, status, _, prompt, response, label in table.rows
        ]
        self._run.log({table.key: texts}, step=table.step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
