"""Rules of batch sizes, algorithms, losses, parallel sizes, experts and the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from furlong.catalogue import Problem
from furlong.config.critic import FLAG as ROLES_FLAG
from furlong.config.critic import critic_settings, role_overrides
from furlong.config.facts import is_unscored, read_model_config
from furlong.config.flag_spec import flag_specs
from furlong.config.sections import Config
from furlong.config.teachers import function_problems, teacher_problems
from furlong.config.topology import Topology
from furlong.core.algorithms import find_algorithm
from furlong.core.routing import RoutingShape
from furlong.errors import ConfigError

STD_FILTER = ".check_reward_nonzero_std"  # also of slime
RECOMPUTED = ("mlp", "moe", "shared_experts")
# Families whose routers have a selection bias.
BIASED_FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "minimax_m2")
# Architecture flags that are compared with config.json, and the keys there; a dot is a nested key.
COMPARED = {
    "num_layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "num_attention_heads": ("num_attention_heads",),
    "num_query_groups": ("num_key_value_heads",),
    "vocab_size": ("vocab_size",),
    "rotary_base": ("rope_parameters.rope_theta", "rope_theta", "rope_scaling.rope_theta"),
}


def batch_problems(config: Config) -> Iterator[str]:
    """CFG01: rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout; and CFG04."""
    data, train = config.data, config.train
    batch, n = data.rollout_batch_size, data.n_samples_per_prompt
    size, steps = train.global_batch_size, train.num_steps_per_rollout
    if train.use_dynamic_batch_size and train.max_tokens_per_gpu is None:
        safe = config.rollout.rollout_max_response_len
        yield Problem(
            "--use-dynamic-batch-size without --max-tokens-per-gpu: the micro-batch size is not set; add "
            f"--max-tokens-per-gpu TOKENS{f', for example {safe}' if safe else ''}",
            "CFG04",
        )
    if batch <= 0 or n <= 0 or (size is not None and size <= 0) or (steps is not None and steps <= 0):
        return
    if size is None or steps is None or batch * n != size * steps:
        left = f"--rollout-batch-size {batch} x --n-samples-per-prompt {n} = {batch * n}"
        shown = ["(not set)" if value is None else str(value) for value in (size, steps)]
        right = f"--global-batch-size {shown[0]} x --num-steps-per-rollout {shown[1]}"
        if size is not None and steps is not None:
            right += f" = {size * steps} samples"
        options = "; ".join(nearest_batch_settings(batch, n, size, steps))
        message = f"batch sizes do not match: {left} samples, but {right}; nearest valid settings: {options}"
        yield Problem(message, "CFG01")
    elif not train.use_dynamic_batch_size and train.micro_batch_size > 0 and size % train.micro_batch_size:
        nearest = sorted(sorted(_divisors(size), key=lambda d: abs(d - train.micro_batch_size))[:3])
        yield Problem(
            f"--micro-batch-size {train.micro_batch_size} does not divide --global-batch-size {size}; "
            f"use {' or '.join(map(str, nearest))}, or --use-dynamic-batch-size",
            "CFG01",
        )


def nearest_batch_settings(batch: int, n: int, size: int | None, steps: int | None) -> list[str]:
    """Return three valid settings of the batch equation near the given one, as flags to paste."""
    samples = batch * n
    requested = size if size is not None else samples / (steps or 1)
    near = sorted(_divisors(samples), key=lambda d: (abs(d - requested), d))
    options = [f"--global-batch-size {d} --num-steps-per-rollout {samples // d}" for d in near[:3]]
    per_rollout = (size or near[0]) * (steps or max(1, round(samples / (size or near[0]))))
    if per_rollout % n == 0 and per_rollout != samples:
        kept = f"--global-batch-size {per_rollout // (steps or per_rollout // (size or near[0]))}"
        return [f"--rollout-batch-size {per_rollout // n} {kept}", *options[:2]]
    return options


def _divisors(number: int) -> set[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return {*small, *(number // d for d in small)}


def algorithm_problems(config: Config) -> Iterator[str]:
    """Yield problems of the algorithm, its loss and its corrections."""
    algo, rollout, n = config.algo, config.rollout, config.data.n_samples_per_prompt
    name, row = algo.advantage_estimator, find_algorithm(algo.advantage_estimator)
    yield from _sampling(config)
    if algo.loss_type == "policy_loss" and not algo.compute_advantages_and_returns:
        if not (rollout.rollout_data_postprocess_path or rollout.custom_convert_samples_to_train_data_path):
            yield (
                "--disable-compute-advantages-and-returns with --loss-type policy_loss, which needs advantages; remove "
                "it, or use --loss-type custom_loss"
            )
    elif algo.loss_type == "policy_loss":
        yield from _estimator(config)
    if algo.kl_coef and not (algo.custom_advantage_function_path or row.kl_in_reward):
        yield (
            f"--kl-coef {algo.kl_coef} has no effect with --advantage-estimator {name}, whose advantages do not "
            "include the KL; use --use-kl-loss --kl-loss-coef"
        )
    if config.optim.lr_decay_style == "WSD" and config.optim.lr_wsd_decay_iters is None:
        yield "--lr-decay-style WSD without the length of its decay; add --lr-wsd-decay-iters"
    if algo.loss_type == "custom_loss" and algo.custom_loss_function_path is None:
        yield "--loss-type custom_loss without a loss function; add --custom-loss-function-path"
    is_own = rollout.rollout_function_path or config.debug.load_debug_rollout_data
    if algo.loss_type == "sft_loss" and n > 1 and not is_own:
        yield (
            f"--n-samples-per-prompt {n} with --loss-type sft_loss: each demonstration would be in a batch {n} times, "
            "with the gradient of one; remove it (--num-epoch repeats the data)"
        )
    if algo.eps_clip_c is not None and row.policy != "clipped_ratio" and algo.loss_type != "sft_loss":
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
    yield from _correction(config)
    if algo.uses_critic:
        yield from _critic(config)
    if algo.keep_old_actor:
        yield from _old_actor(config)
    yield from function_problems(config)
    if config.opd.use_opd:
        yield from _distillation(config)


def _sampling(config: Config) -> Iterator[str]:
    """Refuse training on samples of a truncated distribution: the loss assumes that of the whole vocabulary."""
    rollout, debug = config.rollout, config.debug
    generates = rollout.rollout_function_path is None and not debug.load_debug_rollout_data
    if config.algo.loss_type == "sft_loss" or debug.debug_rollout_only or not generates:
        return
    given = [f"--rollout-top-p {rollout.rollout_top_p:g}"] if 0 < rollout.rollout_top_p < 1 else []
    given += [f"--rollout-top-k {rollout.rollout_top_k}"] if rollout.rollout_top_k > 0 else []
    given += [f"--rollout-min-p {rollout.rollout_min_p:g}"] if rollout.rollout_min_p > 0 else []
    if given:
        yield (
            f"{', '.join(given)}: the engine would sample from a part of the vocabulary, but the log-probs and ratios "
            "of training are those of all tokens, so gradients would be biased; remove it. A lower "
            "--rollout-temperature is applied in training, too, and evaluations may use --eval-top-p and --eval-top-k"
        )


def _estimator(config: Config) -> Iterator[str]:
    algo, rollout, n = config.algo, config.rollout, config.data.n_samples_per_prompt
    name, row = algo.advantage_estimator, find_algorithm(algo.advantage_estimator)
    if row.whitened and not algo.normalize_advantages:
        yield f"--advantage-estimator {name} needs whitened advantages; add --normalize-advantages"
    has_custom_advantages = (
        config.reward.custom_reward_post_process_path
        or algo.custom_advantage_function_path
        or rollout.custom_convert_samples_to_train_data_path
    )
    filtered = rollout.dynamic_sampling_filter_path or ""
    if n == 1 and filtered.endswith(STD_FILTER) and not rollout.custom_generate_function_path:
        yield (
            f"--dynamic-sampling-filter-path {filtered} with --n-samples-per-prompt 1: it keeps groups with different "
            "rewards, and with one sample per prompt rewards cannot differ; use --n-samples-per-prompt 2 or more, or "
            "remove it"
        )
    is_scored_elsewhere = rollout.custom_generate_function_path or rollout.rollout_function_path
    if is_unscored(config) and filtered.endswith(STD_FILTER) and not is_scored_elsewhere:
        yield (
            f"--dynamic-sampling-filter-path {filtered} with --use-opd and without a reward: it keeps groups with "
            "different rewards, and all are 0; remove it, or add a reward, such as --rm-type math with --label-key"
        )
    compares = row.baseline != "none" and algo.rewards_normalization and not config.opd.is_alone
    if compares and n == 1 and not has_custom_advantages:
        yield (
            f"--advantage-estimator {name} with --n-samples-per-prompt 1: the baseline of a single sample is its own "
            "reward, so every advantage would be 0; use --n-samples-per-prompt 2 or more, or --advantage-estimator "
            "reinforce_plus_plus"
            + (", or --opd-task-reward-coef 0 for the teacher alone" if config.opd.use_opd else "")
        )
    if algo.gamma != 1.0 and not row.discounted:
        yield f"--gamma {algo.gamma} has no effect with --advantage-estimator {name}; remove it"


def _correction(config: Config) -> Iterator[str]:
    algo = config.algo
    has_old = algo.use_rollout_logprobs or algo.keep_old_actor
    if algo.use_opsm and algo.loss_type == "policy_loss" and config.train.num_steps_per_rollout == 1 and not has_old:
        yield (
            "--use-opsm has no effect with one step per rollout: the old policy is the current one, so nothing "
            "has drifted; add --use-rollout-logprobs, raise --num-steps-per-rollout, or remove it"
        )
    if algo.use_tis and algo.tis_mode == "truncate" and algo.tis_clip_low and algo.custom_tis_function_path is None:
        yield (
            f"--tis-clip-low {algo.tis_clip_low} has no effect with --tis-mode truncate, which has no lower bound; "
            "use --tis-mode clip or mask, or remove it"
        )
    if algo.tis_batch_normalize and algo.tis_level == "geometric":
        yield "--tis-batch-normalize with --tis-level geometric is not defined; use token or sequence, or remove it"
    low, high = algo.rejection_bounds
    if algo.use_rs and low >= high:
        yield (
            f"--use-rs rejects weights below {low:g} and above {high:g}, which are all; "
            f"use --rs-lower-bound {1 / high:.3g}"
        )
    # Names of slime's mis.yaml for the same settings.
    pairs = {
        "--tis-upper-bound and --tis-clip": (algo.tis_upper_bound, algo.tis_clip),
        "--rs-veto-threshold and --tis-veto": (algo.rs_veto_threshold, algo.tis_veto),
    }
    if algo.tis_mode != "truncate":
        pairs["--tis-lower-bound and --tis-clip-low"] = (algo.tis_lower_bound, algo.tis_clip_low)
    for flags, (theirs, ours) in pairs.items():
        if theirs is not None and ours is not None and theirs != ours:
            yield f"{flags} are names of one setting, but are {theirs} and {ours}; remove one of them"


def _critic(config: Config) -> Iterator[str]:
    algo, name = config.algo, config.algo.advantage_estimator
    if not algo.compute_advantages_and_returns:
        yield (
            f"--disable-compute-advantages-and-returns with --advantage-estimator {name}: the critic learns to predict "
            "the returns; remove it, or use an estimator without a critic"
        )
    alpha, longest = algo.lambd_length_alpha, config.rollout.rollout_max_response_len
    is_one_answer = not (config.rollout.custom_generate_function_path or config.rollout.rollout_function_path)
    if alpha and longest and alpha * longest <= 1 and is_one_answer:
        yield (
            f"--lambd-length-alpha {alpha:g} with --rollout-max-response-len {longest}: lambda is 0 for responses of "
            f"up to {1 / alpha:.0f} tokens, so none would learn from its outcome; use --lambd-length-alpha 0 for "
            "--lambd, or a larger value"
        )
    try:
        critic_settings(config)
        for field, value in role_overrides(config, "actor").items():
            spec = flag_specs(Config)[field]
            if spec.value_in(config) != value:
                yield (
                    f"{ROLES_FLAG} {algo.megatron_config_path} gives the actor {field} {value}, but the command line "
                    f"has {spec.with_value(config)}; remove one of them"
                )
    except ConfigError as error:
        yield str(error)


def _distillation(config: Config) -> Iterator[str]:
    algo, opd = config.algo, config.opd
    yield from teacher_problems(config)
    loss = f"--opd-loss {opd.opd_loss}"
    if opd.has_teacher_model and opd.opd_teacher_load is None and not opd.opd_teacher_urls:
        yield f"--opd-type {opd.opd_type} without a teacher; add --opd-teacher-load FOLDER"
    if opd.has_teacher_model and opd.opd_teacher_urls and opd.opd_teacher_load is None:
        yield f"--opd-type {opd.opd_type} with --opd-teacher-urls: the teacher is in the trainer; remove one of them"
    if not opd.has_teacher_model and opd.opd_teacher_load is not None:
        yield (
            "--opd-type sglang with --opd-teacher-load: engines or servers run the teacher; use --opd-type trainer, or "
            "name servers with --opd-teacher-urls"
        )
    if not opd.has_teacher_model and opd.opd_loss == "full":
        yield (
            f"{loss} with --opd-type sglang: servers do not return the log-probs of the whole vocabulary; use "
            "--opd-loss topk, or --opd-type trainer"
        )
    if opd.opd_loss == "topk" and not opd.opd_log_prob_top_k:
        yield f"{loss} with --opd-log-prob-top-k 0; use a number of tokens, such as 32"
    if opd.opd_loss != "topk" and opd.opd_log_prob_top_k:
        yield f"{loss} with --opd-log-prob-top-k {opd.opd_log_prob_top_k}; remove it, or use --opd-loss topk"
    if algo.loss_type == "sft_loss" or (algo.loss_type == "custom_loss" and opd.opd_loss != "sampled"):
        yield (
            f"--use-opd with --loss-type {algo.loss_type}: {loss} is part of the policy loss; use --loss-type "
            "policy_loss"
        )
    if opd.opd_loss == "sampled" and not algo.compute_advantages_and_returns:
        yield (
            f"--disable-compute-advantages-and-returns with {loss}, which changes advantages; remove it, or use "
            "--opd-loss topk"
        )
    if not opd.opd_kl_coef and not opd.opd_task_reward_coef:
        yield "--opd-kl-coef 0 and --opd-task-reward-coef 0: nothing would be trained; use a value above 0"


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
    mixes = "a response may mix two weight versions, and the log-prob pass uses one"
    if ahead and config.sync.pause_mode != "finish":
        yield (
            f"--keep-old-actor with --pause-mode {config.sync.pause_mode}: {mixes}; use --pause-mode finish or "
            "remove it"
        )
    if rollout.partial_rollout and not rollout.mask_offpolicy_in_partial_rollout:
        yield (
            f"--keep-old-actor with --partial-rollout: {mixes}; add --mask-offpolicy-in-partial-rollout, or remove one "
            "of them"
        )


def parallel_problems(config: Config) -> Iterator[str]:
    """Parallel sizes that do not divide the number of training processes, and Megatron's rules of recomputation."""
    train, megatron, specs = config.train, config.megatron, flag_specs(Config)
    num_ranks = Topology.of(config).num_ranks
    tensor, pipeline = train.tensor_model_parallel_size, train.pipeline_model_parallel_size
    context, expert = train.context_parallel_size, train.expert_model_parallel_size
    sizes = {"context_parallel_size": context, "dp_replicate_size": train.dp_replicate_size}
    if train.train_backend == "megatron":  # with FSDP they are refused
        sizes |= {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
        sizes["expert_model_parallel_size"] = expert
    if any(size < 1 for size in sizes.values()):
        return  # reported as outside of the range
    odd = [name for name, size in sizes.items() if num_ranks % size or (size > 1 and not num_ranks)]
    for name in odd:
        yield (
            f"{specs[name].flag} {sizes[name]} does not divide the {num_ranks} training processes "
            "(--actor-num-nodes x --actor-num-gpus-per-node); use a divisor"
        )
    if train.train_backend != "megatron":
        return
    stage_ranks, own = num_ranks // pipeline, megatron.expert_tensor_parallel_size
    expert_tensor = own or (tensor if expert > 1 else 1)
    if not odd and num_ranks % (copy := tensor * pipeline * context):
        yield (
            f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline} x "
            f"--context-parallel-size {context} = {copy} does not divide the {num_ranks} training processes; give "
            "smaller sizes, or more of them"
        )
    elif not odd and stage_ranks % (expert * expert_tensor):
        source = "" if own else ", which follows --tensor-model-parallel-size"
        fitting = [n for n in range(1, expert) if not stage_ranks % (n * expert_tensor)]
        smaller = f"--expert-model-parallel-size {fitting[-1]}" if fitting else "smaller sizes"
        yield (
            f"--expert-model-parallel-size {expert} x --expert-tensor-parallel-size {expert_tensor}{source} = "
            f"{expert * expert_tensor} does not divide the {stage_ranks} training processes of a pipeline stage; use "
            + (smaller if own or expert_tensor == 1 else "--expert-tensor-parallel-size 1")
        )
    modules = megatron.recompute_modules or ()
    if train.recompute_activations:
        return  # excludes the others
    if megatron.recompute_granularity == "full" and None in (megatron.recompute_method, megatron.recompute_num_layers):
        yield (
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers; add them, or use "
            "--recompute-activations, which is full, uniform and 1"
        )
    elif megatron.recompute_granularity == "selective" and (set(modules) - set(RECOMPUTED) or not modules):
        unknown = ", ".join(sorted(set(modules) - set(RECOMPUTED)))
        state = f"has {unknown}" if modules else "is not given"
        yield (f"--recompute-granularity selective: --recompute-modules {state}; choose from {', '.join(RECOMPUTED)}")


