"""What converts weights, for the commands that do."""

from __future__ import annotations

from typing import Any


def conversion() -> Any:
    """The module `trainers.megatron.convert`. Raises ConfigError without Megatron-core."""
    from furlong.trainers.megatron import compat

    compat.prepare()
    from furlong.trainers.megatron import convert

    return convert
