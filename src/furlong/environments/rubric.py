"""Rubrics: weighted reward functions of an episode, or of the episodes of a group, each with a metric of its name."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from furlong.core.outcome import Outcome
from furlong.core.sample import ROLE, STEP_REWARDS, Sample
from furlong.core.user_code import describe_exception, is_async, is_raised_by_user
from furlong.environments.protocol import AGENT_ERROR, FAILED_PARTS, INFO, PARTS
from furlong.errors import ConfigError

RewardPart = Callable[..., Any]


@dataclass(frozen=True)
class Episode:
    """What a reward function judges.

    messages: the conversation in OpenAI's form. steps: rewards that the environment gave. info: what its steps
    recorded. error: the exception of an agent that failed; "" if it did not.
    """

    prompt: Any
    label: Any
    metadata: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]
    steps: Sequence[float] = ()
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    role: str = ""
    error: str = ""
    is_truncated: bool = False

    @staticmethod
    def of(sample: Sample) -> Episode:
        """Return the episode of a sample."""
        metadata = sample.metadata
        messages = metadata.get("messages")
        if messages is None:
            messages = [{"role": "assistant", "content": sample.response}]
        return Episode(
            sample.prompt,
            sample.label,
            metadata,
            messages,
            metadata.get(STEP_REWARDS) or (),
            metadata.get(INFO) or {},
            str(metadata.get(ROLE) or ""),
            str(metadata.get(AGENT_ERROR) or ""),
            sample.status is Sample.Status.TRUNCATED,
        )

    @property
    def answers(self) -> list[Mapping[str, Any]]:
        """The messages of the policy."""
        return [message for message in self.messages if message.get("role") == "assistant"]

    @property
    def answer(self) -> str:
        """The text of the policy's last message."""
        return str((self.answers or [{}])[-1].get("content") or "")

    @property
    def tool_calls(self) -> list[Mapping[str, Any]]:
        """All tool calls of the policy: mappings with `name` and `arguments`, which is JSON text."""
        return [call["function"] for message in self.answers for call in message.get("tool_calls") or ()]


@dataclass(frozen=True)
class _Part:
    """One function. A weight of 0 makes it a metric only."""

    function: RewardPart
    name: str
    weight: float
    is_of_group: bool
    takes_environment: bool


