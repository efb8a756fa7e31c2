"""What agents call: the policy in this process, and sessions for agents that speak HTTP.

    from furlong.agent import session

    async def generate(args, sample, sampling_params):
        opened = session(sample)
        await my_agent(base_url=f"{opened.url}/v1", api_key=opened.key, task=sample.prompt)
        return sample

Both raise RolloutError outside a custom generate function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from furlong.core.sample import Sample
from furlong.errors import RolloutError
from furlong.rollout.agent import policy

if TYPE_CHECKING:
    from furlong.sessions.open_session import OpenSession

__all__ = ["policy", "session"]


def session(sample: Sample) -> OpenSession:
    """Return the session of the sample that the calling generate function got: its `url`, `key` and `id`.

    The session ends when the function returns; return the sample unchanged, and its conversations are trained on.
    Raises RolloutError outside a custom generate function.
    """
    if not isinstance(sample, Sample):  # pyright: ignore[reportUnnecessaryIsInstance]  user code
        raise RolloutError(
            f"furlong.agent.session got {type(sample).__name__}; pass the sample of the generate function"
        )
    return policy().open_session()
