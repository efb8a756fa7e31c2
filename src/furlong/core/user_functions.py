"""Loading of user functions by path, and what their parameters say about how to call them.

Worker processes of rewards and environments import this without the configuration, which takes as long as the rest.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

from furlong.core.slime_modules import NotInFurlongError
from furlong.core.text import did_you_mean
from furlong.core.user_modules import assignment_of, import_module_of, split_path
from furlong.core.user_objects import set_objects
from furlong.errors import ConfigError

Function = Callable[..., Any]
RewardStyle = Literal["single", "batch", "trl", "named"]
RESPONSE_NAMES = ("response", "solution_str")  # one of them makes a reward function "named"


def use_objects(objects: Mapping[str, Any]) -> None:
    """Make these the objects with paths `python:name`, in place of earlier ones."""
    set_objects(objects)
    load_function.cache_clear()


@functools.cache
def load_function(path: str) -> Function:
    """Load `package.module.attr`, `package.module:attr` or `file.py:attr`.

    Raises ConfigError if the module, file or attribute does not exist, the import fails, or it is not callable.
    """
    module_name, attributes = split_path(path)
    target: Any = import_module_of(path)
    for name in attributes:
        try:
            target = getattr(target, name)
        except AttributeError:
            _, hint = did_you_mean(name, [known for known in vars(target) if not known.startswith("_")])
            raise ConfigError(f"{path}: {module_name} has no {name}; {hint or 'check the name'}") from None
        except NotInFurlongError as error:
            raise ConfigError(f"{path}: {error}") from error
    if not callable(target):
        place = assignment_of(import_module_of(path), attributes[-1])
        raise ConfigError(f"{path} is of type {type(target).__name__}, not a function{place}; give a function")
    return target


def takes_input(function: Function) -> bool:
    """Return whether a generate function has the form of Miles, `fn(input) -> GenerateFnOutput`."""
    return list(inspect.signature(function).parameters) == ["input"]


def accepted_keywords(function: Function, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of `names` that a function has as parameters; all of them if it has `**kwargs`."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return names
    return tuple(name for name in names if name in parameters)


CONVERSATION = "conversation"  # metadata: the messages of a prompt, for functions in TRL's form


def reads_conversations(path: str | None) -> bool:
    """Whether a reward function, or one of several, has TRL's form, in which conversations are messages."""
    try:
        function = None if path is None else load_function(path)
        each: Any = [function] if function is None else getattr(function, "functions", {"": function}).values()
        return any(one is not None and reward_style(one) == "trl" for one in each)
    except (ConfigError, TypeError, ValueError, AttributeError):  # reported where it is called
        return False


def reward_style(function: Function) -> RewardStyle:
    """Return the calling convention of a reward function, determined by its parameter names.

    "named", furlong's own: `fn(response, label, ...) -> float`, called with the parameters that it names
    (`rewards.custom_reward`), which include those of verl; "trl": `fn(prompts, completions, **columns)` -> list, of a
    group; "single": slime's `fn(args, sample, **kw)` -> float or dict; "batch": slime's `fn(args, samples, **kw)` ->
    list, of a group.
    """
    names = list(inspect.signature(function).parameters)
    if "completions" in names:
        return "trl"
    if names[:1] != ["args"] and not {*RESPONSE_NAMES}.isdisjoint(names):
        return "named"
    return "batch" if names[1:2] == ["samples"] else "single"
