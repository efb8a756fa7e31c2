"""Reading a command line."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from furlong.config import Config, load, parse
from furlong.config.command_line import argv_from_config, command_of, config_from_values
from furlong.config.compat import FURLONG_NAMES, TOPICS, find_refusal
from furlong.config.flag_spec import FlagSpec, flag, flag_specs
from furlong.config.flag_values import value_from_words, words_from_value
from furlong.config.help import help_text
from furlong.errors import ConfigError


def problems(*argv: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    return caught.value.problems


def test_names_of_other_programs_stand_for_flags_that_are_here() -> None:
    known = {spec.flag for spec in flag_specs(Config).values()}
    refused = {flag for flag in FURLONG_NAMES.values() if find_refusal(flag) is not None}
    assert set(FURLONG_NAMES.values()) <= known | refused
    assert not set(FURLONG_NAMES) & known
    assert not [name for name in FURLONG_NAMES if find_refusal(name) and FURLONG_NAMES[name] in known]


def test_flags_are_read_with_a_space_and_with_an_equals_sign() -> None:
    spaced = parse(["--lr", "1e-5", "--run-name", "a", "--rollout-top-k", "-1"])
    assert spaced == parse(["--lr=1e-5", "--run-name=a", "--rollout-top-k=-1"])
    assert spaced.config.optim.lr == 1e-5


def test_switches_lists_repeats_and_objects() -> None:
    config = parse(
        [
            *("--use-tis", "--disable-grpo-std-normalization", "--no-check-for-nan-in-loss-and-grad"),
            *("--rollout-stop", "a", "---", "--rollout-stop-token-ids", "1", "-2"),
            *("--rollout-sample-hook-path", "m.f", "--rollout-sample-hook-path", "m.g"),
            *("--apply-chat-template-kwargs", '{"enable_thinking": false}'),
        ]
    ).config
    assert config.algo.use_tis
    assert not config.algo.grpo_std_normalization
    assert not config.fault.check_for_nan_in_loss_and_grad
    assert config.rollout.rollout_stop == ("a", "---")
    assert config.rollout.rollout_stop_token_ids == (1, -2)
    assert config.rollout.rollout_sample_hook_path == ("m.f", "m.g")
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}


def test_a_flag_given_twice_takes_the_last_value() -> None:
    assert parse(["--lr", "1", "--lr", "2"]).config.optim.lr == 2.0


def test_a_typo_names_the_closest_flag() -> None:
    assert problems("--rollout-batchsize", "4") == (
        "unknown flag --rollout-batchsize; did you mean --rollout-batch-size?",
    )


def test_flags_are_not_abbreviated() -> None:
    assert problems("--rollout-batch", "4")[0].startswith("unknown flag --rollout-batch;")


def test_a_flag_like_nothing_known_points_at_the_help() -> None:
    assert problems("--learning-rate", "3") == ("unknown flag --learning-rate; use --lr",)
    refusal = find_refusal("--lora-rank")
    assert refusal is not None
    assert problems("--use-lora") == (refusal.message("--use-lora"),)
    assert problems("--qqqqqq") == ("unknown flag --qqqqqq; see `furlong train --help` for all flags",)


@pytest.mark.parametrize(
    "given",
    ["--precision bf16", "--dtype bf16", "--torch-dtype bfloat16", "--model-dtype float32", "--mixed-precision bf16",
     "--bf16-mode", "--amp"],
)  # fmt: skip
def test_other_flags_of_the_precision_name_the_flags_to_use(given: str) -> None:
    (problem,) = problems(*given.split())
    assert problem.startswith(f"{given.split()[0]} is not accepted: each precision is a flag; use --bf16 or --fp32")


def test_all_problems_are_reported_at_once() -> None:
    found = problems(
        *("--lrr", "1", "--num-rollout", "1.5", "--kl-loss-type", "k4", "--use-tis=1", "--seed"),
        *("--apply-chat-template-kwargs", "[1]", "--lr", "nan", "--release-train", "--no-such-flag-at-all", "stray"),
    )
    assert [re.split("[:;]| is not supported", problem)[0] for problem in found] == [
        "unknown flag --lrr",
        "--num-rollout",
        "--kl-loss-type",
        "--use-tis",
        "--seed",
        "--apply-chat-template-kwargs",
        "--lr",
        "--release-train",
        "unknown flag --no-such-flag-at-all",
    ]


def test_a_stray_word_is_a_problem() -> None:
    assert problems("--lr", "1", "2") == ("unexpected word '2': no flag before it accepts it; remove it or quote it",)


def test_wrong_values_are_reported_with_the_accepted_ones() -> None:
    assert problems("--num-rollout", "ten") == ("--num-rollout: got 'ten', expected an integer",)
    assert problems("--tis-mode", "cap") == ("--tis-mode: got 'cap', expected one of truncate, clip, mask",)


def test_a_misspelt_required_flag_is_reported_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["--hf-checkpont", str(tmp_path), "--rollout-batch-size", "four", "--num-rollout", "1", "--lr", "-1"])
    assert [problem for problem in caught.value.problems if "hf-check" in problem] == [
        "unknown flag --hf-checkpont; did you mean --hf-checkpoint?"
    ]
    assert [problem for problem in caught.value.problems if "rollout-batch-size" in problem] == [
        "--rollout-batch-size: got 'four', expected an integer"
    ]
    assert any(problem.startswith("--lr -1.0") for problem in caught.value.problems)


def test_sources_say_where_each_value_is_from(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("lr: 0.5\nclip-grad: 2\n")
    resolved = parse(["--config", str(file), "--clip-grad", "3"], preset={"async_buffer_size": 1})
    assert resolved.sources["lr"] == f"file {file}"
    assert resolved.sources["clip_grad"] == "flag"
    assert resolved.sources["seed"] == "default"
    assert resolved.sources["async_buffer_size"] == "entry point"
    assert resolved.sources["eps_clip_high"] == "derived: --eps-clip"
    assert set(resolved.sources) == set(flag_specs(Config))


def test_a_preset_gives_way_to_a_flag() -> None:
    assert parse(["--async-buffer-size", "3"], preset={"async_buffer_size": 1}).config.rollout.async_buffer_size == 3


def test_config_json_holds_values_and_sources_but_no_secret() -> None:
    text = parse(["--use-wandb", "--wandb-key", "abc123", "--lr", "0.5"]).to_json()
    written = json.loads(text)
    assert "abc123" not in text
    assert written["config"]["track"]["wandb_key"] == "(not written)"
    assert written["config"]["optim"]["lr"] == 0.5
    assert written["sources"]["lr"] == "flag"


def test_nothing_can_be_assigned_after_construction() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().optim.lr = 1.0  # pyright: ignore[reportAttributeAccessIssue]


def test_values_that_look_like_flags_survive_the_command_line() -> None:
    config = config_from_values({"rollout_stop": ("--lr", "-", "["), "run_name": "--x=y"})
    read = parse(argv_from_config(config)).config
    assert (read.rollout.rollout_stop, read.track.run_name) == (("--lr", "-", "["), "--x=y")


def test_defaults_are_an_empty_command_line() -> None:
    assert argv_from_config(Config()) == []


def test_a_tri_state_is_on_off_or_unset() -> None:
    @dataclass(frozen=True)
    class Section:
        offload: bool | None = flag(None, "Whether to offload.")

    @dataclass(frozen=True)
    class Root:
        section: Section = field(default_factory=Section)

    Section.__annotations__["offload"] = bool | None
    Root.__annotations__["section"] = Section
    spec = flag_specs(Root)["offload"]
    assert [words_from_value(spec, value) for value in (True, False, None)] == [["--offload"], ["--no-offload"], []]


def test_two_sections_cannot_share_a_field() -> None:
    @dataclass(frozen=True)
    class Section:
        x: int = flag(1, "A number.")

    @dataclass(frozen=True)
    class Root:
        one: Section = field(default_factory=Section)
        two: Section = field(default_factory=Section)

    Section.__annotations__["x"] = int
    Root.__annotations__.update(one=Section, two=Section)
    with pytest.raises(TypeError) as error:
        flag_specs(Root)
    assert {"one", "two", "x"} <= set(str(error.value).split())


def helped(*words: str) -> list[str]:
    """The flags in the help about these words."""
    return [line.split()[0].rstrip(",") for line in help_text(words).splitlines() if line.startswith("  --")]


def test_help_starts_with_the_flags_of_most_runs_and_has_all_of_them() -> None:
    assert 25 <= len(helped()) <= 30
    assert set(helped("all")) == {spec.flag for spec in flag_specs(Config).values()} | {
        "--config",
        "--custom-config-path",
    }
    assert "--custom-rm-path FILE.py:FUNCTION" in help_text()
    assert max(map(len, help_text(width=80).splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["reward"], [spec.flag for spec in flag_specs(Config).values() if spec.section == "reward"]),
        (["--lr"], ["--lr"]),
        (["rollout", "temperature"], ["--rollout-temperature"]),
        (["clip", "tis"], ["--tis-clip", "--tis-clip-low"]),
        (["max_grad_norm"], ["--clip-grad"]),
        (["top", "p"], ["--rollout-top-p", "--eval-top-p"]),  # not --rollout-stop
        (["checkpoints", "keep"], ["--keep-checkpoints"]),
    ],
)
def test_help_finds_flags_by_section_and_by_all_of_the_words(words: list[str], flags: list[str]) -> None:
    assert helped(*words) == flags


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("lora", "not supported: all weights are trained"),
        ("vllm", "generate with --engine sglang"),
        ("deepspeed", "--train-backend fsdp"),
        ("fp16", "use --bf16"),
    ],
)
def test_help_answers_what_is_not_here_and_shows_the_flags_to_use(word: str, answer: str) -> None:
    first = " ".join(help_text([word], width=1000).splitlines()[:1])
    assert answer in first
    assert helped(word) == [
        spec.flag for spec in flag_specs(Config).values() if re.search(rf"{spec.flag}(?![\w-])", first)
    ]


def test_answers_of_the_help_name_flags_that_exist() -> None:
    known = {spec.flag for spec in flag_specs(Config).values()}
    assert set(re.findall(r"--[a-z0-9-]+", " ".join(TOPICS.values()))) <= known
    with pytest.raises(ConfigError, match=r"no flag is about tempertaure; did you mean temperature\?"):
        help_text(["tempertaure"])


def test_the_command_of_a_run_has_what_was_given_without_secrets() -> None:
    resolved = parse(["--lr", "1e-3", "--prompt-data", "a b.jsonl", "--use-wandb", "--wandb-key", "secret"])
    assert command_of(resolved) == "furlong train '--prompt-data=a b.jsonl' --lr=0.001 --use-wandb"
    note = "# python:NAME is an object of the program that called furlong.train with these settings\n"
    assert command_of(parse(["--custom-rm-path", "python:f"])) == f"{note}furlong train --custom-rm-path=python:f"


def test_a_float_is_written_so_that_it_reads_back() -> None:
    spec: FlagSpec = flag_specs(Config)["lr"]
    value: Any = 0.1 + 0.2
    (word,) = words_from_value(spec, value)
    assert value_from_words(spec, [word.partition("=")[2]]) == value


def test_the_configuration_imports_no_torch() -> None:
    code = "import sys, furlong.config.hooks, furlong.config.help; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
