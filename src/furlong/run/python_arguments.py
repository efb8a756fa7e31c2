"""Arguments of `furlong.train`: objects where flags have paths, and the defaults of a run that gives no others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from furlong.catalogue import Problem
from furlong.config.command_line import CONFIG_FLAG, OVERRIDE_FLAG, Resolved, examine
from furlong.config.flag_spec import flag_specs
from furlong.config.sections import Config
from furlong.core.text import did_you_mean, shortened
from furlong.core.user_functions import use_objects
from furlong.core.user_objects import PREFIX, import_path, name_of, packed
from furlong.data.row_readers import plain_value
from furlong.errors import ConfigError, FurlongError
from furlong.rewards.custom_reward import AsyncRewardSum, RewardSum, custom_reward

if TYPE_CHECKING:
    from furlong.config.hooks import RewardFunction

E = TypeVar("E", bound=FurlongError)
Rows: TypeAlias = "Iterable[Any] | str | Path"
"""Rows of columns: a list of dicts, a data set of `datasets` or a data frame; or a path or name as in --prompt-data."""
Rewards: TypeAlias = "RewardFunction | Sequence[RewardFunction] | str"
"""A reward function, several whose sum is the reward, the name of a verifier such as "math", or `file.py:function`."""
Environments: TypeAlias = "type | str | Sequence[type | str]"
"""Classes, or values of --environment."""

BATCH_SIZE, RESPONSE_LEN = 32, 512  # of a run that sets neither
_LENGTHS = ("rollout_max_response_len", "rollout_max_context_len", "seq_length")
_COLUMNS = {
    "input_key": ("prompt", "input", "messages", "question", "problem"),
    "label_key": ("label", "answer", "ground_truth", "solution"),
}  # columns of rows in this process, the first that they have

_ARGUMENTS = {
    "hf_checkpoint": "model",
    "custom_rm_path": "reward",
    "eval_prompt_data": "eval_data",
}  # arguments with another name than their flag
_FLAGS = re.compile(r"`\w[^`]*`|--eval-prompt-data NAME FILE|--[a-z][a-z0-9-]*")  # commands, which stay, and flags
_REWARD_TEST = re.compile(r"(;|, and try| with) `furlong reward test` (with|and) the same flags( \w+)*")

_MISSING = {
    "--hf-checkpoint is missing": "model is missing; give a model folder, or the name of a model on the Hub",
    "--prompt-data is missing": "prompt_data is missing; give a list of dicts, a data set, a data frame or a file",
    "responses are not scored": "reward is missing; give a function such as def reward(response, label), or a "
    "verifier's name such as 'math'",
}


@cache
def _keywords() -> dict[str, str]:
    """The keyword of each flag: `lr` of --lr, `use_opd=True` of --use-opd, `x=False` of --no-x."""
    names = {"--eval-prompt-data NAME FILE": "`eval_data`"}
    for name, spec in flag_specs(Config).items():
        names[spec.flag] = f"`{_ARGUMENTS.get(name, name)}`"
        if spec.type is bool:
            names[spec.flag] = f"`{name}={spec.kind != 'off_switch'}`"
            names.setdefault(spec.flag.replace("--", "--no-", 1), f"`{name}=False`")
    return names


def text_in_keywords(text: str) -> str:
    """Return a message with keyword arguments instead of flags, and without a command that cannot call objects."""
    return _FLAGS.sub(lambda found: _keywords().get(found[0], found[0]), _REWARD_TEST.sub("", text))


def in_keywords(error: E) -> E:
    """Return the error, which then names keyword arguments instead of flags."""
    error.args = tuple(text_in_keywords(str(each)) for each in error.args)
    if isinstance(error, ConfigError):
        error.problems = error.args
    return error


@dataclass
class Call:
    """Arguments of `furlong.train` as they are converted: words, keywords and defaults of `examine`, and objects."""

    words: list[str] = field(default_factory=list[str])
    keywords: dict[str, Any] = field(default_factory=dict[str, Any])
    preset: dict[str, Any] = field(default_factory=dict[str, Any])
    objects: dict[str, Any] = field(default_factory=dict[str, Any])

    def path_of(self, value: Any, name: str = "") -> str:
        """Return the path of an object: one that other processes can import, else one among `objects`."""
        if (path := import_path(value)) is not None and not name:
            return path
        stem, count = name or name_of(value), 2
        name = stem
        while self.objects.setdefault(name, value) is not value:
            name, count = f"{stem}_{count}", count + 1
        return PREFIX + name

    def set(self, name: str, value: Any, given_as: str) -> None:
        """Set a keyword. Raises ConfigError if it is given, too."""
        if name in self.keywords:
            raise ConfigError(f"{given_as} and {name} are the same; give one of them")
        self.keywords[name] = value


def resolve_call(
    *,
    model: str | Path | None,
    prompt_data: Rows | None,
    reward: Rewards | None,
    environment: Environments | None,
    eval_data: Rows | Mapping[str, Rows] | None,
    flags: Mapping[str, Any],
) -> tuple[Resolved, list[Problem]]:
    """Resolve the arguments of `furlong.train`, and keep objects where `load_function` finds them.

    Raises ConfigError for an object that worker processes need and cannot get, and for arguments that exclude another.
    """
    for name in ("config", "args"):
        if isinstance(given := flags.get(name), Mapping):
            raise ConfigError(f"{name}: got a dict; pass its entries as keywords: furlong.train(..., **{name})")
        if name == "args" and given is not None:
            raise ConfigError(f"args: got {type(given).__name__}; pass its settings as keywords, such as lr=1e-5")
    named = flags.get("eval_prompt_data")
    if not all(isinstance(each, str | Path | None) for each in (named if isinstance(named, list | tuple) else [named])):
        raise ConfigError("eval_prompt_data contains names and files; give rows as eval_data")
    call = Call(keywords=dict(flags))
    for flag in (CONFIG_FLAG, OVERRIDE_FLAG):
        value = call.keywords.pop(flag.removeprefix("--").replace("-", "_"), None)
        paths = cast("list[object]", value) if isinstance(value, list | tuple) else [] if value is None else [value]
        call.words += [f"{flag}={path}" for path in paths]
    specs = flag_specs(Config)
    for name, value in call.keywords.items():
        if callable(value) and name in specs and specs[name].type_name.startswith("FILE.py:"):
            call.keywords[name] = call.path_of(value)
        elif value is not None and name in specs and specs[name].hub == "model":
            call.keywords[name] = _model_path(name, value)
        else:
            call.keywords[name] = _plain(call, value)
    if model is not None:
        call.set("hf_checkpoint", _model_path("model", model), "model")
    if environment is not None:
        several = [*environment] if isinstance(environment, list | tuple) else [environment]
        if wrong := [each for each in several if not isinstance(each, type | str)]:
            raise ConfigError(
                f"environment: got {shortened(wrong[0])}, expected a class with reset and step; each episode makes an "
                "instance of it"
            )
        call.keywords["environment"] = [each if isinstance(each, str) else call.path_of(each) for each in several]
    if prompt_data is not None:
        call.keywords["prompt_data"] = _data_path(call, prompt_data, "prompt_data", "prompt_data")
    if eval_data is not None:
        _set_evaluation(call, eval_data)
    if reward is not None:
        _set_reward(call, reward)
    _set_defaults(call)
    use_objects(call.objects)
    if (path := call.keywords.get("custom_rm_path")) and str(path).startswith(PREFIX):
        packed(str(path).removeprefix(PREFIX))
    resolved, problems = examine(call.words, keywords=call.keywords, preset=call.preset)
    return resolved, [Problem(_in_python(problem), problem.row) for problem in problems]


def _in_python(problem: str) -> str:
    """Return a problem of one of the main arguments in terms of `furlong.train`."""
    return next((text for start, text in _MISSING.items() if problem.startswith(start)), problem)


def _model_path(name: str, model: Any) -> str:
    if type(model) is not str and not hasattr(model, "__fspath__"):
        fix = "save_pretrained(FOLDER) of a model and its tokenizer writes one"
        raise ConfigError(
            f"{name}: got {' '.join(shortened(model).split())}, expected a model folder or the name of a model on the "
            f"Hub; {'give its model_path' if hasattr(type(model), 'model_path') else fix}"
        )
    return str(model)


def _plain(call: Call, value: Any) -> Any:
    """The value as YAML would have it: paths are text, sequences are lists."""
    if isinstance(value, Path):
        return str(value)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return value.item()
    if isinstance(value, list | tuple):
        return [call.path_of(item) if callable(item) else _plain(call, item) for item in cast("Sequence[Any]", value)]
    return value


def _set_reward(call: Call, reward: Rewards) -> None:
    if isinstance(reward, str):
        is_path = not {":", "."}.isdisjoint(reward)
        call.set("custom_rm_path" if is_path else "rm_type", reward, "reward")
    elif isinstance(reward, Sequence):
        if not reward:
            raise ConfigError("reward is an empty list; give a function, or leave it out if the run needs no reward")
        functions: dict[str, Any] = {}
        for each in cast("Sequence[Any]", reward):
            if not callable(each):
                raise ConfigError(f"reward: got {shortened(each)} among several, expected functions")
            functions[name_of(each) if name_of(each) not in functions else f"{name_of(each)}_{len(functions) + 1}"] = (
                each
            )
        is_async = any(custom_reward(each, name=name, group=False).is_async for name, each in functions.items())
        call.set("custom_rm_path", call.path_of((AsyncRewardSum if is_async else RewardSum)(functions)), "reward")
    elif isinstance(reward, type):
        raise ConfigError(f"reward: got the class {reward.__name__}; give an instance, which is called for each sample")
    elif callable(reward):
        call.set("custom_rm_path", call.path_of(reward), "reward")
    else:
        raise ConfigError(
            f"reward: got {shortened(reward)}, expected a function, several in a list, or the name of a verifier"
        )


def _set_evaluation(call: Call, data: Rows | Mapping[str, Rows]) -> None:
    if isinstance(data, str | Path):
        call.set("eval_prompt_data", [str(data)], "eval_data")
        return
    sets = cast("Mapping[str, Rows]", data) if isinstance(data, Mapping) else {"eval": data}
    shown = "eval_data[{!r}]" if isinstance(data, Mapping) else "eval_data"
    words = [
        word
        for name, rows in sets.items()
        for word in (name, _data_path(call, rows, re.sub(r"\W", "_", f"eval_{name}"), shown.format(name)))
    ]
    call.set("eval_prompt_data", words, "eval_data")


def _data_path(call: Call, data: Rows, name: str, shown: str) -> str:
    if isinstance(data, str | Path):
        return str(data)
    rows: Any = data
    if type(rows).__module__.startswith("pandas"):
        rows = rows.to_dict("records")
    elif hasattr(rows, "to_dicts"):  # polars
        rows = rows.to_dicts()
    elif hasattr(rows, "to_pylist"):  # pyarrow
        rows = rows.to_pylist()
    elif isinstance(rows, Iterator):
        rows = list(cast("Iterator[Any]", rows))
    elif not hasattr(rows, "__iter__") and not hasattr(rows, "__getitem__"):
        raise ConfigError(
            f"{shown}: got {shortened(rows)}, expected rows such as [{{'prompt': '1+1=', 'label': '2'}}], or a file; "
            "N episodes of an environment are 'episodes:N'"
        )
    first = next(iter(rows), None)
    for key, value in first.items() if isinstance(first, Mapping) else ():
        if type(value).__module__.startswith("PIL."):
            fix = f"models are text-only; remove it, as in DATA.remove_columns({key!r})"
            raise ConfigError(f"{shown} has images in the column {key!r}; {fix}")
    if not isinstance(first, Mapping):
        problem = "has no rows" if first is None else f"has the row {shortened(first)}"
        fix = "give a list of dicts such as {'prompt': '1+1=', 'label': '2'}"
        if isinstance(rows, Mapping) and first is not None:
            is_splits = not isinstance(rows[first], list | tuple)
            problem = f"is a dict of {'splits' if is_splits else 'columns'}"
            fix = f"give one of them, as in DATA[{first!r}]" if is_splits else "give pandas.DataFrame(DATA)"
        raise ConfigError(f"{shown} {problem}; {fix}")
    columns = cast("Mapping[str, Any]", first)
    for key, names in _COLUMNS.items():
        if key == "label_key" and call.keywords.get("loss_type") == "sft_loss":
            names = (*names, "completion")
        if found := next((each for each in names if each in columns), None):
            call.preset.setdefault(key, found)
            if name != "prompt_data" and key not in call.keywords and found != call.preset[key]:
                call.preset[f"eval_{key}"] = found
    names, given = _COLUMNS["input_key"], call.keywords
    if columns.keys().isdisjoint(names) and not (
        call.words or {"input_key", "eval_input_key", "environment"} & given.keys()
    ):
        hint = next(filter(None, (did_you_mean(str(each), names)[1] for each in columns)), "name it with input_key")
        raise ConfigError(
            f"{shown} has the columns {[*columns]}, but none of {', '.join(names)} for the prompt; {hint}"
        )
    prompt = columns.get(call.keywords.get("input_key", call.preset.get("input_key", "")))
    if isinstance(plain_value(prompt), list) and not call.keywords.get("environment"):
        call.preset["apply_chat_template"] = True
    if name == "prompt_data" and hasattr(rows, "__len__"):
        call.preset["rollout_batch_size"] = min(BATCH_SIZE, len(rows))
    return call.path_of(rows, name)


def _set_defaults(call: Call) -> None:
    """Set what a run needs and the call leaves out, with lower precedence than any flag and file."""
    given, is_sft = call.keywords, call.keywords.get("loss_type") == "sft_loss"
    call.preset = {"rollout_batch_size": BATCH_SIZE} | call.preset
    if not call.words and not {"num_rollout", "num_epoch"} & given.keys():
        call.preset["num_epoch"] = 1
    if not (is_sft or call.words or given.keys() & {*_LENGTHS}):
        call.preset["rollout_max_response_len"] = _response_len(given.get("hf_checkpoint"))


def _response_len(model: Any) -> int:
    """Return the default length limit of responses: at most half of the context, if the folder is on this machine."""
    try:
        config = json.loads((Path(str(model)) / "config.json").read_bytes())
        return min(RESPONSE_LEN, int(config["max_position_embeddings"]) // 2)
    except (OSError, ValueError, LookupError, TypeError):
        return RESPONSE_LEN
