"""Parsing of a command line into a Config, and the reverse.

argparse is not used, because all problems are reported together (argparse stops at the first), values may start with a
dash (`--rollout-top-k -1`, `--rollout-stop ---`), and the source of every value is recorded.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from furlong.config.checks.validate import validate
from furlong.config.compat import FURLONG_NAMES, find_refusal
from furlong.config.config_file import FileValues, read_config_file, values_from_mapping
from furlong.config.flag_spec import FlagSpec, flag_specs
from furlong.config.flag_values import looks_like_a_flag, many_from_equals, value_from_words, words_from_value
from furlong.config.passthrough import FIELDS, add_option, program_of, value_of
from furlong.config.resolve import derive
from furlong.config.sections import Config, by_field
from furlong.core.catalogue import NO_EFFECT, Problem
from furlong.core.text import did_you_mean
from furlong.errors import ConfigError

CONFIG_FLAG = "--config"
OVERRIDE_FLAG = "--custom-config-path"
KEYWORDS = "keyword arguments"  # the origin that problems with them name


@dataclass(frozen=True)
class Resolved:
    """A complete configuration and the source of each value.

    `sources` maps a field to "flag", "keyword", "file NAME", "default", "entry point" or "derived: why".
    """

    config: Config
    sources: Mapping[str, str]

    def to_json(self) -> str:
        """Return the text of `config.json` in the run directory, without secrets."""
        return json.dumps({"config": _without_secrets(self.config), "sources": dict(self.sources)}, indent=2) + "\n"


@dataclass
class _Scan:
    """Values and problems of the words of a command line."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    config_files: list[str] = field(default_factory=list[str])
    override_files: list[str] = field(default_factory=list[str])
    problems: list[str] = field(default_factory=list[str])
    wrong_flags: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class _Reading:
    """The result of reading flags and files. `is_whole` is False if a file could not be read at all."""

    resolved: Resolved
    problems: list[str]
    wrong_flags: list[str]
    is_whole: bool


def parse(argv: Sequence[str], *, preset: Mapping[str, Any] | None = None) -> Resolved:
    """Read flags and configuration files, and derive the remaining defaults.

    Order of precedence: --custom-config-path, command line, --config, `preset` (an entry point's own defaults, by field
    name), default. Raises ConfigError with every unknown flag, missing value and wrong type. `validate`
    checks combinations of values; `load` does both.
    """
    reading = _read(argv, preset or {})
    if reading.problems:
        raise ConfigError(*reading.problems)
    return reading.resolved


def load(argv: Sequence[str], *, preset: Mapping[str, Any] | None = None, device_type: str | None = None) -> Resolved:
    """`parse` and `validate`. Raises ConfigError with every problem of both.

    `device_type` ("cpu" or "cuda"), if known, enables checks that depend on it.
    """
    resolved, problems = examine(argv, preset=preset, device_type=device_type)
    if problems:
        raise ConfigError(*problems)
    return resolved


def examine(
    argv: Sequence[str],
    *,
    preset: Mapping[str, Any] | None = None,
    keywords: Mapping[str, Any] | None = None,
    device_type: str | None = None,
) -> tuple[Resolved, list[Problem]]:
    """Like `load`, but return the problems, and the configuration as far as it could be read.

    `keywords` are flags as Python values, by name with underscores; they override flags in `argv`.
    """
    reading = _read(argv, preset or {}, keywords or {})
    if not reading.is_whole:  # flags that the file sets would be reported as missing
        return reading.resolved, list(map(Problem, reading.problems))
    problems = validate(reading.resolved.config, device_type=device_type)
    # A flag that is misspelled or has a wrong value is reported once, not again as missing.
    follow_ups = [problem for problem in problems if not any(_names(problem, flag) for flag in reading.wrong_flags)]
    return reading.resolved, [*map(Problem, reading.problems), *follow_ups]


