"""Declaration of a flag as a dataclass field, read by parser, help, documentation and checks."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from furlong.core.algorithms import find_algorithm

Kind = Literal["value", "switch", "off_switch", "tristate", "many", "append", "json"]

Operator = Literal["", "=", "!=", ">", "."]

_METADATA_KEY = "furlong.flag"


@dataclass(frozen=True)
class Interval:
    """Numbers that a flag accepts, in mathematical notation.

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
        """Parse `[a, b]`; round brackets are open ends, `inf` is unbounded."""
        low, high = text[1:-1].split(",")
        return Interval(text, float(low), float(high), text[0] == "(", text[-1] == ")")

    @property
    def fix(self) -> str:
        """The fix for a number outside: `use a value of at least 1`."""
        low = f"{'above' if self.low_open else 'of at least'} {self.low:g}"
        if math.isinf(self.high):
            return f"use a value {low}"
        return f"use a value {low} and {'below' if self.high_open else 'at most'} {self.high:.10g}"

    def __contains__(self, number: float) -> bool:
        above = number > self.low if self.low_open else number >= self.low
        return above and (number < self.high if self.high_open else number <= self.high)


@dataclass(frozen=True)
class Condition:
    """A requirement on another field.

    The field is set (`save`), equal (`engine=embedded`), different (`loss_type!=sft_loss`), greater (`size>1`), or
    selects an algorithm with a property of `core.algorithms.Algorithm` (`advantage_estimator.clips`).
    """

    field: str
    operator: Operator = ""
    value: str = ""

    @staticmethod
    def parse(text: str) -> Condition:
        """Parse one of the five forms.

        >>> Condition.parse("engine=embedded")
        Condition(field='engine', operator='=', value='embedded')
        """
        operators: tuple[Operator, ...] = ("!=", "=", ">", ".")
        for operator in operators:
            if operator in text:
                field, _, value = text.partition(operator)
                return Condition(field, operator, value)
        return Condition(text)

    def is_met(self, value: Any) -> bool:
        """Whether the field's `value` meets the condition."""
        match self.operator:
            case "=":
                return str(value) == self.value
            case "!=":
                return str(value) != self.value
            case ">":
                return value > float(self.value)
            case ".":
                return bool(getattr(find_algorithm(value), self.value))
            case _:
                return bool(value)

    def text(self, spec: FlagSpec) -> str:
        """The condition as flags: `--engine embedded`, `--size above 1`."""
        if (self.operator, self.value) == ("!=", "None"):
            return spec.flag
        words = {"": "", "=": " ", "!=": " other than ", ">": " above ", ".": " with "}
        return f"{spec.flag}{words[self.operator]}{self.value}"


