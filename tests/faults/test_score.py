"""The fast cases of the score of diagnoses: scripts/score_diagnoses.py judges all of them."""

from __future__ import annotations

import pytest

from diagnosis_score import Outcome, case, healthy_line, score_table, wrong_lines
from faults import (
    score_agents,
    score_blind,
    score_doctor,
    score_folders,
    score_healthy,
    score_messages,
    score_refusals,
    score_reports,
    score_runs,
    score_seams,
    score_strangers,
)
from faults.score_cases import FAULTS, SETTINGS
from furlong.catalogue import CATALOGUE, diagnosis

COMMANDS = [*(each for each in (*score_doctor.CASES, *score_seams.CASES) if not each.is_slow)][::3]
REFUSALS = [
    *score_refusals.COMMANDS[::6],
    *score_refusals.CHANGED[::3],
    *score_refusals.PAIRS[::8],
    *score_refusals.USERS,
]
COMMANDS_OF_HEALTHY = [each for each in score_healthy.CASES if not each.is_slow]
METRICS = [*score_healthy.RUNS, *score_healthy.MEASURED]
STRANGERS = [each for each in (*score_strangers.CASES, *score_blind.CASES) if not each.is_slow][::3]
HEALTHY = [*COMMANDS_OF_HEALTHY[: -len(METRICS) : 12], *METRICS]
FAST = [
    *COMMANDS,
    *REFUSALS,
    *score_runs.CASES,
    *score_reports.CASES,
    *score_messages.CASES,
    *score_messages.NOISY,
    *score_folders.CASES,
    *score_agents.METRICS,
    *STRANGERS,
    *HEALTHY,
]


@pytest.mark.parametrize("each", FAST, ids=lambda each: f"{'/'.join(each.rows) or 'healthy'}: {each.name}")
def test_the_case_gets_its_diagnosis(each, tmp_path):
    outcome = each.judge(tmp_path)
    if each.missed and not (outcome.is_right and not outcome.others):
        pytest.xfail(each.missed)
    assert outcome.why() == ""


def test_there_are_enough_cases_with_names_of_their_own():
    assert len(FAULTS) >= 300
    assert {id for each in FAULTS for id in each.rows} == set(CATALOGUE)
    assert len(SETTINGS) >= 190
    everything = [*FAULTS, *SETTINGS]
    assert len({(each.rows, each.name) for each in everything}) == len(everything)
    assert {id for each in FAULTS for id in (*each.rows, *each.also)} <= set(CATALOGUE)


def test_misses_false_fixes_and_second_diagnoses_are_counted():
    def found(*ids: str):
        return lambda _: [diagnosis(id, "seen", remedy="use --lr") for id in ids]

    outcomes = [
        Outcome(case("healthy", "", found())),
        *(
            each.judge(None)
            for each in (
                case("right", "NUM03", found("NUM03"), remedy="--lr"),
                case("another fix", "NUM03", found("NUM03"), remedy="--clip-grad"),
                case("a false fix", "NUM03", found("NUM03"), without="--lr"),
                case("a second one", "NUM03", found("NUM03", "REW02")),
                case("not found", "NUM03 NUM04", found("CKPT03")),
                case("an alarm", "", found("TPL03")),
            )
        ),
    ]
    assert score_table(outcomes, {"NUM03": 2, "REW02": 1})[2:] == [
        "| NUM03 | 2 | 5 | 4 | 2 | 0 | 2 |",
        "| REW02 | 1 | 0 | | | | |",
        "| all | 3 | 5 | 4 | 2 | 0 | 2 |",
    ]
    assert healthy_line(outcomes) == "2 healthy settings: 1 with a false alarm"
    assert len(wrong_lines(outcomes)) == 5
