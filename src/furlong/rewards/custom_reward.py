"""Load and call custom reward functions, sync or async.

The parameters of a function determine its style (`core.user_functions.reward_style`). Both workers and the driver call
functions here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from furlong.core.outcome import Outcome, outcome_from_value, outcomes_from_list
from furlong.core.sample import Sample
from furlong.core.text import did_you_mean
from furlong.core.user_code import describe_exception, is_async, is_raised_by_user, location_of
from furlong.core.user_functions import CONVERSATION, RewardStyle, load_function, reward_style
from furlong.errors import ConfigError, RewardError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class CustomReward:
    """A loaded reward function. `accepts` are its keyword parameters, None if it accepts any (`**kw`)."""

    call: Callable[..., Any]
    name: str
    style: RewardStyle
    is_async: bool
    accepts: frozenset[str] | None = None

    @property
    def is_of_group(self) -> bool:
        """Whether one call scores all samples of a group; otherwise it scores one."""
        return self.style in ("batch", "trl")

    def calls(self, samples: Sequence[Sample]) -> list[Sequence[Sample]]:
        """Return the samples of each call that scores these samples of a group."""
        return [samples] if self.is_of_group else [[sample] for sample in samples]

    def score(self, args: Any, samples: Sequence[Sample]) -> list[Outcome]:
        """Call a function that is not async. Returns one outcome per sample; an exception fails all of them."""
        try:
            value = self._call(args, samples)
            if isinstance(value, Awaitable):  # of a function that is not declared async
                value = asyncio.run(_awaited(value))  # pyright: ignore[reportUnknownArgumentType]
        except BaseException as error:
            if not is_raised_by_user(error):
                raise
            return [Outcome.failed(describe_exception(error))] * len(samples)
        return self._outcomes(value, len(samples))

    async def score_async(self, args: Any, samples: Sequence[Sample], timeout_s: float | None) -> list[Outcome]:
        """Call an async function, and cancel it after `timeout_s`; None for no limit."""

        async def score() -> list[Outcome]:
            try:
                value = await self._call(args, samples)
            except BaseException as error:
                if not is_raised_by_user(error):
                    raise
                return [Outcome.failed(describe_exception(error))] * len(samples)
            return self._outcomes(value, len(samples))

        scoring = asyncio.create_task(score())
        try:
            done, _ = await asyncio.wait({scoring}, timeout=timeout_s)
        finally:
            scoring.cancel()
        if done or timeout_s is None:
            return scoring.result()
        details = f"it did not return from {location_of(self.call)}"
        return [Outcome.timed_out(timeout_s, details=details)] * len(samples)

    def _call(self, args: Any, samples: Sequence[Sample]) -> Any:
        match self.style:
            case "single":
                return self.call(args, samples[0])
            case "batch":
                return self.call(args, list(samples))
            case "named":
                positional, keywords = self._named(args, samples[0])
                return self.call(*positional, **keywords)
            case "trl":
                return self.call(**self._columns(args, samples))

    def _named(self, args: Any, sample: Sample) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a "named" function. Raises RewardError for a parameter that has no value."""
        keys = {"input_key": sample.prompt, "label_key": sample.label}
        columns = {str(name): value for key, value in keys.items() if (name := getattr(args, key, None)) is not None}
        columns |= sample.metadata
        columns |= {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
        columns |= {"metadata": sample.metadata, "sample": sample}
        # verl's names; its rows may have a column of that name
        values = {
            "solution_str": sample.response,
            "ground_truth": sample.label,
            "extra_info": sample.metadata,
            **columns,
        }
        positional: list[Any] = []
        keywords: dict[str, Any] = {}
        parameters = inspect.signature(self.call).parameters
        for place, (name, parameter) in enumerate(parameters.items()):
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                keywords |= {key: value for key, value in columns.items() if key not in parameters}
                continue
            if name in values:
                value = values[name]
            elif parameter.default is not inspect.Parameter.empty:
                value = parameter.default
            elif place == 2 and [*parameters][:2] == ["response", "label"]:
                value = sample.metadata  # the third parameter of a verifier, whatever its name
            else:
                raise self._unknown(name, columns)
            if parameter.kind in _POSITIONAL:
                positional.append(value)
            elif parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                keywords[name] = value
        return positional, keywords

    def _unknown(self, name: str, columns: Iterable[str]) -> RewardError:
        known = [*columns]
        hint = did_you_mean(name, known)[1] or "name one of them, put that column into the object of --metadata-key"
        return RewardError(
            f"the reward function {self.name} has the parameter {name}, which is none of {', '.join(known)}; "
            f"{hint}, or give the parameter a default"
        )

    def _outcomes(self, value: Any, num_samples: int) -> list[Outcome]:
        outcomes = outcomes_from_list(value, num_samples) if self.is_of_group else [outcome_from_value(value)]
        if isinstance(self.call, _Sum):
            return outcomes  # with the places of its functions
        where = location_of(self.call)
        return [o if o.kind == "scored" else dataclasses.replace(o, reason=f"{o.reason} ({where})") for o in outcomes]

    def _columns(self, args: Any, samples: Sequence[Sample]) -> dict[str, Any]:
        columns: dict[str, list[Any]] = {}
        for name in dict.fromkeys(key for s in samples for key in s.metadata if key != CONVERSATION):
            columns[name] = [s.metadata.get(name) for s in samples]
        columns["label"] = [s.label for s in samples]
        if label_key := getattr(args, "label_key", None):
            columns[str(label_key)] = columns["label"]
        columns["prompts"] = prompts = [s.metadata.get(CONVERSATION, s.prompt) for s in samples]
        columns["completions"] = [
            s.response if isinstance(prompt, str) else [{"role": "assistant", "content": s.response}]
            for s, prompt in zip(samples, prompts, strict=True)
        ]
        columns["completion_ids"] = [s.tokens[s.prompt_length :] for s in samples]
        for name, parameter in inspect.signature(self.call).parameters.items():
            is_variadic = parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
            if name not in columns and not is_variadic and parameter.default is inspect.Parameter.empty:
                raise self._unknown(name, columns)
        return {name: column for name, column in columns.items() if self.accepts is None or name in self.accepts}


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _is_of_slime(names: Sequence[str]) -> bool:
    """Whether the first two parameters may be `args` and `sample` by their names, such as `_`, `s` or `a_sample`."""
    first, second = [*names, "", ""][:2]
    return "arg" in first or first[:1] == "_" or "sample" in second or min(len(first), len(second)) < 2


def custom_reward(call: Callable[..., Any], *, name: str, group: bool) -> CustomReward:
    """Wrap a callable, with the style derived from its parameters. `group` selects slime's batch form (`--group-rm`).

    Raises RewardError for unsupported parameters.
    """
    try:
        style = reward_style(call)
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError) as error:
        raise RewardError(f"the reward function {name} cannot be called: {error}") from error
    names, kinds = [p.name for p in parameters], [p.kind for p in parameters]
    has_two = sum(kind in _POSITIONAL for kind in kinds) > 1 or inspect.Parameter.VAR_POSITIONAL in kinds
    if style == "single" and not (has_two and _is_of_slime(names)):
        raise RewardError(
            f"the reward function {name} has the parameters ({', '.join(names)}); it must take (response, label), "
            "(args, sample, **kw), (args, samples, **kw), or TRL's (prompts, completions, **columns)"
        )
    if style == "single" and group:
        style = "batch"
    accepts_any = inspect.Parameter.VAR_KEYWORD in kinds
    return CustomReward(call, name, style, is_async(call), None if accepts_any else frozenset(names))


