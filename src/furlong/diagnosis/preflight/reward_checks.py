"""REW01: the reward, called with a right and a wrong answer before anything is generated."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from furlong.config.checks.value_checks import BOXED
from furlong.config.engine_groups import served_models
from furlong.core.catalogue import Diagnosis, diagnosis
from furlong.core.outcome import Outcome
from furlong.core.sample import Sample
from furlong.diagnosis.preflight.context import PreflightContext
from furlong.errors import RewardError
from furlong.rewards.group_reward import GroupReward
from furlong.rewards.verifiers import REWARDS
from furlong.tools.reward_test import answered, right_answer, unnamed_entry

WRONG = "furlong-wrong-answer-4417"
TIMEOUT_S = 10.0
TRIED_LABELS = 8
# Formats in which a verifier may look for the answer in a response.
FORMS = ("{}", "\\boxed{{{}}}", "</think>\\boxed{{{}}}", "Answer: {}", "Answer: \\boxed{{{}}}")


def own_reward(context: PreflightContext) -> Iterator[Diagnosis]:
    """REW01: --custom-rm-path fails or times out on a row's label or on a wrong answer."""
    config, rows = context.config, context.rows
    path = config.reward.custom_rm_path
    has_generate = config.rollout.custom_generate_function_path is not None  # may set what the reward reads
    if len(served_models(config)) > 1:  # the reward may call one that has not started
        return
    if path is None or context.hooks[0].custom_rm is None or rows is None or not context.generates or has_generate:
        return
    if any(problem.startswith("--custom-rm-path:") for problem in context.hooks[1]):  # it cannot be called
        return
    prompts = rows.prompts[:1]
    if not prompts:
        return
    timeout_s = min(TIMEOUT_S, config.fault.reward_timeout)
    reward = GroupReward(
        custom_rm=path, group_rm=config.reward.group_rm, timeout_s=timeout_s, num_workers=1, args=context.args
    )
    answers = [str(prompts[0].label), WRONG]
    samples = [answered(prompts[0], answer, context.tokenizer, index=index) for index, answer in enumerate(answers)]
    try:
        outcomes = asyncio.run(_scored(reward, samples))
    except RewardError:  # cannot be called: reported by flags.user_functions
        if context.hooks[1]:
            return
        raise
    failed = [i for i, outcome in enumerate(outcomes) if outcome.kind != "scored"]
    if not failed:
        yield from unnamed_entry(f"--custom-rm-path {path}", [o.reward for o in outcomes], config.reward.reward_key)
        return
    first, row = outcomes[failed[0]], prompts[0].row
    is_slow = first.kind == "timed_out"
    response = ("its label", "a wrong answer")[failed[0]]
    remedy = "fix it; `furlong reward test` with the same flags calls it on more rows"
    if is_slow and timeout_s < config.fault.reward_timeout:
        limit = f"--reward-timeout {config.fault.reward_timeout:g}"
        remedy = f"ignore this if it is that slow: this check waits {timeout_s:g} s, the run {limit}"
    elif is_slow:
        remedy = "raise --reward-timeout if it needs that long"
    yield diagnosis(
        "REW01",
        f"--custom-rm-path {path} failed in {len(failed)} of 2 calls; row {row} with {response} as the response: "
        f"{first.reason}",
        cause="The function waits for something that does not answer." if is_slow else None,
        remedy=remedy,
        severity="warning" if is_slow or len(failed) < len(samples) else None,
        evidence={"function": path, "row": row, "outcomes": [outcome.kind for outcome in outcomes]},
    )


def verifier_and_labels(context: PreflightContext) -> Iterator[Diagnosis]:
    """REW01: a verifier that scores none of the first rows' labels as a right answer."""
    config, rows = context.config, context.rows
    name = config.reward.rm_type
    verifier = REWARDS.get((name or "").removeprefix(BOXED))
    if rows is None or verifier is None or verifier.kind != "response" or not context.generates:
        return
    labelled = [p for p in rows.prompts if p.label is not None and "rm_type" not in p.metadata][:TRIED_LABELS]
    if not labelled:
        return
    reward = GroupReward(rm_type=name, timeout_s=TIMEOUT_S, num_workers=1, args=context.args)
    # Format by format: most labels match in the first one, which needs no algebra and so no worker process.
    tries = [[answered(p, form.format(right_answer(p.label)), context.tokenizer) for p in labelled] for form in FORMS]
    if asyncio.run(_accepts_any(reward, tries)):
        return
    first = labelled[0]
    yield diagnosis(
        "REW01",
        f"--rm-type {name} accepts none of the first {len(labelled)} labels as the answer to its row (row {first.row}: "
        f"{first.label!r})",
        cause="--label-key is not the column with the answer, or the verifier expects labels in another format.",
        remedy="check --label-key and --rm-type with `furlong reward test` and the same flags",
        severity="warning",
        evidence={"rm_type": name, "labels": [str(p.label) for p in labelled]},
    )


async def _scored(reward: GroupReward, samples: Sequence[Sample]) -> list[Outcome]:
    try:
        return await reward(samples)
    finally:
        await reward.close()


async def _accepts_any(reward: GroupReward, tries: Sequence[Sequence[Sample]]) -> bool:
    """Whether the reward scores a sample above 0; stops at the first."""
    try:
        for samples in tries:
            if any(outcome.kind == "scored" and _number(outcome) > 0 for outcome in await reward(samples)):
                return True
        return False
    finally:
        await reward.close()


def _number(outcome: Outcome) -> float:
    """Return the score of an outcome, or its entry `score` if it is an object."""
    value = outcome.reward
    return float(value.get("score", 0)) if isinstance(value, dict) else float(value or 0)
