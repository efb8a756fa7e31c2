"""Rules of algorithms, losses, off-policy corrections and penalties."""

from __future__ import annotations

from collections.abc import Iterator

from furlong.config.sections import AlgoFlags, Config
from furlong.core.algorithms import find_algorithm

STD_FILTER = "furlong.rollout.filters.check_reward_nonzero_std"


def algorithm_problems(config: Config) -> Iterator[str]:
    """Yield every problem of the algorithm section."""
    yield from _sampling(config)
    yield from _estimator(config)
    yield from _kl(config)
    yield from _loss(config)
    yield from _correction(config)
    yield from _penalty(config)


def _sampling(config: Config) -> Iterator[str]:
    """Refuse training on samples of a truncated distribution: the loss assumes that of the whole vocabulary."""
    rollout, debug = config.rollout, config.debug
    generates = rollout.rollout_function_path is None and not debug.load_debug_rollout_data
    if config.algo.loss_type == "sft_loss" or debug.debug_rollout_only or not generates:
        return
    given = [
        f"--rollout-{name} {value:g}"
        for name, value, is_off in (
            ("top-p", rollout.rollout_top_p, rollout.rollout_top_p >= 1),
            ("top-k", rollout.rollout_top_k, rollout.rollout_top_k <= 0),
            ("min-p", rollout.rollout_min_p, rollout.rollout_min_p <= 0),
        )
        if not is_off and value > 0
    ]
    if given:
        yield (
            f"{', '.join(given)}: the engine would sample from a part of the vocabulary, but the log-probs and ratios "
            "of training are those of all tokens, so gradients would be biased; remove it. A lower "
            "--rollout-temperature is applied in training, too, and evaluations may use --eval-top-p and --eval-top-k"
        )


def _estimator(config: Config) -> Iterator[str]:
    algo, n = config.algo, config.data.n_samples_per_prompt
    name, row = algo.advantage_estimator, find_algorithm(algo.advantage_estimator)
    if algo.loss_type != "policy_loss":
        return
    if not algo.compute_advantages_and_returns:
        rollout = config.rollout
        if not (rollout.rollout_data_postprocess_path or rollout.custom_convert_samples_to_train_data_path):
            yield (
                "--disable-compute-advantages-and-returns with --loss-type policy_loss, which needs advantages; remove "
                "it, or use --loss-type custom_loss"
            )
        return
    if row.whitened and not algo.normalize_advantages:
        yield f"--advantage-estimator {name} needs whitened advantages; add --normalize-advantages"
    has_custom_advantages = (
        config.reward.custom_reward_post_process_path
        or algo.custom_advantage_function_path
        or config.rollout.custom_convert_samples_to_train_data_path
    )
    filtered, generates = config.rollout.dynamic_sampling_filter_path, config.rollout.custom_generate_function_path
    if n == 1 and filtered == STD_FILTER and not generates:
        yield (
            f"--dynamic-sampling-filter-path {filtered} with --n-samples-per-prompt 1: it keeps groups with different "
            "rewards, and with one sample per prompt rewards cannot differ; use --n-samples-per-prompt 2 or more, or "
            "remove it"
        )
    if row.baseline != "none" and n == 1 and algo.rewards_normalization and not has_custom_advantages:
        yield (
            f"--advantage-estimator {name} with --n-samples-per-prompt 1: the baseline of a single sample is its own "
            "reward, so every advantage would be 0; use --n-samples-per-prompt 2 or more, or --advantage-estimator "
            "reinforce_plus_plus"
        )
    if algo.gamma != 1.0 and not row.discounted:
        yield f"--gamma {algo.gamma} has no effect with --advantage-estimator {name}; remove it"


def _kl(config: Config) -> Iterator[str]:
    algo = config.algo
    is_read = algo.custom_advantage_function_path is not None or find_algorithm(algo.advantage_estimator).kl_in_reward
    if algo.kl_coef and not is_read:
        yield (
            f"--kl-coef {algo.kl_coef} has no effect with --advantage-estimator {algo.advantage_estimator}, whose "
            "advantages do not include the KL; use --use-kl-loss --kl-loss-coef"
        )


def _loss(config: Config) -> Iterator[str]:
    algo = config.algo
    if algo.loss_type == "custom_loss" and algo.custom_loss_function_path is None:
        yield "--loss-type custom_loss without a loss function; add --custom-loss-function-path"
    n, demonstrates = config.data.n_samples_per_prompt, algo.loss_type == "sft_loss"
    if demonstrates and n > 1 and not (config.rollout.rollout_function_path or config.debug.load_debug_rollout_data):
        yield (
            f"--n-samples-per-prompt {n} with --loss-type sft_loss: each demonstration would be in a batch {n} times, "
            "with the gradient of one; remove it (--num-epoch repeats the data)"
        )
    name, row = algo.advantage_estimator, find_algorithm(algo.advantage_estimator)
    if algo.eps_clip_c is not None and row.policy == "clipped_weight" and not demonstrates:
        yield f"--eps-clip-c {algo.eps_clip_c} has no effect with --advantage-estimator {name}; remove it"
    if row.aggregation == "constant" and algo.calculate_per_token_loss:
        yield f"--calculate-per-token-loss: {name} divides by a constant; use --advantage-estimator grpo or remove it"
    elif row.aggregation == "constant" and algo.loss_constant_len is None and algo.loss_type == "policy_loss":
        yield (
            f"--advantage-estimator {name} divides by a constant that is not set; "
            "give --rollout-max-response-len or --loss-constant-len"
        )
    elif row.aggregation == "token" and algo.loss_constant_len is not None:
        yield f"--loss-constant-len {algo.loss_constant_len}: {name} averages over tokens; use grpo or dr_grpo with it"
    elif algo.loss_constant_len is not None and algo.calculate_per_token_loss:
        yield (
            f"--loss-constant-len {algo.loss_constant_len} and --calculate-per-token-loss cannot be combined: they set "
            "different denominators; remove one of them"
        )


