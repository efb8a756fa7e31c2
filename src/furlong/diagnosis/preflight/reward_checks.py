"""REW01: the reward is called before anything is generated, with the right answer and with a wrong one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from furlong.config.engine_groups import served_models
from furlong.config.verifiers import BOXED
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
# How a right answer may be written for a verifier that reads it out of the response.
FORMS = ("{}", "\\boxed{{{}}}", "</think>\\boxed{{{}}}", "Answer: {}", "Answer: \\boxed{{{}}}")


def own_reward(context: PreflightContext) -> Iterator[Diagnosis]:
    """REW01: --custom-rm-path scores a row's label and a wrong answer without failing, within the time limit."""
    config, rows = context.config, context.rows
    path = config.reward.custom_rm_path
    has_generate = config.rollout.custom_generate_function_path is not None  # may leave what the reward reads
    if len(served_models(config)) > 1:  # it may ask one that is not there yet
        return
    if path is None or context.hooks[0].custom_rm is None or rows is None or not context.generates or has_generate:
        return
    if any(problem.startswith("--custom-rm-path:") for problem in context.hooks[1]):  # it cannot be called so
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
    except RewardError:  # cannot be called: said by flags.user_functions
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
    remedy = "correct it; `furlong reward test` with the same flags tries it on more rows"
    if is_slow and timeout_s < config.fault.reward_timeout:
        limit = f"--reward-timeout {config.fault.reward_timeout:g}"
        remedy = f"nothing is to be done if it is so slow: the check waits {timeout_s:g} s, a run {limit}"
    elif is_slow:
        remedy = "a longer --reward-timeout, if it may take so long"
    yield diagnosis(
        "REW01",
        f"--custom-rm-path {path} failed in {len(failed)} of 2 calls; for row {row} with {response} as the response: "
        f"{first.reason}",
        cause="It waits for something that does not answer." if is_slow else None,
        remedy=remedy,
        severity="warning" if is_slow or len(failed) < len(samples) else None,
        evidence={"function": path, "row": row, "outcomes": [outcome.kind for outcome in outcomes]},
    )


def verifier_and_labels(context: PreflightContext) -> Iterator[Diagnosis]:
    """REW01: a label, written as an answer, has to score better than a wrong one for some of the first rows."""
    config, rows = context.config, context.rows
    name = config.reward.rm_type
    verifier = REWARDS.get((name or "").removeprefix(BOXED))
    if rows is None or verifier is None or verifier.kind != "response" or not context.generates:
        return
    labelled = [p for p in rows.prompts if p.label is not None and "rm_type" not in p.metadata][:TRIED_LABELS]
    if not labelled:
        return
    reward = GroupReward(rm_type=name, timeout_s=TIMEOUT_S, num_workers=1, args=context.args)
    # Form by form: most labels are right in the first one, which needs no algebra and so no process of its own.
    tries = [[answered(p, form.format(right_answer(p.label)), context.tokenizer) for p in labelled] for form in FORMS]
    if asyncio.run(_takes_one(reward, tries)):
        return
    first = labelled[0]
    yield diagnosis(
        "REW01",
        f"--rm-type {name} takes none of the first {len(labelled)} labels for a right answer to its own row; the "
        f"first, row {first.row}: {first.label!r}",
        cause="--label-key names another column than the answer, or the labels are written otherwise than it reads.",
        remedy="check --label-key and --rm-type, with `furlong reward test` and the same flags",
        severity="warning",
        evidence={"rm_type": name, "labels": [str(p.label) for p in labelled]},
    )


async def _scored(reward: GroupReward, samples: Sequence[Sample]) -> list[Outcome]:
    try:
        return await reward(samples)
    finally:
        await reward.close()


async def _takes_one(reward: GroupReward, tries: Sequence[Sequence[Sample]]) -> bool:
    """Whether the reward gives one of the samples more than 0; it is asked no further once it does."""
    try:
        for samples in tries:
            if any(outcome.kind == "scored" and _number(outcome) > 0 for outcome in await reward(samples)):
                return True
        return False
    finally:
        await reward.close()


def _number(outcome: Outcome) -> float:
    """The score of an outcome; of an object the entry `score`."""
    value = outcome.reward
    return float(value.get("score", 0)) if isinstance(value, dict) else float(value or 0)