def model_problems(config: Config) -> Iterator[str]:
    """Yield flags of experts without effect, and architecture flags that contradict config.json."""
    specs = [spec for spec in flag_specs(Config).values() if spec.section in ("architecture", "moe")]
    given = [spec for spec in specs if spec.is_set(config)]
    if not given:
        return
    try:
        hf = read_model_config(config)
    except ConfigError as error:
        yield f"--hf-checkpoint: {error}"
        return
    folder, moe = config.rollout.hf_checkpoint, config.moe
    routers = [spec for spec in given if spec.section == "moe"]
    if hf and RoutingShape.of(hf) is None:
        yield from (f"{spec.flag} has no effect: {folder} has no experts; remove it" for spec in routers)
    elif moe.moe_router_enable_expert_bias and hf.get("model_type") not in BIASED_FAMILIES:
        yield (
            f"--moe-router-enable-expert-bias: routers of {hf.get('model_type')} have no selection bias, so "
            "transformers and engines would ignore it; remove it, or use --moe-aux-loss-coeff"
        )
    text: Mapping[str, Any] = hf.get("text_config") or hf
    for spec in given:
        if spec.field not in COMPARED or (spec.field == "num_query_groups" and text.get("kv_lora_rank")):
            continue
        for key in COMPARED[spec.field]:
            outer, _, inner = key.rpartition(".")
            actual = ((text.get(outer) or {}) if outer else text).get(inner)
            if actual is not None and float(actual) != spec.value_in(config):
                yield (
                    f"{spec.with_value(config)} does not match the model: {folder}/config.json has {key} {actual}; "
                    f"remove {spec.flag}, as the model is built from config.json, or give another model with "
                    "--hf-checkpoint"
                )
            if actual is not None:
                break
