"""DATA and REW01 rows: prompt files, read as the run would read them, and the reward, called with their labels."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import quantiles
from typing import Any

from furlong.catalogue import Diagnosis, diagnosis
from furlong.config.checks.value_checks import BOXED
from furlong.config.engine_groups import served_models
from furlong.config.facts import is_unscored
from furlong.core.chat_template import demonstration_problem
from furlong.core.outcome import Outcome
from furlong.core.sample import Sample
from furlong.core.user_functions import load_function, reward_style
from furlong.data.prompt import Prompt, PromptFormat, RejectedRow
from furlong.diagnosis.preflight.context import PreflightContext, SampledRows
from furlong.errors import RewardError
from furlong.rewards.group_reward import GroupReward
from furlong.rewards.verifiers import REWARDS
from furlong.tools.reward_test import answered, right_answer, unnamed_entry
from furlong.tools.template_test import generation_ends

ROW_OF_KIND = {"syntax": "DATA01", "form": "DATA01", "empty": "DATA02", "messages": "TPL01", "template": "TPL01"}
CAUSES = {
    "form": "",  # the reason says it
    "syntax": "The file is not JSON Lines in UTF-8 (one object per line).",
    "messages": "The prompts are messages, which need a chat template.",
    "template": "The template has rules for roles and their order, or needs fields that the messages lack.",
}
MANY = 0.5  # share of the rows read from which on skipped rows are a warning
SHOWN = 3
WRONG = "furlong-wrong-answer-4417"
TIMEOUT_S = 10.0  # of a reward call
TRIED_LABELS = 8
# Formats in which a verifier may look for the answer in a response.
FORMS = ("{}", "\\boxed{{{}}}", "</think>\\boxed{{{}}}", "Answer: {}", "Answer: \\boxed{{{}}}")


def files(context: PreflightContext) -> Iterator[Diagnosis]:
    """DATA01: a file cannot be opened or read."""
    for file in context.files:
        if file.problem:
            finding, _, remedy = file.problem.rpartition("; ")
            yield diagnosis(
                "DATA01",
                f"{file.name} {file.path}: {finding or file.problem}",
                cause="The file is missing, damaged, or in another format.",
                remedy=remedy if finding else "use a .jsonl or .parquet file",
            )


def rows(context: PreflightContext) -> Iterator[Diagnosis]:
    """DATA01, DATA02, TPL01: rows that cannot be used, by their problem."""
    for file in context.files:
        if file.rows is None:
            continue
        if not file.rows.num_rows:
            yield diagnosis(
                "DATA02",
                f"{file.name} {file.path} has no rows",
                cause="The file or its slice is empty.",
                remedy="use a file with rows, or another slice",
            )
        refused_rows = [*file.rows.refused, *_not_demonstrations(context, file.name, file.rows)]
        for kind, row in ROW_OF_KIND.items():
            bad = [refused for refused in refused_rows if refused.kind == kind]
            if bad:
                yield _bad_rows(file.name, row, bad, file.rows, skips=context.config.fault.skip_bad_rows)


def _not_demonstrations(context: PreflightContext, name: str, rows: SampledRows) -> Iterator[RejectedRow]:
    config = context.config
    if name != "--prompt-data" or config.algo.loss_type != "sft_loss" or config.rollout.rollout_function_path:
        return
    for prompt in rows.prompts:
        if problem := demonstration_problem(prompt.text, prompt.label):
            yield RejectedRow(prompt.row, f"row {prompt.row} (from 0)", problem)


def _bad_rows(flag: str, row: str, bad: Sequence[RejectedRow], rows: SampledRows, *, skips: bool) -> Diagnosis:
    first = bad[0]
    reason, _, remedy = first.reason.rpartition("; ")
    if not reason:
        reason, remedy = first.reason, "correct these rows"
    if reason.startswith("no key ") and len(bad) < MANY * rows.num_rows:
        remedy = "correct these rows"  # most rows have the key
    if first.kind != "messages" and not skips and len(bad) < rows.num_rows:
        remedy += ", or skip them with --skip-bad-rows"
    severity = None
    if skips and first.kind != "messages":
        severity = "warning" if len(bad) >= MANY * rows.num_rows else "info"
    return diagnosis(
        row,
        f"{flag}: {len(bad)} of the {rows.num_rows} rows read cannot be used; first: {first.where}: {reason}",
        cause=CAUSES.get(first.kind),
        remedy=remedy,
        severity=severity,
        evidence={
            "num_bad": len(bad),
            "num_rows": rows.num_rows,
            "first": [{"where": refused.where, "reason": refused.reason} for refused in bad[:SHOWN]],
        },
    )


def lengths(context: PreflightContext) -> Iterator[Diagnosis]:
    """DATA04: token counts of the prompts against the limits of prompts and of the context."""
    rows = context.rows
    if rows is None or not rows.num_rows:
        return
    kept = [len(prompt.tokens) for prompt in rows.prompts if prompt.tokens]
    long = [refused.num_tokens for refused in rows.refused if refused.num_tokens is not None]
    prompt_format, context_len = PromptFormat.of(context.config), context.context_len
    limit, flag = prompt_format.max_prompt_len, prompt_format.limit_flag
    if not kept and not long:
        return
    every = [*kept, *long]
    tenths = quantiles(every, n=10, method="inclusive") if len(every) > 1 else every * 9
    distribution = f"median {math.ceil(tenths[4])}, 90 % below {math.ceil(tenths[8])}, longest {max(every)}"
    if long:
        share = len(long) / (len(kept) + len(long))
        severity = None if not kept else "warning" if share >= MANY else "info"
        longest = max(long)
        fits = context_len is None or longest < context_len
        shown = limit if flag == "--rollout-max-prompt-len" else context.config.rollout.rollout_max_context_len
        yield diagnosis(
            "DATA04",
            f"{flag} {shown} drops {len(long)} of the {len(kept) + len(long)} prompts read; tokens: {distribution}",
            cause="The limit is smaller than the data needs.",
            remedy=f"use --rollout-max-prompt-len {longest} to keep all of these"
            if fits
            else f"shorten the prompts: the longest has {longest} tokens, the context {context_len}"
            + ("" if shown == limit else f"; or raise {flag} if the model supports it"),
            severity=severity,
            evidence={"num_long": len(long), "num_prompts": len(kept) + len(long), "limit": limit, "longest": longest},
        )
    flags = context.config.rollout
    own_len, response_len = flags.rollout_max_context_len, flags.rollout_max_response_len or 0
    if context_len is None or (own_len is not None and own_len <= response_len):
        return  # no prompt fits: reported with the flags
    if over := [length for length in kept if length >= context_len]:
        yield diagnosis(
            "DATA04",
            f"{len(over)} of the {len(kept)} prompts read leave no room for a response in the context of "
            f"{context_len} tokens; tokens: {distribution}",
            remedy=f"drop such prompts with --rollout-max-prompt-len {max(1, context_len // 2)}"
            if len(over) < len(kept)
            else "use shorter prompts" + (", or raise --rollout-max-context-len" if own_len else ""),
            severity="warning" if context.config.rollout.custom_generate_function_path else None,
            evidence={
                "num_long": len(over),
                "num_prompts": len(kept),
                "context_len": context_len,
                "longest": max(over),
            },
        )
    elif kept and max(kept) + response_len > context_len and own_len is None and context.generates:
        if context.serves_another_length:
            return
        room = context_len - math.ceil(tenths[4])
        yield diagnosis(
            "DATA04",
            f"prompt + --rollout-max-response-len {response_len} exceeds the model's context of {context_len} tokens; "
            f"responses are cut off where it is full, after about {room} tokens",
            cause="",
            remedy=f"use --rollout-max-response-len {context_len - max(kept)} or less (the longest prompt has "
            f"{max(kept)} tokens), or a model with a longer context",
            severity="warning" if response_len >= context_len else "info",
            evidence={"max_response_len": response_len, "context_len": context_len, "longest": max(kept)},
        )


def own_reward(context: PreflightContext) -> Iterator[Diagnosis]:
    """REW01: --custom-rm-path fails or times out on a row's label or on a wrong answer."""
    config, rows = context.config, context.rows
    path = config.reward.custom_rm_path
    has_generate = config.rollout.custom_generate_function_path is not None  # may set what the reward reads
    if len(served_models(config)) > 1:  # the reward may call one that has not started
        return
    if path is None or context.hooks[0].custom_rm is None or rows is None or not context.generates or has_generate:
        return
    if any(problem.startswith("--custom-rm-path") for problem in (*context.hooks[1], *context.problems)):
        return
    prompts = rows.prompts[:1]
    if not prompts:
        return
    if config.data.label_key is None and _reads_label(path):
        yield diagnosis(
            "REW01",
            f"--custom-rm-path {path} has the parameter `label`, which is None for every row",
            cause="--label-key is not set.",
            remedy="name the column of the answers with --label-key, or remove the parameter",
            severity="warning",
        )
    timeout_s = min(TIMEOUT_S, config.fault.reward_timeout)
    reward = GroupReward(
        custom_rm=path,
        group_rm=config.reward.group_rm,
        timeout_s=timeout_s,
        num_workers=1,
        memory_limit_bytes=config.reward.memory_limit_bytes,
        args=context.args,
    )
    label, ends = str(prompts[0].label), _ends_of_response(context)
    answers = [label, WRONG, *(label + end for end in ends)]
    samples = [answered(prompts[0], answer, context.tokenizer, index=index) for index, answer in enumerate(answers)]
    try:
        outcomes = asyncio.run(_scored(reward, samples))
    except RewardError:  # cannot be called: reported by flags.user_functions
        if context.hooks[1]:
            return
        raise
    failed = [i for i, outcome in enumerate(outcomes) if outcome.kind != "scored"]
    if not failed:
        rewards = [outcome.reward for outcome in outcomes]
        if config.reward.custom_reward_post_process_path is not None and config.reward.reward_key is None:
            return  # that function reads the objects
        yield from unnamed_entry(f"--custom-rm-path {path}", rewards, config.reward.reward_key)
        if isinstance(prompts[0].label, int | float) and rewards[0] == rewards[1]:
            as_text = [replace(sample, label=label) for sample in samples[:2]]
            right, wrong = asyncio.run(_scored(reward, as_text))
            if right.kind == wrong.kind == "scored" and right.reward != wrong.reward:
                yield _numeric_label(path, prompts[0].label, right.reward)
        yield from _misses_ends(context, rewards, ends)
        return
    first, row = outcomes[failed[0]], prompts[0].row
    is_slow = first.kind == "timed_out"
    response = ("its label", "a wrong answer", *(f"its label and {end!r}" for end in ends))[failed[0]]
    remedy = "fix it; `furlong reward test` with the same flags calls it on more rows"
    if is_slow and timeout_s < config.fault.reward_timeout:
        limit = f"--reward-timeout {config.fault.reward_timeout:g}"
        remedy = f"ignore this if it is that slow: this check waits {timeout_s:g} s, the run {limit}"
    elif is_slow:
        remedy = "raise --reward-timeout if it needs that long"
    yield diagnosis(
        "REW01",
        f"--custom-rm-path {path} failed in {len(failed)} of {len(samples)} calls; row {row} with {response} as the "
        f"response: {first.reason}",
        cause="The function waits for something that does not answer." if is_slow else "",
        remedy=remedy,
        severity="warning" if is_slow or len(failed) < len(samples) else None,
        evidence={"function": path, "row": row, "outcomes": [outcome.kind for outcome in outcomes]},
    )


