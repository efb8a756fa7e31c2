"""Custom reward functions: load one by path, determine its calling style, call it.

The style follows from the parameters (`config.hooks.reward_style`); each may be sync or async.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from furlong.config.hooks import RewardStyle, reward_style
from furlong.config.hooks import load_function as load_callable
from furlong.core.outcome import Outcome, outcome_from_value, outcomes_from_list
from furlong.core.sample import Sample
from furlong.core.user_code import describe_exception, is_async
from furlong.errors import ConfigError, RewardError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class RewardFunction:
    """A loaded reward function. `accepts` are the keywords it takes; None for one that takes any (`**kw`)."""

    call: Callable[..., Any]
    name: str
    style: RewardStyle
    is_async: bool
    accepts: frozenset[str] | None = None

    def answer(self, args: Any, samples: Sequence[Sample]) -> Any:
        """Call the function and return what it returns: a value, or an awaitable of one. Its exceptions come through.

        `samples` is one sample for the styles `single` and `verifier`.
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
        """Turn what the function returned into one outcome per sample."""
        if self.style in ("batch", "trl"):
            return outcomes_from_list(value, num_samples)
        return [outcome_from_value(value)]

    async def score(self, args: Any, samples: Sequence[Sample]) -> list[Outcome]:
        """Call the function and return one outcome per sample; an exception fails all of them."""
        try:
            value = self.answer(args, samples)
            if isinstance(value, Awaitable):
                value = await value
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Not a cancellation of this task: the function raised it.
            return [Outcome.failed(describe_exception(error))] * len(samples)
        except (Exception, SystemExit) as error:  # noqa: BLE001  reward boundary: what user code raises is an outcome
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


def function_from(call: Callable[..., Any], *, name: str, group: bool) -> RewardFunction:
    """Tell the style of a callable from its parameters. `group` asks for slime's batch form (`--group-rm`).

    Raises RewardError for a callable that has none of the known forms.
    """
    try:
        style = reward_style(call)
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError) as error:
        raise RewardError(f"the reward function {name} cannot be called: {error}") from error
    names, kinds = [p.name for p in parameters], [p.kind for p in parameters]
    takes_two = sum(kind in _POSITIONAL for kind in kinds) > 1 or inspect.Parameter.VAR_POSITIONAL in kinds
    if style == "single" and not takes_two:
        raise RewardError(
            f"the reward function {name} has the parameters ({', '.join(names)}); it must take (args, sample, **kw), "
            "(args, samples, **kw), or TRL's (prompts, completions, **columns)"
        )
    if style == "single" and group:
        style = "batch"
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    return RewardFunction(call, name, style, is_async(call), None if takes_any else frozenset(names))


def load_function(path: str, *, group: bool = False) -> RewardFunction:
    """Load a reward function from `pkg.module.attr`, `pkg.module:attr` or `file.py:attr`.

    Raises RewardError that names the path and what went wrong on the way.
    """
    try:
        found = load_callable(path)
    except ConfigError as error:
        if error.__cause__ is None:
            raise RewardError(f"the reward function {error}") from error
        raise RewardError(
            f"the reward function {path} cannot be loaded: {describe_exception(error.__cause__)}"
        ) from error
    return function_from(found, name=path, group=group)
