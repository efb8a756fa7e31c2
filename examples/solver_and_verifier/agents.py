"""A solver and a verifier: two roles of one model in an episode, each with rewards and a baseline of its role.

solver     user 47+85=         assistant 22
verifier   user 47+85=22?      assistant n

The solver's reward is the share of right digits, the verifier's is 1 for a right judgement.
"""

from __future__ import annotations

from typing import Any

from furlong import Sample, policy


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:  # noqa: ARG001  slime's signature
    """Let the solver answer and the verifier judge the answer."""
    solver, verifier = policy().role("solver"), policy().role("verifier")
    answer = await solver.chat([{"role": "user", "content": sample.prompt}])
    judgement = await verifier.chat([{"role": "user", "content": f"{sample.prompt}{answer.content}?"}])
    sample.metadata |= {"answer": answer.content, "judgement": judgement.content}
    return sample


def reward(args: Any, sample: Any) -> dict[str, float]:  # noqa: ARG001  slime's signature
    """Return the rewards by role."""
    answer, judgement = sample.metadata["answer"], sample.metadata["judgement"]
    right = sum(a == b for a, b in zip(answer, sample.label, strict=False))
    expected = "y" if answer == sample.label else "n"
    return {"solver": right / max(len(answer), len(sample.label)), "verifier": float(judgement == expected)}