def _reads_label(path: str) -> bool:
    function: Any = load_function(path)
    several: list[Any] = [*getattr(function, "functions", {"": function}).values()]
    found = [
        inspect.signature(each).parameters.get("label") for each in several if reward_style(each) in ("named", "trl")
    ]
    return any(each is not None and each.default is inspect.Parameter.empty for each in found)


def _numeric_label(path: str, label: float, reward: object) -> Diagnosis:
    kind = type(label).__name__
    return diagnosis(
        "REW01",
        f"--custom-rm-path {path} gives a right answer what a wrong one gets: the label is {label!r} of type {kind}, "
        f"and responses are text; with the label {str(label)!r} it gives {reward}",
        cause="The function compares text with a number.",
        remedy="compare with str(label) in the function, or write labels as text",
        severity="warning",
        evidence={"function": path, "label": label, "type": kind},
    )


def _ends_of_response(context: PreflightContext) -> list[str]:
    """Return the texts of the tokens that end a response, which reward functions get with it."""
    config = context.config
    is_cut = config.rollout.rollout_skip_special_tokens or config.reward.group_rm
    if is_cut or context.model_dir is None:
        return []
    return [context.tokenizer.decode([end]) for end in generation_ends(context.model_dir, context.tokenizer)]


def _misses_ends(context: PreflightContext, rewards: Sequence[Any], ends: Sequence[str]) -> Iterator[Diagnosis]:
    """REW01: a label is right as a response, but only without the end that responses have."""
    key, path = context.config.reward.reward_key, context.config.reward.custom_rm_path
    right, wrong, *ended = [reward.get(key) if isinstance(reward, dict) else reward for reward in rewards]
    if not ended or right is None or wrong is None or not right > wrong or any(value != wrong for value in ended):
        return
    yield diagnosis(
        "REW01",
        f"--custom-rm-path {path} gives {right:g} to a label as the response, but {wrong:g}, as to a wrong answer, if "
        f"it ends in {' or '.join(map(repr, ends))}, as responses of this model do",
        cause="The function compares the response with its end-of-turn token.",
        remedy=f"use --rollout-skip-special-tokens, or response.removesuffix({ends[0]!r}) in the function",
        severity="warning",
        evidence={"right": right, "wrong": wrong, "ends": list(ends)},
    )


