"""Derived values."""

from __future__ import annotations

from furlong.config import Resolved, parse


def derived(*argv: str) -> Resolved:
    return parse(argv)


def test_the_batch_equation_is_completed_from_either_side() -> None:
    base = ["--rollout-batch-size", "8", "--n-samples-per-prompt", "4"]
    assert derived(*base).config.train.global_batch_size == 32
    by_steps = derived(*base, "--num-steps-per-rollout", "2")
    assert by_steps.config.train.global_batch_size == 16
    assert by_steps.sources["global_batch_size"] == "derived: samples of a rollout / --num-steps-per-rollout"
    assert derived(*base, "--global-batch-size", "8").config.train.num_steps_per_rollout == 4


def test_sizes_that_do_not_divide_are_left_for_validation() -> None:
    config = derived("--rollout-batch-size", "3", "--num-steps-per-rollout", "5").config
    assert config.train.global_batch_size is None


def test_the_number_of_samples_follows_from_the_algorithm() -> None:
    for words, n in (
        ([], 8),
        (["--advantage-estimator", "rloo"], 8),
        (["--advantage-estimator", "reinforce_plus_plus"], 1),
        (["--loss-type", "sft_loss"], 1),
        (["--loss-type", "sft_loss", "--n-samples-per-prompt", "2"], 2),
        (["--n-samples-per-prompt", "1"], 1),
    ):
        config = derived(*words, "--rollout-batch-size", "2").config
        assert (config.data.n_samples_per_prompt, config.train.global_batch_size) == (n, 2 * n), words


def test_evaluation_inherits_missing_settings_from_training() -> None:
    config = derived(
        *("--rollout-temperature", "0.7", "--rollout-top-k", "5", "--input-key", "q", "--reward-key", "acc"),
        *("--eval-top-k", "1", "--seq-length", "64", "--rollout-function-path", "m.f"),
    ).config
    assert (config.eval.eval_temperature, config.eval.eval_top_k) == (0.7, 1)
    assert (config.eval.eval_input_key, config.reward.eval_reward_key) == ("q", "acc")
    assert (config.rollout.rollout_max_context_len, config.eval.eval_max_context_len) == (64, 64)
    assert config.eval.eval_function_path == "m.f"


def test_the_run_is_named_after_algorithm_and_model_or_its_folder() -> None:
    named = derived("--hf-checkpoint", "/models/Qwen3 0.6B", "--advantage-estimator", "gspo").config.track
    assert (named.run_name, named.output_dir) == ("gspo-qwen3-0.6b", "outputs/gspo-qwen3-0.6b")
    assert derived("--output-dir", "runs/a").config.track.run_name == "a"
    assert derived("--run-name", "b").config.track.output_dir == "outputs/b"


def test_one_sample_per_prompt_turns_off_the_standard_deviation() -> None:
    assert not derived("--n-samples-per-prompt", "1").config.algo.grpo_std_normalization
    assert derived("--n-samples-per-prompt", "2").config.algo.grpo_std_normalization


def test_clipping_above_is_clipping_below_except_for_dapo() -> None:
    assert derived("--eps-clip", "0.3").config.algo.eps_clip_high == 0.3
    dapo = derived("--advantage-estimator", "dapo").config.algo
    assert (dapo.eps_clip_high, dapo.calculate_per_token_loss) == (0.28, True)


def test_dr_grpo_divides_by_the_longest_response() -> None:
    argv = ("--advantage-estimator", "dr_grpo", "--rollout-max-response-len", "512")
    algo = derived(*argv).config.algo
    assert (algo.grpo_std_normalization, algo.loss_constant_len) == (False, 512)
    assert derived(*argv, "--loss-constant-len", "9").config.algo.loss_constant_len == 9


def test_a_lower_bound_selects_clipping_of_the_importance_weight() -> None:
    assert derived("--use-tis", "--tis-clip-low", "0.5").config.algo.tis_mode == "clip"
    assert derived("--use-tis", "--tis-clip-low", "0.5", "--tis-mode", "mask").config.algo.tis_mode == "mask"


def test_the_reference_is_the_start_where_one_is_needed() -> None:
    assert derived("--hf-checkpoint", "m", "--use-kl-loss").config.checkpoint.ref_load == "m"
    assert derived("--hf-checkpoint", "m").config.checkpoint.ref_load is None


def test_debug_flags_set_what_they_imply() -> None:
    dump = derived("--dump-details", "d").config.debug
    assert dump.save_debug_rollout_data == "d/rollout_data/{rollout_id}.safetensors"
    assert dump.save_debug_train_data == "d/train_data/{rollout_id}_{rank}.safetensors"
    assert derived("--load-debug-rollout-data", "r_{rollout_id}").config.debug.debug_train_only


def test_the_schedule_ends_with_the_run() -> None:
    argv = ("--rollout-batch-size", "4", "--num-rollout", "10", "--num-steps-per-rollout", "2")
    assert derived(*argv).config.optim.lr_decay_iters == 20


def test_saving_without_an_interval_is_at_the_end() -> None:
    assert derived("--save", "s", "--num-rollout", "10").config.checkpoint.save_interval == 10


def test_given_values_are_never_replaced() -> None:
    for argv, field, value in [
        (("--over-sampling-batch-size", "9", "--rollout-batch-size", "3"), "over_sampling_batch_size", 9),
        (
            (
                "--rollout-batch-size",
                "3",
            ),
            "over_sampling_batch_size",
            3,
        ),
        ((), "async_buffer_size", 0),
    ]:
        assert getattr(derived(*argv).config.rollout, field) == value


def test_adam_without_moments_takes_none_from_a_checkpoint() -> None:
    flags = ("--use-stateless-adam", "--no-save-optim")
    assert derived(*flags, "--load", "folder").config.checkpoint.no_load_optim
    assert not derived(*flags).config.checkpoint.no_load_optim
    assert not derived("--load", "folder").config.checkpoint.no_load_optim
