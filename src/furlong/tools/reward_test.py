"""A reward on rows of the data before anything is trained: the label as the answer, and a wrong one (REW01)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from furlong.core.catalogue import Diagnosis, diagnosis
from furlong.core.outcome import Outcome
from furlong.core.sample import Sample, Status
from furlong.data.prompt import Prompt
from furlong.rewards.group_reward import GroupReward

# How a right answer is written for a verifier that looks for it in a certain place; others get the label itself.
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
    """One call. `kind` says what the response is: the label, a wrong answer, or the user's text."""

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
        """One line, and the traceback of a call that failed."""
        shown = repr(self.response if len(self.response) <= SHOWN else f"{self.response[: SHOWN - 3]}...")
        what = f"{self.value!r} ({self.type})" if self.outcome == "scored" else self.outcome
        line = f"row {self.row}, label {self.label!r}, {self.kind} {shown}: {what}, {self.seconds * 1000:.1f} ms"
        return f"{line}\n  {self.reason}" if self.reason else line

    def record(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


async def call_reward(
    reward: GroupReward, prompts: Sequence[Prompt], *, rm_type: str | None, response: str | None, tokenizer: Any = None
) -> list[RewardCall]:
    """Call the reward on each prompt: with `response`, or else with its label and with the label of another row."""
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
    """REW01: calls that failed, objects of which no entry is trained on, right answers that score no better."""
    findings: list[Diagnosis] = []
    if failed := [call for call in calls if call.outcome != "scored"]:
        first = failed[0]
        findings.append(
            diagnosis(
                "REW01",
                f"{name}: {len(failed)} of {len(calls)} calls gave no reward; row {first.row} with {first.kind}: "
                f"{first.reason}",
                remedy="correct the function, or the row; --reward-timeout SECONDS if it only needs longer",
                evidence={"num_failed": len(failed), "num_calls": len(calls)},
            )
        )
    scored = [call for call in calls if call.outcome == "scored"]
    if unnamed := list(unnamed_entry(name, [call.value for call in scored], reward_key)):
        return [*findings, *unnamed]
    right = {call.row: _number(call, reward_key) for call in scored if call.kind == "the label"}
    wrong_ones = {call.row: _number(call, reward_key) for call in scored if call.kind == "a wrong answer"}
    both = right.keys() & wrong_ones.keys()
    if both and all(right[row] <= wrong_ones[row] for row in both):
        row = min(both)
        findings.append(
            diagnosis(
                "REW01",
                f"{name}: the label as the answer scores no more than a wrong one in {len(both)} of {len(both)} rows; "
                f"row {row}: {right[row]} and {wrong_ones[row]}",
                cause="--label-key names another column than the answer, or the answer is read from another place.",
                remedy="check --label-key, and try a whole response with --response 'TEXT with {label}'",
                severity="warning",
            )
        )
    return findings


def unnamed_entry(name: str, rewards: Sequence[Any], reward_key: str | None) -> Iterator[Diagnosis]:
    """REW01: rewards that are objects, of which --reward-key names no entry."""
    wrong = next((value for value in rewards if isinstance(value, dict) and reward_key not in value), None)
    if wrong is None:
        return
    keys = sorted(wrong)
    asked = "--reward-key is not given" if reward_key is None else f"--reward-key {reward_key} is not among them"
    yield diagnosis(
        "REW01",
        f"{name} returns an object with {keys}, and {asked}",
        cause="One entry of it is trained on, and it has to be named.",
        remedy=" or ".join(f"--reward-key {key}" for key in keys[:3]) or "return one with entries",
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
    """What answers a label of a verifier: of a list, any of which is right, the first."""
    return label[0] if isinstance(label, list) and label else label


def answered(prompt: Prompt, response: str, tokenizer: Any, *, index: int = 0) -> Sample:
    """A finished sample with a response that nobody generated; without a tokenizer it has no tokens of it."""
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
