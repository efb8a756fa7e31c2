"""Text of `furlong train --help`: all flags by section."""

from __future__ import annotations

import textwrap
import typing
from collections.abc import Sequence
from typing import Any

from furlong.config.command_line import CONFIG_FLAG, OVERRIDE_FLAG
from furlong.config.compat import FURLONG_NAMES
from furlong.config.flag_spec import FlagSpec, flag_specs
from furlong.config.sections import Config
from furlong.errors import ConfigError

USAGE = """usage: furlong train FLAGS [--config run.yaml]
       furlong train --help [SECTION|WORD ...]

With words, only the flags of a section, or those whose name or description
contains a word. Sections:
{sections}"""

FILE_FLAGS = {
    CONFIG_FLAG: "FILE  YAML file with flag names as keys, flat or by section. Command-line flags override it.",
    OVERRIDE_FLAG: "FILE  Like --config, but overrides command-line flags.",
}


def written(spec: FlagSpec) -> str:
    """Return the syntax of a flag: `--rollout-stop str ...`."""
    if spec.kind in ("switch", "off_switch"):
        return spec.flag
    if spec.kind == "tristate":
        return f"{spec.flag}, {spec.flag.replace('--', '--no-', 1)}"
    return f"{spec.flag} {spec.type_name}"


def shown_default(spec: FlagSpec) -> str:
    """Return the default as it would be typed; "" for switches, None, empty values and what is required."""
    if spec.kind in ("switch", "off_switch", "tristate") or spec.default in (None, (), {}, ""):
        return ""
    if spec.help.endswith("Required."):
        return ""
    values: tuple[Any, ...] = spec.default if isinstance(spec.default, tuple) else (spec.default,)
    return " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)


def help_text(words: Sequence[str] = (), *, width: int = 80) -> str:
    """Return all flags with syntax, description, range and default, in lines of at most `width` columns.

    With `words`, only sections with such a name and flags whose name contains one; a word that is in no name is looked
    up in the flag names of other programs, then in choices and descriptions. Raises ConfigError if nothing matches.
    """
    lines = [USAGE.format(sections=_wrapped(", ".join(_sections()), width))] if not words else []
    flags = {flag for word in words for flag in _flags_about(word)}
    shown = [spec for spec in flag_specs(Config).values() if not words or spec.flag in flags]
    section = ""
    for spec in shown:
        if spec.section != section:
            section = spec.section
            doc = (_sections()[section].__doc__ or "").strip()
            lines += ["", *textwrap.wrap(f"{section}: {doc}", width)]
        lines += _entry(spec, width)
    if not words:
        lines += ["", "files:"]
        for name, text in FILE_FLAGS.items():
            lines += textwrap.wrap(f"{name} {text}", width, initial_indent="  ", subsequent_indent=" " * 6)
    return "\n".join(lines).strip("\n") + "\n"


def _entry(spec: FlagSpec, width: int) -> list[str]:
    head = f"  {written(spec)}"
    facts = [f"in {spec.within.text}"] if spec.within else []
    if len(head) > width and spec.choices:
        head = f"  {spec.flag} NAME"
        facts = [f"one of {', '.join(spec.choices)}"]
    facts += [f"default {shown_default(spec)}"] if shown_default(spec) else []
    text = spec.help + (f" ({'; '.join(facts)})" if facts else "")
    return [head, _wrapped(text, width)]


def _wrapped(text: str, width: int) -> str:
    indent = " " * 6
    return textwrap.fill(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _sections() -> dict[str, type]:
    return typing.get_type_hints(Config)


def _flags_about(word: str) -> list[str]:
    """Return the flags of the section `word` or with `word` in their name, else in their description."""
    specs, part = flag_specs(Config).values(), word.strip("-").replace("_", "-")
    named = [spec.flag for spec in specs if spec.section == word or part in spec.flag]
    here = FURLONG_NAMES.get(f"--{part}")
    meant = [spec.flag for spec in specs if spec.flag == here]
    described = [spec.flag for spec in specs if word.lower() in f"{spec.help} {' '.join(spec.choices)}".lower()]
    if not (named or meant or described):
        raise ConfigError(f"--help {word}: no section or flag matches; sections are {', '.join(_sections())}")
    return named or meant or described
