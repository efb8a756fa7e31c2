"""User functions named by flags, and checks of their signatures before the run starts.

Signatures are those of slime, so functions written for it work unchanged; further parameters with defaults and
`**kwargs` are allowed. Rewards may also have the form `reward(response, label, ...) -> float`, whose parameters are
chosen by name, and TRL's form `reward_func(prompts, completions, **kwargs) -> list[float]`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from furlong.config.args_view import Args
from furlong.config.checks.value_checks import RM_TYPES
from furlong.config.environment_specs import class_path, class_problems, parse_environments
from furlong.config.flag_spec import flag_specs
from furlong.config.sections import Config
from furlong.config.sections.sessions import TOOL_PARSERS
from furlong.config.topology import uses_ray
from furlong.core.sample import Sample
from furlong.core.user_code import is_async, with_hook_errors
from furlong.core.user_functions import Function, accepted_keywords, load_function, reward_style, takes_input
from furlong.core.user_objects import object_name
from furlong.errors import ConfigError

Calling = Literal["sync", "async", "either"]
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

# Types of user functions, for annotations. Parameters after those named here arrive as keywords.
GenerateFunction = Callable[[Args, Sample, dict[str, Any]], Awaitable[Sample | list[Sample]]]
"""`--custom-generate-function-path`: args, sample and sampling parameters; returns the sample, or several."""
Reward = float | Mapping[str, Any] | None
RewardFunction = Callable[..., Reward | Awaitable[Reward]]
"""`--custom-rm-path`: `fn(response, label, ...)`, or slime's `fn(args, sample, **kwargs)`; returns a number, or a
mapping that `--reward-key` reads."""
GroupRewardFunction = Callable[..., "list[Reward] | Awaitable[list[Reward]]"]
"""`--custom-rm-path` with `--group-rm`: `fn(args, samples, **kwargs)`; returns one reward per sample."""
GroupFilter = Callable[..., Any]
"""`--dynamic-sampling-filter-path`: `fn(args, samples, **kwargs)`; returns a bool or a `DynamicFilterOutput`."""
RolloutFunction = Callable[..., Any]
"""`--rollout-function-path`: `fn(args, rollout_id, data_source, evaluation=False)`."""


@dataclass(frozen=True)
class Hook:
    """Call of the function of one flag: `fn(*positional, **{name: ... for name in keywords})`.

    With `drops_keywords`, keywords that the function does not name are left out (`accepted_keywords`). `calling`
    determines whether the result is awaited. A class is called once, and its instance needs `methods`. `names`: other
    values of the flag, which select something of furlong.
    """

    flag: str
    positional: tuple[str, ...]
    keywords: tuple[str, ...] = ()
    calling: Calling = "sync"
    methods: tuple[str, ...] = ()
    drops_keywords: bool = False
    names: tuple[str, ...] = ()

    @property
    def signature(self) -> str:
        """The signature for messages and documentation."""
        prefix = "async " if self.calling == "async" else ""
        if self.methods:
            return f"class with __init__({', '.join(self.positional)}) and {', '.join(self.methods)}"
        names = [*self.positional, *(["*", *self.keywords] if self.keywords else [])]
        return f"{prefix}def fn({', '.join(names)})"


_ROLLOUT = ("args", "rollout_id", "data_source")
_TIS = ("pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths")
_REDUCER = ("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss")
_LOGGING = ("rollout_id", "args", "samples", "extra_metrics", "rollout_time")
_STEP = ("args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler")

# slime's example of importance weights with rejection: --use-tis, --use-rs and their settings do the same.
BUILT_IN = (
    "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
    "examples.train_infer_mismatch_helper.mis.compute_mis_weights",
)


def _hook(positional: tuple[str, ...], keywords: tuple[str, ...] = (), *, several: bool = False, **facts: Any) -> Any:
    """Declare the call of a flag's function; see `Hook`. The flag is `--field-name-path`, unless `flag` is given."""
    facts |= {"positional": positional, "keywords": keywords}
    return dataclasses.field(default=() if several else None, metadata=facts)


