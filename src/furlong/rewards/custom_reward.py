"""Load and call custom reward functions.

The parameters of a function determine its style (`core.user_functions.reward_style`). Functions may be sync or async.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from furlong.core.outcome import Outcome, outcome_from_value, outcomes_from_list
from furlong.core.sample import Sample
from furlong.core.user_code import describe_exception, is_async, is_raised_by_user, location_of
from furlong.core.user_functions import RewardStyle, load_function, reward_style
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

    def evaluate(self, args: Any, samples: Sequence[Sample]) -> Any:
        """Call the function and return its value or awaitable. Exceptions propagate.

        `samples` contains one sample for the styles `single` and `verifier`.
        """
        match self.style:
            case "single":
                return self.call(args, samples[0])
            case "batch":
                return self.call(args, list(samples))
            case "verifier":
                return self.call(samples[0].response, samples[0].label, samples[0].metadata)
            case "trl":
                return self.call(**self._columns(args, samples))

    def outcomes(self, value: Any, num_samples: int) -> list[Outcome]:
        """Convert the return value of the function to one outcome per sample."""
        is_list = self.style in ("batch", "trl")
        outcomes = outcomes_from_list(value, num_samples) if is_list else [outcome_from_value(value)]
        return [each if each.kind == "scored" else self._located(each) for each in outcomes]

    def _located(self, outcome: Outcome) -> Outcome:
        """Add the function to the reason of a value that is no reward."""
        return dataclasses.replace(outcome, reason=f"{outcome.reason} ({location_of(self.call)})")

    async def score(self, args: Any, samples: Sequence[Sample]) -> list[Outcome]:
        """Call the function and return one outcome per sample; an exception fails all of them."""
        try:
            value = self.evaluate(args, samples)
            if isinstance(value, Awaitable):
                value = await value
        except BaseException as error:
            if not is_raised_by_user(error):
                raise
            return [Outcome.failed(describe_exception(error))] * len(samples)
        return self.outcomes(value, len(samples))

    def _columns(self, args: Any, samples: Sequence[Sample]) -> dict[str, Any]:
        """Return TRL's keyword arguments: prompts, completions, and every dataset column as a list."""
        columns: dict[str, list[Any]] = {}
        for name in dict.fromkeys(key for s in samples for key in s.metadata):
            columns[name] = [s.metadata.get(name) for s in samples]
        labels = [s.label for s in samples]
        columns["label"] = labels
        if label_key := getattr(args, "label_key", None):
            columns[str(label_key)] = labels
        columns["prompts"] = [s.prompt for s in samples]
        columns["completions"] = [
            s.response if isinstance(s.prompt, str) else [{"role": "assistant", "content": s.response}] for s in samples
        ]
        columns["completion_ids"] = [s.tokens[s.prompt_length :] for s in samples]
        if self.accepts is None:
            return columns
        return {name: column for name, column in columns.items() if name in self.accepts}


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
    if style == "single" and not has_two:
        raise RewardError(
            f"the reward function {name} has the parameters ({', '.join(names)}); it must take (args, sample, **kw), "
            "(args, samples, **kw), or TRL's (prompts, completions, **columns)"
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
