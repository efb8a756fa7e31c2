"""Lazy import of the weight converter, which needs Megatron-core."""

from __future__ import annotations

from typing import Any


def conversion() -> Any:
    """Return the module `training.megatron.megatron_lm.convert_weights`. Raises ConfigError without Megatron-core."""
    from furlong.training.megatron import megatron_compat as compat

    compat.prepare()
    from furlong.training.megatron.megatron_lm import convert_weights

    return convert_weights
