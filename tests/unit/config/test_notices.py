"""Flags of slime's scripts without effect are accepted with a line for each, and refused with --strict-flags."""

from __future__ import annotations

from furlong.config import Config, parse, validate
from furlong.config.checks.validate import notices
from furlong.config.command_line import examine
from furlong.config.evaluation import used_eval_specs
from furlong.config.flag_spec import flag_specs
from furlong.run.launch import findings_before_run
from furlong.training.megatron.parallel_layout import Layout

MEGATRON = ["--train-backend", "megatron"]
VALUES = {int: "2", float: "0.1", str: "name"}


def test_a_flag_without_effect_has_one_line_and_is_an_error_with_strict_flags():
    for spec in flag_specs(Config).values():
        if not spec.instead:
            continue
        choices = [choice for choice in spec.choices or [VALUES.get(spec.type, "")] if choice != spec.default]
        words = [spec.flag] if spec.type is bool else [spec.flag, choices[0]]
        (notice,) = notices(parse(words).config)
        assert notice.startswith(f"{spec.flag} ")
        assert spec.instead in notice
        strict = validate(parse([*words, "--strict-flags"]).config)
        assert [problem for problem in strict if problem.startswith(notice)]


def test_flags_that_ask_for_something_else_have_one_line_and_others_none():
    for words, is_noticed in (
        ([*MEGATRON, "--sequence-parallel"], True),
        ([*MEGATRON, "--sequence-parallel", "--tensor-model-parallel-size", "2"], False),
        ([*MEGATRON, "--moe-token-dispatcher-type", "flex"], True),
        ([*MEGATRON, "--attention-backend", "flash", "--context-parallel-size", "2"], True),
        ([*MEGATRON, "--attention-backend", "flash"], False),
        (["--ref-load", "elsewhere"], True),
        (["--num-epoch", "1", "--num-rollout", "2"], True),
        (["--num-epoch", "1"], False),
        (["--ref-load", "elsewhere", "--use-kl-loss"], False),
    ):
        assert len(list(notices(parse(words).config))) == is_noticed, words


def test_an_evaluation_set_without_a_name_is_named_after_its_file():
    for words, named in (
        (["d/sums.jsonl@[:20]"], ("sums", "d/sums.jsonl@[:20]")),
        (["reasoning-gym:gcd?size=3"], ("gcd", "reasoning-gym:gcd?size=3")),
        (["mine", "sums.jsonl"], ("mine", "sums.jsonl")),
    ):
        config = parse(["--eval-prompt-data", *words]).config
        assert [(spec.name, spec.path) for spec in used_eval_specs(config)] == [named]


def test_one_tensor_parallel_rank_has_no_sequence_parallelism():
    config = parse([*MEGATRON, "--sequence-parallel"]).config
    assert not Layout.of(config.train, config.megatron).sequence_parallel


def test_doctor_shows_the_lines_as_notes():
    resolved, problems = examine(["--moe-enable-deepep"])
    found = [each for each in findings_before_run(resolved, problems) if each.finding.startswith("--moe-enable-deepep")]
    assert [(each.id, each.severity) for each in found] == [("CFG02", "info")]