@dataclass(frozen=True)
class FlagSpec:
    """A flag of the command line.

    `kind` is its syntax: value `--x V`, switch `--x`, off_switch `--disable-x` (the field is True without it),
    tristate `--x` / `--no-x`, many `--x A B`, append `--x A --x B`, json `--x '{...}'`. Of each tuple in `needs`
    at least one condition must hold; `excludes` are fields that conflict with this one; `bound` compares it with
    another. `instead`: what happens instead of what a flag of slime asks for; setting it is a notice. `hub`: what a
    value may be the name of on the Hub (`config.hub`).
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
    needs: tuple[tuple[Condition, ...], ...] = ()
    excludes: tuple[str, ...] = ()
    bound: tuple[str, str] | None = None
    is_secret: bool = False
    instead: str = ""
    metavar: str = ""
    hub: Literal["", "model", "dataset"] = ""

    @property
    def type_name(self) -> str:
        """The values as help and documentation show them."""
        name = self.metavar or "|".join(self.choices) or {"dict": "JSON"}.get(self.type.__name__, self.type.__name__)
        if self.field.endswith("_path") and not self.metavar:
            name = "FILE.py:CLASS" if " class" in self.help else "FILE.py:FUNCTION"
        return {"many": f"{name} ...", "append": f"{name}, repeatable"}.get(self.kind, name)

    def value_in(self, config: Any) -> Any:
        """Return the value in a `Config`."""
        return getattr(getattr(config, self.section), self.field)

    def is_set(self, config: Any) -> bool:
        """Whether the value differs from the default. A default is never in conflict with another flag."""
        return self.value_in(config) != self.default

    def with_value(self, config: Any) -> str:
        """The flag as given: `--rollout-stop a b`; without the value of a secret."""
        value = self.value_in(config)
        if self.kind == "tristate" and not value:
            return self.flag.replace("--", "--no-", 1)
        if self.type is bool or self.is_secret:
            return self.flag
        return f"{self.flag} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


def flag(
    default: Any,
    help: str,
    *,
    name: str = "",
    kind: Kind | None = None,
    within: str = "",
    needs: str = "",
    excludes: str = "",
    bound: str = "",
    secret: bool = False,
    choices: Iterable[str] = (),
    instead: str = "",
    metavar: str = "",
    hub: Literal["", "model", "dataset"] = "",
) -> Any:
    """Declare a field of a section as a flag.

    Args:
        default: The value without the flag.
        help: What the flag does, with the unit, and the default rule if the default is derived.
        name: The flag, unless it is `--field-name` (or `--disable-field-name` for a bool that defaults to True).
        kind: The syntax, unless it follows from the type ("append").
        within: The interval of accepted numbers, such as "(0, 1]".
        needs: Conditions without which the flag has no effect: "save", "engine=embedded", "size>1" (forms:
            `Condition`); alternatives are separated by " or ", several conditions by "; ".
        excludes: Fields that cannot be set together with this one, separated by spaces.
        bound: A comparison with another field, where both are set: "<= lr", "< num_rollout" or ">= rollout_batch_size".
        secret: Whether the value is left out of files and messages.
        choices: The accepted words, unless they follow from the type.
        instead: What happens instead, for a flag that is accepted from slime's scripts and has no effect.
        metavar: The value in help, such as DIR. Default: FILE.py:FUNCTION if the field ends in `_path`, else the type.
        hub: Whether a value may also be the name of a model or data set on the Hub.
    """
    settings = {"help": help, "name": name, "kind": kind, "within": within, "needs": needs, "instead": instead}
    settings["metavar"] = metavar
    settings |= {"excludes": tuple(excludes.split()), "secret": secret, "choices": tuple(choices)}
    settings |= {"bound": tuple(bound.split()) or None, "hub": hub}
    metadata = {_METADATA_KEY: settings}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=typing.cast(dict[str, Any], default).copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def _element(annotation: Any) -> tuple[Kind, type, bool, tuple[str, ...]]:
    """Return syntax, type of one value, whether None is allowed, and choices of an annotation."""
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
    raise TypeError(f"fields of type {annotation} cannot be flags")


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
        needs=tuple(
            tuple(map(Condition.parse, alternatives.split(" or ")))
            for alternatives in settings["needs"].split("; ")
            if alternatives
        ),
        excludes=settings["excludes"],
        bound=settings["bound"],
        is_secret=settings["secret"],
        instead=settings["instead"],
        metavar=settings["metavar"],
        hub=settings["hub"],
    )


@cache
def flag_specs(root: type) -> Mapping[str, FlagSpec]:
    """Return every flag of a dataclass of sections by field name, in the order of declaration.

    Raises TypeError if two sections have a field of the same name: flags and `args` of hooks are flat.
    """
    specs: dict[str, FlagSpec] = {}
    for section, section_type in typing.get_type_hints(root).items():
        hints = typing.get_type_hints(section_type)
        for field in dataclasses.fields(section_type):
            if field.name in specs:
                raise TypeError(f"sections {specs[field.name].section} and {section} both have a field {field.name}")
            specs[field.name] = _spec(section, field, hints[field.name])
    return types.MappingProxyType(specs)