def verifier_and_labels(context: PreflightContext) -> Iterator[Diagnosis]:
    """REW01: a verifier that scores none of the first rows' labels as a right answer, or returns an object."""
    config, rows = context.config, context.rows
    name = config.reward.rm_type
    verifier = REWARDS.get((name or "").removeprefix(BOXED))
    if rows is None or verifier is None or verifier.kind != "response" or not context.generates:
        return
    if is_unscored(config):
        return
    scored = [p for p in rows.prompts if "rm_type" not in p.metadata]
    labelled = [p for p in scored if p.label is not None][:TRIED_LABELS]
    limit = config.reward.memory_limit_bytes
    reward = GroupReward(rm_type=name, timeout_s=TIMEOUT_S, num_workers=1, memory_limit_bytes=limit, args=context.args)
    if not labelled:
        if scored and config.rollout.custom_generate_function_path is None:  # which may set labels
            yield from _without_labels(context, reward, scored[0])
        return
    # Format by format: most labels match in the first one, which needs no algebra and so no worker process.
    tries = [[answered(p, form.format(right_answer(p.label)), context.tokenizer) for p in labelled] for form in FORMS]
    outcomes, is_accepted = asyncio.run(_until_accepted(reward, tries))
    if config.reward.custom_reward_post_process_path is None or config.reward.reward_key is not None:
        rewards = [outcome.reward for outcome in outcomes if outcome.kind == "scored"]
        yield from unnamed_entry(f"--rm-type {name}", rewards, config.reward.reward_key)
    if is_accepted:
        return
    first, raised = labelled[0], all(outcome.kind == "failed" for outcome in outcomes)
    yield diagnosis(
        "REW01",
        f"--rm-type {name} accepts none of the first {len(labelled)} labels as the answer to its row (row {first.row}: "
        f"{first.label!r})" + (f": {outcomes[0].reason.partition('; ')[0]}" if raised else ""),
        cause="--label-key is not the column with the answer, or the verifier expects labels in another format.",
        remedy="check --label-key and --rm-type with `furlong reward test` and the same flags",
        severity=None if raised else "warning",
        evidence={"rm_type": name, "labels": [str(p.label) for p in labelled]},
    )