class Rubric:
    """The weighted sum of reward functions, and of the rewards that the environment's steps gave.

    Each part is a function, or a pair (function, weight). Its parameter is named `episode`, or `episodes` if it judges
    a whole group and returns one number for each. With the parameters `episode` and `environment` it gets the instance
    that played the episode, before that is closed. It may be async. `metrics` are functions with the weight 0: if one
    of them fails, the episode is still scored. Values are reported as `reward/NAME`, failures as `reward/NAME_failed`.
    Raises ConfigError for parts that cannot be called so.

    >>> def exact(episode):
    ...     return float(episode.answer == episode.label)
    >>> def turns(episode):
    ...     return len(episode.answers)
    >>> Rubric(exact, metrics=[turns]).weights
    {'exact': 1.0, 'turns': 0.0}
    """

    def __init__(self, *parts: RewardPart | tuple[RewardPart, float], metrics: Sequence[RewardPart] = ()) -> None:
        pairs = [part if isinstance(part, tuple) else (part, 1.0) for part in parts]
        self._parts = [_part(function, weight) for function, weight in (*pairs, *((each, 0.0) for each in metrics))]
        names = [part.name for part in self._parts]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(
                f"a rubric has several functions named {', '.join(repeated)}; give each a different name: it is the "
                "name of its metric"
            )

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each function by name."""
        return {part.name: part.weight for part in self._parts}

    @property
    def has_group_parts(self) -> bool:
        """Whether a function compares the episodes of a group."""
        return any(part.is_of_group for part in self._parts)

    @property
    def in_environment(self) -> dict[str, RewardPart]:
        """The functions with a parameter `environment` by name; `record` stores their values."""
        return {part.name: part.function for part in self._parts if part.takes_environment}

    @staticmethod
    def record(sample: Sample, row: Mapping[str, float | str]) -> None:
        """Store the values of functions, or why they have none, in the metadata of a sample."""
        sample.metadata[PARTS] = {name: value for name, value in row.items() if not isinstance(value, str)}
        sample.metadata.pop(FAILED_PARTS, None)
        if failed := {name: value for name, value in row.items() if isinstance(value, str)}:
            sample.metadata[FAILED_PARTS] = failed

    async def __call__(self, args: Any, sample: Sample) -> float | Outcome:
        """Return the reward of one sample, or an outcome that names the functions that failed."""
        return (await self.of_group(args, [sample]))[0]

    async def of_group(self, args: Any, samples: Sequence[Sample]) -> list[float | Outcome]:
        """Return the rewards of the samples of a group, as `__call__`."""
        del args
        episodes = [Episode.of(sample) for sample in samples]
        columns = await asyncio.gather(*(_column(part, episodes) for part in self._parts))
        return [self._total(sample, [column[i] for column in columns]) for i, sample in enumerate(samples)]

    def _total(self, sample: Sample, values: Sequence[float | str]) -> float | Outcome:
        row = {part.name: value for part, value in zip(self._parts, values, strict=True)}
        self.record(sample, row)
        weights = self.weights
        failed = sample.metadata.get(FAILED_PARTS, {})
        if decisive := [name for name in failed if weights[name]]:
            return Outcome.failed("; ".join(f"the rubric's {name} {failed[name]}" for name in decisive))
        steps = sample.metadata.get(STEP_REWARDS) or ()
        return math.fsum((*steps, *(weights[name] * value for name, value in sample.metadata[PARTS].items())))


def _part(function: Any, weight: Any) -> _Part:
    name = getattr(function, "__name__", type(function).__name__)
    form = (
        "write def NAME(episode), def NAME(episode, environment) or def NAME(episodes), and (NAME, weight) for another "
        "weight than 1"
    )
    if not callable(function):
        raise ConfigError(f"a rubric has {function!r} as a function; {form}")
    if not name.isidentifier():
        raise ConfigError(f"a rubric has the function {name}, whose name is the name of its metric; {form}")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ConfigError(f"the rubric's {name} has the weight {weight!r}; give a finite number: {form}")
    parameters = inspect.signature(function).parameters.values()
    required = [each.name for each in parameters if each.default is each.empty]
    if required not in (["episode"], ["episodes"], ["episode", "environment"]):
        raise ConfigError(f"the rubric's {name} has the parameters ({', '.join(required)}); {form}")
    return _Part(function, name, float(weight), required == ["episodes"], len(required) == 2)


async def _column(part: _Part, episodes: Sequence[Episode]) -> list[float | str]:
    if part.takes_environment:
        return [_recorded(part, episode.metadata) for episode in episodes]
    if part.is_of_group:
        value, failure = await _called(part, list(episodes))
        if failure:
            return [failure] * len(episodes)
        value = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != len(episodes):
            return [f"returned {value!r:.80}; return one number for each of the {len(episodes)} episodes"] * len(
                episodes
            )
        return [number_of(each) for each in value]
    answers = await asyncio.gather(*(_called(part, episode) for episode in episodes))
    return [failure or number_of(value) for value, failure in answers]


def _recorded(part: _Part, metadata: Mapping[str, Any]) -> float | str:
    for key in (PARTS, FAILED_PARTS):
        if part.name in (metadata.get(key) or {}):
            return metadata[key][part.name]
    return "needs the environment of the episode, which was not played here"


async def _called(part: _Part, argument: Any) -> tuple[Any, str]:
    try:
        value = part.function(argument)
        if is_async(part.function) or isinstance(value, Awaitable):
            value = await value
    except BaseException as error:
        if not is_raised_by_user(error):
            raise
        return None, f"raised {describe_exception(error)}"
    return value, ""


def number_of(value: Any) -> float | str:
    """Return what a function returned as a finite number, or why it is none."""
    value = value.tolist() if hasattr(value, "tolist") else value
    try:
        number = float(value) if isinstance(value, bool | int | float) else math.nan
    except OverflowError:
        number = math.inf
    return number if math.isfinite(number) else f"returned {value!r:.80}; return a finite number"
