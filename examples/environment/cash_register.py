"""An environment of one's own, and the episode that connects it to the policy.

The environment is a cash register. It shows a total and a price, and the policy types the new total; right or wrong,
the next price is added to what was typed. An episode has three prices:

12+30=          the prompt: the first total and price
42              action: generated, trained on
42+17=          observation: appended by the environment, loss mask 0
59              action
59+25=          observation
84              action
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from furlong import Sample, policy

ROUNDS = 3


@dataclass
class Step:
    """What the environment returns: the next observation, the reward of the action, and whether the episode is over."""

    observation: str
    reward: float
    done: bool


class CashRegister:
    """Begins with the sum in the prompt; later prices follow from the seed, the same for all episodes of a group."""

    def __init__(self, prompt: str, seed: int) -> None:
        self.total, self.price = (int(number) for number in prompt.rstrip("=").split("+"))
        self._random = random.Random(seed)
        self._rounds = 0

    async def step(self, action: str) -> Step:
        """Check the typed total and continue with it; ends early if the action is not a total below 100."""
        right = str(self.total + self.price)
        reward = sum(a == b for a, b in zip(action, right, strict=False)) / max(len(action), len(right))
        self._rounds += 1
        if self._rounds == ROUNDS or not action.isdigit() or len(action) > 2:
            return Step("", reward, done=True)
        self.total, self.price = int(action), self._random.randrange(10, 30)
        return Step(f"{self.total}+{self.price}=", reward, done=False)


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:  # noqa: ARG001  slime's signature
    """Play one episode; the reward is the mean over rounds of the fraction of right digits."""
    register = CashRegister(str(sample.prompt), sample.metadata["seed"])
    sample.reward = 0.0
    while True:
        turn = await policy().generate(sample.tokens, **{**sampling_params, "max_new_tokens": 4})
        if turn.finish_reason == "abort":  # the group is generated again
            sample.status = Sample.Status.ABORTED
            return sample
        sample.append_response_tokens(
            tokens=turn.tokens, log_probs=turn.log_probs, text=turn.text, version=turn.versions
        )
        state = await register.step(turn.text.removesuffix("<|im_end|>"))
        sample.reward += state.reward / ROUNDS
        if state.done:
            sample.status = Sample.Status.COMPLETED
            return sample
        tokens = policy().encode(state.observation)
        sample.append_response_tokens(tokens=tokens, trainable=False, text=state.observation)
