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
KNOWN, OWN = GOLDEN["known"], GOLDEN["own"]
SPECS = {spec.flag: spec for spec in flag_specs(Config).values()}
ACCEPTED = sorted(flag for flag, facts in KNOWN.items() if facts["verdict"] == "accepted" and flag != OVERRIDE_FLAG)
TURNED_DOWN = sorted(flag for flag, facts in KNOWN.items() if facts["verdict"] in ("refused", "not-yet"))
PASSED = sorted(flag for flag, facts in KNOWN.items() if facts["verdict"] == "passed")


def facts_of(spec: FlagSpec) -> dict[str, Any]:
    kind = {"switch": "switch", "off_switch": "switch", "json": "object", "value": spec.type.__name__}
    default = list(spec.default) if isinstance(spec.default, tuple) else spec.default
    facts = {"type": kind.get(spec.kind, f"{spec.kind} {spec.type.__name__}"), "default": default}
    return facts | ({"choices": list(spec.choices)} if spec.choices else {})


def test_the_golden_file_covers_slime_and_the_guides() -> None:
    assert len(KNOWN) == 264
    assert {facts["verdict"] for facts in KNOWN.values()} == {"accepted", "passed", "refused", "not-yet"}


@pytest.mark.parametrize("flag", ACCEPTED)
def test_an_accepted_flag_has_the_recorded_type_default_and_choices(flag: str) -> None:
    recorded = {name: KNOWN[flag][name] for name in ("type", "default", "choices") if name in KNOWN[flag]}
    assert facts_of(SPECS[flag]) == recorded


@pytest.mark.parametrize("flag", ACCEPTED)
def test_a_deviation_from_slime_has_a_note(flag: str) -> None:
    facts = KNOWN[flag]
    if facts["from"] == "slime":
        is_equal = (
            facts["type"] == facts["slime_type"]
            and facts["default"] == facts["slime_default"]
            and "slime_choices" not in facts
        )
        assert is_equal or facts["note"]


def test_every_flag_of_the_program_is_recorded() -> None:
    assert {flag: facts_of(SPECS[flag]) for flag in set(SPECS) - set(KNOWN)} == OWN


@pytest.mark.parametrize("flag", TURNED_DOWN)
def test_a_refused_flag_names_the_reason_and_the_alternative(flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse([flag, "1"])
    facts = KNOWN[flag]
    (problem,) = caught.value.problems
    row = find_refusal(flag)
    assert row is not None
    assert row.verdict == facts["verdict"]
    assert problem == row.message(flag)
    assert row.reason in problem
    assert problem.endswith(f"; {row.instead}")


def test_a_flag_of_miles_names_the_alternative() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(["--fully-async", "--lora-rank", "8"])
    refused, not_yet = caught.value.problems
    assert refused.startswith("--fully-async ")
    assert "--async-buffer-size" in refused
    assert not_yet.startswith("--lora-rank ")
    verdicts = [row.verdict for flag in ("--fully-async", "--lora-rank") if (row := find_refusal(flag))]
    assert verdicts == ["refused", "not-yet"]


def test_a_flag_that_was_removed_is_refused_with_its_reason() -> None:
    for row in REMOVED:
        for flag in row.names:
            with pytest.raises(ConfigError, match=f"{flag} is not accepted: "):
                parse([flag, "1"])


def test_no_flag_is_both_taken_and_turned_down() -> None:
    flags = (*SPECS, CONFIG_FLAG, OVERRIDE_FLAG)
    assert [flag for flag in flags if find_refusal(flag)] == []


def test_refusals_point_only_at_flags_that_exist() -> None:
    named = [
        word.strip(";,.`()")
        for row in (*SLIME, *MILES, *REMOVED, *VALUES.values())
        for word in f"{row.reason} {row.instead}".split()
        if word.startswith("--") and word not in ("--run", "--logdir")  # of doctor and of TensorBoard
    ]
    assert set(named) <= set(SPECS)


@pytest.mark.parametrize(("flag", "value"), VALUES)
def test_a_refused_value_is_no_choice_and_names_the_reason(flag: str, value: str) -> None:
    assert value not in SPECS[flag].choices
    with pytest.raises(ConfigError, match=f"{flag} {value} is not"):
        parse([flag, value])


@pytest.mark.parametrize("flag", PASSED)
def test_a_flag_of_the_engine_is_passed_on_to_it(flag: str) -> None:
    assert flag not in SPECS
    assert find(flag).kind == KNOWN[flag]["kind"]


def test_every_flag_has_a_sentence_of_help() -> None:
    assert [spec.flag for spec in SPECS.values() if not spec.help.rstrip(")").endswith((".", ".)"))] == []
