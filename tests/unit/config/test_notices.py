"""Flags of slime's scripts without effect are accepted with a line for each, and refused with --strict-flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from furlong.config import Config, parse
from furlong.config.checks.notices import notices, strict_problems
from furlong.config.command_line import examine
from furlong.config.evaluation import used_eval_specs
from furlong.config.flag_spec import flag_specs
from furlong.run.checks import findings_before_run
from furlong.training.megatron.parallel_layout import Layout

MEGATRON = ["--train-backend", "megatron"]
VALUES = {int: "2", float: "0.1", str: "name"}


def words_of(field: str) -> list[str]:
    """Return the words that set a flag to something else than its default."""
    spec = flag_specs(Config)[field]
    if spec.type is bool:
        return [spec.flag]
    return [spec.flag, spec.choices[0] if spec.choices else VALUES[spec.type]]


ACCEPTED = [spec.field for spec in flag_specs(Config).values() if spec.instead]


@pytest.mark.parametrize("field", ACCEPTED)
def test_a_flag_without_effect_has_one_line_and_is_an_error_with_strict_flags(field):
    words = words_of(field)
    config = parse(words).config
    (notice,) = notices(config)
    assert notice.startswith(f"{words[0]} ")
    assert flag_specs(Config)[field].instead in notice
    assert list(strict_problems(config)) == []
    (problem,) = strict_problems(parse([*words, "--strict-flags"]).config)
    assert problem.startswith(notice)


@pytest.mark.parametrize(
    "words",
    [
        [*MEGATRON, "--sequence-parallel"],
        [*MEGATRON, "--moe-token-dispatcher-type", "flex"],
        [*MEGATRON, "--attention-backend", "flash", "--context-parallel-size", "2"],
        ["--eval-prompt-data", "a", "a.jsonl"],
        ["--eval-config", "sets.yaml"],
        ["--eval-prompt-data", "a.jsonl", "--eval-interval", "2"],
        ["--ref-load", "elsewhere"],
    ],
)
def test_flags_that_ask_for_something_else_have_one_line(words):
    (notice,) = notices(parse(words).config)
    assert words[-1] in notice or words[0] in notice or "--eval-interval" in notice


@pytest.mark.parametrize(
    "words",
    [
        [],
        [*MEGATRON, "--sequence-parallel", "--tensor-model-parallel-size", "2"],
        [*MEGATRON, "--attention-backend", "flash"],
        ["--eval-prompt-data", "a", "a.jsonl", "--eval-interval", "2"],
        ["--ref-load", "elsewhere", "--use-kl-loss"],
    ],
)
def test_other_commands_have_none(words):
    assert list(notices(parse(words).config)) == []


def test_a_single_evaluation_file_is_named_as_in_slime():
    config = parse(["--eval-prompt-data", "sums.jsonl", "--eval-interval", "1"]).config
    assert [(spec.name, spec.path) for spec in used_eval_specs(config)] == [("aime", "sums.jsonl")]


def test_sets_without_an_interval_are_not_read(tmp_path: Path):
    config = parse(["--eval-config", str(tmp_path / "none.yaml")]).config
    assert used_eval_specs(config) == []


def test_only_evaluating_needs_the_interval():
    _, problems = examine(["--num-rollout", "0", "--eval-prompt-data", "a", "a.jsonl"])
    assert [problem for problem in problems if "--eval-interval is missing" in problem]


def test_one_tensor_parallel_rank_has_no_sequence_parallelism():
    config = parse([*MEGATRON, "--sequence-parallel"]).config
    assert not Layout.of(config.train, config.megatron).sequence_parallel


def test_doctor_shows_the_lines_as_notes():
    resolved, problems = examine(["--moe-enable-deepep"])
    found = [each for each in findings_before_run(resolved, problems) if each.finding.startswith("--moe-enable-deepep")]
    assert [(each.id, each.severity) for each in found] == [("CFG02", "info")]
