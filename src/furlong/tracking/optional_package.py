"""Imports packages that only some runs need."""

from __future__ import annotations

import importlib
import math
from typing import Any

from furlong.errors import ConfigError


def import_optional(package: str, flag: str) -> Any:
    """Import a package that `flag` needs; it is also the name of the extra that installs it.

    Raises ConfigError if it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ConfigError(
            f"{flag} needs the package {package}, which is not installed; pip install 'furlong[{package}]'"
        ) from error


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """Return the finite values: trackers cannot plot others."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
