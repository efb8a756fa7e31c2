"""Command `furlong train`."""

from __future__ import annotations

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
    from furlong.core.c_exit import c_exit_fails
    from furlong.core.process_exit import fatal_signals_print_stacks
    from furlong.core.user_code import exits_raise
    from furlong.core.user_processes import ending_user_processes
    from furlong.run.launch import run

    with exits_raise(), c_exit_fails(), fatal_signals_print_stacks(), ending_user_processes():
        run(*examine(words, preset=preset), owns_process=True)
    return 0
