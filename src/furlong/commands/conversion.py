"""What converts weights, for the commands that do."""

from __future__ import annotations

from typing import Any


def conversion() -> Any:
    """The module `training.megatron.megatron_lm.convert`. Raises ConfigError without Megatron-core."""
    from furlong.training.megatron import megatron_compat as compat

    compat.prepare()
    from furlong.training.megatron.megatron_lm import convert

    return convert
