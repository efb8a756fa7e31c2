"""Every flag of slime and of its guides has a verdict, and the program agrees with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from furlong.config import Config, parse
from furlong.config.command_line import CONFIG_FLAG, OVERRIDE_FLAG
from furlong.config.compat import MILES, SLIME, VALUES, find_refusal
from furlong.config.compat import OWN as REMOVED
from furlong.config.flag_spec import FlagSpec, flag_specs
from furlong.config.passthrough import find
from furlong.errors import ConfigError

GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[2] / "golden" / "flags.json").read_text())
KNOWN, OWN = GOLDEN["known"], GOLDEN["own"]  # flags of slime and its guides; others whose type and default stay
SPECS = {spec.flag: spec for spec in flag_specs(Config).values()}


def facts_of(spec: FlagSpec) -> dict[str, Any]:
    kind = {"switch": "switch", "off_switch": "switch", "json": "object", "value": spec.type.__name__}
    default = list(spec.default) if isinstance(spec.default, tuple) else spec.default
    facts = {"type": kind.get(spec.kind, f"{spec.kind} {spec.type.__name__}"), "default": default}
    return facts | ({"choices": list(spec.choices)} if spec.choices else {})


def problem_of(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(words)
    (problem,) = caught.value.problems
    return problem


def test_accepted_flags_have_the_recorded_type_default_and_choices() -> None:
    assert len(KNOWN) == 264
    accepted = {
        flag: facts for flag, facts in KNOWN.items() if facts["verdict"] == "accepted" and flag != OVERRIDE_FLAG
    }
    recorded = {
        flag: {name: facts[name] for name in ("type", "default", "choices") if name in facts}
        for flag, facts in accepted.items()
    } | OWN
    assert {flag: facts_of(SPECS[flag]) for flag in recorded} == recorded
    for flag, facts in accepted.items():
        if facts["from"] == "slime":
            is_equal = (facts["type"], facts["default"]) == (facts["slime_type"], facts["slime_default"])
            assert (is_equal and "slime_choices" not in facts) or facts["note"], flag


def test_refused_flags_and_values_name_the_reason_and_the_alternative() -> None:
    for flag, facts in KNOWN.items():
        if facts["verdict"] in ("refused", "not-yet"):
            row = find_refusal(flag)
            assert row is not None, flag
            assert row.verdict == facts["verdict"], flag
            assert problem_of(flag, "1") == row.message(flag)
            assert row.message(flag).endswith(f"; {row.instead}")
    for row in REMOVED:
        for flag in row.names:
            assert problem_of(flag, "1").startswith(f"{flag} is not accepted: ")
    for flag, value in VALUES:
        assert value not in SPECS[flag].choices
        assert f"{flag} {value} is not" in problem_of(flag, value)
    assert [flag for flag in (*SPECS, CONFIG_FLAG, OVERRIDE_FLAG) if find_refusal(flag)] == []


def test_flags_of_the_engine_are_passed_on_to_it() -> None:
    for flag, facts in KNOWN.items():
        if facts["verdict"] == "passed":
            assert flag not in SPECS
            assert find(flag).kind == facts["kind"], flag


def test_refusals_point_only_at_flags_that_exist() -> None:
    named = [
        word.strip(";,.`()")
        for row in (*SLIME, *MILES, *REMOVED, *VALUES.values())
        for word in f"{row.reason} {row.instead}".split()
        if word.startswith("--") and word not in ("--run", "--logdir")  # of doctor and of TensorBoard
    ]
    assert set(named) <= set(SPECS)


def test_flags_of_miles_name_the_alternative() -> None:
    assert "--async-buffer-size" in problem_of("--async-max-concurrent-samples", "8")
    assert [row.verdict for flag in ("--rollout-external", "--lora-rank") if (row := find_refusal(flag))] == [
        "refused",
        "not-yet",
    ]


def test_every_flag_has_a_sentence_of_help() -> None:
    assert [spec.flag for spec in SPECS.values() if not spec.help.rstrip(")").endswith((".", ".)"))] == []
