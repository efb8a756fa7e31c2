"""Configuration files: YAML with flag names as keys, flat or by section."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from furlong.config.compat import FURLONG_NAMES, find_refusal
from furlong.config.flag_spec import FlagSpec
from furlong.config.flag_values import in_short, value_from_yaml
from furlong.config.passthrough import add_option, program_of, value_in_file
from furlong.core.catalogue import NO_EFFECT, Problem
from furlong.core.text import did_you_mean
from furlong.errors import ConfigError

OWN_SETTINGS = "settings of your functions belong in a file that they read themselves"
MOST_BYTES = 4 << 20


@dataclass(frozen=True)
class FileValues:
    """Values by field name, problems, and the flags that the problems concern.

    `is_unread` is True if the file could not be read at all, so that its values are unknown.
    """

    values: dict[str, Any]
    problems: list[str]
    wrong_flags: list[str]
    is_unread: bool = False


def read_config_file(path: str, specs: Mapping[str, FlagSpec]) -> FileValues:
    """Read the YAML file `path`. A key is a field or a flag (dashes or underscores), alone or inside its section."""
    try:
        content = read_yaml(path, f"configuration file {path}", form="`key: value` lines")
    except ConfigError as error:
        return FileValues({}, list(error.problems), [], is_unread=True)
    if not isinstance(content, dict | None):
        kind = type(content).__name__
        problem = f"configuration file {path} contains a {kind}; write `key: value` lines"
        return FileValues({}, [problem], [], is_unread=True)
    return values_from_mapping(content or {}, path, specs)


def values_from_mapping(content: Mapping[Any, Any], path: str, specs: Mapping[str, FlagSpec]) -> FileValues:
    """Convert keys and values to fields. Every problem starts with `path`, the name of their origin."""
    found = FileValues({}, [], [])
    by_key = _specs_by_key(specs)
    sections = {spec.section for spec in specs.values()}
    origin: dict[str, str] = {}
    for key, section, value in _entries(content, sections):
        shown = f"{section}.{key}" if section else key
        spec = by_key.get(_canonical(key))
        if spec is None and not section and key in sections:
            found.problems.append(f"{path}: {key} is a section, got {in_short(value)}; write its flags below it")
        elif spec is None and _is_passed(key):
            _store_passed(found, path, shown, key, value)
        elif spec is None:
            found.problems.append(_unknown_key(path, shown, key, by_key, found.wrong_flags))
        elif section and spec.section != section:
            found.problems.append(
                f"{path}: {shown}: {key} is in section {spec.section}; move it there, or to the top level"
            )
            found.wrong_flags.append(spec.flag)
        elif spec.field in origin:
            found.problems.append(f"{path}: {shown} and {origin[spec.field]} set the same flag {spec.flag}; keep one")
        else:
            origin[spec.field] = shown
            _store(found, path, shown, spec, key, value)
    return found


def _entries(content: Mapping[Any, Any], sections: set[str]) -> Iterator[tuple[str, str, Any]]:
    """Yield (key, section or "", value) of flat keys and of those inside a section."""
    for key, value in content.items():
        if str(key) in sections and (value is None or isinstance(value, dict)):  # None: all keys are commented out
            for inner_key, inner in (value or {}).items():
                yield str(inner_key), str(key), inner
        else:
            yield str(key), "", value


def _canonical(key: str) -> str:
    return key.removeprefix("--").replace("-", "_")


def _specs_by_key(specs: Mapping[str, FlagSpec]) -> dict[str, FlagSpec]:
    by_key = {_canonical(spec.flag): spec for spec in specs.values()}
    return by_key | dict(specs)


def _unknown_key(path: str, shown: str, key: str, by_key: Mapping[str, FlagSpec], wrong_flags: list[str]) -> str:
    as_flag = "--" + _canonical(key).replace("_", "-")
    if (why := find_refusal(as_flag)) is not None:
        return Problem(f"{path}: {why.message(shown)}", NO_EFFECT)
    names, hint = did_you_mean(_canonical(key), by_key)
    if (here := FURLONG_NAMES.get(as_flag)) is not None:
        names, hint = [_canonical(here)], f"use {here.removeprefix('--')}"
    wrong_flags.extend(by_key[name].flag for name in names)
    fix = hint or f"see `furlong train --help` for all flags; {OWN_SETTINGS}"
    return Problem(f"{path}: unknown key {shown}; {fix}", NO_EFFECT)


def _is_passed(key: str) -> bool:
    """Whether a key is an option of SGLang or sglang-router."""
    flag = "--" + _canonical(key).replace("_", "-")
    return find_refusal(flag) is None and program_of(flag) is not None


def _store_passed(found: FileValues, path: str, shown: str, key: str, value: Any) -> None:
    flag = "--" + _canonical(key).replace("_", "-")
    try:
        add_option(found.values, flag, lambda option: value_in_file(option, value))
    except ValueError as error:
        found.problems.append(f"{path}: {shown} {error}")
        found.wrong_flags.append(flag)


def _store(found: FileValues, path: str, shown: str, spec: FlagSpec, key: str, value: Any) -> None:
    try:
        converted = value_from_yaml(spec, value)
    except ValueError as error:
        found.problems.append(f"{path}: {shown}: {error}")
        found.wrong_flags.append(spec.flag)
        return
    # `disable-x: true` is the flag, `x: false` the field; both are accepted.
    inverted = spec.kind == "off_switch" and _canonical(key) != spec.field
    found.values[spec.field] = not converted if inverted else converted


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


def read_yaml(path: Path | str, where: str, *, form: str) -> Any:
    """Return the content of a YAML or JSON file of at most `MOST_BYTES`.

    Raises ConfigError that starts with `where`; `form` is the expected content.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)  # bounded, as the path may be a device
        if len(content) > MOST_BYTES:
            raise ConfigError(f"{where} is larger than {MOST_BYTES >> 20} MiB; write {form}")
        return yaml.load(content.decode("utf-8"), _UniqueKeys)
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}; give an existing file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} is not YAML: {error}; write {form}") from error