@dataclass(frozen=True)
class Hooks:
    """Loaded functions by flag name without `_path`; None if the flag is not given."""

    rollout_function: Function | None = _hook(_ROLLOUT, ("evaluation",))
    eval_function: Function | None = _hook(_ROLLOUT, ("evaluation",))
    custom_generate_function: Function | None = _hook(("args", "sample", "sampling_params"), calling="async")
    rollout_sample_hook: tuple[Function, ...] = _hook(
        ("args", "sample"), ("rollout_id", "evaluation"), several=True, calling="either", drops_keywords=True
    )
    agent_function: Function | None = _hook(
        (),
        ("base_url", "api_key", "prompt", "label", "request_kwargs", "metadata"),
        calling="either",
        drops_keywords=True,
    )
    environment: tuple[Function, ...] = _hook(
        ("**arguments",), several=True, flag="--environment", methods=("reset", "step")
    )
    custom_rm: Function | None = _hook(("args", "sample"), calling="either")
    dynamic_sampling_filter: Function | None = _hook(("args", "samples"))
    buffer_filter: Function | None = _hook(("args", "rollout_id", "buffer", "num_samples"))
    rollout_sample_filter: Function | None = _hook(("args", "data"))
    rollout_all_samples_process: Function | None = _hook(("args", "all_samples", "data_source"))
    rollout_data_postprocess: Function | None = _hook(("args", "rollout_id", "rollout_data"))
    custom_loss_function: Function | None = _hook(("args", "batch", "logits", "sum_of_sample_mean"))
    custom_tis_function: Function | None = _hook(("args",), _TIS, names=BUILT_IN)
    custom_pg_loss_reducer_function: Function | None = _hook(_REDUCER)
    custom_advantage_function: Function | None = _hook(("args", "rollout_data"))
    custom_reward_post_process: Function | None = _hook(("args", "samples"))
    custom_convert_samples_to_train_data: Function | None = _hook(("args", "samples"))
    custom_rollout_log_function: Function | None = _hook(_LOGGING)
    custom_eval_rollout_log_function: Function | None = _hook(("rollout_id", "args", "data", "extra_metrics"))
    custom_megatron_init: Function | None = _hook(("args",))
    custom_model_provider: Function | None = _hook((), ("pre_process", "post_process", "vp_stage"), drops_keywords=True)
    custom_megatron_before_log_prob_hook: Function | None = _hook(("args", "model", "store_prefix"))
    custom_megatron_before_train_step_hook: Function | None = _hook(_STEP)
    custom_update_weight_post_write: Function | None = _hook(("args", "version_dir", "rollout_engines"))
    data_source: Function | None = _hook(("args",), methods=("get_samples", "add_samples", "save", "load", "__len__"))
    session_match: Function | None = _hook(("message",), flag="--session-match", names=("echo", "strict"))
    session_leaves: Function | None = _hook(("leaves",), flag="--session-leaves", names=("all", "last", "longest"))
    session_tool_parser: Function | None = _hook(
        ("text", "tools"), flag="--session-tool-parser", names=("auto", *TOOL_PARSERS)
    )


HOOKS: dict[str, Hook] = {
    field.name: Hook(**{**dict[str, Any](flag=f"--{field.name.replace('_', '-')}-path"), **field.metadata})
    for field in dataclasses.fields(Hooks)
}
_CAUGHT_BY_CALLER = ("custom_rm", "custom_generate_function", "agent_function", "environment")


def check_signature(hook: Hook, function: Function) -> str | None:
    """Return why `function` cannot be called as `hook`; None if it can."""
    name = getattr(function, "__qualname__", repr(function))
    if hook.calling == "async" and not is_async(function):
        return f"{hook.flag}: {name} is not async; write {hook.signature}"
    if hook.calling == "sync" and is_async(function):
        return f"{hook.flag}: {name} is async, but its result is not awaited; write {hook.signature}"
    if hook.flag == "--custom-generate-function-path" and takes_input(function):
        return None
    missing = [method for method in hook.methods if not hasattr(function, method)]
    if missing:
        return f"{hook.flag}: {name} has no {', '.join(missing)}; write a {hook.signature}"
    if isinstance(function, type) and hook.flag == "--custom-rm-path":
        return f"{hook.flag}: {name} is a class; name an instance of it, or a function"
    try:
        signature = inspect.signature(function)
    except ValueError:
        return None  # a builtin without a signature
    try:
        style = reward_style(function) if hook.flag == "--custom-rm-path" else "single"
        if style == "trl":
            signature.bind(**dict.fromkeys(n for n, p in signature.parameters.items() if p.kind not in _VARIADIC))
        elif style in ("single", "batch"):
            names = accepted_keywords(function, hook.keywords) if hook.drops_keywords else hook.keywords
            signature.bind(*hook.positional, **dict.fromkeys(names))
    except TypeError as error:
        return f"{hook.flag}: {name}{signature} cannot be called ({error}); write {hook.signature}"
    places = list(signature.parameters)
    for place, expected in enumerate(hook.positional if style == "single" else ()):
        if expected in places and places.index(expected) != place:
            return f"{hook.flag}: {name}{signature} has {expected} in another position; write {hook.signature}"
    return None


