"""Configuration files: YAML with flag names as keys, flat or by section."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import yaml

from furlong.catalogue import NO_EFFECT, Problem
from furlong.config.compat import FURLONG_NAMES, VERL_KEYS, find_refusal
from furlong.config.flag_spec import FlagSpec
from furlong.config.flag_values import value_from_yaml
from furlong.config.miles_flags import MILES_FLAGS
from furlong.config.passthrough import EngineOption, add_option, program_of, value_in_file
from furlong.core.text import did_you_mean, nearest_path, shortened
from furlong.errors import ConfigError

MOST_BYTES = 4 << 20
KEYWORDS = "keyword arguments"  # the origin that problems with them name
# arguments of furlong.train, by the flag that they set
_ARGUMENTS = {"hf_checkpoint": "model", "custom_rm_path": "reward", "eval_prompt_data": "eval_data"}


@dataclass
class FlagValues:
    """Values by field name from one source, problems, the flags that these concern, and lines for the log.

    `is_unread` is True for a file that could not be read at all, so that its values are unknown.
    """

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    problems: list[str] = field(default_factory=list[str])
    wrong_flags: list[str] = field(default_factory=list[str])
    lines: list[str] = field(default_factory=list[str])
    is_unread: bool = False

    def refuse(self, flag: str, problem: str) -> None:
        """Record a problem with the value of `flag`."""
        self.problems.append(problem)
        self.wrong_flags.append(flag)

    def set_option(self, flag: str, where: str, convert: Callable[[EngineOption], Any]) -> None:
        """Store an option of SGLang or sglang-router; `where` starts the message of a problem."""
        try:
            add_option(self.values, flag, convert)
        except ValueError as error:
            self.refuse(flag, f"{where} {error}")


def is_engine_option(flag: str) -> bool:
    """Whether a flag is passed on to SGLang or sglang-router."""
    return find_refusal(flag) is None and program_of(flag) is not None


def read_config_file(path: str, specs: Mapping[str, FlagSpec]) -> FlagValues:
    """Read the YAML file `path`. A key is a field or a flag (dashes or underscores), alone or inside its section."""
    try:
        content = read_yaml(path, f"configuration file {path}", form="`key: value` lines")
    except ConfigError as error:
        return FlagValues(problems=list(error.problems), is_unread=True)
    if not isinstance(content, dict | None):
        kind = type(content).__name__
        problem = f"configuration file {path} contains a {kind}; write `key: value` lines"
        return FlagValues(problems=[problem], is_unread=True)
    return values_from_mapping(content or {}, path, specs)


def values_from_mapping(content: Mapping[Any, Any], path: str, specs: Mapping[str, FlagSpec]) -> FlagValues:
    """Convert keys and values to fields. Every problem starts with `path`, the name of their origin."""
    read = FlagValues()
    by_key = {_canonical(spec.flag): spec for spec in specs.values()} | dict(specs)
    sections = {spec.section for spec in specs.values()}
    origin: dict[str, str] = {}
    for key, section, value in _entries(content, sections):
        shown = f"{section}.{key}" if section else key
        where, flag = f"{path}: {shown}", "--" + _canonical(key).replace("_", "-")
        spec = by_key.get(_canonical(key))
        if spec is None and not section and key in sections and not (path == KEYWORDS and flag in FURLONG_NAMES):
            read.problems.append(f"{path}: {key} is a section, got {shortened(value)}; write its flags below it")
        elif spec is None and is_engine_option(flag):
            read.set_option(flag, where, partial(value_in_file, value=value))
        elif spec is None:
            for name in _dotted(shown, value):
                _refuse_unknown(read, path, name, "--" + _canonical(name.rpartition(".")[2]).replace("_", "-"), by_key)
        elif section and spec.section != section:
            problem = f"{where}: {key} is in section {spec.section}; move it there, or to the top level"
            read.refuse(spec.flag, problem)
        elif spec.field in origin:
            read.problems.append(f"{path}: {shown} and {origin[spec.field]} set the same flag {spec.flag}; keep one")
        else:
            origin[spec.field] = shown
            _store(read, where, spec, key, value)
    return read


def _entries(content: Mapping[Any, Any], sections: set[str]) -> Iterator[tuple[str, str, Any]]:
    for key, value in content.items():
        if str(key) in sections and (value is None or isinstance(value, dict)):  # None: all keys are commented out
            for inner_key, inner in (value or {}).items():
                yield str(inner_key), str(key), inner
        else:
            yield str(key), "", value


def _dotted(name: str, value: Any) -> Iterator[str]:
    """Yield the names of the values in `value`, as `name.key` if it is a mapping, as Hydra writes them."""
    if not isinstance(value, dict) or not value:
        yield name
        return
    for key, inner in cast("dict[Any, Any]", value).items():
        yield from _dotted(f"{name}.{key}", inner)


def _canonical(key: str) -> str:
    return key.removeprefix("--").replace("-", "_")


def _refuse_unknown(read: FlagValues, path: str, shown: str, flag: str, by_key: Mapping[str, FlagSpec]) -> None:
    if flag in MILES_FLAGS:
        name = _canonical(MILES_FLAGS[flag].words.partition(" ")[0])
        fix = f"use {name}" if name in by_key else "give it on the command line, where it is translated"
        read.problems.append(f"{path}: {shown} is a flag of other programs; {fix}")
        return
    if (refusal := find_refusal(flag)) is not None:
        read.problems.append(Problem(f"{path}: {refusal.message(shown)}", NO_EFFECT))
        return
    names, hint = did_you_mean(_canonical(flag), by_key)
    if (known := VERL_KEYS.get(shown) or FURLONG_NAMES.get(flag)) is not None:
        name = _canonical(known.split()[0].rstrip(","))
        names, hint = [name], f"use {_ARGUMENTS.get(name, name) if path == KEYWORDS else known.removeprefix('--')}"
    fix = hint or (
        "see `furlong train --help` for all flags; settings of your functions belong in a file that they read "
        "themselves"
    )
    read.problems.append(Problem(f"{path}: unknown key {shown}; {fix}", NO_EFFECT))
    read.wrong_flags.extend(by_key[name].flag for name in names if name in by_key)


def _store(read: FlagValues, where: str, spec: FlagSpec, key: str, value: Any) -> None:
    try:
        converted = value_from_yaml(spec, value)
    except ValueError as error:
        read.refuse(spec.flag, f"{where}: {error}")
        return
    # `disable-x: true` is the flag, `x: false` the field; both are accepted.
    inverted = spec.kind == "off_switch" and _canonical(key) != spec.field
    read.values[spec.field] = not converted if inverted else converted


class _UniqueKeys(yaml.SafeLoader):
    """A safe loader that rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build one mapping."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value}", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_YAML_FIXES = {"duplicate key": "keep one of them", r"'\t'": "indent with spaces"}
# Errors of PyYAML itself, and of its constructors for values such as `!!bool x` or the date 2026-13-01.
_NOT_YAML = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


def read_yaml(path: Path | str, where: str, *, form: str) -> Any:
    """Return the content of a YAML or JSON file of at most `MOST_BYTES`.

    Raises ConfigError that starts with `where`; `form` is the expected content.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)  # bounded, as the path may be a device
    except OSError as error:
        fix = nearest_path(Path(path)) if isinstance(error, FileNotFoundError) else "give an existing file"
        raise ConfigError(f"{where} cannot be read: {error.strerror}; {fix}") from error
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{where} is larger than {MOST_BYTES >> 20} MiB; write {form}")
    try:
        return yaml.load(content.decode("utf-8"), _UniqueKeys)
    except _NOT_YAML as error:
        fix = next((fix for mark, fix in _YAML_FIXES.items() if mark in str(error)), f"write {form}")
        raise ConfigError(f"{where} is not YAML: {error}; {fix}") from error
