"""Command `furlong train`."""

from __future__ import annotations

import faulthandler
from collections.abc import Mapping
from typing import Any

from furlong.commands.output import show, terminal_width


def train(words: list[str], preset: Mapping[str, Any] | None = None) -> int:
    """Train a model, or print the help of the flags. `preset` overrides defaults of flags."""
    if "-h" in words or "--help" in words:
        from furlong.config.help import help_text

        about = words[1:] if words[0] in ("-h", "--help") else []
        show(help_text(about, width=terminal_width(80, 110)))
        return 0
    from furlong.config.command_line import examine
    from furlong.run.launch import run

    faulthandler.enable(2)
    run(*examine(words, preset=preset))
    return 0
