"""Validation of a configuration before anything is started. All problems are returned at once."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from furlong.catalogue import Problem
from furlong.config.checks.agent_checks import agent_problems
from furlong.config.checks.algorithm_checks import algorithm_problems
from furlong.config.checks.cluster_checks import cluster_problems
from furlong.config.checks.device_checks import device_problems
from furlong.config.checks.engine_checks import engine_problems
from furlong.config.checks.model_rules import model_problems
from furlong.config.checks.notices import strict_problems
from furlong.config.checks.pool_checks import pool_problems
from furlong.config.checks.value_checks import (
    BOXED,
    model_problem,
    prompt_file_problem,
    set_name_problem,
    url_problem,
    verifier_problem,
)
from furlong.config.flag_spec import Condition, FlagSpec, flag_specs
from furlong.config.resolve import COPIES, derive
from furlong.config.sections import Config
from furlong.config.topology import Topology
from furlong.core.text import did_you_mean

Problems = Iterator[str]
_SHELL = re.compile(r"~[\w-]*/|~$|\$\{?[A-Za-z_]")


def validate(config: Config, *, device_type: str | None = None) -> list[Problem]:
    """Return one message per problem: what is wrong, the values, the fix. [] if the run can start.

    `config` includes derived values. `device_type` ("cpu" or "cuda"), if known, enables checks that depend on it.
    """
    problems: list[str] = []
    for rule in _RULES:
        problems.extend(rule(config))
    if device_type is not None:
        problems.extend(device_problems(config, device_type))
    return [Problem(problem) for problem in problems]


def _allowed_numbers(config: Config) -> Problems:
    specs = flag_specs(Config)
    for spec in specs.values():
        value = spec.value_in(config)
        if spec.within is None or value is None or value == spec.default:  # a required flag's default is outside
            continue
        if spec.field in COPIES and value == specs[COPIES[spec.field]].value_in(config):
            continue
        for number in value if isinstance(value, tuple) else (value,):
            if number not in spec.within:
                yield f"{spec.flag} {number} is outside of {spec.within.text} ({_help(spec)}); {spec.within.fix}"
    if config.rollout.rollout_top_k == 0:
        yield "--rollout-top-k 0 leaves no token to sample from; use -1 for all tokens, or a positive number"
    if config.eval.eval_top_k == 0 and config.rollout.rollout_top_k != 0:
        yield "--eval-top-k 0 leaves no token to sample from; use -1 for all tokens, or a positive number"


def declared_problems(config: Config) -> Problems:
    """Yield what the declarations of flags (`needs`, `excludes`) do not allow."""
    specs = flag_specs(Config)
    for spec in (spec for spec in specs.values() if spec.is_set(config)):
        written = spec.with_value(config)
        unmet = (any_of for any_of in spec.needs if not any(c.is_met(specs[c.field].value_in(config)) for c in any_of))
        any_of = next(unmet, None)
        if any_of is not None and spec.field != "max_tokens_per_gpu" and not _is_derived(spec, config):
            yield _unmet(written, spec.flag, any_of[0], specs[any_of[0].field], config)
        for other in (specs[name] for name in spec.excludes):
            if other.is_set(config) and other.value_in(config) and spec.value_in(config):
                yield f"{written} and {other.with_value(config)} cannot be combined; remove one of them"


def _is_derived(spec: FlagSpec, config: Config) -> bool:
    """Whether a field has the value that it would have without its flag."""
    value, derived = spec.value_in(config), derive(config, frozenset())
    if spec.field in COPIES and value == flag_specs(Config)[COPIES[spec.field]].value_in(config):
        return True
    return spec.field in derived and derived[spec.field][0] == value


def _unmet(written: str, flag: str, condition: Condition, other: FlagSpec, config: Config) -> str:
    """The problem of a flag whose condition is not met."""
    if other.kind == "off_switch":
        return f"{written} has no effect with {other.flag}; remove one of them"
    needed = condition.text(other)
    if condition.operator in ("!=", "."):
        why = f", where `{condition.value}` is False" if condition.operator == "." else ""
        return f"{written} has no effect with {other.with_value(config)}{why}; remove {flag}"
    if not condition.operator or other.value_in(config) is None:
        return f"{written} has no effect without {needed}; add {needed}, or remove {flag}"
    actual = f"{other.flag} is {other.value_in(config)}"
    return f"{written} has no effect without {needed}, but {actual}; set {needed}, or remove {flag}"


def _unexpanded(config: Config) -> Problems:
    """Text that a shell should have expanded (`--save=~/runs`, and YAML), or expanded to nothing."""
    for spec in flag_specs(Config).values():
        value = spec.value_in(config)
        if spec.type is not str or spec.field in ("rollout_stop", "eval_stop") or value is None:
            continue
        for text in value if isinstance(value, tuple) else (value,):
            if not text.strip() and text != spec.default:
                yield f"{spec.flag} {text!r} is empty, perhaps from an unset shell variable; give a value or remove it"
            if _SHELL.match(text):
                shown, whole = ("", "key") if spec.is_secret else (f" {text}", "path")
                yield f"{spec.flag}{shown}: was not expanded by a shell; write the full {whole}"


def _required(config: Config) -> Problems:
    data, rollout, debug = config.data, config.rollout, config.debug
    if rollout.hf_checkpoint is None:
        yield Problem("--hf-checkpoint is missing: there is no model to start from; give a model directory", "CKPT07")
    elif problem := model_problem("--hf-checkpoint", rollout.hf_checkpoint):
        yield Problem(problem, "CKPT07")
    if not data.rollout_batch_size:
        yield "--rollout-batch-size is missing; give the number of prompts per rollout"
    if data.num_rollout is None and data.num_epoch is None:
        yield "--num-rollout and --num-epoch are missing: the length of the run is not set; give one of them"
    has_data = data.data_source_path is not None or not data.rollout_global_dataset or debug.load_debug_rollout_data
    if data.prompt_data is None and not has_data and data.num_rollout != 0:
        yield "--prompt-data is missing: there are no prompts; give a .jsonl or .parquet file, or a --data-source-path"
    if data.prompt_data is not None and (problem := prompt_file_problem("--prompt-data", data.prompt_data)):
        yield problem
    if data.num_rollout and data.start_rollout_id is not None and data.start_rollout_id >= data.num_rollout:
        yield (
            f"--start-rollout-id {data.start_rollout_id} leaves no rollouts: --num-rollout {data.num_rollout} "
            "counts from the first start of the run; raise --num-rollout"
        )
    if data.streaming_data and data.num_rollout is None and data.num_epoch is not None:
        yield (
            f"--num-epoch {data.num_epoch} with --streaming-data: the number of rows is unknown until they are read; "
            "use --num-rollout"
        )
    if not data.rollout_global_dataset and data.num_rollout is None:
        yield "--num-epoch has no meaning with --disable-rollout-global-dataset; use --num-rollout"


def _batches(config: Config) -> Problems:
    """CFG01: rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout."""
    data, train = config.data, config.train
    batch, n = data.rollout_batch_size, data.n_samples_per_prompt
    size, steps = train.global_batch_size, train.num_steps_per_rollout
    samples = batch * n
    if batch <= 0 or n <= 0 or (size is not None and size <= 0) or (steps is not None and steps <= 0):
        return
    if size is None or steps is None or samples != size * steps:
        left = f"--rollout-batch-size {batch} x --n-samples-per-prompt {n} = {samples}"
        right = f"--global-batch-size {_or_unset(size)} x --num-steps-per-rollout {_or_unset(steps)}"
        if size is not None and steps is not None:
            right += f" = {size * steps} samples"
        options = nearest_batch_settings(batch, n, size, steps)
        message = f"batch sizes do not match: {left} samples, but {right}; nearest valid settings: "
        yield Problem(message + "; ".join(options), "CFG01")
    elif not train.use_dynamic_batch_size and train.micro_batch_size > 0 and size % train.micro_batch_size:
        nearest = sorted(sorted(_divisors(size), key=lambda d: abs(d - train.micro_batch_size))[:3])
        yield Problem(
            f"--micro-batch-size {train.micro_batch_size} does not divide --global-batch-size {size}; "
            f"use {' or '.join(map(str, nearest))}, or --use-dynamic-batch-size",
            "CFG01",
        )
    over = config.rollout.over_sampling_batch_size
    if over is not None and over < batch:
        yield f"--over-sampling-batch-size {over} is below --rollout-batch-size {batch}; raise it to {batch} or more"


def nearest_batch_settings(batch: int, n: int, size: int | None, steps: int | None) -> list[str]:
    """Return three valid settings of the batch equation near the given one, as flags to paste."""
    samples = batch * n
    requested = size if size is not None else samples / (steps or 1)
    near = sorted(_divisors(samples), key=lambda d: (abs(d - requested), d))
    options = [f"--global-batch-size {d} --num-steps-per-rollout {samples // d}" for d in near[:2]]
    per_rollout = (size or near[0]) * (steps or max(1, round(samples / (size or near[0]))))
    if per_rollout % n == 0 and per_rollout != samples:
        kept = f"--global-batch-size {per_rollout // (steps or per_rollout // (size or near[0]))}"
        return [f"--rollout-batch-size {per_rollout // n} {kept}", *options]
    options.extend(f"--global-batch-size {d} --num-steps-per-rollout {samples // d}" for d in near[2:3])
    return options


def _divisors(number: int) -> set[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return {*small, *(number // d for d in small)}


def _micro_batches(config: Config) -> Problems:
    train, rollout = config.train, config.rollout
    safe = f", for example {rollout.rollout_max_response_len}" if rollout.rollout_max_response_len else ""
    if train.use_dynamic_batch_size and train.max_tokens_per_gpu is None:
        yield Problem(
            "--use-dynamic-batch-size without --max-tokens-per-gpu: the micro-batch size is not set; add "
            f"--max-tokens-per-gpu TOKENS{safe}",
            "CFG04",
        )
    if train.max_tokens_per_gpu is not None and not train.use_dynamic_batch_size:
        yield Problem(
            f"--max-tokens-per-gpu {train.max_tokens_per_gpu} has no effect without --use-dynamic-batch-size; add that "
            f"flag (a safe start is rollout_max_response_len / context_parallel_size{safe}), or remove it",
            "CFG04",
        )


def _optimizer(config: Config) -> Problems:
    optim = config.optim
    if optim.min_lr > optim.lr >= 0:
        yield f"--min-lr {optim.min_lr} is above --lr {optim.lr}; lower it"
    if optim.lr_warmup_iters and optim.lr_decay_iters is not None and optim.lr_warmup_iters > optim.lr_decay_iters:
        yield (
            f"--lr-warmup-iters {optim.lr_warmup_iters} exceeds --lr-decay-iters {optim.lr_decay_iters}; "
            "lower it or raise --lr-decay-iters"
        )
    if optim.lr_warmup_init > optim.lr >= 0:
        yield f"--lr-warmup-init {optim.lr_warmup_init} is above --lr {optim.lr}; lower it"


def _lengths(config: Config) -> Problems:
    names = ("max_prompt_len", "max_response_len", "max_context_len", "min_new_tokens")
    sides = {
        "rollout": [getattr(config.rollout, f"rollout_{name}") for name in names],
        "eval": [getattr(config.eval, f"eval_{name}") for name in names],
    }
    if sides["eval"] == sides["rollout"] or not config.eval.is_used:
        del sides["eval"]
    for side, (prompt, response, context, least) in sides.items():
        flags = f"--{side}-"
        if context is not None and response is not None and response >= context:
            yield (
                f"{flags}max-response-len {response} leaves no room for a prompt in {flags}max-context-len {context}; "
                "lower it or raise the context"
            )
        if context is not None and prompt is not None and prompt >= context:
            yield (
                f"{flags}max-prompt-len {prompt} leaves no room for a response in {flags}max-context-len {context}; "
                "lower it or raise the context"
            )
        if response is not None and least is not None and least > response:
            yield f"{flags}min-new-tokens {least} is above {flags}max-response-len {response}; lower it"


def _evaluation(config: Config) -> Problems:
    section = config.eval
    has_sets = section.eval_prompt_data or section.eval_config
    if has_sets and not section.is_used:
        if config.data.num_rollout == 0:
            yield "--num-rollout 0 only evaluates, but --eval-interval is missing; add --eval-interval 1"
        return  # a notice: nothing reads the sets
    sets = section.named_files()
    if len(sets) % 2:
        words = f"{len(sets)} word{'s' * (len(sets) != 1)}"
        yield (
            f"--eval-prompt-data {' '.join(sets)}: {words}, expected pairs NAME FILE; give every file a name (in YAML: "
            "[NAME, FILE])"
        )
    elif sets:
        names = sets[::2]
        if len(set(names)) != len(names):
            yield f"--eval-prompt-data has duplicate names: {', '.join(names)}; give each set a different name"
        problems = [set_name_problem("--eval-prompt-data", name) for name in names]
        problems += [prompt_file_problem("--eval-prompt-data", file) for file in sets[1::2]]
        yield from (problem for problem in problems if problem)
    if section.eval_config and not Path(section.eval_config).is_file():
        yield f"--eval-config {section.eval_config}: no such file; give a YAML or JSON file"
    n = section.n_samples_per_eval_prompt
    for k in section.eval_pass_k or ():
        if k > n:
            yield f"--eval-pass-k {k} needs {k} samples, but --n-samples-per-eval-prompt is {n}; raise it or lower k"
    if config.data.num_rollout == 0 and not has_sets:
        yield "--num-rollout 0 only evaluates, but there are no evaluation sets; add --eval-prompt-data NAME FILE"


def _stops(config: Config) -> Problems:
    if "" in (config.rollout.rollout_stop or ()):
        yield "--rollout-stop contains an empty string, which matches everywhere; give the string that ends a response"
    if any(number < 0 for number in config.rollout.rollout_stop_token_ids or ()):
        yield "--rollout-stop-token-ids contains a negative number; give ids of the tokenizer's vocabulary"


def _rewards(config: Config) -> Problems:
    reward, debug = config.reward, config.debug
    if reward.rm_type is not None and (problem := verifier_problem("--rm-type", reward.rm_type)):
        yield problem
    is_remote = (reward.rm_type or "").removeprefix(BOXED) == "remote_rm"
    if is_remote and not reward.rm_url:
        yield "--rm-type remote_rm has no server; add --rm-url"
    if reward.rm_url and (problem := url_problem("--rm-url", reward.rm_url)):
        yield problem
    evaluation = config.eval.is_used or config.eval.eval_function_path
    if config.algo.loss_type == "sft_loss" and not (evaluation or config.rollout.rollout_function_path):
        for flag, value in (("--rm-type", reward.rm_type), ("--custom-rm-path", reward.custom_rm_path)):
            if value is not None:
                yield (
                    f"{flag} {value} has no effect with --loss-type sft_loss, which computes no rewards, without "
                    "evaluation sets; remove it, or add --eval-prompt-data NAME FILE"
                )
    yield from agent_problems(config)
    is_custom = config.rollout.rollout_function_path or config.rollout.custom_generate_function_path
    replay = debug.load_debug_rollout_data
    scored = reward.rm_type or reward.custom_rm_path or is_custom or replay
    if not scored and config.algo.loss_type != "sft_loss" and config.data.prompt_data is not None:
        yield (
            "responses are not scored: --rm-type and --custom-rm-path are missing; give one of them, such as "
            "--rm-type math (metadata.rm_type of a row takes precedence)"
        )


def _checkpoints(config: Config) -> Problems:
    checkpoint = config.checkpoint
    if checkpoint.save is not None and checkpoint.save_interval is None:
        yield (
            f"--save {checkpoint.save} without --save-interval and --num-rollout: the interval is not set; "
            "add --save-interval ROLLOUTS"
        )
    # CKPT01 and CKPT02 check the contents; this checks that the directory exists.
    if checkpoint.load is not None and checkpoint.load != checkpoint.save and not Path(checkpoint.load).is_dir():
        what = "is a file" if Path(checkpoint.load).exists() else "no such directory"
        yield Problem(f"--load {checkpoint.load}: {what}; give a directory written by --save, or remove it", "CKPT01")
    reference = checkpoint.ref_load
    if reference not in (None, config.rollout.hf_checkpoint) and (problem := model_problem("--ref-load", reference)):
        yield Problem(problem, "CKPT01")


def _debugging(config: Config) -> Problems:
    debug = config.debug
    if debug.debug_rollout_only and debug.debug_train_only:
        why = " (--load-debug-rollout-data sets the second)" if debug.load_debug_rollout_data else ""
        yield f"--debug-rollout-only and --debug-train-only cannot be combined{why}; remove one of them"
    evaluates = config.eval.is_used
    if debug.save_debug_rollout_data and not debug.dump_details and not evaluates and _is_demonstrated(config):
        yield (
            f"--save-debug-rollout-data {debug.save_debug_rollout_data} has no effect with --loss-type sft_loss, which "
            "does not generate; use --save-debug-train-data or remove it"
        )
    for flag in ("save_debug_rollout_data", "load_debug_rollout_data", "save_debug_train_data"):
        yield from _template(flag, getattr(debug, flag), "file for all rollouts")
    yield from _template("save_hf", config.checkpoint.save_hf, "folder for all checkpoints")
    num_ranks, template = Topology.of(config).num_ranks, debug.save_debug_train_data
    if num_ranks > 1 and template is not None and "{rank}" not in template:
        yield f"--save-debug-train-data {template} names one file for {num_ranks} processes; add {{rank}} to the name"
    yield from _shared_dumps(config, num_ranks)


_ROLLOUTS = (0, 1, 2, 10, 11, 12)  # numbers that show whether names of dumps can be equal


def _shared_dumps(config: Config, num_ranks: int) -> Problems:
    """Check that no training batch is written to a file of samples, nor one rank's to another's."""
    debug = config.debug
    if (batches := debug.save_debug_train_data) is None:
        return
    samples = {
        os.path.abspath(template.replace("{rollout_id}", name)): f"{flag} {template}"
        for flag, template in (
            ("--save-debug-rollout-data", debug.save_debug_rollout_data),
            ("--load-debug-rollout-data", debug.load_debug_rollout_data),
        )
        if template is not None
        for number in _ROLLOUTS
        for name in (str(number), f"eval_{number}")
    }
    written = set[str]()
    for number in _ROLLOUTS:
        for rank in range(min(num_ranks, 13)) if "{rank}" in batches else (0,):
            path = os.path.abspath(batches.replace("{rollout_id}", str(number)).replace("{rank}", str(rank)))
            if (other := samples.get(path)) is not None:
                yield (
                    f"--save-debug-train-data {batches} and {other} name the same file, such as {path}; use another "
                    "name for one of them"
                )
                return
            if path in written and "{rollout_id}" in batches:
                yield (
                    f"--save-debug-train-data {batches} names the same file, {path}, for two ranks of different "
                    "rollouts; put a separator between {rollout_id} and {rank}"
                )
                return
            written.add(path)


def _is_demonstrated(config: Config) -> bool:
    """Whether the run trains on demonstrations from --prompt-data."""
    return config.algo.loss_type == "sft_loss" and config.rollout.rollout_function_path is None


def _template(field: str, template: str | None, what: str) -> Problems:
    """Check a path template: it contains {rollout_id} and no unknown braces."""
    if template is None:
        return
    written = f"--{field.replace('_', '-')} {template}"
    if "{rollout_id}" not in template:
        yield f"{written} names one {what}; add {{rollout_id}} to the name"
    rest = template.replace("{rollout_id}", "").replace("{rank}", "" if field == "save_debug_train_data" else "{rank}")
    if "{rollout_id}" in template and set(rest) & {"{", "}"}:
        known = "{rollout_id} and {rank}" if field == "save_debug_train_data" else "{rollout_id}"
        yield f"{written} has braces other than {known}; remove them"


def _help(spec: FlagSpec) -> str:
    """Return the first clause of the help of a flag."""
    first = spec.help.split(". ")[0].split(";")[0].rstrip(".")
    return first if first[1:2].isupper() else first[:1].lower() + first[1:]  # keep acronyms


def _or_unset(value: int | None) -> str:
    return "(not set)" if value is None else str(value)


def _profiling(config: Config) -> Problems:
    debug = config.debug
    known = ("train_overall", "train_actor", "train_log_probs")
    for target in debug.profile_target:
        if target not in known:
            hint = did_you_mean(target, known)[1] or f"use one of {', '.join(known)}"
            yield f"--profile-target {target} is not a part of training; {hint}"
    if "train_overall" in debug.profile_target and len(debug.profile_target) > 1:
        yield (
            f"--profile-target {' '.join(debug.profile_target)}: train_overall includes the others, and profiles do "
            "not nest; give it alone, or remove it"
        )
    if debug.profile_step_end <= debug.profile_step_start:
        yield (
            f"--profile-step-start {debug.profile_step_start} is not before --profile-step-end "
            f"{debug.profile_step_end}: no rollout would be profiled; raise --profile-step-end"
        )


_RULES: tuple[Callable[[Config], Problems], ...] = (
    _unexpanded,
    _required,
    _allowed_numbers,
    declared_problems,
    _batches,
    _micro_batches,
    _optimizer,
    _lengths,
    algorithm_problems,
    pool_problems,
    engine_problems,
    cluster_problems,
    model_problems,
    _rewards,
    _stops,
    _evaluation,
    _checkpoints,
    _profiling,
    _debugging,
    strict_problems,
)
