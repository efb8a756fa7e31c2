"""Validation of a configuration before anything is started. All problems are returned at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from furlong.catalogue import Problem
from furlong.config.checks.engine_checks import device_problems, engine_problems
from furlong.config.checks.training_checks import algorithm_problems, batch_problems, model_problems, parallel_problems
from furlong.config.checks.value_checks import (
    BOXED,
    RM_TYPES,
    model_problem,
    prompt_file_problem,
    set_name_problem,
    url_problem,
    verifier_problem,
)
from furlong.config.environment_specs import environment_problems
from furlong.config.facts import default_staleness, further_models, is_unscored, model_folder
from furlong.config.flag_spec import Condition, FlagSpec, flag_specs
from furlong.config.hooks import BUILT_IN
from furlong.config.resolve import COPIES, Derived, derive
from furlong.config.sections import Config
from furlong.config.topology import Topology
from furlong.core.process_environment import SESSIONS_KEY_VARIABLE
from furlong.core.text import did_you_mean

Problems = Iterator[str]
PROFILED = ("train_overall", "train_actor", "train_log_probs")
_ROWS = {"max_tokens_per_gpu": "CFG04"}  # rows of the catalogue for what declarations do not allow


def validate(config: Config, *, device_type: str | None = None) -> list[Problem]:
    """Return one message per problem: what is wrong, the values, the fix. [] if the run can start.

    `config` includes derived values. `device_type` ("cpu" or "cuda"), if known, enables checks that depend on it.
    """
    problems: list[str] = []
    for rule in _RULES:
        problems.extend(rule(config))
    if device_type is not None:
        problems.extend(device_problems(config, device_type))
    if config.debug.strict_flags:
        problems.extend(f"{notice}; remove the flag, or --strict-flags" for notice in notices(config))
    return [Problem(problem) for problem in problems]


def declared_problems(config: Config) -> Problems:
    """Yield what the declarations of flags (`within`, `needs`, `excludes`, `bound`) do not allow."""
    specs, derived = flag_specs(Config), derive(config, frozenset())
    for spec in specs.values():
        value = spec.value_in(config)
        is_derived = _is_derived(spec, config, derived)
        if spec.is_set(config) and value is not None:
            yield from _unreadable_value(spec, config)
        if spec.bound is not None and value is not None and (config.eval.is_used or spec.section != "eval"):
            yield from _out_of_bound(spec, config)
        if not spec.is_set(config):
            continue
        written = spec.with_value(config)
        unmet = (any_of for any_of in spec.needs if not any(c.is_met(specs[c.field].value_in(config)) for c in any_of))
        if not is_derived and (any_of := next(unmet, None)) is not None:
            problem = _unmet(written, spec.flag, any_of[0], specs[any_of[0].field], config)
            yield Problem(problem, _ROWS.get(spec.field, ""))
        for other in (specs[name] for name in spec.excludes):
            both = other.is_set(config) and other.value_in(config) and value
            if both and not _is_derived(other, config, derived):
                yield f"{written} and {other.with_value(config)} cannot be combined; remove one of them"


def _unreadable_value(spec: FlagSpec, config: Config) -> Problems:
    """Yield numbers outside of the interval, and empty text, as a shell makes of an unset variable."""
    value = spec.value_in(config)
    if spec.field in COPIES and value == flag_specs(Config)[COPIES[spec.field]].value_in(config):
        return  # reported for the other flag
    for each in value if isinstance(value, tuple) else (value,):
        if spec.within is not None and each not in spec.within:
            first = spec.help.split(". ")[0].split(";")[0].rstrip(".")
            meaning = first if first[1:2].isupper() else first[:1].lower() + first[1:]  # keep acronyms
            yield f"{spec.flag} {each} is outside of {spec.within.text} ({meaning}); {spec.within.fix}"
        if isinstance(each, str) and not each.strip() and spec.field not in ("rollout_stop", "eval_stop"):
            yield f"{spec.flag} {each!r} is empty, perhaps from an unset shell variable; give a value or remove it"


def _out_of_bound(spec: FlagSpec, config: Config) -> Problems:
    assert spec.bound is not None
    operator, other = spec.bound[0], flag_specs(Config)[spec.bound[1]]
    value, limit = spec.value_in(config), other.value_in(config)
    if limit is None or (other.within is not None and limit not in other.within):
        return
    if spec.section == "eval" and (value, limit) == tuple(
        flag_specs(Config)[COPIES[each.field]].value_in(config) for each in (spec, other)
    ):
        return  # reported for the rollout's flags
    is_met = {"<=": value <= limit, "<": value < limit, ">=": value >= limit}[operator]
    if not is_met and (spec.is_set(config) or other.is_set(config)):
        relation = {"<=": "is above", "<": "is not below", ">=": "is below"}[operator]
        fix = f"raise it, or lower {other.flag}" if operator == ">=" else f"lower it, or raise {other.flag}"
        yield f"{spec.flag} {value} {relation} {other.flag} {limit}; {fix}"


def _is_derived(spec: FlagSpec, config: Config, derived: Derived) -> bool:
    value = spec.value_in(config)
    if spec.field in COPIES and value == flag_specs(Config)[COPIES[spec.field]].value_in(config):
        return True
    return spec.field in derived and derived[spec.field][0] == value


def _unmet(written: str, flag: str, condition: Condition, other: FlagSpec, config: Config) -> str:
    if other.kind == "off_switch":
        return f"{written} has no effect with {other.flag}; remove one of them"
    needed = condition.text(other)
    if condition.value == "has_critic":
        named = other.with_value(config)
        return f"{written} has no effect with {named}, which trains no critic; use {other.flag} ppo, or remove {flag}"
    if condition.operator in ("!=", ".") and other.value_in(config) is not None:
        return f"{written} has no effect with {other.with_value(config)}; remove {flag}"
    if not condition.operator or other.value_in(config) is None:
        return f"{written} has no effect without {needed}; add {needed}, or remove {flag}"
    actual = f"{other.flag} is {other.value_in(config)}"
    return f"{written} has no effect without {needed}, but {actual}; set {needed}, or remove {flag}"


def _required(config: Config) -> Problems:
    data, rollout, checkpoint = config.data, config.rollout, config.checkpoint
    if rollout.hf_checkpoint is None:
        yield Problem("--hf-checkpoint is missing: there is no model to start from; give a model directory", "CKPT07")
    elif problem := model_problem("--hf-checkpoint", rollout.hf_checkpoint):
        yield Problem(problem, "CKPT07")
    if not data.rollout_batch_size:
        yield "--rollout-batch-size is missing, or 0; give the number of prompts per rollout"
    if data.num_rollout is None and data.num_epoch is None:
        yield "--num-rollout and --num-epoch are missing: the length of the run is not set; give one of them"
    has_data = data.data_source_path or not data.rollout_global_dataset or config.debug.load_debug_rollout_data
    if data.prompt_data is None and not has_data and data.num_rollout != 0:
        yield "--prompt-data is missing: there are no prompts; give a .jsonl or .parquet file, or a --data-source-path"
    if data.prompt_data is not None and (problem := prompt_file_problem("--prompt-data", data.prompt_data)):
        yield problem
    if data.num_rollout is None and data.num_epoch is not None and data.streaming_data:
        yield (
            f"--num-epoch {data.num_epoch} with --streaming-data: the number of rows is unknown until they are read; "
            "use --num-rollout"
        )
    if not data.rollout_global_dataset and data.num_rollout is None:
        yield "--num-epoch has no meaning with --disable-rollout-global-dataset; use --num-rollout"
    if checkpoint.save is not None and checkpoint.save_interval is None:
        yield (
            f"--save {checkpoint.save} without --save-interval and --num-rollout: the interval is not set; "
            "add --save-interval ROLLOUTS"
        )
    # CKPT01 and CKPT02 check the contents; this checks that the directory exists.
    if checkpoint.load is not None and checkpoint.load != checkpoint.save and not Path(checkpoint.load).is_dir():
        what = "is a file" if Path(checkpoint.load).exists() else "no such directory"
        yield Problem(f"--load {checkpoint.load}: {what}; give a directory written by --save, or remove it", "CKPT01")
    kept = model_folder(config, Path(str(config.track.output_dir)))
    output_dir = flag_specs(Config)["output_dir"]  # a default one that has a run gets a number
    is_chosen = config.track.output_dir and not _is_derived(output_dir, config, derive(config, frozenset()))
    has_own = checkpoint.save_hf is not None or is_chosen
    inputs = {"--hf-checkpoint": str(rollout.hf_checkpoint)}
    inputs |= {model.flag: model.load for model in further_models(config) if model.load != rollout.hf_checkpoint}
    for flag, load in inputs.items():
        if has_own and kept is not None and kept.resolve() == Path(load).resolve():
            yield (
                f"{flag} {load} is the folder that the trained model replaces at the end; choose another --output-dir, "
                "or a folder for the trained model with --save-hf"
            )
    for model in further_models(config):
        if model.load != rollout.hf_checkpoint and (problem := model_problem(model.flag, model.load)):
            yield Problem(problem, "CKPT01")


def _rollouts(config: Config) -> Problems:
    rollout, reward = config.rollout, config.reward
    for side, top_k in (("rollout", rollout.rollout_top_k), ("eval", config.eval.eval_top_k)):
        if top_k == 0 and (side == "rollout" or rollout.rollout_top_k != 0):
            yield f"--{side}-top-k 0 leaves no token to sample from; use -1 for all tokens, or a positive number"
    if "" in (rollout.rollout_stop or ()):
        yield "--rollout-stop contains an empty string, which matches everywhere; give the string that ends a response"
    if reward.rm_type is not None and (problem := verifier_problem("--rm-type", reward.rm_type)):
        yield problem
    if reward.custom_rm_path in RM_TYPES:
        yield f"--custom-rm-path {reward.custom_rm_path} is a verifier; use --rm-type {reward.custom_rm_path}"
    if (reward.rm_type or "").removeprefix(BOXED) == "remote_rm" and not reward.rm_url:
        yield "--rm-type remote_rm has no server; add --rm-url"
    if reward.rm_url and (problem := url_problem("--rm-url", reward.rm_url)):
        yield problem
    is_sft = config.algo.loss_type == "sft_loss"
    if is_sft and not (config.eval.is_used or config.eval.eval_function_path or rollout.rollout_function_path):
        for flag, value in (("--rm-type", reward.rm_type), ("--custom-rm-path", reward.custom_rm_path)):
            if value is not None:
                yield (
                    f"{flag} {value} has no effect with --loss-type sft_loss, which computes no rewards, without "
                    "evaluation sets; remove it, or add --eval-prompt-data NAME FILE"
                )
    is_custom = rollout.rollout_function_path or rollout.custom_generate_function_path
    scored = reward.rm_type or reward.custom_rm_path or is_custom or config.debug.load_debug_rollout_data
    scored = scored or config.opd.use_opd
    if not scored and not is_sft and config.data.prompt_data is not None:
        yield (
            "responses are not scored: --rm-type and --custom-rm-path are missing; give one of them, such as "
            "--rm-type math (metadata.rm_type of a row takes precedence)"
        )
    session = config.session
    if session.online_sessions and not os.environ.get(SESSIONS_KEY_VARIABLE):
        yield (
            "--online-sessions: whatever reaches the session server, such as a command of the policy, could take "
            f"sessions and set rewards; set {SESSIONS_KEY_VARIABLE} to a secret that applications send"
        )
    if session.environment or session.agent_function_path:
        yield from environment_problems(config)
    longest, limit = config.fault.generate_timeout, rollout.episode_timeout
    if longest is not None and limit is not None and longest <= limit:
        yield (
            f"--generate-timeout {longest:g} ends episodes before --episode-timeout {limit:g}, and fails them, "
            "which would train on what was sampled; remove it, or raise it above"
        )
    bound, least = rollout.max_token_staleness, default_staleness(config)
    if bound is None:
        return
    if not rollout.async_buffer_size and not rollout.partial_rollout and bound >= least:
        yield (
            f"--max-token-staleness {bound} has no effect: without rollouts in flight ahead of training, tokens are at "
            f"most {least} rollouts old; raise --async-buffer-size, or remove it"
        )
    elif rollout.stale_tokens == "pace" and rollout.partial_rollout:
        yield (
            f"--max-token-staleness {bound} with --partial-rollout: a response that is continued later may be older; "
            "add --stale-tokens mask or drop"
        )
    elif rollout.stale_tokens == "pace" and bound < least:
        yield (
            f"--max-token-staleness {bound} is less than --async-buffer-size {rollout.async_buffer_size or 0} + "
            f"--update-weights-interval {config.sync.update_weights_interval} - 1 = {least}: waiting cannot keep it; "
            f"raise it to {least}, lower one of them, or use --stale-tokens mask or drop"
        )


def _evaluation(config: Config) -> Problems:
    section = config.eval
    n = section.n_samples_per_eval_prompt
    for k in section.eval_pass_k or ():
        if k > n:
            yield f"--eval-pass-k {k} needs {k} samples, but --n-samples-per-eval-prompt is {n}; raise it or lower k"
    if config.data.num_rollout == 0 and not section.is_used:
        yield "--num-rollout 0 only evaluates, but there are no evaluation sets; add --eval-prompt-data NAME FILE"
    sets = section.named_files()
    if len(sets) % 2:
        yield (
            f"--eval-prompt-data {' '.join(sets)}: {len(sets)} words, expected pairs NAME FILE; give every file a name "
            "(in YAML: [NAME, FILE])"
        )
    elif sets:
        names = sets[::2]
        if len(set(names)) != len(names):
            yield f"--eval-prompt-data has duplicate names: {', '.join(names)}; give each set a different name"
        flag = "--eval-prompt-data"
        problems = [
            prompt_file_problem(flag, file) or set_name_problem(flag, name)
            for name, file in zip(names, sets[1::2], strict=True)
        ]
        yield from (problem for problem in problems if problem)
    if section.eval_config and not Path(section.eval_config).is_file():
        yield f"--eval-config {section.eval_config}: no such file; give a YAML or JSON file"


def _debugging(config: Config) -> Problems:
    debug, num_ranks = config.debug, Topology.of(config).num_ranks
    is_demonstrated = config.algo.loss_type == "sft_loss" and config.rollout.rollout_function_path is None
    if debug.save_debug_rollout_data and not debug.dump_details and not config.eval.is_used and is_demonstrated:
        yield (
            f"--save-debug-rollout-data {debug.save_debug_rollout_data} has no effect with --loss-type sft_loss, which "
            "does not generate; use --save-debug-train-data or remove it"
        )
    if "{rollout_id}" in (debug.dump_details or ""):
        yield (
            f"--dump-details {debug.dump_details} is a folder that gets a file for each rollout; remove {{rollout_id}}"
        )
    templates = {name: getattr(debug, f"{name}_data") for name in ("save_debug_rollout", "load_debug_rollout")}
    templates |= {"save_debug_train": debug.save_debug_train_data, "save_hf": config.checkpoint.save_hf}
    for name, template in templates.items():
        if template is None:
            continue
        written = f"--{name.replace('_', '-')}{'' if name == 'save_hf' else '-data'} {template}"
        if "{rollout_id}" not in template and name != "save_hf":
            yield f"{written} names one file for all rollouts; add {{rollout_id}} to the name"
        known = ("{rollout_id}", "{rank}") if name == "save_debug_train" else ("{rollout_id}",)
        rest = template
        for word in known:
            rest = rest.replace(word, "")
        if ("{rollout_id}" in template or name == "save_hf") and set(rest) & {"{", "}"}:
            yield f"{written} has braces other than {' and '.join(known)}; remove them"
    batches = debug.save_debug_train_data
    if num_ranks > 1 and batches is not None and "{rank}" not in batches:
        yield f"--save-debug-train-data {batches} names one file for {num_ranks} processes; add {{rank}} to the name"
    for name in ("save_debug_rollout", "load_debug_rollout"):
        if batches and templates[name] and os.path.abspath(batches) == os.path.abspath(templates[name]):
            yield (
                f"--save-debug-train-data {batches} and --{name.replace('_', '-')}-data {templates[name]} name the "
                "same file; use another name for one of them"
            )
    for target in debug.profile_target:
        if target not in PROFILED:
            hint = did_you_mean(target, PROFILED)[1] or f"use one of {', '.join(PROFILED)}"
            yield f"--profile-target {target} is not a part of training; {hint}"
    if "train_overall" in debug.profile_target and len(debug.profile_target) > 1:
        yield (
            f"--profile-target {' '.join(debug.profile_target)}: train_overall includes the others, and profiles do "
            "not nest; give it alone, or remove it"
        )


_RULES: tuple[Callable[[Config], Problems], ...] = (
    _required,
    declared_problems,
    batch_problems,
    algorithm_problems,
    engine_problems,
    parallel_problems,
    model_problems,
    _rollouts,
    _evaluation,
    _debugging,
)


def notices(config: Config) -> Problems:
    """Yield a line for each flag of slime's scripts that is accepted although something else happens.

    With --strict-flags each is an error, except for flags that describe the model.
    """
    specs = flag_specs(Config).values()
    for spec in specs:
        if spec.instead and spec.is_set(config):
            yield f"{spec.with_value(config)} has no effect: {spec.instead}"
    train, data = config.train, config.data
    if data.num_epoch is not None and data.num_rollout is not None:
        yield f"--num-epoch {data.num_epoch} has no effect: --num-rollout {data.num_rollout} sets the length of the run"
    if config.moe.moe_token_dispatcher_type == "flex":
        yield "--moe-token-dispatcher-type flex: tokens are sent as with alltoall"
    if train.sequence_parallel and train.tensor_model_parallel_size == 1:
        yield "--sequence-parallel has no effect: with --tensor-model-parallel-size 1 there is nothing to split"
    if config.megatron.attention_backend == "flash" and train.context_parallel_size > 1:
        yield (
            f"--attention-backend flash with --context-parallel-size {train.context_parallel_size}: context-parallel "
            "attention uses PyTorch's kernels, as with auto"
        )
    if (function := config.algo.custom_tis_function_path) in BUILT_IN:
        yield f"--custom-tis-function-path {function} is not called: --use-tis, --use-rs and their settings do the same"
    reference = config.checkpoint.ref_load
    if reference not in (None, config.rollout.hf_checkpoint) and not config.algo.uses_reference:
        yield (
            f"--ref-load {reference} without a KL term: training starts from its weights if --load has none, as in "
            "slime, and there is no reference model"
        )
    if is_unscored(config) and config.reward.rm_type is not None:
        yield (
            f"--rm-type {config.reward.rm_type} with --use-opd and without --label-key: there is nothing to compare "
            "answers with, so rewards are 0 and the policy learns from the teacher alone"
        )
    described = [spec.flag for spec in specs if spec.section == "architecture" and spec.is_set(config)]
    if described and not config.debug.strict_flags:
        more = f" and {len(described) - 2} other flags" if len(described) > 2 else ""
        yield f"{', '.join(described[:2])}{more} describe the model, which is built from config.json"
