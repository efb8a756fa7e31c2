"""`metrics.jsonl`: one JSON object per step."""

from __future__ import annotations

import math
from pathlib import Path

from furlong.tracking.step_file import StepFile


class JsonlTracker:
    """Appends one object per step (see `StepFile`). A value that is not finite is null, because JSON has no nan."""

    def __init__(self, path: Path) -> None:
        self._file = StepFile(path)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Append one row. Raises OSError if it cannot be written."""
        self._file.append(
            step, {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()