def load_reward(path: str, *, group: bool = False) -> CustomReward:
    """Load a reward function from `pkg.module.attr`, `pkg.module:attr` or `file.py:attr`.

    Raises RewardError with the path and the cause.
    """
    try:
        function = load_function(path)
    except ConfigError as error:
        cause = error.__cause__
        problem = str(error) if cause is None else f"{path} cannot be loaded: {describe_exception(cause)}"
        raise RewardError(f"the reward function {problem}") from error
    return custom_reward(function, name=path, group=group)


PARTS = "rewards"  # key of a sample's metadata, as of rubrics (`environments.protocol`)


class _Sum:
    """Several reward functions, by name."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.functions = dict(functions)

    def _loaded(self) -> dict[str, CustomReward]:
        return {name: custom_reward(each, name=name, group=False) for name, each in self.functions.items()}

    def _sums(self, outcomes: Mapping[str, Sequence[Outcome]], samples: Sequence[Sample]) -> list[Outcome]:
        sums: list[Outcome] = []
        for i, sample in enumerate(samples):
            values: dict[str, float] = {}
            problem: Outcome | None = None
            for name, outcome in ((name, each[i]) for name, each in outcomes.items()):
                if outcome.kind != "scored":
                    problem = problem or outcome
                elif isinstance(outcome.reward, float):
                    values[name] = outcome.reward
                else:
                    reason = f"{name} returned a dict; return a number from each of several functions"
                    problem = problem or Outcome.failed(reason)
            sample.metadata[PARTS] = values
            sums.append(problem or Outcome.scored(sum(values.values())))
        return sums


class RewardSum(_Sum):
    """The sum of several reward functions, whose values are recorded in the metadata. Scores a group at a time.

    A sample that one of them fails to score is not scored.
    """

    def __call__(self, args: Any, samples: Sequence[Sample]) -> list[Outcome]:
        """Score the samples of a group with functions that are not async."""
        outcomes = {
            name: [outcome for call in each.calls(samples) for outcome in each.score(args, call)]
            for name, each in self._loaded().items()
        }
        return self._sums(outcomes, samples)


class AsyncRewardSum(_Sum):
    """A `RewardSum` of which one function or more is async."""

    async def __call__(self, args: Any, samples: Sequence[Sample]) -> list[Outcome]:
        """Score the samples of a group; calls of async functions run concurrently."""
        outcomes: dict[str, list[Outcome]] = {}
        for name, function in self._loaded().items():
            calls = function.calls(samples)
            if function.is_async:
                scored = await asyncio.gather(*(function.score_async(args, call, None) for call in calls))
            else:
                scored = [function.score(args, call) for call in calls]
            outcomes[name] = [outcome for call in scored for outcome in call]
        return self._sums(outcomes, samples)
