"""The group of trackers of a run, whose failures do not end it, and the tracker for `metrics.jsonl`."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from furlong.errors import ConfigError
from furlong.interfaces import Tracker
from furlong.tracking.run_files import StepFile
from furlong.tracking.sample_tables import SampleTables, SampleTracker

logger = logging.getLogger(__name__)


class Trackers:
    """Passes every record to each tracker, and calls a tracker that failed again at the next step.

    Trackers that show samples also get the tables of `samples`.
    The first failure of a tracker is logged as a warning with its traceback; the total is logged at `close` and is in
    `failures`.

    >>> trackers = Trackers.open({"jsonl": lambda: JsonlTracker(Path("outputs/x/metrics.jsonl"))})
    """

    def __init__(self, trackers: Mapping[str, Tracker], samples: SampleTables | None = None) -> None:
        self._trackers, self._samples = dict(trackers), samples
        self.failures: Counter[str] = Counter()

    @staticmethod
    def open(builders: Mapping[str, Callable[[], Tracker]], samples: SampleTables | None = None) -> Trackers:
        """Build each tracker. One that cannot be opened counts as failed and is left out; ConfigError propagates."""
        trackers = Trackers({}, samples)
        for name, build in builders.items():
            try:
                trackers._trackers[name] = build()
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001  tracker boundary: a missing sink must not end the run
                trackers._report(name, "open", error)
        return trackers

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record one step in every tracker, with the tables of samples up to it."""
        tables = [] if self._samples is None else self._samples.take(step)
        for name, tracker in self._trackers.items():
            try:
                tracker.log(step, metrics)
                if isinstance(tracker, SampleTracker):
                    for table in tables:
                        tracker.log_samples(table)
            except Exception as error:  # noqa: BLE001  tracker boundary
                self._report(name, f"record step {step}", error)

    def close(self) -> None:
        """Close all trackers and log their failures."""
        for name, tracker in self._trackers.items():
            try:
                tracker.close()
            except Exception as error:  # noqa: BLE001  tracker boundary
                self._report(name, "close", error)
        for name, count in self.failures.items():
            logger.warning("tracker %s failed %d times in this run", name, count)

    def _report(self, name: str, action: str, error: Exception) -> None:
        self.failures[name] += 1
        if self.failures[name] == 1:
            logger.warning(
                "tracker %s could not %s (%s: %s); the run continues, and its later failures are only counted",
                name,
                action,
                type(error).__name__,
                error,
                exc_info=None if isinstance(error, OSError) else error,  # the file system's errors need no place
            )


class JsonlTracker:
    """Appends one object per step (see `StepFile`). Non-finite values are null, because JSON has no NaN."""

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