OF_RANKS = (
    *("custom_loss_function", "custom_tis_function", "custom_pg_loss_reducer_function", "custom_advantage_function"),
    *("rollout_data_postprocess", "custom_megatron_init", "custom_model_provider", "custom_update_weight_post_write"),
    *("custom_megatron_before_log_prob_hook", "custom_megatron_before_train_step_hook"),
)  # functions that trainer processes call


def function_paths(config: Config) -> dict[str, tuple[str, ...]]:
    """Return the paths of user functions by field of `Hooks`, without `Hook.names`."""
    fields = {spec.flag: spec for spec in flag_specs(Config).values()}
    values = {name: fields[hook.flag].value_in(config) for name, hook in HOOKS.items()}
    values = {name: None if value in HOOKS[name].names else value for name, value in values.items()}
    values["environment"] = tuple(map(class_path, config.session.environment))
    return {name: (value,) if isinstance(value, str) else value or () for name, value in values.items()}


def load_hooks(config: Config) -> tuple[Hooks, list[str]]:
    """Load all user functions and check their signatures. Returns the hooks and every problem."""
    fields = {spec.flag: spec for spec in flag_specs(Config).values()}
    paths_by_name = function_paths(config)
    loaded: dict[str, Any] = {}
    problems: list[str] = []
    for name, hook in HOOKS.items():
        spec = fields[hook.flag]
        value = spec.value_in(config)
        functions: list[Function] = []
        num_problems = len(problems)
        for path in paths_by_name[name]:
            if name in OF_RANKS and object_name(path) is not None and uses_ray(config):
                problems.append(
                    f"{hook.flag}: trainer processes cannot import {path}, which this program defines; put it into a "
                    "file, and give file.py:function"
                )
                continue
            if name == "custom_rm" and path in RM_TYPES:
                continue  # reported with the flags
            if hook.names and not set(path) & {":", "."}:
                problems.append(f"{hook.flag} {path} is none of {', '.join(hook.names)}, and not a function; name one")
                continue
            try:
                functions.append(load_function(path))
            except ConfigError as error:
                problems.append(f"{hook.flag} {error}")
            else:
                if name == "environment":
                    with contextlib.suppress(ConfigError):  # of the values of the flag, which `validate` reports
                        spec_of_class = parse_environments(config.session.environment)[len(functions) - 1]
                        problems.extend(class_problems(spec_of_class, functions[-1]))
                elif problem := check_signature(hook, functions[-1]):
                    problems.append(problem)
        if name == "eval_function" and value == config.rollout.rollout_function_path:
            del problems[num_problems:]  # derived from that flag, whose problems are reported
        if functions:
            loaded[name] = tuple(functions) if spec.kind in ("append", "many") else functions[0]
    return Hooks(**loaded), problems


def usable_hooks(config: Config) -> Hooks:
    """Load all user functions and wrap them so that their exceptions become HookErrors.

    Rewards and generate functions are not wrapped: their callers handle failures per sample. Raises ConfigError with
    every problem.
    """
    hooks, problems = load_hooks(config)
    if problems:
        raise ConfigError(*problems)
    wrapped: dict[Function, Function] = {}  # one function may serve two flags, and must stay one object
    for name, hook in HOOKS.items():
        loaded = getattr(hooks, name)
        for function in loaded if isinstance(loaded, tuple) else (loaded,):
            if function is not None and name not in _CAUGHT_BY_CALLER and function not in wrapped:
                where = f"{hook.flag}: {getattr(function, '__qualname__', repr(function))}"
                wrapped[function] = with_hook_errors(function, where)
    values: dict[str, Any] = {}
    for name, loaded in vars(hooks).items():
        is_several = isinstance(loaded, tuple)
        values[name] = tuple(wrapped.get(f, f) for f in loaded) if is_several else wrapped.get(loaded, loaded)
    return Hooks(**values)
