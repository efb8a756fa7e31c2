"""Parsing of a command line into a Config, and the reverse.

argparse is not used, because all problems are reported together (argparse stops at the first), values may start with a
dash (`--rollout-top-k -1`, `--rollout-stop ---`), and the source of every value is recorded.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from furlong.catalogue import NO_EFFECT, Problem
from furlong.config.checks.validate import validate
from furlong.config.compat import FURLONG_NAMES, VERL_KEYS, find_refusal
from furlong.config.config_file import KEYWORDS, FlagValues, is_engine_option, read_config_file, values_from_mapping
from furlong.config.flag_spec import FlagSpec, flag_specs
from furlong.config.flag_values import looks_like_a_flag, many_from_equals, value_from_words, words_from_value
from furlong.config.hub import LocalCopies, resolve_config
from furlong.config.miles_flags import MILES_FLAGS, MilesFlag
from furlong.config.named_parts import select_parts
from furlong.config.passthrough import FIELDS, value_of
from furlong.config.resolve import derive
from furlong.config.sections import Config, by_field
from furlong.core.text import did_you_mean, redact_credentials
from furlong.core.user_objects import PREFIX, object_name
from furlong.errors import ConfigError

CONFIG_FLAG = "--config"
OVERRIDE_FLAG = "--custom-config-path"
YAML_FILES = (".yaml", ".yml")
TYPOGRAPHIC = str.maketrans({**dict.fromkeys("“”„«»", '"'), **dict.fromkeys("‘’‚", "'"), "\xa0": " "})
_MEANT = {r"\.ya?ml$": CONFIG_FLAG, r"\.py:": "--custom-rm-path", r"\.(jsonl|parquet)(@|$)": "--prompt-data"}
_ON, _OFF = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True)
class Resolved:
    """A complete configuration and the source of each value.

    `sources` maps a field to "flag", "keyword", "file NAME", "default", "entry point" or "derived: why". `lines` are
    for the log: parts of the run that values of flags have selected by slime's names. `hub`: names on the Hub, whose
    local copies are in `config`.
    """

    config: Config
    sources: Mapping[str, str]
    lines: tuple[str, ...] = ()
    hub: LocalCopies = field(default_factory=LocalCopies)

    def to_json(self) -> str:
        """Return the text of `config.json` in the run directory, without secrets."""
        hub = {"hub": self.hub.commits} if self.hub.commits else {}
        content = {"config": _without_secrets(self.config), "sources": dict(self.sources), **hub}
        return json.dumps(content, indent=2) + "\n"


def parse(argv: Sequence[str], *, preset: Mapping[str, Any] | None = None) -> Resolved:
    """Read flags and configuration files, and derive the remaining defaults.

    Order of precedence: --custom-config-path, command line, --config, `preset` (an entry point's own defaults, by field
    name), default. Raises ConfigError with every unknown flag, missing value and wrong type. `validate`
    checks combinations of values; `load` does both.
    """
    resolved, parts = _read(argv, preset or {})
    if problems := [problem for part in parts for problem in part.problems]:
        raise ConfigError(*problems)
    return resolved


def load(
    argv: Sequence[str],
    *,
    preset: Mapping[str, Any] | None = None,
    device_type: str | None = None,
    weights: bool = True,
) -> Resolved:
    """`parse` and `validate`. Raises ConfigError with every problem of both.

    `device_type` ("cpu" or "cuda"), if known, enables checks that depend on it. `weights` as in `examine`.
    """
    resolved, problems = examine(argv, preset=preset, device_type=device_type, weights=weights)
    if problems:
        raise ConfigError(*problems)
    return resolved


def examine(
    argv: Sequence[str],
    *,
    preset: Mapping[str, Any] | None = None,
    keywords: Mapping[str, Any] | None = None,
    device_type: str | None = None,
    weights: bool = True,
) -> tuple[Resolved, list[Problem]]:
    """Like `load`, but return the problems, and the configuration as far as it could be read.

    Names on the Hub are resolved to local copies; without `weights`, of models only configuration and tokenizer.
    `keywords` are flags as Python values, by name with underscores; they override flags in `argv`.
    """
    resolved, parts = _read(argv, preset or {}, keywords or {})
    problems = [Problem(problem) for part in parts for problem in part.problems]
    if any(part.is_unread for part in parts):  # flags that the file sets would be reported as missing
        return resolved, problems
    # A flag that is misspelled or has a wrong value is reported once, not again as missing.
    wrong_flags = {flag for part in parts for flag in part.wrong_flags}
    resolved, not_found = with_local_copies(resolved, weights=weights)
    problems += not_found
    wrong_flags |= {problem.split()[0] for problem in not_found}
    for problem in validate(resolved.config, device_type=device_type):
        if wrong_flags.isdisjoint(word.strip(".,:;()`'\"").split("=")[0] for word in problem.split()):
            problems.append(problem)
    # what is wrong with the value of a flag that has no effect is left out
    idle = {flag for problem in problems if problem.row == NO_EFFECT and (flag := problem.split()[0]).startswith("--")}
    return resolved, [each for each in problems if each.row == NO_EFFECT or each.split()[0] not in idle]


def with_local_copies(resolved: Resolved, *, weights: bool) -> tuple[Resolved, list[Problem]]:
    """Replace names on the Hub by local copies. Returns the problems, and keeps the names that have one."""
    copies = resolve_config(resolved.config, weights=weights)
    config = config_from_values(copies.values, resolved.config)
    lines = (*resolved.lines, *(f"{name} on the Hub: commit {commit}" for name, commit in copies.commits.items()))
    return dataclasses.replace(resolved, config=config, lines=lines, hub=copies), copies.problems


def argv_from_config(config: Config) -> list[str]:
    """Return the shortest command line that `parse` reads as `config`, if nothing is derived."""
    words: list[str] = []
    for spec in flag_specs(Config).values():
        words.extend(words_from_value(spec, spec.value_in(config)))
    return words


def command_of(resolved: Resolved) -> str:
    """Return the command of a run: what flags, keywords and files have set, without secrets, with names on the Hub."""
    words = ["furlong", "train"]
    for spec in flag_specs(Config).values():
        source = resolved.sources[spec.field]
        if not spec.is_secret and not source.startswith(("default", "derived")):
            words += words_from_value(spec, spec.value_in(resolved.config))
    for path, name in resolved.hub.names.items():
        words = [word.replace(path, name) for word in words]
    note = ""
    if any(object_name(word.partition("=")[2] or word) for word in words):
        note = f"# {PREFIX}NAME is an object of the program that called furlong.train with these settings\n"
    return note + redact_credentials(shlex.join(words))


def flags_as_written(config: Config) -> dict[str, Any]:
    """Return the flags by field name, with the values that `config.json` would contain."""
    return by_field(json.loads(json.dumps(_without_secrets(config))))


def _without_secrets(config: Config) -> dict[str, dict[str, Any]]:
    values = dataclasses.asdict(config)
    for spec in flag_specs(Config).values():
        if spec.is_secret and values[spec.section][spec.field] is not None:
            values[spec.section][spec.field] = "(not written)"
    return without_credentials(values)


def without_credentials(value: Any) -> Any:
    """Redact the credentials in URLs of JSON data."""
    if isinstance(value, str):
        return redact_credentials(value)
    if isinstance(value, Mapping):
        return {name: without_credentials(each) for name, each in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [without_credentials(each) for each in cast("Sequence[Any]", value)]
    return value


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


def _read(
    argv: Sequence[str], preset: Mapping[str, Any], keywords: Mapping[str, Any] | None = None
) -> tuple[Resolved, list[FlagValues]]:
    specs = flag_specs(Config)
    flags, paths = _scan(argv, specs)
    config_files = [(f"file {path}", read_config_file(path, specs)) for path in paths[CONFIG_FLAG]]
    override_files = [(f"file {path}", read_config_file(path, specs)) for path in paths[OVERRIDE_FLAG]]
    from_keywords = values_from_mapping(keywords or {}, KEYWORDS, specs)

    values, sources = dict(preset), dict.fromkeys(preset, "entry point")
    replaced = [
        f"{specs[name].flag} is {value} of {source}, not {flags.values[name]} of the command line: {OVERRIDE_FLAG} "
        "takes precedence"
        for source, part in override_files
        for name, value in part.values.items()
        if name in flags.values and flags.values[name] != value and name not in FIELDS.values()
    ]
    by_precedence = (*config_files, ("flag", flags), ("keyword", from_keywords), *override_files)
    for source, part in by_precedence:
        for name, value in part.values.items():
            is_options = name in FIELDS.values() and name in values  # engine options are set one by one
            values[name] = {**values[name], **value} if is_options else value
            sources[name] = source

    selected = FlagValues()
    lines, selected.problems = select_parts(values, sources)
    idle = [line for line in flags.lines if " has no effect: " in line] if values.get("strict_flags") else []
    selected.problems += [Problem(f"{line}; remove it, or --strict-flags", NO_EFFECT) for line in idle]
    lines += [*replaced, *(line for line in flags.lines if line not in idle)]
    explicit = config_from_values(values)
    derived = derive(explicit, frozenset(values))
    sources.update({name: f"derived: {why}" for name, (_, why) in derived.items()})
    config = config_from_values({name: value for name, (value, _) in derived.items()}, explicit)
    resolved = Resolved(config, {name: sources.get(name, "default") for name in specs}, tuple(lines))
    return resolved, [flags, selected, *(part for _, part in by_precedence if part is not flags)]


def _scan(argv: Sequence[str], specs: Mapping[str, FlagSpec]) -> tuple[FlagValues, dict[str, list[str]]]:
    """Read the words from left to right, and return the values and the paths of configuration files.

    If a flag is given twice, the last one counts, as in slime's scripts.
    """
    by_flag = {spec.flag: spec for spec in specs.values()}
    negated = {spec.flag.replace("--", "--no-", 1): spec for spec in specs.values() if spec.kind == "tristate"}
    read = FlagValues()
    paths: dict[str, list[str]] = {CONFIG_FLAG: [], OVERRIDE_FLAG: []}
    if any(word.endswith("\r") for word in argv):
        read.is_unread = "\r" in argv  # the lines after a backslash are not part of the command
        read.problems.append("the script has Windows line endings; remove them: `sed -i 's/\\r$//' SCRIPT`")
        argv = [word.removesuffix("\r") for word in argv if word != "\r"]
    words, tied = list(argv), list[tuple[str, FlagSpec]]()
    while words:
        word = words.pop(0)
        name, equals, text = word.partition("=")
        if name in paths:
            path = [text] if equals else _take_values(words, 1)
            paths[name] += path
            read.problems += [] if path else [f"{name} has no value; write {name} FILE"]
        elif (spec := by_flag.get(name)) is not None:
            _read_flag(read, spec, words, text if equals else None)
        elif name in negated:
            read.values[negated[name].field] = False
        elif (flag := MILES_FLAGS.get(name)) is not None:
            given = [text] if equals else _take_values(words, len(words))
            words[:0] = _translated(read, name, flag, given)
            if flag.same_as:
                tied.append((f"{name} {' '.join(given)}", specs[flag.same_as]))
        elif is_engine_option(name):
            option_words = [text] if equals else _take_values(words, len(words))
            read.set_option(name, name, partial(value_of, words=option_words))
        elif looks_like_a_flag(word):
            _refuse_unknown(read, name, [*by_flag, *negated, *paths])
            _take_values(words, len(words))  # the values of the unknown flag
        else:
            so_far = argv[: len(argv) - len(words) - 1]
            last = max((i for i, each in enumerate(so_far) if looks_like_a_flag(each)), default=len(so_far))
            before = "".join(so_far[last : last + 1])
            path = " ".join([*so_far[last + 1 :], word, *_take_values(list(words), len(words))])
            if " " in path and before and os.path.exists(path.partition("@[")[0]):
                read.refuse(before, f"unexpected word {word!r}: the path has spaces; write {before} '{path}'")
                _take_values(words, len(words))
                continue
            read.problems.append(_unexpected(word, words, [*by_flag, *negated, *paths], before))
            read.is_unread |= word.endswith(YAML_FILES) or word.startswith((" ", "\\"))
    for given, spec in tied:
        own = str(read.values.get(spec.field, spec.default))
        if given.split()[1:] != [own]:
            read.problems.append(f"{given} differs from {spec.flag} {own}, which sets it; remove it")
    return read, paths


def _translated(read: FlagValues, name: str, flag: MilesFlag, given: list[str]) -> list[str]:
    try:
        words, line = flag.translated(name, given)
    except ValueError as error:
        read.problems.append(Problem(str(error), NO_EFFECT))
        return []
    read.lines.append(line)
    return words


def _take_values(words: list[str], most: int) -> list[str]:
    taken: list[str] = []
    while words and len(taken) < most and not looks_like_a_flag(words[0]):
        taken.append(words.pop(0))
    return taken


def _read_flag(read: FlagValues, spec: FlagSpec, words: list[str], text: str | None) -> None:
    try:
        value = _value(spec, words, text)
    except ValueError as error:
        problem = str(error)
        read.refuse(spec.flag, problem if problem.startswith(spec.flag) else f"{spec.flag}: {problem}")
    else:
        read.values[spec.field] = (*read.values.get(spec.field, ()), value) if spec.kind == "append" else value


def _value(spec: FlagSpec, words: list[str], text: str | None) -> Any:
    if spec.kind in ("switch", "off_switch", "tristate"):
        if text is None and words and words[0].lower() in (*_ON, *_OFF):
            text = words.pop(0)
        if text is not None:
            fix = f"remove {spec.flag}" if text.lower() in _OFF else f"write {spec.flag} alone, or remove it"
            raise ValueError(f"takes no value, got {text!r}; {fix}")
        return spec.kind != "off_switch"
    if text is not None:
        return value_from_words(spec, many_from_equals(spec, text) if spec.kind == "many" else [text])
    values = _take_values(words, len(words) if spec.kind == "many" else 1)
    if values[:1] == ["="]:
        given = "".join([*values[1:], *_take_values(words, 1)][:1])
        raise ValueError(f"is followed by a single =; write {spec.flag} {given or 'VALUE'}")
    if not values:
        name = spec.metavar or "VALUE"
        raise ValueError(f"has no value, expected {spec.type_name}; write {spec.flag} {name} or {spec.flag}={name}")
    return value_from_words(spec, values)


def _unexpected(word: str, words: list[str], known: Sequence[str], before: str) -> str:
    """Return the problem of a word that is no flag and no value, and remove what seems to belong to it from `words`.

    before: the last flag, if there is one.
    """
    if not word:
        return "unexpected word '', perhaps an unset shell variable; set it, or remove the word"
    if not (rest := word.strip("\\ \t\r\n\xa0")) or rest[0] == "#":
        _take_values(words, len(words) if rest else 0)
        return f"unexpected word {word!r}: a backslash continues a line only at its end; delete what follows it"
    if (plain := word.translate(TYPOGRAPHIC).strip("'\"")) != word.strip("'\""):
        _take_values(words, len(words))
        return f"unexpected word {word!r}: it has typographic quotes or spaces; write {plain}"
    key, equals, value = word.lstrip("+").partition("=")
    if (flag := VERL_KEYS.get(key)) is not None and equals:
        return f"{word}: {key} is a setting of verl; use {flag}"
    dashed = "--" + key.lstrip("-–—").replace("_", "-")
    _, hint = did_you_mean(FURLONG_NAMES.get(dashed, dashed), known) if "." not in key else ([], "")
    if hint and (equals or not word[0].isalnum() or dashed in known):
        given = " ".join([value] if equals else _take_values(words, 1))
        return f"unexpected word {word!r}: flags begin with two dashes; {hint.rstrip('?')} {given}".rstrip() + "?"
    last = "--" + key.rpartition(".")[2].lower().replace("_", "-")
    if "." in key and equals and (refusal := find_refusal(last)) is not None:
        return refusal.message(word)
    if "." in key and equals and (flag := FURLONG_NAMES.get(last, last)) in known:
        return f"{word}: settings of other programs are not read; use {flag}"
    if "." in key and equals:
        return f"unexpected word {word!r}: settings of other programs are not read; see `furlong train --help`"
    if before == "--prompt-data":
        return f"unexpected word {word!r}: {before} takes one file; join several into one"
    if (flag := next((flag for mark, flag in _MEANT.items() if re.search(mark, word)), None)) is not None:
        return f"unexpected word {word!r}; did you mean {flag} {word}?"
    return f"unexpected word {word!r}: no flag before it accepts it; remove it or quote it"


def _refuse_unknown(read: FlagValues, name: str, known: Sequence[str]) -> None:
    if (plain := name.translate(TYPOGRAPHIC)) != name:
        read.refuse(plain.split()[0], f"unknown flag {name!r}: it has typographic quotes or spaces; write {plain}")
        return
    dashed = name.lower().replace("_", "-")
    if (refusal := find_refusal(dashed)) is not None:
        read.problems.append(Problem(refusal.message(name), NO_EFFECT))
        return
    matches, hint = ([dashed], f"did you mean {dashed}?") if dashed in known else did_you_mean(dashed, known)
    if dashed in FURLONG_NAMES:
        matches, hint = [FURLONG_NAMES[dashed]], f"use {FURLONG_NAMES[dashed]}"
    elif (switch := dashed.replace("--no-", "--", 1)) != dashed and switch in known:
        matches, hint = [switch], f"{switch} is off unless it is given; remove {name}"
    message = f"unknown flag {name}; {hint or 'see `furlong train --help` for all flags'}"
    read.problems.append(Problem(message, NO_EFFECT))
    read.wrong_flags.extend(matches)
