"""A multi-turn tool agent: the model decides whether to call a calculator before it answers.

47+85=          the prompt
[47+85]         generated: a call of the tool, trained on
=132;           appended by the tool: loss mask 0
132             generated: the answer, trained on

A direct answer without a call is possible, too. The reward is 1 for the right answer, less CALL_COST for each call.
"""

from __future__ import annotations

import re
from typing import Any

from furlong import Sample, policy

MAX_CALLS = 2
CALL_COST = 0.1
CALL = re.compile(r"\[(\d+)\+(\d+)\]$")


def calculator(text: str) -> str | None:
    """Return the tool's output if `text` ends with a call, else None."""
    call = CALL.search(text)
    return None if call is None else f"={int(call[1]) + int(call[2])};"


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:  # noqa: ARG001  slime's signature
    """Alternate between the policy and the tool until the policy answers."""
    params = {**sampling_params, "max_new_tokens": 12, "stop": ["]"]}  # a call ends with "]", which is kept in the text
    num_calls = 0
    while True:
        turn = await policy().generate(sample.tokens, **params)
        if turn.finish_reason == "abort":  # the group is generated again
            sample.status = Sample.Status.ABORTED
            return sample
        sample.append_response_tokens(
            tokens=turn.tokens, log_probs=turn.log_probs, text=turn.text, version=turn.versions
        )
        output = calculator(turn.text)
        if output is None or num_calls == MAX_CALLS:
            break
        num_calls += 1
        sample.append_response_tokens(tokens=policy().encode(output), trainable=False, text=output)
    answer = turn.text.removesuffix("<|im_end|>")
    sample.reward = float(answer == sample.label) - CALL_COST * num_calls
    sample.metadata["round_number"] = 1 + num_calls  # for --log-multi-turn
    sample.status = Sample.Status.COMPLETED if turn.finish_reason == "stop" else Sample.Status.TRUNCATED
    return sample
