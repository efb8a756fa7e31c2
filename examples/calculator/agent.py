"""A calculator agent with `policy()`, and the same agent as a client of an OpenAI endpoint.

user       47+85=
assistant  [47+85]     a call of the calculator
user       132         its output
assistant  132         the answer
"""

from __future__ import annotations

import re
from typing import Any

import httpx

from furlong import Sample, policy

MAX_CALLS = 2
CALL = re.compile(r"\[(\d+)\+(\d+)\]")


def calculator(text: str) -> str | None:
    """Return the sum if `text` is a call, else None."""
    call = CALL.fullmatch(text)
    return None if call is None else str(int(call[1]) + int(call[2]))


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:  # noqa: ARG001  slime's signature
    """Run the agent in the process of the run: `--custom-generate-function-path`."""
    messages: list[Any] = [{"role": "user", "content": sample.prompt}]
    for _ in range(1 + MAX_CALLS):
        reply = await policy().chat(messages)
        if (output := calculator(reply.content)) is None:
            break
        messages += [reply.message, {"role": "user", "content": output}]
    return sample


async def solve(base_url: str, api_key: str, prompt: str, request_kwargs: dict[str, Any]) -> None:
    """Run the agent as a client of the session's endpoint: `--agent-function-path`."""
    messages: list[Any] = [{"role": "user", "content": prompt}]
    async with httpx.AsyncClient(
        timeout=600, verify=False, headers={"X-Api-Key": api_key}
    ) as client:  # certificates take 30 ms
        for _ in range(1 + MAX_CALLS):
            body = {"messages": messages, **request_kwargs}
            reply = await client.post(f"{base_url}/v1/chat/completions", json=body)
            message = reply.raise_for_status().json()["choices"][0]["message"]
            if (output := calculator(message["content"])) is None:
                break
            messages += [message, {"role": "user", "content": output}]
