"""The session of one sample: the policy that its generate function calls, and the samples made of its conversations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from furlong.core.sample import Sample, Status
from furlong.errors import RolloutError
from furlong.interfaces import SamplingParams
from furlong.rollout.agent import GenerateFunctionError
from furlong.rollout.episode_limits import LIMIT, EpisodeWatch
from furlong.rollout.policy import Policy
from furlong.sessions.samples import Leaves, samples_from_session
from furlong.sessions.session import Session

if TYPE_CHECKING:
    from furlong.rollout.generate import Generation


def policy_of_sample(
    sample: Sample, generation: Generation, params: SamplingParams, continues: Callable[[], bool], *, session: str
) -> Policy:
    """Return the policy that the generate function of a sample calls; `session` names it in the engine."""
    context_len = generation.max_context_len or generation.max_tokens
    conversation = None
    if generation.chat_format is not None:
        conversation = Session(
            generation.chat_format,
            lambda ids, params, part, stream=None: policy.complete(ids, params, part, stream),
            name=session,
            params=params,
            settings=generation.session_settings,
            context_len=context_len,
        )
    policy = Policy(
        generation.engine,
        generation.tokenizer,
        session,
        generation.params.return_routed_experts,
        reward=generation.reward,
        context_len=context_len,
        continues=continues,
        conversation=conversation,
        load=generation.load,
        watch=EpisodeWatch(generation.limits_of(sample)),
        blocking=generation.blocking,
        sample=generation.recorded(sample),
        server=generation.session_server,
    )
    return policy


def session_samples(produced: list[Sample], policy: Policy, leaves: Leaves) -> list[Sample]:
    """Return the samples of the function's conversations if it returned a sample without a response.

    Raises GenerateFunctionError if the conversations are not what would be trained.
    """
    session = policy.conversation
    if session is None or not session.tree.nodes or len(produced) != 1 or produced[0].response_length:
        return produced
    if produced[0].status in (Status.ABORTED, Status.FAILED):
        return produced
    try:
        samples = samples_from_session(session, produced[0], leaves=leaves)
    except RolloutError as error:
        raise GenerateFunctionError(error) from error
    if LIMIT in produced[0].metadata:  # of an environment
        for sample in samples:
            sample.status = Status.TRUNCATED if sample.status is Status.COMPLETED else sample.status
    return samples
