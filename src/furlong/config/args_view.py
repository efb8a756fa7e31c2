"""`args`, the flat view of a Config that user functions receive, as in slime. Only generate functions change flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from furlong.config.compat import find_refusal
from furlong.config.flag_spec import flag_specs
from furlong.config.passthrough import FIELDS, OptionList
from furlong.config.sections import Config
from furlong.core.addresses import bracketed, host_and_port
from furlong.core.text import did_you_mean
from furlong.errors import ConfigError

ROUTED = ("sglang_router_ip", "sglang_router_port", "sglang_model_routers")


class Args:
    """All fields of all sections as attributes; can be pickled and copied. Flags are read-only, except in `for_call`.

    `routers` are host and port of the router of each served model, available as `args.sglang_model_routers`. As in
    slime, that of the trained model is also `args.sglang_router_ip`, an IPv6 address in brackets, and
    `args.sglang_router_port`. `changed`: values that functions have set: those of other names than flags last as long
    as the process, and those of a call of a generate function until it ends.

    >>> args = Args(Config())
    >>> args.calls = 1
    >>> call = args.for_call()
    >>> call.rollout_temperature, call.calls = 0.5, 3
    >>> args.rollout_temperature, call.rollout_temperature, args.calls, call.calls
    (1.0, 0.5, 1, 3)
    """

    __slots__ = ("_changed", "_config", "_is_of_call", "_routers")
    _config: Config
    _routers: dict[str, tuple[str, int]]
    _changed: dict[str, Any]
    _is_of_call: bool

    def __init__(
        self,
        config: Config,
        routers: Mapping[str, tuple[str, int]] | None = None,
        changed: Mapping[str, Any] | None = None,
        is_of_call: bool = False,
    ) -> None:
        object.__setattr__(self, "_config", config)
        object.__setattr__(self, "_routers", dict(routers or {}))
        object.__setattr__(self, "_changed", dict(changed or {}))
        object.__setattr__(self, "_is_of_call", is_of_call)

    def for_call(self) -> Args:
        """Return a copy that one call of a generate function may change."""
        return Args(self._config, self._routers, self._changed, is_of_call=True)

    def __getattr__(self, name: str) -> Any:
        """Return a flag. Raises AttributeError with the closest name, or why a slime flag is not supported."""
        specs = flag_specs(Config)
        if name in self._changed:
            return self._changed[name]
        if self._routers and name in ROUTED:
            return self._routed()[name]
        if (spec := specs.get(name)) is not None:
            return spec.value_in(self._config)
        program, _, option = name.partition("_")
        if program in FIELDS and (known := OptionList.of(program).options.get(option.replace("_", "-"))) is not None:
            given: Mapping[str, Any] = getattr(self._config.engines, FIELDS[program])
            return given.get(option, False if known.kind == "switch" else None)  # None: the default of the program
        if name == "qkv_format":  # functions written for Miles ask
            return "thd"
        if (why := find_refusal(f"--{name.replace('_', '-')}")) is not None:
            raise AttributeError(f"args.{name}: {why.reason}")
        _, hint = did_you_mean(name, specs)
        raise AttributeError(f"args has no {name}; {hint or '`furlong train --help` lists all names'}")

    def __setattr__(self, name: str, value: Any) -> None:
        if not self._is_of_call and (name in flag_specs(Config) or name in ROUTED):
            raise ConfigError(
                f"the flags in args are read-only, but {name} was set to {value!r}; set the flag of the run instead, "
                "or another attribute of args"
            )
        if name.startswith("_"):
            raise ConfigError(f"args.{name} cannot be set: names with an underscore are reserved; use another name")
        self._changed[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self._changed:
            raise AttributeError(f"args.{name} was not set by a function; only such values can be deleted")
        del self._changed[name]

    def __dir__(self) -> list[str]:
        return [*object.__dir__(self), *self.as_dict()]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Args) and other.__reduce__() == self.__reduce__()

    __hash__ = None  # pyright: ignore[reportAssignmentType]  sections hold dicts, so equal views cannot hash

    def __reduce__(self) -> tuple[type[Args], tuple[Any, ...]]:
        return (Args, (self._config, self._routers, self._changed, self._is_of_call))

    def __repr__(self) -> str:
        return f"Args({len(flag_specs(Config))} flags)"

    def as_dict(self) -> dict[str, Any]:
        """Return all values by name, like `vars(args)` in slime."""
        flags = {name: spec.value_in(self._config) for name, spec in flag_specs(Config).items()}
        return flags | self._routed() | self._changed

    def _routed(self) -> dict[str, Any]:
        if not self._routers:
            return {}
        ip, port = next(iter(self._routers.values()))
        return dict(zip(ROUTED, (bracketed(ip), port, dict(self._routers)), strict=True))


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    """Return the URL of `endpoint` at the router of a served model (`--sglang-config`).

    `args` are those passed to user functions. Raises ConfigError for an unknown model name.
    """
    routers: Mapping[str, tuple[str, int]] = getattr(args, "sglang_model_routers", None) or {}
    if model_name not in routers:
        raise ConfigError(
            f"model {model_name!r} has no router in this run; models with one: {', '.join(routers) or 'none'}; "
            "add it to --sglang-config"
        )
    ip, port = routers[model_name]
    return f"http://{host_and_port(ip, port)}{endpoint}"
