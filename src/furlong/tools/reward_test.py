"""Tests a reward on rows of the data: with the label as the answer, and with a wrong answer (REW01)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from furlong.catalogue import Diagnosis, diagnosis
from furlong.core.outcome import Outcome
from furlong.core.sample import Sample, Status
from furlong.data.prompt import Prompt
from furlong.rewards.group_reward import GroupReward

FIX = (
    "fix the function or the row; raise --reward-timeout if it is only slow, or --reward-memory-limit if it needs more "
    "memory"
)
# Response formats of verifiers that look for the answer in a certain place; others get the label itself.
ANSWER_FORMS = {
    "math": "\\boxed{{{}}}",
    "boxed": "\\boxed{{{}}}",
    "deepscaler": "</think>\n\\boxed{{{}}}",
    "dapo": "Answer: {}",
    "gpqa": "Answer: {}",
}
NO_ANSWER = "no answer"
SHOWN = 60


@dataclass(frozen=True)
class RewardCall:
    """One reward call. `kind` describes the response: the label, a wrong answer, or the user's text."""

    row: int
    kind: str
    response: str
    label: Any
    outcome: str
    value: Any
    type: str
    reason: str
    seconds: float

    def text(self) -> str:
        """Describe the call in one line, with the traceback of a failed call below."""
        shown = repr(self.response if len(self.response) <= SHOWN else f"{self.response[: SHOWN - 3]}...")
        result = f"{self.value!r} ({self.type})" if self.outcome == "scored" else self.outcome
        line = f"row {self.row}, label {self.label!r}, {self.kind} {shown}: {result}, {self.seconds * 1000:.1f} ms"
        return f"{line}\n  {self.reason}" if self.reason else line

    def record(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


async def call_reward(
    reward: GroupReward, prompts: Sequence[Prompt], *, rm_type: str | None, response: str | None, tokenizer: Any = None
) -> list[RewardCall]:
    """Call the reward on each prompt: with `response`, or else with its label and another row's label."""
    calls: list[RewardCall] = []
    await reward.start()
    try:
        for prompt in prompts:
            for kind, text in _responses(prompt, prompts, rm_type=rm_type, response=response):
                sample = answered(prompt, text, tokenizer)
                started = time.perf_counter()
                (outcome,) = await reward([sample])
                calls.append(_call(prompt, kind, text, outcome, time.perf_counter() - started))
    finally:
        await reward.close()
    return calls


def reward_findings(calls: Sequence[RewardCall], *, name: str, reward_key: str | None) -> list[Diagnosis]:
    """REW01: failed calls, object rewards without --reward-key, and right answers that score no better."""
    diagnoses: list[Diagnosis] = []
    if failed := [call for call in calls if call.outcome != "scored"]:
        first = failed[0]
        diagnoses.append(
            diagnosis(
                "REW01",
                f"{name}: {len(failed)} of {len(calls)} calls gave no reward; row {first.row} with {first.kind}: "
                f"{first.reason}",
                remedy=FIX,
                evidence={"num_failed": len(failed), "num_calls": len(calls)},
            )
        )
    scored = [call for call in calls if call.outcome == "scored"]
    if unnamed := list(unnamed_entry(name, [call.value for call in scored], reward_key)):
        return [*diagnoses, *unnamed]
    right = {call.row: _number(call, reward_key) for call in scored if call.kind == "the label"}
    wrong = {call.row: _number(call, reward_key) for call in scored if call.kind == "a wrong answer"}
    both = right.keys() & wrong.keys()
    if both and all(right[row] <= wrong[row] for row in both):
        row = min(both)
        diagnoses.append(
            diagnosis(
                "REW01",
                f"{name}: the label scores no better than a wrong answer in {len(both)} of {len(both)} rows; "
                f"row {row}: {right[row]} and {wrong[row]}",
                cause="--label-key is not the column with the answer, or the reward expects another response format."
                if isinstance(scored[0].label, str)
                else f"The labels are of type {type(scored[0].label).__name__}, and responses are text, or the reward "
                "expects another response format.",
                remedy="check --label-key, and try a full response with --response 'TEXT with {label}'",
                severity="warning",
            )
        )
    return diagnoses


def unnamed_entry(name: str, rewards: Sequence[Any], reward_key: str | None) -> Iterator[Diagnosis]:
    """REW01: object rewards without an entry named by --reward-key."""
    unnamed = next((value for value in rewards if isinstance(value, dict) and reward_key not in value), None)
    if unnamed is None:
        return
    keys = sorted(unnamed)
    choices = " or ".join(f"--reward-key {key}" for key in keys[:3])
    problem = "--reward-key is not set" if reward_key is None else f"--reward-key {reward_key} is not among them"
    yield diagnosis(
        "REW01",
        f"{name} returns an object with {keys}, but {problem}",
        cause="--reward-key must name the entry to train on.",
        remedy=f"use {choices}" if choices else "return an object with entries",
    )


def _responses(
    prompt: Prompt, prompts: Sequence[Prompt], *, rm_type: str | None, response: str | None
) -> list[tuple[str, str]]:
    if response is not None:
        return [("the response", response.replace("{label}", str(prompt.label)))]
    kind = "boxed" if (rm_type or "").startswith("boxed_") else rm_type or ""
    form = ANSWER_FORMS.get(kind, "{}")
    right = right_answer(prompt.label) if rm_type else prompt.label
    others = (right_answer(p.label) if rm_type else p.label for p in prompts)
    wrong = next((other for other in others if str(other) != str(right)), NO_ANSWER)
    return [("the label", form.format(right)), ("a wrong answer", form.format(wrong))]


def right_answer(label: Any) -> Any:
    """Return the answer for a verifier's label: the first of a list of alternatives."""
    return label[0] if isinstance(label, list) and label else label


def answered(prompt: Prompt, response: str, tokenizer: Any, *, index: int = 0) -> Sample:
    """Build a finished sample with this response; its tokens are left out without a tokenizer."""
    tokens = [] if tokenizer is None else list(tokenizer.encode(response, add_special_tokens=False))
    return Sample(
        group_index=0,
        index=index,
        prompt=prompt.text,
        tokens=[*prompt.tokens, *tokens],
        response=response,
        response_length=len(tokens),
        label=prompt.label,
        status=Status.COMPLETED,
        metadata=dict(prompt.metadata),
        tools=prompt.tools,
    )


def _call(prompt: Prompt, kind: str, response: str, outcome: Outcome, seconds: float) -> RewardCall:
    value = outcome.reward
    return RewardCall(
        prompt.row, kind, response, prompt.label, outcome.kind, value, type(value).__name__, outcome.reason, seconds
    )


def _number(call: RewardCall, reward_key: str | None) -> float:
    return float(call.value[reward_key] if isinstance(call.value, dict) else call.value)
