"""The text of `--help`: every flag, grouped by section."""

from __future__ import annotations

import textwrap
import typing
from collections.abc import Sequence

from furlong.config.flag import FlagSpec, flag_specs
from furlong.config.flags import CONFIG_FLAG, OVERRIDE_FLAG
from furlong.config.sections import Config
from furlong.errors import ConfigError

USAGE = """usage: furlong train FLAGS [--config run.yaml]
       furlong train --help [SECTION|WORD ...]

With a word: the flags of that section, or whose names hold the word. Sections:
{sections}"""

FILE_FLAGS = {
    CONFIG_FLAG: "FILE  YAML with the same names as the flags, flat or by section; flags given beside it go first.",
    OVERRIDE_FLAG: "FILE  The same, but this file goes first.",
}


def written(spec: FlagSpec) -> str:
    """How a flag is written, with its values: `--rollout-stop str ...`."""
    if spec.kind in ("switch", "off_switch"):
        return spec.flag
    if spec.kind == "tristate":
        return f"{spec.flag}, {spec.flag.replace('--', '--no-', 1)}"
    return f"{spec.flag} {spec.type_name}"


def shown_default(spec: FlagSpec) -> str:
    """The default as it would be written; "" where there is none to speak of."""
    if spec.kind in ("switch", "off_switch", "tristate") or spec.default in (None, (), {}, ""):
        return ""
    return f"{spec.default:g}" if isinstance(spec.default, float) else str(spec.default)


def help_text(words: Sequence[str] = (), *, width: int = 80) -> str:
    """Every flag with its values, meaning, allowed numbers and default, in lines of at most `width` columns.

    With `words` only the sections of these names, and the flags whose names hold one of them. Raises ConfigError for a
    word that is in none.
    """
    lines = [USAGE.format(sections=_wrapped(", ".join(_sections()), width))] if not words else []
    shown = [spec for spec in flag_specs(Config).values() if not words or any(_is_about(spec, word) for word in words)]
    for word in words:
        if not any(_is_about(spec, word) for spec in shown):
            raise ConfigError(
                f"--help {word}: no section and no flag of that name; sections are {', '.join(_sections())}"
            )
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
    """One flag: how it is written, and below that what it means."""
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


def _is_about(spec: FlagSpec, word: str) -> bool:
    """Whether a word is the name of a flag's section or a part of the flag's own name."""
    return spec.section == word or word.strip("-").replace("_", "-") in spec.flag
