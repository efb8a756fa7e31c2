"""Agents whose samples teachers score, and the log-probs that a model of a folder gives to them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from furlong.core.sample import Sample
from furlong.environments import Step, Task

SPELLING, BRANCHES = f"{__file__}:Spelling", f"{__file__}:branches"


class Spelling:
    """Three turns, with a text between them that is not trained."""

    def reset(self, task: Task, seed: int) -> str:
        del task, seed
        self.turns = 0
        return "a="

    def step(self, message: Any) -> Step:
        self.turns += 1
        return Step(f"{self.turns}=", reward=len(set(message["content"])) / 8, done=self.turns == 3)


async def branches(base_url: str, api_key: str, prompt: str, request_kwargs: dict[str, Any]) -> None:
    """Ask over HTTP: two continuations of the first answer, and another conversation; three leaves."""
    async with httpx.AsyncClient(timeout=60, verify=False, headers={"X-Api-Key": api_key}) as client:

        async def ask(messages: list[Any]) -> Any:
            reply = await client.post(f"{base_url}/v1/chat/completions", json={"messages": messages, **request_kwargs})
            return reply.raise_for_status().json()["choices"][0]["message"]

        begin = [{"role": "user", "content": prompt}]
        answered = [*begin, await ask(begin)]
        for text in ("1=", "2="):
            await ask([*answered, {"role": "user", "content": text}])
        await ask([{"role": "user", "content": "b="}])


@functools.cache
def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def all_log_probs(folder: Path, sample: Sample) -> Tensor:
    """Log-probs [response tokens, vocabulary] of a model's own forward pass over a sample."""
    with torch.no_grad():
        logits = loaded(folder)(torch.tensor([sample.tokens])).logits[0].float()
    return logits[sample.prompt_length - 1 : -1].log_softmax(-1)


def own_log_probs(folder: Path, sample: Sample) -> Tensor:
    """Those of the sampled tokens."""
    return all_log_probs(folder, sample).gather(1, torch.tensor(sample.tokens[sample.prompt_length :])[:, None])[:, 0]
