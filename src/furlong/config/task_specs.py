"""Procedural tasks of the package reasoning-gym, as `--prompt-data reasoning-gym:NAME?key=value` names them."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from urllib.parse import parse_qsl

from furlong.core import user_objects
from furlong.core.json_values import written_value
from furlong.core.text import did_you_mean, shortened
from furlong.errors import ConfigError

PREFIX = "reasoning-gym:"
PACKAGE = "reasoning_gym"
EPISODES = "episodes:"  # rows without content, for environments that make their own tasks
DEFAULT_SIZE = 1_000
MAX_WEIGHT = 1_000
OWN_KEYS = ("size", "seed", "weight", "system_prompt")  # the others are options of the task
_FORM = f"write {PREFIX}NAME, {PREFIX}NAME?key=value&key=value, or several with + between them"


def is_task(path: str) -> bool:
    """Return whether `path` names procedural tasks or rows in this process and not a file."""
    return path.startswith((PREFIX, EPISODES, user_objects.PREFIX))


def num_episodes(text: str) -> int | None:
    """Return N of `episodes:N`, None for other tasks. Raises ConfigError if it is not a number of at least 1."""
    if not text.startswith(EPISODES):
        return None
    count = text.removeprefix(EPISODES)
    if not count.isdecimal() or not 1 <= int(count) <= 1 << 40:
        raise ConfigError(f"{text}: {count!r} is not a whole number of at least 1; write {EPISODES}1000")
    return int(count)


@dataclass(frozen=True)
class TaskSpec:
    """One task. options: of its configuration in the package. weight: its share of the rows of a mixture."""

    name: str
    options: Mapping[str, Any]
    weight: int = 1
    system_prompt: str | None = None

    @property
    def key(self) -> str:
        """Name and options as JSON: what the rows depend on, besides the seed."""
        return json.dumps([self.name, self.options], sort_keys=True)


@dataclass(frozen=True)
class TaskMixture:
    """`size` rows of tasks in turn, by weight; row i of a task depends on task, `seed` and i only."""

    tasks: tuple[TaskSpec, ...]
    size: int = DEFAULT_SIZE
    seed: int = 0

    @functools.cached_property
    def _turns(self) -> list[int]:
        weights = [task.weight for task in self.tasks]
        total, taken, turns = sum(weights), [0] * len(weights), []
        for row in range(total):
            behind = [weight * (row + 1) - count * total for weight, count in zip(weights, taken, strict=True)]
            turns.append(behind.index(max(behind)))
            taken[turns[-1]] += 1
        return turns

    def row(self, row: int) -> tuple[TaskSpec, int]:
        """Return the task of a row, and the number of earlier rows of that task."""
        period, place = divmod(row, len(self._turns))
        turn = self._turns[place]
        return self.tasks[turn], period * self.tasks[turn].weight + self._turns[:place].count(turn)


@functools.lru_cache(maxsize=64)
def parse_tasks(text: str) -> TaskMixture:
    """Parse `reasoning-gym:NAME?key=value+NAME...`.

    Raises ConfigError for a wrong form, an unknown task or option, and if the package is not installed.
    """
    if find_spec(PACKAGE) is None:
        raise ConfigError(
            f"{text} needs the package reasoning-gym, which is not installed; pip install 'furlong-rl[reasoning-gym]'"
        )
    shared: dict[str, int] = {}
    tasks = [_task(part.strip(), text, shared) for part in text.removeprefix(PREFIX).split("+")]
    keys = [task.key for task in tasks]
    if len(set(keys)) < len(keys):
        raise ConfigError(f"{text} names a task twice with equal options; use weight=2, or different options")
    divisor = math.gcd(*(task.weight for task in tasks))
    tasks = [dataclasses.replace(task, weight=task.weight // divisor) for task in tasks]
    return TaskMixture(tuple(tasks), **shared)


def tasks_problem(flag: str, path: str) -> str | None:
    """Return why `path` does not name procedural tasks or rows in this process; None if it does."""
    try:
        if user_objects.object_name(path) is not None:
            user_objects.find_object(path)
        elif num_episodes(path) is None:
            parse_tasks(path)
    except ConfigError as error:
        return f"{flag} {error}"
    return None


def _task(part: str, text: str, shared: dict[str, int]) -> TaskSpec:
    name, _, query = part.partition("?")
    config = _configs().get(name)
    if config is None:
        _, hint = did_you_mean(name, sorted(_configs()))
        raise ConfigError(f"{text}: {name or 'nothing'} is not a task of reasoning-gym; {hint or _FORM}")
    values = query_values(text, query, _FORM)
    weight = _whole(text, "weight", values.pop("weight", "1"), least=1, most=MAX_WEIGHT)
    for key, least in (("size", 1), ("seed", 0)):
        if key in values:
            number = _whole(text, key, values.pop(key), least=least)
            if shared.setdefault(key, number) != number:
                raise ConfigError(f"{text}: {key} is given twice, {shared[key]} and {number}; give it once")
    if (system_prompt := values.pop("system_prompt", None)) is not None:
        from reasoning_gym.utils import SYSTEM_PROMPTS

        if system_prompt not in SYSTEM_PROMPTS:
            known = ", ".join(SYSTEM_PROMPTS)
            raise ConfigError(f"{text}: system_prompt={system_prompt} is not one of {known}; use one of them")
    options = {key: _option(text, name, config, key, value) for key, value in values.items()}
    try:
        checked: Any = config(**options)
        if hasattr(checked, "validate"):
            checked.validate()
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"{text}: {error or type(error).__name__}; change the options") from error
    return TaskSpec(name, options, weight, system_prompt)


def query_values(where: str, query: str, form: str) -> dict[str, str]:
    """Return the values of `key=value&key=value`. Raises ConfigError for another form, and for a key given twice."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise ConfigError(f"{where}: {shortened(query)} is not of the form key=value&key=value; {form}") from None
    values: dict[str, str] = {}
    for key, value in pairs:
        if key in values:
            raise ConfigError(f"{where}: {key} is given twice, {values[key]} and {value}; give it once")
        values[key] = value
    return values


@functools.cache
def _configs() -> dict[str, type]:
    from reasoning_gym.factory import DATASETS  # here: takes a second to import

    return {name: config for name, (_, config) in DATASETS.items()}


def _whole(text: str, key: str, value: str, *, least: int, most: int = 1 << 62) -> int:
    if not value.isdecimal() or not least <= int(value) <= most:
        raise ConfigError(f"{text}: {key}={value} must be a whole number from {least} to {most}")
    return int(value)


def _option(text: str, task: str, config: type, key: str, value: str) -> Any:
    names = sorted({field.name for field in dataclasses.fields(config)} - {"size", "seed"})
    if key not in names:
        _, hint = did_you_mean(key, [*names, *OWN_KEYS])
        raise ConfigError(f"{text}: {task} has no option {key}; {hint or 'use some of ' + ', '.join(names)}")
    try:
        parsed = written_value(value)
    except ValueError as error:
        raise ConfigError(f"{text}: the value of {key} cannot be used: {error}") from None
    kind = typing.get_type_hints(config)[key]
    kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    for each in sorted(kinds, key=lambda each: each is str):  # text last: it takes anything
        origin = typing.get_origin(each) or each
        if origin is float and type(parsed) is int:
            return float(parsed)
        if origin is str:
            return value
        if origin in (tuple, list) and isinstance(parsed, list):
            return parsed
        if origin in (int, float, bool, dict, types.NoneType) and type(parsed) is origin:
            return parsed
    raise ConfigError(f"{text}: {key}={value[:200]} is not a value of type {kind}; write numbers, true, or JSON")
