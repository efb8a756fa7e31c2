"""Rules about values that do not fit together. Every problem names the flags, the values and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from furlong.config import load, parse, validate
from furlong.config.checks.training_checks import nearest_batch_settings
from furlong.errors import ConfigError


@pytest.fixture
def run(tmp_path: Path) -> list[str]:
    """The command line of design and documentation: the smallest that runs."""
    model, data = tmp_path / "model", tmp_path / "train.jsonl"
    model.mkdir()
    data.write_text('{"prompt": "1+1=", "label": "2"}\n')
    return [
        *("--hf-checkpoint", str(model), "--prompt-data", str(data), "--input-key", "prompt", "--label-key", "label"),
        *("--rm-type", "math", "--num-rollout", "100", "--rollout-batch-size", "32", "--n-samples-per-prompt", "8"),
        *("--global-batch-size", "256", "--output-dir", str(tmp_path / "x")),
    ]


def problems(argv: list[str], device_type: str | None = None) -> list[str]:
    return validate(parse(argv).config, device_type=device_type)


def without(argv: list[str], *flags: str) -> list[str]:
    pairs = zip(argv[::2], argv[1::2], strict=True)
    return [word for pair in pairs if pair[0] not in flags for word in pair]


def test_the_documented_command_has_no_problem(run: list[str]) -> None:
    assert problems(run) == []
    assert load(run, device_type="cpu").config.train.global_batch_size == 256


def test_a_model_of_the_run_is_not_a_folder_to_write_to(run: list[str], tmp_path: Path) -> None:
    model, teacher = run[1], str(tmp_path / "teacher")
    Path(teacher).mkdir()
    distill = [*run, "--use-opd", "--opd-teacher-load", teacher]
    assert problems([*distill, "--save-hf", str(tmp_path / "free")]) == []
    [problem] = problems([*distill, "--save-hf", teacher])
    assert problem.startswith(f"--opd-teacher-load {teacher} is the folder that the trained model replaces")
    [problem] = problems([*distill, "--opd-teacher-key", "origin"])
    assert problem.startswith(f"--opd-teacher-key origin and --opd-teacher-load {teacher} cannot be combined")
    [problem] = problems([*run, "--advantage-estimator", "ppo", "--save", "s", "--critic-save", model])
    assert "the folder of --hf-checkpoint" in problem


def test_an_empty_command_line_lists_everything_that_is_required() -> None:
    assert [problem.split(" is missing")[0].split(" are missing")[0] for problem in problems([])][:4] == [
        "--hf-checkpoint",
        "--rollout-batch-size",
        "--num-rollout and --num-epoch",
        "--prompt-data",
    ]


def test_problems_of_reading_and_of_checking_come_together(run: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load([*run, "--lrr", "1", "--rollout-temperature", "0", "--record-memory-history"], device_type="cpu")
    first = [problem.split()[0] for problem in caught.value.problems]
    assert first == ["unknown", "--rollout-temperature", "--record-memory-history"]


# One row per rule: flags added to the documented command, and what the one problem names, separated by |.
RULES = [
    (
        "--agent-command true --generate-timeout 9 --episode-timeout 60",
        "--generate-timeout 9 | --episode-timeout 60 | above",
    ),
    ("--rollout-top-p 0", "--rollout-top-p 0.0 | (0, 1]"),
    ("--rollout-top-p 0.95", "--rollout-top-p 0.95 | --rollout-temperature | --eval-top-p"),
    ("--rollout-top-p 0.9 --rollout-top-k 20 --rollout-min-p 0.01", "--rollout-top-p 0.9 | top-k 20 | min-p 0.01"),
    ("--tis-clip 3", "--tis-clip 3.0 | --use-tis"),
    ("--colocate --engine sglang --update-weight-mode delta", "--update-weight-mode delta | --colocate | host memory"),
    (
        "--save-debug-rollout-data d/{rollout_id}.x --save-debug-train-data ./d/../d/{rollout_id}.x",
        "--save-debug-train-data | --save-debug-rollout-data | same file",
    ),
    ("--use-opsm", "--use-opsm"),
    ("--kl-loss-coef 0.1", "--kl-loss-coef 0.1 | --use-kl-loss"),
    ("--wandb-key abc", "--wandb-key | --use-wandb"),
    ("--output-dir=", "--output-dir ''"),
    ("--max-tokens-per-gpu 64", "--max-tokens-per-gpu 64 | --use-dynamic-batch-size"),
    ("--use-dynamic-batch-size", "--use-dynamic-batch-size | --max-tokens-per-gpu"),
    ("--micro-batch-size 3", "--micro-batch-size 3 | --global-batch-size 256 | 1 or 2 or 4"),
    ("--bf16 --fp32", "--bf16 | --fp32"),
    ("--min-lr 1", "--min-lr 1.0 | --lr 1e-06"),
    ("--lr-warmup-iters 200", "--lr-warmup-iters 200 | --lr-decay-iters | 100"),
    ("--use-stateless-adam --no-save-optim --optimizer sgd", "--use-stateless-adam | --optimizer | sgd"),
    ("--kl-coef 0.1", "--kl-coef 0.1 | --advantage-estimator grpo"),
    ("--advantage-estimator reinforce_plus_plus", "--advantage-estimator reinforce_plus_plus"),
    ("--n-samples-per-prompt 1 --global-batch-size 32", "--advantage-estimator grpo | --n-samples-per-prompt 1"),
    ("--gamma 0.9", "--gamma 0.9 | --advantage-estimator grpo"),
    ("--use-tis --tis-clip-low 3", "--tis-clip-low 3.0 | --tis-clip 2.0"),
    ("--use-tis --tis-clip-low 0.5 --tis-mode truncate", "--tis-clip-low 0.5 | --tis-mode truncate"),
    ("--return-level turn", "--return-level turn has no effect with --advantage-estimator grpo; remove"),
    ("--save s --critic-save c", "--critic-save c | --advantage-estimator grpo | ppo"),
    ("--advantage-estimator ppo --save s --critic-save ./s", "--save | --critic-save ./s_critic"),
    ("--advantage-estimator ppo --critic-lr 11", "--critic-lr 11.0 | [0, 10]"),
    ("--keep-old-actor", "--keep-old-actor"),
    ("--keep-old-actor "
     "--async-buffer-size 2",
     "--keep-old-actor | --async-buffer-size 2 | --update-weights-interval 1"),
    ("--keep-old-actor "
     "--update-weights-interval 3",
     "--keep-old-actor | --async-buffer-size 0 | --update-weights-interval 3"),
    ("--keep-old-actor --async-buffer-size 1 --pause-mode hold", "--keep-old-actor | --pause-mode hold"),
    ("--keep-old-actor --async-buffer-size 1 --partial-rollout", "--keep-old-actor | --partial-rollout"),
    ("--disable-compute-advantages-and-returns", "--disable-compute-advantages-and-returns | --loss-type policy_loss"),
    ("--n-samples-per-prompt 1 --global-batch-size 32 --disable-rewards-normalization "
     "--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
     "--dynamic-sampling-filter-path | --n-samples-per-prompt 1"),
    ("--loss-constant-len 9 --calculate-per-token-loss", "--loss-constant-len 9 | --calculate-per-token-loss"),
    ("--eps-clip-c 3 --advantage-estimator cispo", "--eps-clip-c 3.0 | --advantage-estimator cispo"),
    ("--advantage-estimator dr_grpo", "--advantage-estimator dr_grpo"),
    ("--advantage-estimator dr_grpo --calculate-per-token-loss", "--calculate-per-token-loss | dr_grpo"),
    ("--advantage-estimator dapo --loss-constant-len 9", "--loss-constant-len 9 | dapo"),
    ("--loss-type custom_loss", "--loss-type custom_loss"),
    ("--overlong-buffer-len 9", "--overlong-buffer-len 9 | --rollout-max-response-len"),
    ("--overlong-buffer-len 9 --rollout-max-response-len 9", "--overlong-buffer-len 9 | --rollout-max-response-len 9"),
    ("--rollout-max-response-len 8 --rollout-max-context-len 8", "--rollout-max-response-len 8"),
    ("--eval-interval 1", "--eval-interval 1 | --eval-prompt-data"),
    ("--rm-type mth", "--rm-type mth | math?"),
    ("--rm-type boxed_maths", "--rm-type boxed_maths | boxed_math?"),
    ("--rm-type remote_rm", "--rm-type remote_rm | --rm-url"),
    ("--rm-type remote_rm --rm-url me:secret@x/score", "--rm-url ***@x/score is not a URL"),
    ("--rm-type remote_rm --rm-url http://me:s#c@x", "--rm-url ***@x is not a URL"),
    ("--load nowhere", "--load nowhere"),
    ("--debug-train-only", "--debug-train-only | --load-debug-rollout-data"),
    ("--save-debug-train-data x.safetensors", "--save-debug-train-data x.safetensors"),
    ("--save-debug-rollout-data d/{rollout_id}_{x}", "--save-debug-rollout-data d/{rollout_id}_{x}"),
    ("--save-debug-rollout-data d/{rollout_id:05d}", "--save-debug-rollout-data d/{rollout_id:05d}"),
    ("--dump-details d/{rollout_id}", "--dump-details d/{rollout_id}"),
    ("--save x --save-hf d/{rollout_id}{", "--save-hf d/{rollout_id}{"),
    ("--actor-num-gpus-per-node 2 --rollout-num-gpus 1 "
     "--save-debug-train-data d/{rollout_id}",
     "--save-debug-train-data d/{rollout_id} | 2"),
    ("--load-debug-rollout-data d/{rollout_id} --save-debug-train-data d/{rollout_id}",
     "--save-debug-train-data d/{rollout_id} | --load-debug-rollout-data d/{rollout_id}"),
    ('--apply-chat-template-kwargs {"a":1}', "--apply-chat-template-kwargs {'a': 1} | --apply-chat-template"),
    ("--num-rollout 0", "--num-rollout 0"),
    ("--eval-interval 1 --eval-prompt-data a", "--eval-prompt-data a | no file a"),
    ("--eval-interval 1 --eval-prompt-data a b c", "--eval-prompt-data a b c | 3 words"),
    ("--eval-interval 1 --eval-config none.yaml", "--eval-config none.yaml"),
    ("--disable-rollout-global-dataset "
     "--rollout-function-path m.f",
     "--prompt-data | --disable-rollout-global-dataset"),
    ("--engine sglang --rollout-num-gpus 3 --rollout-num-gpus-per-engine 2", "--rollout-num-gpus 3 | 2 or 4 "),
    ("--rollout-num-gpus 2 --rollout-num-gpus-per-engine 2", "--rollout-num-gpus-per-engine 2 | one device"),
    ("--rollout-num-gpus 2 --update-weight-transport memory", "--rollout-num-gpus | use nccl"),
    ("--rollout-external-engine-addrs a:1 --rollout-num-gpus 2", "--rollout-num-gpus 2 | --engine"),
    ("--engine sglang --rollout-num-gpus 1 --embedded-num-slots 4", "--embedded-num-slots 4 | --engine is sglang"),
    ("--sglang-log-dir x", "--sglang-log-dir x | --rollout-num-gpus"),
    ("--engine external", "--rollout-external-engine-addrs"),
    ("--engine embedded --rollout-external-engine-addrs a:1",
     "--rollout-external-engine-addrs a:1 | --engine is embedded"),
    ("--rollout-external-engine-addrs a:1 --update-weight-transport memory", "use nccl | or disk"),
    ("--update-weight-transport disk", "--update-weight-transport disk | --engine"),
    ("--rollout-external-engine-addrs a:1 --update-weight-disk-dir x", "without --update-weight-transport"),
    ("--rollout-external-engine-addrs a:1 a:1", "twice"),
    ("--sglang-router-ip a", "--sglang-router-port"),
    ("--actor-num-gpus-per-node 2", "--rollout-num-gpus"),
    ("--colocate --async-buffer-size 1", "--colocate with --async-buffer-size 1"),
    ("--ray-address auto --rollout-num-gpus 12 --rollout-num-gpus-per-engine 12 --engine sglang", "whole machines"),
    ('--ray-address auto --rollout-num-gpus 1 --train-env-vars {"A":1}', "--train-env-vars: A is 1"),
    ("--colocate --update-weights-interval 2", "--update-weights-interval 2 with --colocate"),
    ("--colocate --rollout-num-gpus 2", "--rollout-num-gpus 2 with --colocate"),
    ("--profile-target train_actor", "--profile-target train_actor | --use-pytorch-profiler"),
    ("--use-pytorch-profiler --profile-target train_actr", "did you mean train_actor"),
    ("--use-pytorch-profiler --profile-target train_overall train_actor", "train_overall train_actor"),
    ("--use-pytorch-profiler --profile-step-start 3", "--profile-step-start 3"),
    ("--custom-megatron-init-path own.init", "--custom-megatron-init-path | --train-backend megatron"),
]  # fmt: skip


def test_each_rule_names_flags_values_and_the_fix(run: list[str]) -> None:
    wrong: list[object] = []
    for added, named in RULES:
        found = problems([*run, *added.split()])
        if len(found) != 1 or ";" not in found[0] or any(words not in found[0] for words in named.split(" | ")):
            wrong.append((added, named, found))
    assert wrong == []


FITTING = [
    "--use-dynamic-batch-size --max-tokens-per-gpu 4096 --balance-by-flops",
    "--use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl --ref-update-interval 5",
    "--save-debug-rollout-data d/{rollout_id} --save-debug-train-data d/{rollout_id}_{rank}",
    "--use-tis --tis-clip-low 0.5 --tis-mode mask --tis-level geometric --tis-veto 1e-4",
    "--advantage-estimator reinforce_plus_plus --normalize-advantages --kl-coef 0.01 --gamma 0.99",
    "--kl-coef 0.01 --custom-advantage-function-path a.b",
    "--advantage-estimator dapo --rollout-max-response-len 64 --overlong-buffer-len 16",
    "--advantage-estimator dr_grpo --rollout-max-response-len 64",
    "--n-samples-per-prompt 1 --global-batch-size 32 --advantage-estimator reinforce_plus_plus --normalize-advantages",
    "--save s --save-interval 5 --save-hf hf/{rollout_id} --keep-checkpoints 2",
    "--save-hf hf",
    "--save-hf hf/{rollout_id} --save-interval 5",
    "--async-buffer-size 2 --pause-mode hold",
    "--async-buffer-size 1 --keep-old-actor",
    "--update-weights-interval 2 --keep-old-actor",
    "--rm-type boxed_math",
    "--colocate --update-weights-interval 2 --no-offload-rollout",
    "--save-debug-rollout-data d/{rollout_id}.jsonl",
    "--lr-decay-style cosine --lr-warmup-iters 5 --lr 1e-4 --min-lr 1e-5",
]


def test_flags_that_fit_are_no_problem(run: list[str]) -> None:
    assert [found for added in FITTING if (found := problems([*run, *added.split()]))] == []


def test_the_batch_equation_is_shown_with_three_settings_that_fit(run: list[str]) -> None:
    (problem,) = problems([*run, "--global-batch-size", "250"])
    assert "--rollout-batch-size 32 x --n-samples-per-prompt 8 = 256 samples" in problem
    options = problem.split("nearest valid settings: ")[1].split("; ")
    assert len(options) == 3
    for option in options:
        assert problems([*run, *option.split()]) == []


def test_the_proposed_batch_settings_fit() -> None:
    for batch, n, size, steps in [(32, 8, 250, None), (6, 4, None, 5), (7, 3, 6, 2), (1, 1, 4, 4)]:
        options = nearest_batch_settings(batch, n, size, steps)
        assert len(set(options)) == len(options) >= 1
        for option in options:
            words = option.split()
            given = {name: int(value) for name, value in zip(words[::2], words[1::2], strict=True)}
            samples = given.get("--rollout-batch-size", batch) * n
            step_count = given.get("--num-steps-per-rollout", steps)
            assert samples % given["--global-batch-size"] == 0
            assert step_count is None or samples == given["--global-batch-size"] * step_count


def test_a_prompt_file_with_a_slice_is_looked_for_without_it(run: list[str], tmp_path: Path) -> None:
    argv = without(run, "--prompt-data")
    assert problems([*argv, "--prompt-data", f"{tmp_path / 'train.jsonl'}@[0:10]"]) == []
    (missing,) = problems([*argv, "--prompt-data", f"{tmp_path / 'none.jsonl'}@[0:10]"])
    assert "none.jsonl; " in missing
    (bad,) = problems([*argv, "--prompt-data", f"{tmp_path / 'train.jsonl'}@[a:b]"])
    assert "is not a slice" in bad
    (tmp_path / "train.csv").write_text("")
    assert "the format .csv is not read" in problems([*argv, "--prompt-data", str(tmp_path / "train.csv")])[0]
    assert "write openai/gsm8k:SPLIT for a data set on the Hub" in problems([*argv, "--prompt-data", "openai/gsm8k"])[0]
    assert "https://a.b/c.jsonl" in problems([*argv, "--prompt-data", "https://a.b/c.jsonl"])[0]


def test_a_model_is_a_folder(run: list[str], tmp_path: Path) -> None:
    argv = without(run, "--hf-checkpoint")
    assert (
        "write Qwen/Qwen3-0.6B@main for a model on the Hub"
        in problems([*argv, "--hf-checkpoint", "Qwen/Qwen3-0.6B"])[0]
    )
    assert "no such directory" in problems([*argv, "--hf-checkpoint", str(tmp_path / "none")])[0]
    assert "is a file" in problems([*argv, "--hf-checkpoint", str(tmp_path / "train.jsonl")])[0]


def test_own_data_needs_no_prompt_file(run: list[str]) -> None:
    assert problems([*without(run, "--prompt-data"), "--data-source-path", "m.Source"]) == []


def test_explicit_default_is_not_a_flag_without_effect(run: list[str]) -> None:
    given = "--eps-clip 0.2 --tis-clip 2 --tis-clip-low 0 --opsm-delta 1e-4 --kl-coef 0 --kl-loss-coef 0 --gamma 1"
    engines = "--rollout-num-gpus-per-engine 1 --rollout-max-engine-restarts 10"  # as scripts of slime have them
    assert problems([*run, *given.split(), *engines.split()]) == []


def test_unsendable_key_is_reported_without_showing_it(run: list[str]) -> None:
    for key in ["hidden-word\n", "hidden\r-word", " hidden-word", "hidden-wörd"]:
        (problem,) = problems([*run, "--engine", "sglang", "--rollout-num-gpus", "1", "--sglang-api-key", key])
        assert problem.startswith("--sglang-api-key")
        assert "hidden" not in problem


def test_responses_that_nothing_scores_are_a_problem(run: list[str]) -> None:
    (problem,) = problems(without(run, "--rm-type"))
    assert "--rm-type and --custom-rm-path are missing" in problem
    demonstrates = ["--loss-type", "sft_loss", "--n-samples-per-prompt", "1", "--rollout-batch-size", "256"]
    assert problems([*without(run, "--rm-type"), *demonstrates]) == []
    (problem,) = problems([*without(run, "--rm-type"), *demonstrates, "--save-debug-rollout-data", "d/{rollout_id}"])
    assert problem.startswith("--save-debug-rollout-data d/{rollout_id} has no effect with --loss-type sft_loss")


def test_a_demonstration_is_not_learned_several_times_in_a_batch(run: list[str]) -> None:
    argv = [*run, "--loss-type", "sft_loss"]
    problem, unused = problems(argv)
    assert unused.startswith("--rm-type math has no effect with --loss-type sft_loss")
    assert problem.startswith("--n-samples-per-prompt 8 with --loss-type sft_loss")
    assert problems([*argv, "--rollout-function-path", "m.f"]) == []


@pytest.mark.parametrize("critic", ["--critic-lr 1e-5", "--num-critic-only-steps 3", "--value-clip 0.3"])
def test_demonstrations_train_no_critic(run: list[str], critic: str) -> None:
    demonstrates = [
        *without(run, "--rm-type", "--n-samples-per-prompt", "--global-batch-size"),
        "--loss-type",
        "sft_loss",
    ]
    for estimator in ("grpo", "ppo"):
        [problem] = problems([*demonstrates, "--advantage-estimator", estimator, *critic.split()])
        assert problem.startswith(critic.split()[0])
        assert "has no effect with --loss-type sft_loss; remove" in problem


def test_rewards_of_distillation_without_a_reward_function_do_not_pass_a_filter_for_their_spread(
    run: list[str],
) -> None:
    name = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    teacher = ["--use-opd", "--opd-teacher-load", run[1], "--dynamic-sampling-filter-path"]
    for unscored in (without(run, "--rm-type"), without(run, "--label-key")):  # the latter has nothing to compare with
        [problem] = problems([*unscored, *teacher, name])
        assert problem.startswith(f"--dynamic-sampling-filter-path {name} with --use-opd and without a reward")
        assert "remove it, or add a reward, such as --rm-type math with --label-key" in problem
        assert problems([*unscored, *teacher, f"{name}_with_fallback"]) == []
        assert problems([*unscored, *teacher, name, "--custom-generate-function-path", "m.f"]) == []
    assert problems([*run, *teacher, name]) == []


def test_evaluation_sets_are_checked_one_by_one(run: list[str], tmp_path: Path) -> None:
    file = str(tmp_path / "train.jsonl")
    argv = [*run, "--eval-interval", "5", "--eval-prompt-data", "a", file]
    assert problems(argv) == []
    assert "duplicate" in problems([*argv, "a", file])[0]
    assert "no file none.jsonl" in problems([*argv, "b", "none.jsonl"])[0]
    assert "number" not in problems([*run, "--eval-interval", "5", "--eval-prompt-data", "a", file, "b"])[0]


def test_every_problem_is_returned_not_only_the_first(run: list[str]) -> None:
    added = "--rollout-temperature 0 --tis-clip 3 --bf16 --fp32 --gamma 0.5 --rm-type mth --ckpt-step 1"
    assert len(problems([*run, *added.split()])) == 6


def test_a_truncated_distribution_is_only_refused_where_it_is_trained_on(run: list[str]) -> None:
    for flags in ["--debug-rollout-only", "--eval-top-p 0.9 --rollout-top-p 1"]:
        words = [*run, "--rollout-top-p", "0.9", *flags.split()]
        assert not [problem for problem in problems(words) if "part of the vocabulary" in problem]


def refusals(argv: list[str]) -> list[str]:
    try:
        load(argv, device_type="cpu")
    except ConfigError as error:
        return list(error.problems)
    return []


def test_a_prompt_is_not_rendered_before_its_session_renders_it(run: list[str]) -> None:
    for agent in ["--agent-function-path a.py:f", "--agent-command ./a", "--environment a.py:G"]:
        (problem,) = refusals([*run, *agent.split(), "--apply-chat-template"])
        assert f"{agent} and --apply-chat-template" in problem
        assert refusals([*run, *agent.split(), "--apply-chat-template-kwargs", '{"enable_thinking": false}']) == []


def test_sessions_that_applications_take_need_a_key(run: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*run, "--online-sessions"]
    monkeypatch.delenv("FURLONG_SESSIONS_KEY", raising=False)
    (problem,) = refusals(words)
    assert "FURLONG_SESSIONS_KEY" in problem
    monkeypatch.setenv("FURLONG_SESSIONS_KEY", "sesame")
    assert refusals(words) == []
