"""CFG rows: flags, evaluation sets, and custom functions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from furlong.catalogue import Diagnosis, Problem, diagnosis
from furlong.config.checks.validate import notices
from furlong.config.evaluation import used_eval_specs
from furlong.diagnosis.preflight.context import PreflightContext
from furlong.errors import ConfigError
from furlong.models.tokenizer import read_template
from furlong.training.megatron.parallel_layout import Layout, layout_flag_problems, model_problems, uneven_notice

LARGE_EPSILON = 1e-2  # of Adam: gradients of one parameter are 1e-8 to 1e-3


def flag_problems(context: PreflightContext) -> Iterator[Diagnosis]:
    """CFG01 to CFG05, and rows of folders: every problem found while flags were parsed and validated."""
    data, train = context.config.data, context.config.train
    batch = {
        "rollout_batch_size": data.rollout_batch_size,
        "n_samples_per_prompt": data.n_samples_per_prompt,
        "global_batch_size": train.global_batch_size,
        "num_steps_per_rollout": train.num_steps_per_rollout,
        "micro_batch_size": train.micro_batch_size,
    }
    for problem in context.problems:
        yield from_problem(problem, batch if problem.row == "CFG01" else {})


def accepted_flags(context: PreflightContext) -> Iterator[Diagnosis]:
    """CFG02: flags of slime that are accepted although something else happens."""
    if context.config.debug.strict_flags:
        return  # reported as problems of the flags
    uneven = uneven_stages(context)
    for notice in (*notices(context.config), *([uneven] if uneven else ())):
        remedy = "no action needed; --strict-flags makes it an error"
        yield diagnosis("CFG02", notice, cause="", remedy=remedy, severity="info")


def uneven_stages(context: PreflightContext) -> str | None:
    """Return the notice of pipeline stages that differ although no flag asks for it; None if there is none."""
    train, megatron = context.config.train, context.config.megatron
    if train.train_backend != "megatron" or context.model is None:
        return None
    return uneven_notice(train, megatron, context.model.text_config.get("num_hidden_layers"))


def from_problem(problem: str, evidence: dict[str, Any] | None = None, row: str = "") -> Diagnosis:
    """Convert a message whose remedy follows its last semicolon; in CFG01, which lists remedies, the first."""
    known = Problem(problem, row)
    finding, _, remedy = known.partition("; ") if known.row == "CFG01" else known.rpartition("; ")
    if not finding:
        finding, remedy = remedy, "correct it, or remove it"
    return diagnosis(known.row, finding, cause="", remedy=remedy, evidence=evidence)


def evaluation_sets(context: PreflightContext) -> Iterator[Diagnosis]:
    """CFG05: an unreadable --eval-config."""
    path = context.config.eval.eval_config
    if path is None or not Path(path).is_file():
        return  # reported with the flags
    try:
        used_eval_specs(context.config)
    except ConfigError as error:
        yield from (from_problem(problem) for problem in error.problems if problem not in context.problems)


def backend(context: PreflightContext) -> Iterator[Diagnosis]:
    """CFG05: a model that --train-backend megatron does not support, or cannot shard as the flags ask."""
    train, megatron = context.config.train, context.config.megatron
    if train.train_backend == "megatron" and context.model is not None:
        model = context.model.text_config
        layout = Layout.of(train, megatron, model.get("num_hidden_layers"))
        problems = *layout_flag_problems(train, megatron, model), *model_problems(model, layout)
        yield from (from_problem(problem) for problem in problems)
        if context.config.debug.strict_flags and (uneven := uneven_stages(context)):
            yield from_problem(f"{uneven}; add that flag, or remove --strict-flags")


def chat_template(context: PreflightContext) -> Iterator[Diagnosis]:
    """CFG05: a --chat-template-path that cannot be read."""
    try:
        if (path := context.config.data.chat_template_path) is not None:
            read_template(path)
    except ConfigError as error:
        yield diagnosis("CFG05", str(error), cause="", remedy="use a Jinja file, or a name of `furlong template list`")


def kl_without_pull(context: PreflightContext) -> Iterator[Diagnosis]:
    """CFG02: a KL term in the loss that does not constrain the policy."""
    algo = context.config.algo
    if algo.use_kl_loss and not algo.kl_loss_coef and context.sources.get("kl_loss_coef") == "default":
        yield diagnosis(
            "CFG02",
            "--use-kl-loss without --kl-loss-coef: the KL term is only reported, as its weight is 0",
            cause="",
            remedy="add --kl-loss-coef 0.001, or 0 to only report the KL",
            severity="warning",
        )
    is_in_loss = algo.loss_type == "policy_loss" and algo.use_kl_loss and algo.kl_loss_coef != 0
    if is_in_loss and algo.kl_loss_type == "k1" and not algo.use_unbiased_kl:
        yield diagnosis(
            "CFG02",
            f"--kl-loss-coef {algo.kl_loss_coef} with --kl-loss-type k1: the gradient of that term is 0 on average "
            "over the policy's own samples, so it adds noise and does not keep the policy near the reference",
            cause="k1 estimates the value of the KL; its derivative is that of the log-prob alone.",
            remedy="use --kl-loss-type k2 (the KL's gradient) or k3 (GRPO's), or add --use-unbiased-kl",
            severity="warning",
            evidence={"kl_loss_coef": algo.kl_loss_coef, "kl_loss_type": algo.kl_loss_type},
        )


def large_epsilon(context: PreflightContext) -> Iterator[Diagnosis]:
    """CFG05: an --adam-eps that makes Adam's steps vanish, as such or for clipped gradients."""
    flags = context.config.optim
    if flags.optimizer == "adam" and flags.adam_eps > LARGE_EPSILON * min(flags.clip_grad or 1.0, 1.0):
        yield diagnosis(
            "CFG05",
            f"--adam-eps {flags.adam_eps:g} is far above gradients, whose norm is at most --clip-grad "
            f"{flags.clip_grad:g}, so steps are much smaller than --lr",
            cause="Adam divides by the gradients' root mean square plus this value.",
            remedy="use --adam-eps 1e-8 and --clip-grad 1, and --lr to change the size of steps",
            severity="warning",
        )


def user_functions(context: PreflightContext) -> Iterator[Diagnosis]:
    """HOOK01, and REW01 for rewards: import every custom function and check its signature."""
    _, problems = context.hooks
    for problem in problems:
        yield from_problem(problem, row="REW01" if problem.startswith("--custom-rm-path") else "HOOK01")


CHECKS = (
    flag_problems,
    accepted_flags,
    backend,
    evaluation_sets,
    chat_template,
    kl_without_pull,
    large_epsilon,
    user_functions,
)
