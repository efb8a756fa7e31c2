"""Config -> argv -> Config is the identity for every value that a flag accepts."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.config import Config
from furlong.config.command_line import _scan, argv_from_config, config_from_values
from furlong.config.compat import VALUES
from furlong.config.flag_spec import FlagSpec, flag_specs

TEXT = st.one_of(  # no value ends as a line does on Windows: a script with such lines is refused
    st.text(max_size=8).filter(lambda t: not t.endswith("\r")),
    st.sampled_from(["-1", "--", "---", "--lr", "--lr=1", "[", '["a"]', "", " ", "=", "a=b"]),
)
JSON = st.dictionaries(
    st.text(max_size=4),
    st.one_of(st.booleans(), st.integers(), st.text(max_size=4), st.none(), st.lists(st.integers())),
)


def values_of(spec: FlagSpec) -> st.SearchStrategy[Any]:
    # a single = is that of `--flag = value`
    taken = {*VALUES, *([(spec.flag, "=")] if spec.kind in ("many", "append") else [])}
    element = {
        int: st.integers(-(2**40), 2**40),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.sampled_from(spec.choices) if spec.choices else TEXT.filter(lambda t: (spec.flag, t) not in taken),
        bool: st.booleans(),
        dict: JSON,
    }[spec.type]
    if spec.kind in ("many", "append"):
        element = st.lists(element, max_size=4).map(tuple)
    return st.one_of(st.none(), element) if spec.optional else element


SPECS = list(flag_specs(Config).values())


def read_flags(argv: list[str]) -> Config:
    """Parse flags without reading files or deriving defaults."""
    scan, _ = _scan(argv, flag_specs(Config))
    assert scan.problems == []
    return config_from_values(scan.values)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    chosen = draw(st.lists(st.sampled_from(SPECS), unique_by=lambda spec: spec.field, max_size=12))
    return config_from_values({spec.field: draw(values_of(spec)) for spec in chosen})


@settings(max_examples=150, deadline=None)
@given(configs())
def test_a_config_read_from_its_own_command_line_is_equal(config: Config) -> None:
    assert read_flags(argv_from_config(config)) == config


@settings(max_examples=60, deadline=None)
@given(st.permutations(SPECS).map(lambda specs: specs[:6]), st.data())
def test_the_order_of_flags_does_not_matter(specs: list[FlagSpec], data: st.DataObject) -> None:
    values = {spec.field: data.draw(values_of(spec)) for spec in specs}
    parts = [argv_from_config(config_from_values({name: value})) for name, value in values.items()]
    forwards = read_flags([word for part in parts for word in part])
    backwards = read_flags([word for part in reversed(parts) for word in part])
    assert forwards == backwards == config_from_values(values)
