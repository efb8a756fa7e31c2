"""DATA rows: the files of prompts, read as the run would read them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import quantiles

from furlong.core.catalogue import Diagnosis, diagnosis
from furlong.data.prompt import RejectedRow
from furlong.diagnosis.preflight.context import PreflightContext, SampledRows

ROW_OF_KIND = {"syntax": "DATA01", "form": "DATA01", "empty": "DATA02", "messages": "TPL01"}
CAUSES = {
    "syntax": "The file is no JSON Lines in UTF-8: one object a line.",
    "messages": "Prompts are messages, which only a template turns into text.",
}
MANY = 0.5  # of the rows looked at: from this share on, rows left out are worth a warning
SHOWN = 3


def files(context: PreflightContext) -> Iterator[Diagnosis]:
    """DATA01: a file that cannot be opened or read."""
    for file in context.files:
        if file.problem:
            finding, _, remedy = file.problem.rpartition("; ")
            yield diagnosis(
                "DATA01",
                f"{file.name} {file.path}: {finding or file.problem}",
                cause="The file is not there, is damaged, or has another format.",
                remedy=remedy if finding else "give a .jsonl or .parquet file",
            )


def rows(context: PreflightContext) -> Iterator[Diagnosis]:
    """DATA01, DATA02, TPL01: rows that cannot be used, by what is wrong with them."""
    for file in context.files:
        if file.rows is None:
            continue
        if not file.rows.num_rows:
            yield diagnosis(
                "DATA02",
                f"{file.name} {file.path} has no rows",
                cause="The file is empty, or the slice takes none of it.",
                remedy="give a file with rows, or another slice",
            )
        for kind, row in ROW_OF_KIND.items():
            bad = [refused for refused in file.rows.refused if refused.kind == kind]
            if bad:
                yield _bad_rows(file.name, row, bad, file.rows, skips=context.config.fault.skip_bad_rows)


def prompts_again(context: PreflightContext) -> Iterator[Diagnosis]:
    """CFG01, as worth knowing: a rollout has more prompts than the file, so that it takes some of them again."""
    found, config = context.rows, context.config
    if found is None or not found.is_whole or found.refused or config.data.num_epoch is not None or not found.prompts:
        return
    wanted, num_prompts = config.data.rollout_batch_size, len(found.prompts)
    if wanted > num_prompts:
        yield diagnosis(
            "CFG01",
            f"--rollout-batch-size {wanted} is more than the {num_prompts} prompts of {found.name}: a rollout takes "
            "some of them again",
            cause="",
            remedy=f"more prompts, or --rollout-batch-size {num_prompts} with more --n-samples-per-prompt",
            severity="info",
            evidence={"rollout_batch_size": wanted, "num_prompts": num_prompts},
        )


def _bad_rows(flag: str, row: str, bad: Sequence[RejectedRow], found: SampledRows, *, skips: bool) -> Diagnosis:
    first = bad[0]
    reason, _, remedy = first.reason.rpartition("; ")
    if not reason:
        reason, remedy = first.reason, "correct such rows"
    if reason.startswith("no key ") and len(bad) < MANY * found.num_rows:
        remedy = "correct such rows"  # another key would be one that most rows lack
    if row != "TPL01" and not skips and len(bad) < found.num_rows:
        remedy += ", or --skip-bad-rows to leave them out"
    severity = None
    if skips and row != "TPL01":
        severity = "warning" if len(bad) >= MANY * found.num_rows else "info"
    return diagnosis(
        row,
        f"{flag}: {len(bad)} of {found.num_rows} rows looked at cannot be used; the first, {first.where}: {reason}",
        cause=CAUSES.get(first.kind),
        remedy=remedy,
        severity=severity,
        evidence={
            "num_bad": len(bad),
            "num_rows": found.num_rows,
            "first": [{"where": refused.where, "reason": refused.reason} for refused in bad[:SHOWN]],
        },
    )


def lengths(context: PreflightContext) -> Iterator[Diagnosis]:
    """DATA04: token counts of the prompts against --rollout-max-prompt-len and the context."""
    found = context.rows
    if found is None or not found.num_rows:
        return
    kept = [len(prompt.tokens) for prompt in found.prompts if prompt.tokens]
    long = [refused.num_tokens for refused in found.refused if refused.num_tokens is not None]
    limit, context_len = context.config.rollout.rollout_max_prompt_len, context.context_len
    if not kept and not long:
        return
    shape = _shape([*kept, *long])
    if long:
        share = len(long) / (len(kept) + len(long))
        severity = None if not kept else "warning" if share >= MANY else "info"
        wanted = max(long)
        fits = context_len is None or wanted < context_len
        yield diagnosis(
            "DATA04",
            f"--rollout-max-prompt-len {limit} leaves out {len(long)} of {len(kept) + len(long)} prompts looked at; "
            f"tokens: {shape}",
            cause="The limit is below what the data needs.",
            remedy=f"--rollout-max-prompt-len {wanted} keeps all of these"
            if fits
            else f"the longest has {wanted} tokens, the context {context_len}: shorten the prompts",
            severity=severity,
            evidence={"num_long": len(long), "num_prompts": len(kept) + len(long), "limit": limit, "longest": wanted},
        )
    if context_len is not None and (over := [length for length in kept if length >= context_len]):
        yield diagnosis(
            "DATA04",
            f"{len(over)} of {len(kept)} prompts looked at leave no room for a response in the context of "
            f"{context_len} tokens; tokens: {shape}",
            remedy=f"--rollout-max-prompt-len {max(1, context_len // 2)} leaves such prompts out"
            + (
                "; --rollout-max-context-len raises the context"
                if context.config.rollout.rollout_max_context_len
                else ""
            ),
            severity="warning" if context.config.rollout.custom_generate_function_path else None,
            evidence={
                "num_long": len(over),
                "num_prompts": len(kept),
                "context_len": context_len,
                "longest": max(over),
            },
        )


def _shape(lengths: list[int]) -> str:
    """A distribution in four numbers."""
    if len(lengths) < 2:
        return str(lengths[0])
    tenths = quantiles(lengths, n=10, method="inclusive")
    return f"median {math.ceil(tenths[4])}, 90 % below {math.ceil(tenths[8])}, longest {max(lengths)}"
