"""Text of `furlong train --help`: the flags of a first run by task, and all others by section or word."""

from __future__ import annotations

import re
import textwrap
import typing
from collections.abc import Sequence
from typing import Any

from furlong.config.command_line import CONFIG_FLAG, OVERRIDE_FLAG
from furlong.config.compat import FURLONG_NAMES, TOPICS, find_refusal
from furlong.config.flag_spec import FlagSpec, flag_specs
from furlong.config.sections import Config
from furlong.core.text import did_you_mean
from furlong.errors import ConfigError

USAGE = """usage: furlong train FLAGS [--config FILE.yaml]
       furlong train --help [all | SECTION | WORD ...]"""

MORE = """These are the flags of most runs. `--help all` lists all flags, `--help WORD ...` those about something, such
as `--help learning rate` or `--help eval`. Sections: {sections}."""

# The flags of most runs, by task.
ESSENTIALS = {
    "Model and data": "hf_checkpoint prompt_data input_key label_key apply_chat_template",
    "Reward": "rm_type custom_rm_path",
    "Agents": "environment custom_generate_function_path",
    "Algorithm": "advantage_estimator loss_type lr",
    "Batch and lengths": "num_rollout num_epoch rollout_batch_size n_samples_per_prompt rollout_max_response_len",
    "Evaluation": "eval_prompt_data eval_interval",
    "Output": "output_dir save save_interval load use_wandb",
    "GPUs": "engine actor_num_gpus_per_node rollout_num_gpus colocate",
}
COLUMN = 34  # of descriptions, in the list of essentials

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
    if spec.help.endswith("Required.") or "Default: " in spec.help:
        return ""
    values: tuple[Any, ...] = spec.default if isinstance(spec.default, tuple) else (spec.default,)
    return " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)


def help_text(words: Sequence[str] = (), *, width: int = 80) -> str:
    """Return the flags of most runs; with `words`, all flags, those of a section, or those about all of the words.

    Whole words are searched for in names, then also in descriptions; what other programs call a flag is understood.
    Lines have at most `width` columns. Raises ConfigError if nothing matches.
    """
    if not words:
        return _essentials(width)
    specs = list(flag_specs(Config).values())
    lines: list[str] = []
    if list(words) != ["all"]:
        answer, specs = _about(words, specs)
        lines += textwrap.wrap(answer, width, break_on_hyphens=False)
    section = ""
    for spec in specs:
        if spec.section != section:
            section = spec.section
            doc = (_sections()[section].__doc__ or "").strip()
            lines += ["", *textwrap.wrap(f"{section}: {doc}", width)]
        lines += _entry(spec, width)
    if list(words) == ["all"]:
        lines += ["", "files:"]
        for name, text in FILE_FLAGS.items():
            lines += textwrap.wrap(f"{name} {text}", width, initial_indent="  ", subsequent_indent=" " * 6)
    return "\n".join(lines).strip("\n") + "\n"


def _essentials(width: int) -> str:
    specs, lines = flag_specs(Config), [USAGE]
    for title, names in ESSENTIALS.items():
        lines += ["", f"{title}:"]
        for spec in (specs[name] for name in names.split()):
            head = f"  {spec.flag} NAME" if len(spec.choices) > 3 else f"  {written(spec)}"
            text = re.split(r"[.;] ", spec.help)[0].rstrip(".") + "."
            text += f" One of {', '.join(spec.choices)}." if head.endswith(" NAME") and spec.choices else ""
            text += "".join(re.findall(r" (?:Required|Default: .*?)\.(?= |$)", spec.help))
            text += f" Default: {shown_default(spec)}." if shown_default(spec) else ""
            rows = textwrap.wrap(text, width - COLUMN, break_on_hyphens=False)
            lines += [] if len(head) < COLUMN else [head]
            lines += [f"{head if len(head) < COLUMN else '':{COLUMN}}{rows[0]}"]
            lines += [" " * COLUMN + row for row in rows[1:]]
    sections = ", ".join(_sections())
    return "\n".join([*lines, "", *textwrap.wrap(MORE.format(sections=sections), width)]) + "\n"


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


def _about(words: Sequence[str], specs: Sequence[FlagSpec]) -> tuple[str, list[FlagSpec]]:
    """Return an answer, or "", and the flags about all of the words, in the order of declaration."""
    if len(words) == 1 and words[0] in _sections():
        return "", [spec for spec in specs if spec.section == words[0]]
    if exact := [spec for spec in specs if spec.flag in words]:
        return "", exact
    parts = [part for word in words for part in _words(word)]
    name = "--" + "-".join(parts)
    answer = next((text for part in parts if (text := TOPICS.get(part))), "")
    if not answer and (refusal := find_refusal(name)) is not None:
        answer = refusal.message(name)
    if answer:
        named = set(re.findall(r"--[a-z0-9-]+", answer))
        return answer, [spec for spec in specs if spec.flag in named]
    meant = [spec for spec in specs if spec.flag in (name, FURLONG_NAMES.get(name))]
    in_name = [spec for spec in specs if set(parts) <= set(_words(spec.flag))]
    in_text = [spec for spec in specs if set(parts) <= set(_words(f"{spec.flag} {spec.help} {' '.join(spec.choices)}"))]
    if chosen := meant + (in_name or in_text):
        return "", [spec for spec in specs if spec in chosen]
    known = {word for spec in specs for word in _words(f"{spec.flag} {spec.help}")} | set(_sections()) | set(TOPICS)
    hints = [hint for part in parts if part not in known and (hint := did_you_mean(part, known)[1])]
    fix = "; ".join(hints) or f"use other words, or a section: {', '.join(_sections())}"
    raise ConfigError(f"--help {' '.join(words)}: no flag is about {' and '.join(parts)}; {fix}")


def _words(text: str) -> list[str]:
    """Return the words of a text in lower case and the singular."""
    return [word.removesuffix("s") or word for word in re.findall(r"[a-z0-9]+", text.lower())]