def _correction(config: Config) -> Iterator[str]:
    algo = config.algo
    has_old = algo.use_rollout_logprobs or algo.keep_old_actor
    if algo.use_opsm and algo.loss_type == "policy_loss" and config.train.num_steps_per_rollout == 1 and not has_old:
        yield (
            "--use-opsm has no effect with one step per rollout: the old policy is the current one, so nothing "
            "has drifted; add --use-rollout-logprobs, raise --num-steps-per-rollout, or remove it"
        )
    if algo.use_tis and algo.tis_clip_low > algo.tis_clip:
        yield f"--tis-clip-low {algo.tis_clip_low} is above --tis-clip {algo.tis_clip}; lower it"
    if algo.use_tis and algo.tis_mode == "truncate" and algo.tis_clip_low and algo.custom_tis_function_path is None:
        yield (
            f"--tis-clip-low {algo.tis_clip_low} has no effect with --tis-mode truncate, which has no lower bound; "
            "use --tis-mode clip or mask, or remove it"
        )
    if algo.tis_batch_normalize and algo.tis_level == "geometric":
        yield "--tis-batch-normalize with --tis-level geometric is not defined; use token or sequence, or remove it"
    yield from _slime_bounds(algo)
    if algo.keep_old_actor:
        yield from _old_actor(config)


def _slime_bounds(algo: AlgoFlags) -> Iterator[str]:
    """Bounds under the names of slime's mis.yaml: against furlong's names for them, and each other."""
    low, high = algo.rejection_bounds
    if algo.use_rs and low >= high:
        yield (
            f"--use-rs rejects weights below {low:g} and above {high:g}, which are all; "
            f"use --rs-lower-bound {1 / high:.3g}"
        )
    pairs = {
        "--tis-upper-bound and --tis-clip": (algo.tis_upper_bound, algo.tis_clip),
        "--rs-veto-threshold and --tis-veto": (algo.rs_veto_threshold, algo.tis_veto),
    }
    if algo.tis_mode != "truncate":
        pairs["--tis-lower-bound and --tis-clip-low"] = (algo.tis_lower_bound, algo.tis_clip_low)
    for flags, (theirs, ours) in pairs.items():
        if theirs is not None and ours is not None and theirs != ours:
            yield f"{flags} are names of one setting, but are {theirs} and {ours}; remove one of them"


def _old_actor(config: Config) -> Iterator[str]:
    """--keep-old-actor keeps two policies: the current one and the one before the last rollout."""
    rollout, interval = config.rollout, config.sync.update_weights_interval
    ahead = rollout.async_buffer_size or 0
    if config.train.num_steps_per_rollout == 1 and not ahead and interval == 1:
        yield (
            "--keep-old-actor has no effect in a synchronous run with one step per rollout: the old policy is the "
            "current one; remove it, or raise --async-buffer-size or --num-steps-per-rollout"
        )
    if ahead + interval > 2:
        yield (
            f"--keep-old-actor with --async-buffer-size {ahead} and --update-weights-interval {interval}: the weights "
            f"of rollouts would be up to {ahead + interval - 1} rollouts old, and only those of the last one are kept; "
            "lower one of them, or remove it"
        )
    if ahead and config.sync.pause_mode != "finish":
        yield (
            f"--keep-old-actor with --pause-mode {config.sync.pause_mode}: a response may mix two weight "
            "versions, and the log-prob pass uses one; use --pause-mode finish or remove it"
        )
    if rollout.partial_rollout and not rollout.mask_offpolicy_in_partial_rollout:
        yield (
            "--keep-old-actor with --partial-rollout: a response may mix two weight versions, and the log-prob pass "
            "uses one; add --mask-offpolicy-in-partial-rollout, or remove one of them"
        )


def _penalty(config: Config) -> Iterator[str]:
    algo, longest = config.algo, config.rollout.rollout_max_response_len
    if algo.overlong_buffer_len is None:
        return
    if longest is None:
        yield (
            f"--overlong-buffer-len {algo.overlong_buffer_len} ends at --rollout-max-response-len, which is "
            "not set; set it"
        )
    elif algo.overlong_buffer_len >= longest:
        yield (
            f"--overlong-buffer-len {algo.overlong_buffer_len} is not below --rollout-max-response-len {longest}; "
            "lower it or raise the limit"
        )
