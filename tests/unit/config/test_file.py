"""Configuration files."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest

from furlong.config import Config, parse
from furlong.config.command_line import config_from_values, examine
from furlong.config.compat import find_refusal
from furlong.config.environment_specs import parse_environments
from furlong.errors import ConfigError


def read(tmp_path: Path, text: str, *argv: str, flag: str = "--config") -> Config:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return parse([flag, str(file), *argv]).config


def problems(tmp_path: Path, text: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    return tuple(problem.replace(str(tmp_path / "run.yaml"), "FILE") for problem in caught.value.problems)


def test_keys_are_flat_or_sectioned_with_dashes_or_underscores(tmp_path: Path) -> None:
    text = "rollout-batch-size: 8\nnum_rollout: 3\noptim:\n  lr: 1e-6\n  adam-beta2: 0.98\nrollout_stop: [a, b]\n"
    config = read(tmp_path, text)
    assert (config.data.rollout_batch_size, config.data.num_rollout) == (8, 3)
    assert (config.optim.lr, config.optim.adam_beta2) == (1e-6, 0.98)
    assert config.rollout.rollout_stop == ("a", "b")


def test_a_switch_may_be_written_as_its_flag_or_as_its_field(tmp_path: Path) -> None:
    assert not read(tmp_path, "disable-rewards-normalization: true").algo.rewards_normalization
    assert not read(tmp_path, "rewards_normalization: false").algo.rewards_normalization
    assert read(tmp_path, "disable-rewards-normalization: false").algo.rewards_normalization


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    assert read(tmp_path, "lr: 1.0", "--lr", "2").optim.lr == 2.0


def test_the_overriding_file_wins_over_the_command_line(tmp_path: Path) -> None:
    assert read(tmp_path, "lr: 1.0", "--lr", "2", flag="--custom-config-path").optim.lr == 1.0
    resolved, _ = examine(["--lr", "2", "--custom-config-path", str(tmp_path / "run.yaml")])
    (line,) = [line for line in resolved.lines if "--lr" in line]
    assert line.startswith(f"--lr is 1.0 of file {tmp_path / 'run.yaml'}, not 2.0 of the command line")


def test_all_problems_of_a_file_are_reported_with_file_and_key(tmp_path: Path) -> None:
    text = """
