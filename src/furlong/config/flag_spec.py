"""One dataclass field is one flag: how a section declares it, and what the parser, help and checks read from it."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

Kind = Literal["value", "switch", "off_switch", "tristate", "many", "append", "json"]

_METADATA_KEY = "furlong.flag"


@dataclass(frozen=True)
class Interval:
    """Numbers that a flag allows, in the notation of mathematics.

    >>> 0.0 in Interval.parse("(0, 1]"), 1.0 in Interval.parse("(0, 1]")
    (False, True)
    """

    text: str
    low: float
    high: float
    low_open: bool
    high_open: bool

    @staticmethod
    @cache
    def parse(text: str) -> Interval:
        """Read `[a, b]` with round brackets for open ends and `inf` for none."""
        low, high = text[1:-1].split(",")
        return Interval(text, float(low), float(high), text[0] == "(", text[-1] == ")")

    @property
    def way(self) -> str:
        """What to give, in words: `give at least 1`."""
        low = f"{'more than' if self.low_open else 'at least'} {self.low:g}"
        if math.isinf(self.high):
            return f"give {low}"
        return f"give {low} and {'less than' if self.high_open else 'at most'} {self.high:.10g}"

    def __contains__(self, number: float) -> bool:
        above = number > self.low if self.low_open else number >= self.low
        return above and (number < self.high if self.high_open else number <= self.high)


@dataclass(frozen=True)
class FlagSpec:
    """A flag as the command line sees it.

    `kind` says how it is written: value `--x V`, switch `--x`, off_switch `--disable-x` (the field is True without it),
    tristate `--x` / `--no-x`, many `--x A B`, append `--x A --x B`, json `--x '{...}'`.
    """

    section: str
    field: str
    flag: str
    kind: Kind
    type: type
    default: Any
    help: str
    optional: bool
    choices: tuple[str, ...] = ()
    within: Interval | None = None
    needs: str = ""
    is_secret: bool = False

    @property
    def type_name(self) -> str:
        """How the documentation names the values."""
        name = "|".join(self.choices) or {"dict": "JSON object"}.get(self.type.__name__, self.type.__name__)
        return {"many": f"{name} ...", "append": f"{name}, repeatable"}.get(self.kind, name)

    def value_in(self, config: Any) -> Any:
        """Its value in a `Config`."""
        return getattr(getattr(config, self.section), self.field)


def flag(
    default: Any,
    help: str,  # the word that argparse and dataclass-based parsers use
    *,
    name: str = "",
    kind: Kind | None = None,
    within: str = "",
    needs: str = "",
    secret: bool = False,
    choices: Iterable[str] = (),
) -> Any:
    """Declare a field of a section as a flag.

    Args:
        default: The value without the flag.
        help: What it sets, with the unit.
        name: The flag, where it is not `--field-name` (or `--disable-field-name` for a bool that defaults to True).
        kind: How it is written, where the type does not say it ("append").
        within: The interval of allowed numbers, such as "(0, 1]".
        needs: A field that must be set as well, because the flag has no effect without it.
        secret: The value is left out of files.
        choices: The words that it takes, where the type does not list them.
    """
    settings: dict[str, Any] = {"help": help, "name": name, "kind": kind, "within": within, "needs": needs}
    settings |= {"secret": secret, "choices": tuple(choices)}
    metadata = {_METADATA_KEY: settings}
    if isinstance(default, dict):
        fixed = typing.cast(dict[str, Any], default)
        make: Callable[[], dict[str, Any]] = lambda: dict(fixed)  # noqa: E731  a lambda keeps the type next to its use
        return dataclasses.field(default_factory=make, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def _element(annotation: Any) -> tuple[Kind, type, bool, tuple[str, ...]]:
    """Read a field's annotation: how it is written, the type of one value, whether None is allowed, the choices."""
    optional = False
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(annotation) if member is not type(None)]
        if len(members) != 1:
            raise TypeError(f"a flag has one type, or one type and None; got {annotation}")
        optional, annotation = True, members[0]
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return "value", str, optional, typing.get_args(annotation)
    if origin is tuple:
        return "many", typing.get_args(annotation)[0], optional, ()
    if origin is dict:
        return "json", dict, optional, ()
    if annotation is bool:
        return ("tristate" if optional else "switch"), bool, optional, ()
    if annotation in (int, float, str):
        return "value", annotation, optional, ()
    raise TypeError(f"no flag can be made of a field of type {annotation}")


def _spec(section: str, field: dataclasses.Field[Any], annotation: Any) -> FlagSpec:
    settings = field.metadata[_METADATA_KEY]
    kind, element, optional, choices = _element(annotation)
    default = field.default if field.default is not dataclasses.MISSING else typing.cast(Any, field.default_factory)()
    dashed = field.name.replace("_", "-")
    if kind == "switch" and default is True and settings["kind"] is None:
        kind, dashed = "off_switch", f"disable-{dashed}"
    return FlagSpec(
        section=section,
        field=field.name,
        flag=settings["name"] or f"--{dashed}",
        kind=settings["kind"] or kind,
        type=element,
        default=default,
        help=settings["help"],
        optional=optional,
        choices=settings["choices"] or choices,
        within=Interval.parse(settings["within"]) if settings["within"] else None,
        needs=settings["needs"],
        is_secret=settings["secret"],
    )


@cache
def flag_specs(root: type) -> Mapping[str, FlagSpec]:
    """Every flag of a root dataclass of sections, by field name, in the order of declaration.

    Raises TypeError if two sections have a field of one name: flags and hooks' `args` are flat.
    """
    specs: dict[str, FlagSpec] = {}
    for section, section_type in typing.get_type_hints(root).items():
        hints = typing.get_type_hints(section_type)
        for field in dataclasses.fields(section_type):
            if field.name in specs:
                raise TypeError(f"sections {specs[field.name].section} and {section} both have a field {field.name}")
            specs[field.name] = _spec(section, field, hints[field.name])
    return types.MappingProxyType(specs)