def argv_from_config(config: Config) -> list[str]:
    """Return the shortest command line that `parse` reads as `config`, if nothing is derived."""
    words: list[str] = []
    for spec in flag_specs(Config).values():
        words.extend(words_from_value(spec, spec.value_in(config)))
    return words


def flags_as_written(config: Config) -> dict[str, Any]:
    """Return the flags by field name, with the values that `config.json` would contain."""
    return by_field(json.loads(json.dumps(_without_secrets(config))))


def _without_secrets(config: Config) -> dict[str, dict[str, Any]]:
    values = dataclasses.asdict(config)
    for spec in flag_specs(Config).values():
        if spec.is_secret and values[spec.section][spec.field] is not None:
            values[spec.section][spec.field] = "(not written)"
    return values


def config_to_json(config: Config) -> str:
    """Serialize a complete configuration for another process of the run, including secrets."""
    return json.dumps(dataclasses.asdict(config))


def config_from_json(text: str) -> Config:
    """Inverse of `config_to_json`."""
    specs, sections = flag_specs(Config), json.loads(text)
    values = {
        name: tuple(value) if isinstance(value := sections[spec.section][name], list) else value
        for name, spec in specs.items()
    }
    return config_from_values(values)


def config_from_values(values: Mapping[str, Any], base: Config | None = None) -> Config:
    """Return `base`, by default a Config of defaults, with these fields replaced (flat names)."""
    base = base or Config()
    by_section: dict[str, dict[str, Any]] = {}
    specs = flag_specs(Config)
    for name, value in values.items():
        by_section.setdefault(specs[name].section, {})[name] = value
    sections = {name: dataclasses.replace(getattr(base, name), **changes) for name, changes in by_section.items()}
    return dataclasses.replace(base, **sections)


def _read(argv: Sequence[str], preset: Mapping[str, Any], keywords: Mapping[str, Any] | None = None) -> _Reading:
    specs = flag_specs(Config)
    scan = _scan(argv, specs)
    from_keywords = values_from_mapping(keywords or {}, KEYWORDS, specs)
    values = dict(preset)
    sources = dict.fromkeys(preset, "entry point")

    unread: list[str] = []

    def update(changes: Mapping[str, Any], source: str) -> None:
        for name, value in changes.items():
            is_options = name in FIELDS.values() and name in values  # engine options are set one by one
            values[name] = {**values[name], **value} if is_options else value
            sources[name] = source

    def add(content: FileValues, source: str) -> None:
        scan.problems.extend(content.problems)
        scan.wrong_flags.extend(content.wrong_flags)
        update(content.values, source)

    def read_files(paths: Sequence[str]) -> None:
        for path in paths:
            content = read_config_file(path, specs)
            unread.extend([path] if content.is_unread else [])
            add(content, f"file {path}")

    read_files(scan.config_files)
    update(scan.values, "flag")
    add(from_keywords, "keyword")
    read_files(scan.override_files)

    given = config_from_values(values)
    derived = derive(given, frozenset(values))
    sources.update({name: f"derived: {why}" for name, (_, why) in derived.items()})
    config = config_from_values({name: value for name, (value, _) in derived.items()}, given)
    complete = {name: sources.get(name, "default") for name in specs}
    return _Reading(Resolved(config, complete), scan.problems, scan.wrong_flags, is_whole=not unread)