num_rollout: yes
rollout_batch_siz: 4
lr: fast
optim: {seed: 1, clip_grad: .inf}
release_train: true
kl-loss-type: k9
data: {train_batch_size: 8}
actor_rollout_ref: {model: {path: m}, rollout: {gpu_memory_utilization: 0.5}, critic: {optim: {lr: 1}}}
eval_interval: null
rollout_temperature: null
"""
    refusal = find_refusal("--release-train")
    assert refusal is not None
    assert problems(tmp_path, text) == (
        "FILE: num_rollout: got True (bool), expected an integer",
        "FILE: unknown key rollout_batch_siz; did you mean rollout_batch_size?",
        "FILE: lr: got 'fast' (str), expected a number",
        "FILE: optim.seed: seed is in section train; move it there, or to the top level",
        "FILE: optim.clip_grad: got inf, expected a finite number",
        f"FILE: {refusal.message('release_train')}",
        "FILE: kl-loss-type: got 'k9', expected one of k1, k2, k3, low_var_kl",
        "FILE: unknown key data.train_batch_size; use rollout-batch-size",
        "FILE: unknown key actor_rollout_ref.model.path; use hf-checkpoint",
        "FILE: unknown key actor_rollout_ref.rollout.gpu_memory_utilization; use sglang-mem-fraction-static",
        "FILE: unknown key actor_rollout_ref.critic.optim.lr; did you mean lr?",
        "FILE: rollout_temperature: has no value, expected a number; give a value or remove the key",
    )


def test_a_key_that_only_a_function_would_read_has_another_place(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "my_search_url: http://localhost\n")
    assert problem.startswith("FILE: unknown key my_search_url; ")
    assert problem.endswith("settings of your functions belong in a file that they read themselves")


def test_a_key_given_twice_in_two_forms_is_a_problem(tmp_path: Path) -> None:
    assert problems(tmp_path, "lr: 1.0\noptim: {lr: 2.0}\n") == (
        "FILE: optim.lr and lr set the same flag --lr; keep one",
    )


def test_a_key_given_twice_in_one_form_is_a_problem(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "lr: 1.0\nlr: 2.0\n")
    assert "duplicate key lr" in problem
    assert problem.endswith("keep one of them")
    assert problems(tmp_path, "optim:\n\tlr: 1.0\n")[0].endswith("indent with spaces")


def test_an_object_that_json_cannot_hold_is_a_problem(tmp_path: Path) -> None:
    assert "expected a JSON object" in problems(tmp_path, "apply_chat_template_kwargs: {day: 2020-01-01}")[0]


def test_number_is_not_accepted_as_text(tmp_path: Path) -> None:
    assert problems(tmp_path, "label_key: 3") == ("FILE: label_key: got 3 (int), expected a string",)


def test_a_missing_a_broken_and_a_wrong_file_are_problems(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml.*No such file"):
        parse(["--config", str(tmp_path / "none.yaml")])
    (problem,) = problems(tmp_path, "a: [")
    assert "FILE" in problem
    assert "YAML" in problem
    with pytest.raises(ConfigError, match=r"/dev/zero .*\b4 MiB"):
        parse(["--config", "/dev/zero"])
    (problem,) = problems(tmp_path, "- a\n")
    assert "FILE" in problem
    assert "list" in problem


def test_an_unreadable_file_reports_no_missing_tensors(tmp_path: Path) -> None:
    _, found = examine(["--config", str(tmp_path / "none.yaml")])
    assert [problem.partition(": ")[0] for problem in found] == [
        f"configuration file {tmp_path / 'none.yaml'} cannot be read"
    ]


def test_a_section_holds_flags_or_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, "optim:\n  # lr: 1.0\n") == read(tmp_path, "")
    assert problems(tmp_path, "optim: 3\n") == ("FILE: optim is a section, got 3; write its flags below it",)


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, "") == parse([]).config


def test_config_without_a_file_is_a_problem() -> None:
    with pytest.raises(ConfigError, match="--config has no value"):
        parse(["--config"])


def test_values_are_placed_in_their_sections() -> None:
    assert config_from_values({"lr": 3.0}).optim.lr == 3.0


def test_a_file_that_unfolds_to_a_huge_value_is_refused_in_a_few_words(tmp_path: Path) -> None:
    folds = [f"x{i + 1}: &x{i + 1} [{', '.join([f'*x{i}'] * 8)}]" for i in range(6)]  # 8^7 texts
    found = problems(tmp_path, "\n".join(["x0: &x0 [a, a, a, a, a, a, a, a]", *folds, "rm-type: *x6", "optim: *x6"]))
    assert any("rm-type: got [[" in problem for problem in found)
    assert max(map(len, found)) < 2000


def test_values_that_yaml_cannot_read_are_problems_of_the_file(tmp_path: Path) -> None:
    for value in ("2026-13-01", "!!bool x", "!!timestamp x", "? {a: b}", "\t"):
        assert "FILE" in problems(tmp_path, f"lr: {value}")[0]


def test_a_json_flag_with_values_that_no_json_should_have_is_a_problem() -> None:
    for text, words in [
        ('{"a": {"b": 1, "b": 2}}', "the key 'b' is given twice"),
        ('{"a": [NaN]}', "'NaN' is not a finite number"),
        ('{"a": -Infinity}', "'-Infinity' is not a finite number"),
        ('{"a": 1e999}', "'1e999' is not a finite number"),
        ('\ufeff{"a": 1}', "BOM"),
        ('{"a": ' + "9" * 5000 + "}", "digits"),
        ("[1]", "expected a JSON object"),
    ]:
        with pytest.raises(ConfigError) as caught:
            parse(["--apply-chat-template-kwargs", text])
        (problem,) = caught.value.problems
        assert problem.startswith("--apply-chat-template-kwargs")
        assert words in problem
        assert len(problem) < 500


def test_an_option_of_an_environment_that_json_cannot_hold_is_a_problem() -> None:
    for value in ('{"a":1,"a":2}', "[NaN]"):
        with pytest.raises(ConfigError, match=r"--environment .*: the value of x cannot be used: "):
            parse_environments((f"own.py:Env?x={quote(value)}",))
    assert parse_environments(("own.py:Env?x=[1",))[0].arguments == {"x": "[1"}
