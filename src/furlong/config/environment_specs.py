"""Environments as `--environment` names them: `module:Class?key=value&key=value`."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from furlong.config.checks.value_checks import prompt_file_problem
from furlong.config.sections import Config
from furlong.config.task_specs import query_values
from furlong.core.json_values import written_value
from furlong.core.user_code import message_of
from furlong.core.user_modules import split_path
from furlong.errors import ConfigError

LIMITS = {
    "max_turns": int,
    "max_episode_tokens": int,
    "episode_timeout": float,
    "turn_timeout": float,
    "tool_timeout": float,
}
OWN_KEYS = ("name", "weight", "prompt_data", *LIMITS)  # the others are arguments of the class
# Environments of other libraries: prefix -> class, package that it imports, extra that installs it.
PLUGS = {
    "gym": ("furlong.environments.gymnasium_text:GymnasiumText", "gymnasium", "gym"),
    "openenv": ("furlong.environments.openenv_client:OpenEnvClient", "openenv", "openenv"),
    "nemo-gym": ("furlong.environments.nemo_gym:NemoGym", "httpx", ""),
    "verifiers": ("furlong.environments.verifiers_taskset:VerifiersTaskset", "verifiers", "verifiers"),
}
SHOWN_CHARS = 200  # of a value in messages
FORM = "write file.py:Class or file.py:Class?key=value&key=value"


@dataclass(frozen=True)
class EnvironmentSpec:
    """One environment. arguments: of the class. weight: its share of the prompts. limits: those that replace flags."""

    name: str
    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    weight: float = 1.0
    prompt_data: str | None = None
    limits: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def rubric_path(self) -> str:
        """The path of the class's rubric, as reward workers load it."""
        module, attributes = split_path(self.path)
        return f"{module}:{'.'.join((*attributes, 'rubric'))}"


@functools.lru_cache(maxsize=64)
def parse_environments(entries: Sequence[str]) -> tuple[EnvironmentSpec, ...]:
    """Parse the values of `--environment`. Raises ConfigError with every problem."""
    specs: list[EnvironmentSpec] = []
    problems: list[str] = []
    for entry in entries:
        try:
            specs.append(_spec(entry))
        except ConfigError as error:
            problems += error.problems
    names = [spec.name for spec in specs]
    problems += [
        f"--environment: the name {name} is used {names.count(name)} times; set name=... in one of them: it is part of "
        "metrics"
        for name in sorted({name for name in names if names.count(name) > 1})
    ]
    if problems:
        raise ConfigError(*problems)
    return tuple(specs)


def parse_env_workers(values: Sequence[str]) -> tuple[str, int]:
    """Return kind and number of `--env-workers`. Raises ConfigError."""
    kind, number = values if len(values) == 2 else ("", "")
    if kind not in ("thread", "process") or not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"--env-workers {' '.join(values)}: write thread N or process N, with a number of at least 1")
    return kind, int(number)


def class_path(entry: str) -> str:
    """Return the path of the class that a value of `--environment` names."""
    prefix, separator, _ = entry.partition(":")
    return PLUGS[prefix][0] if separator and prefix in PLUGS else entry.partition("?")[0]


def _spec(entry: str) -> EnvironmentSpec:
    where, (path, _, query) = f"--environment {entry[:SHOWN_CHARS]}", entry.partition("?")
    prefix, _, target = path.partition(":")
    plug = PLUGS.get(prefix)
    if plug is not None:
        if not target:
            raise ConfigError(f"{where} names nothing of {prefix}; write {prefix}:NAME")
        if find_spec(plug[1]) is None:
            raise ConfigError(
                f"{where} needs the package {plug[1]}, which is not installed; pip install 'furlong-rl[{plug[2]}]'"
            )
    path = class_path(entry)
    try:
        _, attributes = split_path(path)
    except ConfigError:
        raise ConfigError(f"{where} does not name a class; {FORM}") from None
    values = query_values(where, query, FORM)
    last = re.sub(r"[^A-Za-z0-9_.-]+", "-", target).strip("-") if plug is not None else attributes[-1]
    name = values.get("name", last)
    if not name or not all(character.isalnum() or character in "_-." for character in name):
        raise ConfigError(f"{where}: the name {name!r} has other characters than letters, digits, '_', '-' and '.'")
    limits = {key: _number(where, key, values[key], kind) for key, kind in LIMITS.items() if key in values}
    return EnvironmentSpec(
        name,
        path,
        ({"target": target} if plug is not None else {})
        | {key: _value(where, key, value) for key, value in values.items() if key not in OWN_KEYS},
        _number(where, "weight", values.get("weight", "1"), float),
        values.get("prompt_data"),
        limits,
    )