def _scan(argv: Sequence[str], specs: Mapping[str, FlagSpec]) -> _Scan:
    """Read the words from left to right. If a flag is given twice, the last one counts, as in slime's scripts."""
    by_flag = {spec.flag: spec for spec in specs.values()}
    negated = {spec.flag.replace("--", "--no-", 1): spec for spec in specs.values() if spec.kind == "tristate"}
    scan = _Scan()
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, text = word.partition("=")
        if name in (CONFIG_FLAG, OVERRIDE_FLAG):
            _take_path(scan, name, [text] if equals else _take_values(words, 1))
        elif (spec := by_flag.get(name)) is not None:
            _take_flag(scan, spec, words, text if equals else None)
        elif name in negated:
            scan.values[negated[name].field] = False
        elif find_refusal(name) is None and program_of(name) is not None:
            _take_passed(scan, name, words, text if equals else None)
        elif looks_like_a_flag(word):
            _unknown_flag(scan, name, [*by_flag, *negated, CONFIG_FLAG, OVERRIDE_FLAG])
            _take_values(words, len(words))  # the values of the unknown flag
        else:
            scan.problems.append(f"unexpected word {word!r}: no flag before it accepts it; remove it or quote it")
    return scan


def _take_values(words: list[str], most: int) -> list[str]:
    """Remove up to `most` values from the front of `words`, up to the next flag."""
    taken: list[str] = []
    while words and len(taken) < most and not looks_like_a_flag(words[0]):
        taken.append(words.pop(0))
    return taken


def _take_path(scan: _Scan, name: str, given: list[str]) -> None:
    if not given:
        scan.problems.append(f"{name} has no value; write {name} FILE")
    elif name == CONFIG_FLAG:
        scan.config_files.extend(given)
    else:
        scan.override_files.extend(given)


def _take_flag(scan: _Scan, spec: FlagSpec, words: list[str], text: str | None) -> None:
    """Consume the values of a flag. `text` is the text after `=`, or None."""
    if spec.kind in ("switch", "off_switch", "tristate"):
        if text is not None:
            _wrong(scan, spec, f"takes no value, got {text!r}; write {spec.flag} alone or remove it")
            return
        scan.values[spec.field] = spec.kind != "off_switch"
        return
    if text is not None:
        given = many_from_equals(spec, text) if spec.kind == "many" else [text]
    else:
        given = _take_values(words, len(words) if spec.kind == "many" else 1)
        if not given:
            _wrong(scan, spec, f"has no value, expected {spec.type_name}; write {spec.flag} VALUE or {spec.flag}=VALUE")
            return
    try:
        value = value_from_words(spec, given)
    except ValueError as error:
        _wrong(scan, spec, str(error))
        return
    scan.values[spec.field] = (*scan.values.get(spec.field, ()), value) if spec.kind == "append" else value


def _take_passed(scan: _Scan, name: str, words: list[str], text: str | None) -> None:
    """Consume an option of SGLang or sglang-router, and add it to the mapping of options."""
    given = _take_values(words, len(words)) if text is None else [text]
    try:
        add_option(scan.values, name, lambda option: value_of(option, given))
    except ValueError as error:
        scan.problems.append(f"{name} {error}")
        scan.wrong_flags.append(name)


def _wrong(scan: _Scan, spec: FlagSpec, what: str) -> None:
    scan.problems.append(what if what.startswith(spec.flag) else f"{spec.flag}: {what}")
    scan.wrong_flags.append(spec.flag)


def _unknown_flag(scan: _Scan, name: str, known: Sequence[str]) -> None:
    if (why := find_refusal(name)) is not None:
        scan.problems.append(Problem(why.message(name), NO_EFFECT))
        return
    matches, hint = _meant(name, known)
    message = f"unknown flag {name}; {hint or 'see `furlong train --help` for all flags'}"
    scan.problems.append(Problem(message, NO_EFFECT))
    scan.wrong_flags.extend(matches)


def _meant(name: str, known: Sequence[str]) -> tuple[list[str], str]:
    """Return the likely flags, best first, and a hint for the message."""
    here = FURLONG_NAMES.get(name)
    return ([here], f"use {here}") if here is not None else did_you_mean(name, known)


def _names(problem: str, flag: str) -> bool:
    """Whether a message mentions exactly this flag, not just a longer one with the same prefix."""
    return any(word.strip(".,:;()`'\"").split("=")[0] == flag for word in problem.split())
