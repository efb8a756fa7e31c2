"""`args`, the flat view of a Config that user functions receive, as in slime; only generate functions may change it."""

from __future__ import annotations

import copy
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
    """All fields of all sections as attributes. Read-only; can be pickled and copied.

    `routers` are host and port of the router of each served model, available as `args.sglang_model_routers`. As in
    slime, that of the trained model is also `args.sglang_router_ip`, an IPv6 address in brackets, and
    `args.sglang_router_port`.

    >>> Args(Config()).rollout_temperature
    1.0
    """

    __slots__ = ("_config", "_routers")
    _config: Config
    _routers: dict[str, tuple[str, int]]

    def __init__(self, config: Config, routers: Mapping[str, tuple[str, int]] | None = None) -> None:
        object.__setattr__(self, "_config", config)
        object.__setattr__(self, "_routers", dict(routers or {}))

    def __getattr__(self, name: str) -> Any:
        """Return a flag. Raises AttributeError with the closest name, or why a slime flag is not supported."""
        specs = flag_specs(Config)
        if self._routers and name in ROUTED:
            return self._routed()[name]
        if (spec := specs.get(name)) is not None:
            return spec.value_in(self._config)
        if (why := find_refusal(f"--{name.replace('_', '-')}")) is not None:
            raise AttributeError(f"args.{name}: {why.reason}")
        _, hint = did_you_mean(name, specs)
        raise AttributeError(f"args has no {name}; {hint or '`furlong train --help` lists all names'}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(
            f"args is read-only, but {name} was set to {value!r}; set the flag of the run instead, or keep state "
            "in sample.metadata or in your module"
        )

    def __delattr__(self, name: str) -> None:
        raise ConfigError(f"args is read-only, but {name} was deleted; remove that statement")

    def __dir__(self) -> list[str]:
        return [*object.__dir__(self), *flag_specs(Config), *self._routed()]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Args) and (other._config, other._routers) == (self._config, self._routers)

    __hash__ = None  # pyright: ignore[reportAssignmentType]  sections hold dicts, so equal views cannot hash

    def __reduce__(self) -> tuple[type[Args], tuple[Config, dict[str, tuple[str, int]]]]:
        return (Args, (self._config, self._routers))

    def __repr__(self) -> str:
        return f"Args({len(flag_specs(Config))} flags)"

    def as_dict(self) -> dict[str, Any]:
        """Return all values by field name, like `vars(args)` in slime."""
        return {name: getattr(self, name) for name in (*flag_specs(Config), *self._routed())}

    def for_call(self) -> CallArgs:
        """Return a copy that one call of a generate function may change."""
        return CallArgs(self._config, self._routers)

    def _routed(self) -> dict[str, Any]:
        """Return the attributes for the routers of this run."""
        if not self._routers:
            return {}
        ip, port = next(iter(self._routers.values()))
        return dict(zip(ROUTED, (bracketed(ip), port, dict(self._routers)), strict=True))


class CallArgs(Args):
    """The `args` of one call of a generate function: values that it sets last until the call ends.

    >>> args = Args(Config()).for_call()
    >>> args.rollout_temperature, args.turns = 0.5, 3
    >>> args.rollout_temperature, args.turns
    (0.5, 3)
    """

    __slots__ = ("_changed",)
    _changed: dict[str, Any]

    def __init__(
        self,
        config: Config,
        routers: Mapping[str, tuple[str, int]] | None = None,
        changed: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(config, routers)
        object.__setattr__(self, "_changed", dict(changed or {}))

    def __getattribute__(self, name: str) -> Any:
        """Return a value that this call has set, or the flag."""
        if not name.startswith("_") and name in (changed := object.__getattribute__(self, "_changed")):
            return changed[name]
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise ConfigError(f"args.{name} cannot be set: names with an underscore are reserved; use another name")
        self._changed[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self._changed:
            raise AttributeError(f"args.{name} was not set in this call; only such values can be deleted")
        del self._changed[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._changed]

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and isinstance(other, CallArgs) and other._changed == self._changed

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __copy__(self) -> CallArgs:
        return CallArgs(self._config, self._routers, self._changed)

    def __deepcopy__(self, memo: dict[int, Any]) -> CallArgs:
        """Copy what this call has set; the configuration cannot change and is shared."""
        return CallArgs(self._config, self._routers, copy.deepcopy(self._changed, memo))

    def __reduce__(self) -> Any:
        return (CallArgs, (self._config, self._routers, self._changed))

    def as_dict(self) -> dict[str, Any]:
        """Return all values by field name, and those that this call has set."""
        return super().as_dict() | self._changed


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