def _number(where: str, key: str, text: str, kind: type) -> float:
    try:
        number = kind(text)
    except ValueError:
        number = 0
    if not 0 < number < float("inf"):
        what = "whole number of at least 1" if kind is int else "number above 0"
        raise ConfigError(f"{where}: {key}={text} must be a {what}")
    return number


def _value(where: str, key: str, text: str) -> Any:
    try:
        return written_value(text)
    except ValueError as error:
        raise ConfigError(f"{where}: the value of {key} cannot be used: {error}") from None


def environment_problems(config: Config) -> Iterator[str]:
    """Yield what is wrong with the values of `--environment`, with the files that they name, and with their workers."""
    flags = config.session
    try:
        kind, _ = parse_env_workers(flags.env_workers)
        runs_here = flags.environment or flags.agent_function_path
        if runs_here and flags.agent_memory_limit is not None and kind == "thread":
            what = "environments run" if flags.environment else "the agent function runs"
            yield (
                f"--agent-memory-limit {flags.agent_memory_limit:g} limits processes, and {what} in threads; "
                "add --env-workers process N, or remove --agent-memory-limit"
            )
        specs = parse_environments(flags.environment)
    except ConfigError as error:
        yield from error.problems
        return
    for spec in specs:
        if spec.prompt_data is not None:
            problem = prompt_file_problem(f"--environment {spec.name}, prompt_data", spec.prompt_data)
            if problem is not None:
                yield problem
    if config.data.streaming_data and len(specs) > 1:
        yield (
            f"--streaming-data cannot be combined with a mixture of {len(specs)} environments, whose prompts are in "
            "memory; remove --streaming-data"
        )


def _signature_problems(where: str, made: Any, methods: Sequence[str]) -> Iterator[str]:
    for method in methods:
        arguments = {"reset": ("task", "seed"), "step": ("message",)}[method]
        own = (None,) if inspect.isfunction(inspect.getattr_static(made, method, None)) else ()  # self
        signature = inspect.signature(getattr(made, method))
        try:
            signature.bind(*own, *arguments)
        except TypeError as error:
            yield (
                f"{where}: {getattr(made, '__qualname__', made)}.{method}{signature} cannot be called with "
                f"({', '.join(arguments)}): {error}; write def {method}(self, {', '.join(arguments)})"
            )


def class_problems(spec: EnvironmentSpec, made: Any) -> Iterator[str]:
    """Yield why a class cannot be the environment of `spec`."""
    where, name = f"--environment {spec.path}", getattr(made, "__qualname__", repr(made))
    together = inspect.getattr_static(made, "step_many", None)
    needed = ("reset", "step") if together is None else ("reset",)
    methods = [method for method in needed if not callable(getattr(made, method, None))]
    if methods and not callable(getattr(made, "run", None)):
        yield f"{where}: {name} has no {' and no '.join(methods)}; write a class with reset and step, or with run"
    elif not methods:
        yield from _signature_problems(where, made, needed)
    if together is not None and not isinstance(together, staticmethod | classmethod):
        yield (
            f"{where}: {name}.step_many belongs to one instance, but gets the (environment, message) of several; make "
            "it a staticmethod or a classmethod"
        )
    try:
        parameters = inspect.signature(made).parameters
        reserved = [key for key in OWN_KEYS if key in parameters]
        if reserved:
            yield (
                f"{where}: {name} has the parameter {reserved[0]}, which is furlong's own setting of an environment "
                f"({', '.join(OWN_KEYS)}); rename it"
            )
        inspect.signature(made).bind(**spec.arguments)
        if callable(check := getattr(made, "check_arguments", None)):
            check(**spec.arguments)
    except ConfigError as error:
        yield from error.problems
    except TypeError as error:
        yield f"{where}: {name}{inspect.signature(made)} cannot be called with {dict(spec.arguments)}: {error}; {FORM}"
    except ValueError:
        pass  # a builtin without a signature
    if callable(schemas := getattr(made, "tool_schemas", None)) and not methods:
        try:
            schemas(made.__new__(made))
        except ConfigError as error:
            yield from (f"{where}: {problem}" for problem in error.problems)
        except Exception as error:  # noqa: BLE001  user code
            yield f"{where}: the tools of {name} raised {type(error).__name__}: {message_of(error)}; fix them"