def _without_labels(context: PreflightContext, reward: GroupReward, prompt: Prompt) -> Iterator[Diagnosis]:
    [outcome] = asyncio.run(_scored(reward, [answered(prompt, WRONG, context.tokenizer)]))
    if outcome.kind == "scored":
        return
    key = context.config.data.label_key
    yield diagnosis(
        "REW01",
        f"--rm-type {context.config.reward.rm_type} fails on row {prompt.row}: {outcome.reason.partition('; ')[0]}",
        cause="--label-key is not set." if key is None else f"The first rows have no {key!r} (--label-key).",
        remedy="name the column of the answers with --label-key, or use --custom-rm-path for answers without a label",
        evidence={"rm_type": context.config.reward.rm_type, "row": prompt.row, "label_key": key},
    )


async def _scored(reward: GroupReward, samples: Sequence[Sample]) -> list[Outcome]:
    try:
        return await reward(samples)
    finally:
        await reward.close()


async def _until_accepted(reward: GroupReward, tries: Sequence[Sequence[Sample]]) -> tuple[list[Outcome], bool]:
    outcomes: list[Outcome] = []
    try:
        for samples in tries:
            outcomes += await reward(samples)
            if any(outcome.kind == "scored" and _number(outcome) > 0 for outcome in outcomes):
                return outcomes, True
        return outcomes, False
    finally:
        await reward.close()


def _number(outcome: Outcome) -> float:
    value = outcome.reward
    return float(value.get("score", 0)) if isinstance(value, dict) else float(value or 0)


CHECKS = (files, rows, lengths, own_reward, verifier_and_labels)
