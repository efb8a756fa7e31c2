"""Episodes of `--online-sessions`: an application outside of the run talks to the policy, and sets the reward.

`generate` is the custom generate function of such runs. It offers the session of the sample, and waits until the
application ends it.
"""

from __future__ import annotations

import asyncio
import logging
from contextvars import Context
from typing import Any

from furlong.core.sample import Sample
from furlong.errors import InfraError, RolloutError
from furlong.rollout.agent import policy
from furlong.rollout.agent_function import record_posted_result
from furlong.rollout.episode_limits import SILENT
from furlong.sessions.session_offers import SessionOffer

REMIND_S = 60.0  # without an application, after which the log says how to open a session

logger = logging.getLogger(__name__)


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:  # noqa: ARG001  slime's signature
    """Offer one episode. Raises InfraError if the application leaves, RolloutError if it reports an error."""
    current = policy()
    opened = current.open_session()
    offers = None if current.server is None else current.server.offers
    if offers is None:
        raise RolloutError("this run does not offer sessions; add --online-sessions")
    task = {
        "prompt": sample.prompt,
        "label": sample.label,
        "metadata": sample.metadata,
        "tools": sample.tools,
        "group": sample.group_index,
        "sample": sample.index,
        "evaluation": evaluation,
    }
    is_scored = args.custom_rm_path or args.rm_type or sample.custom_rm_path or sample.metadata.get("rm_type")
    offer = SessionOffer(opened, task, needs_reward=not is_scored)
    current.watch.pause()
    await offers.add(offer)
    try:
        await _wait_until_taken(offer)
        current.watch.restart()
        await _wait_until_ended(offer, args.session_idle_timeout)
    finally:
        offers.withdraw(offer)
    record_posted_result(sample, opened)
    if not current.session_tree.tree.nodes:
        sample.metadata[SILENT] = True
        raise RolloutError(f"the application ended sample {sample.index} without an answer of the policy")
    return sample


async def _wait_until_taken(offer: SessionOffer) -> None:
    if not await _is_set_within(offer.is_taken, REMIND_S):
        server = offer.opened.url.rpartition("/")[0]
        logger.info("sample %s waits for an application: POST %s", offer.task["sample"], server)
        await offer.is_taken.wait()


async def _wait_until_ended(offer: SessionOffer, idle_s: float) -> None:
    """Wait for the end of a session. Raises InfraError if it is not used for `idle_s`."""
    watch = policy().watch
    while not await _is_set_within(offer.is_ended, idle_s - watch.idle_s):
        if watch.idle_s >= idle_s:
            reason = f"it was not used for {idle_s:g} s (--session-idle-timeout)"
            offer.opened.session.end(reason)
            raise InfraError(f"the session of an application expired: {reason}")


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event. The event loop keeps cancelled timers, so this one has no context with the episode."""
    waiting = asyncio.create_task(event.wait())
    timer = asyncio.get_running_loop().call_later(max(seconds, 0.0), waiting.cancel, context=Context())
    try:
        await asyncio.wait({waiting})
    finally:
        timer.cancel()
        waiting.cancel()
    return event.is_set()
