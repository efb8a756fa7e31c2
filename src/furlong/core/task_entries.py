"""Questions of the package reasoning-gym: made again from task, seed and index, and scored by the task itself."""

from __future__ import annotations

import functools
import json
from typing import Any

ROWS_PER_SEED = 1_000_000  # between the first rows of two seeds; the package adds seed and row number


@functools.lru_cache(maxsize=64)
def task_dataset(key: str, seed: int) -> Any:
    """Return the package's dataset of a task; `key` is its name and options as JSON.

    Row i of the package's seed s is row 0 of its seed s + i. Seeds are spread, so that two of them share no rows.
    """
    from reasoning_gym.factory import create_dataset  # here: takes a second to import

    name, options = json.loads(key)
    return create_dataset(name, **{"size": 1 << 62, "seed": seed * ROWS_PER_SEED, **options})


@functools.lru_cache(maxsize=256)
def task_entry(key: str, seed: int, index: int) -> dict[str, Any]:
    """Return question, answer and metadata. Raises what the package raises for options that it cannot use."""
    return task_dataset(key, seed)[index]
