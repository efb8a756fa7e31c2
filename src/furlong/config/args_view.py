"""`args`, the flat view of a Config that user functions receive, as in slime; only generate functions may change it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from furlong.config.compat import find_refusal
from furlong.config.flag_spec import flag_specs
from furlong.config.sections import Config
from furlong.core.addresses import bracketed, host_and_port
from furlong.core.text import did_you_mean
from furlong.errors import ConfigError

ROUTED = ("sglang_router_ip", "sglang_router_port", "sglang_model_routers")


class Args:
    """All fields of all sections as attributes. Read-only, but for the copy of one call; can be pickled and copied.

    `routers` are host and port of the router of each served model, available as `args.sglang_model_routers`. As in
    slime, that of the trained model is also `args.sglang_router_ip`, an IPv6 address in brackets, and
    `args.sglang_router_port`. `changed`: values that a call of a generate function has set, which last until it ends.

    >>> args = Args(Config())
    >>> call = args.for_call()
    >>> call.rollout_temperature, call.turns = 0.5, 3
    >>> args.rollout_temperature, call.rollout_temperature, call.turns
    (1.0, 0.5, 3)
    """

    __slots__ = ("_changed", "_config", "_routers")
    _config: Config
    _routers: dict[str, tuple[str, int]]
    _changed: dict[str, Any] | None

    def __init__(
        self,
        config: Config,
        routers: Mapping[str, tuple[str, int]] | None = None,
        changed: Mapping[str, Any] | None = None,
    ) -> None:
        object.__setattr__(self, "_config", config)
        object.__setattr__(self, "_routers", dict(routers or {}))
        object.__setattr__(self, "_changed", None if changed is None else dict(changed))

    def for_call(self) -> Args:
        """Return a copy that one call of a generate function may change."""
        return Args(self._config, self._routers, {})

    def __getattr__(self, name: str) -> Any:
        """Return a flag. Raises AttributeError with the closest name, or why a slime flag is not supported."""
        specs = flag_specs(Config)
        if self._changed and name in self._changed:
            return self._changed[name]
        if self._routers and name in ROUTED:
            return self._routed()[name]
        if (spec := specs.get(name)) is not None:
            return spec.value_in(self._config)
        if name == "qkv_format":  # functions written for Miles ask
            return "thd"
        if (why := find_refusal(f"--{name.replace('_', '-')}")) is not None:
            raise AttributeError(f"args.{name}: {why.reason}")
        _, hint = did_you_mean(name, specs)
        raise AttributeError(f"args has no {name}; {hint or '`furlong train --help` lists all names'}")

    def __setattr__(self, name: str, value: Any) -> None:
        if self._changed is None:
            raise ConfigError(
                f"args is read-only, but {name} was set to {value!r}; set the flag of the run instead, or keep state "
                "in sample.metadata or in your module"
            )
        if name.startswith("_"):
            raise ConfigError(f"args.{name} cannot be set: names with an underscore are reserved; use another name")
        self._changed[name] = value

    def __delattr__(self, name: str) -> None:
        if self._changed is None:
            raise ConfigError(f"args is read-only, but {name} was deleted; remove that statement")
        if name not in self._changed:
            raise AttributeError(f"args.{name} was not set in this call; only such values can be deleted")
        del self._changed[name]

    def __dir__(self) -> list[str]:
        return [*object.__dir__(self), *self.as_dict()]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Args) and other.__reduce__() == self.__reduce__()

    __hash__ = None  # pyright: ignore[reportAssignmentType]  sections hold dicts, so equal views cannot hash

    def __reduce__(self) -> tuple[type[Args], tuple[Any, ...]]:
        return (Args, (self._config, self._routers, self._changed))

    def __repr__(self) -> str:
        return f"Args({len(flag_specs(Config))} flags)"

    def as_dict(self) -> dict[str, Any]:
        """Return all values by name, like `vars(args)` in slime."""
        flags = {name: spec.value_in(self._config) for name, spec in flag_specs(Config).items()}
        return flags | self._routed() | (self._changed or {})

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
