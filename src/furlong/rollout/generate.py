"""Generation and scoring of samples: one sample, and a prompt group."""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import is_, itemgetter
from time import monotonic
from typing import TYPE_CHECKING, Any

from furlong.chat.template_boundary import ChatFormat
from furlong.config.hooks import Hooks
from furlong.core.event_loop import gather_or_cancel
from furlong.core.outcome import Outcome, outcome_from_value
from furlong.core.routing import extend_routes
from furlong.core.sample import STATUS_BY_FINISH_REASON, Group, Sample, Status
from furlong.core.tracing import heartbeat, tracer
from furlong.core.user_code import describe_exception
from furlong.core.user_functions import Function, accepted_keywords
from furlong.environments.sample_keys import AGENT_ERROR, ENVIRONMENT
from furlong.errors import InfraError, RolloutError
from furlong.interfaces import Completion, Engine, Reward, SamplingParams
from furlong.rollout.agent import (
    GenerateFunctionError,
    call_generate_function,
    check_fields,
    check_group,
    check_produced,
    check_sample,
    copy_identity,
    load_generate_function,
)
from furlong.rollout.asked_context import ContextDifference
from furlong.rollout.blocking_timer import BlockingTimer
from furlong.rollout.episode_limits import LIMIT, REISSUED, EpisodeLimitError, EpisodeLimits, EpisodeWatch
from furlong.rollout.episode_load import EpisodeLoad, RewardWait
from furlong.rollout.policy import seed_of_part, shortened
from furlong.rollout.roles import pick_rewards_of_roles
from furlong.rollout.sample_metrics import OTHER_CONTEXT
from furlong.rollout.sample_session import policy_of_sample, session_samples
from furlong.sessions.samples import LEAF, Leaves
from furlong.sessions.session import SessionSettings

if TYPE_CHECKING:  # imports a web server, which most runs do not need
    from furlong.sessions.session_server import SessionServer

logger = logging.getLogger(__name__)

UNFINISHED = (Status.PENDING, Status.ABORTED)  # a tuple: user code may set the value instead of the member
MAX_LOGGED_FAILURES = 8  # kinds; a message that quotes the response is a new kind for each sample


@dataclass(frozen=True)
class Generation:
    """How samples of one kind (of training, or of one evaluation set) are generated and scored.

    max_context_len: limit of prompt + response; timeout_s: limit of one sample's generation. Tokens from custom
    functions must be below `vocab_size` and at most `max_tokens` per sample, the model's context. logged_failures:
    kinds of failures of user code already logged. load, limits: of episodes. blocking: time that custom functions
    blocked the event loop. chat_format: renders messages for `policy().chat`.
    """

    engine: Engine
    tokenizer: Any
    reward: Reward
    params: SamplingParams
    max_context_len: int | None = None
    hooks: Hooks = field(default_factory=Hooks)
    timeout_s: float | None = None
    evaluation: bool = False
    args: Any = None
    vocab_size: int | None = None
    max_tokens: int | None = None
    load: EpisodeLoad = field(default_factory=EpisodeLoad)
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    limits_by_environment: Mapping[str, EpisodeLimits] = field(default_factory=dict[str, EpisodeLimits])
    logged_failures: set[str] = field(default_factory=set[str])
    blocking: BlockingTimer = field(default_factory=BlockingTimer)
    chat_format: ChatFormat | None = None
    session_settings: SessionSettings = field(default_factory=SessionSettings)
    session_leaves: Leaves = "all"
    session_server: SessionServer | None = None

    def function_of(self, sample: Sample) -> Function | None:
        """Return the sample's custom function; None for the single turn. Raises ConfigError for an invalid path."""
        if (path := sample.generate_function_path) is None:
            return self.hooks.custom_generate_function
        return load_generate_function(path)

    def is_custom(self, group: Group) -> bool:
        """Return whether user functions generate samples of the group, and may change them."""
        return self.hooks.custom_generate_function is not None or any(
            sample.generate_function_path is not None for sample in group.samples
        )

    def limits_of(self, sample: Sample) -> EpisodeLimits:
        """Return the limits of the sample's episode: those of its environment in a mixture."""
        return self.limits_by_environment.get(str(sample.metadata.get(ENVIRONMENT)), self.limits)

    def recorded(self, sample: Sample) -> int | None:
        """Return the number under which requests of the sample are recorded; None in evaluations."""
        return None if self.evaluation else sample.index

    def log_failure(self, what: str, sample: Sample, reason: str) -> None:
        """Log that user code failed on a sample: each of the first kinds of failure once. Metrics count all."""
        kind = re.sub(r"\d+", "0", reason)  # lengths and ids differ between samples
        is_new = kind not in self.logged_failures and len(self.logged_failures) < MAX_LOGGED_FAILURES
        if is_new:
            self.logged_failures.add(kind)
        level = logging.WARNING if is_new else logging.DEBUG
        logger.log(level, "%s failed on sample %s: %s", what, sample.index, reason)

    def log_other_context(self, sample: Sample, differences: Sequence[ContextDifference]) -> None:
        """Log the first sample whose tokens were sampled in another context than they are trained in."""
        if OTHER_CONTEXT not in self.logged_failures:
            self.logged_failures.add(OTHER_CONTEXT)
            logger.warning(
                "the custom generate function asked the engine with another context than is trained on: sample %s, %s "
                "(%d such parts); return one sample per context, or ask with sample.tokens",
                sample.index, differences[0], len(differences),
            )  # fmt: skip


def continuation(sample: Sample, generation: Generation) -> SamplingParams:
    """Return sampling parameters for the rest of a sample's response, seeded for this position.

    Raises RolloutError if the prompt leaves no room for a response.
    """
    room = generation.params.max_new_tokens - sample.response_length
    if generation.max_context_len is not None:
        room = min(room, generation.max_context_len - len(sample.tokens))
    if room <= 0 and sample.response_length == 0:
        raise RolloutError(
            f"sample {sample.index}: a prompt of {len(sample.tokens)} tokens leaves no room in a context of "
            f"{generation.max_context_len}; raise --rollout-max-context-len or filter with --rollout-max-prompt-len"
        )
    seed = None if sample.seed is None else seed_of_part(sample.seed, sample.response_length)
    return generation.params.for_request(max(room, 0), seed)


def append_completion(sample: Sample, completion: Completion) -> None:
    """Append one completion to the sample's response and set the status from its finish reason."""
    if sample.rollout_log_probs is None:
        sample.rollout_log_probs = []
    sample.tokens.extend(completion.tokens)
    sample.rollout_log_probs.extend(completion.log_probs)
    sample.token_versions.extend(completion.versions)
    if sample.loss_mask is not None:
        sample.loss_mask.extend([1] * len(completion.tokens))
    sample.response += completion.text
    sample.response_length += len(completion.tokens)
    if completion.versions:
        sample.weight_versions.append(str(completion.versions[-1]))
    sample.rollout_routed_experts = extend_routes(sample.rollout_routed_experts, completion.routed_experts)
    sample.status = STATUS_BY_FINISH_REASON[completion.finish_reason]


async def generate_turn(
    sample: Sample, generation: Generation, continues: Callable[[], bool], cut_at: int | None
) -> Sample:
    """Generate the response of `sample`, or continue it.

    A request that was aborted by a weight update is continued from its tokens while `continues()`. A response that is
    complete already, in a partial group, stays unchanged. `cut_at`: response length at which the sample is left
    aborted, as if the engine had aborted it.
    """
    while sample.status in UNFINISHED:
        params = continuation(sample, generation)
        if cut_at is not None and sample.response_length >= cut_at:
            sample.status = Status.ABORTED
            return sample
        if cut_at is not None:
            params = shortened(params, cut_at - sample.response_length)
        if params.max_new_tokens == 0:
            sample.status = Status.TRUNCATED
            return sample
        with tracer.flight("generate", sample=sample.index, group=sample.group_index):
            completion = await generation.load.complete(
                generation.engine,
                list(sample.tokens),
                params,
                session=session_of(sample),
                sample=generation.recorded(sample),
            )
        heartbeat.note("request")
        append_completion(sample, completion)
        if sample.response_length == cut_at and completion.finish_reason == "length":
            sample.status = Status.ABORTED
        if not continues():
            break
    return sample


def session_of(sample: Sample) -> str:
    """Return the session of the sample's requests, for routing affinity and aborts."""
    return sample.session_id or f"sample-{sample.index}"


async def generate_sample(
    sample: Sample,
    generation: Generation,
    *,
    rollout_id: int,
    continues: Callable[[], bool],
    cut_at: int | None = None,
    began: Callable[[], object] | None = None,
) -> list[Sample]:
    """Run generation and hooks for one sample, when an episode may start; a custom function may fan it out.

    A custom function that raises, and generation longer than `timeout_s`, make the sample FAILED with the reason; a
    TimeoutError of the function counts as timed out, too. Engine errors propagate. A finished sample stays unchanged.
    """
    if sample.status not in UNFINISHED:
        return [sample]
    await generation.load.begin_episode()
    try:
        if began is not None:
            began()
        produced = await _produce(sample, generation, continues, cut_at)
        if not generation.hooks.rollout_sample_hook:
            return produced
        return [await _run_hooks(each, generation, rollout_id) for each in produced]
    finally:
        generation.load.end_episode()


async def _produce(
    sample: Sample, generation: Generation, continues: Callable[[], bool], cut_at: int | None
) -> list[Sample]:
    prompt, started = sample.tokens[: sample.prompt_length], monotonic()
    try:
        async with asyncio.timeout(generation.timeout_s):
            if (function := generation.function_of(sample)) is None:
                return [await generate_turn(sample, generation, continues, cut_at)]
            return await _generate_reissued(function, sample, generation, continues)
    except TimeoutError:
        seconds = min(monotonic() - started, generation.timeout_s or math.inf)
        return [_failed(sample, prompt, Outcome.timed_out(seconds, stage="generate"))]
    except GenerateFunctionError as error:
        reason = describe_exception(error.cause)
        generation.log_failure("custom generate function", sample, reason)
        kind = "timed_out" if isinstance(error.cause, TimeoutError) else "failed"
        kind = "infra" if isinstance(error.cause, InfraError) else kind
        return [_failed(sample, prompt, Outcome(kind, reason=f"generate raised {reason}", stage="generate"))]


async def _generate_reissued(
    function: Function, sample: Sample, generation: Generation, continues: Callable[[], bool]
) -> list[Sample]:
    """Run the generate function; once more, from the sample as it was issued, if it raises InfraError."""
    origin = copy.deepcopy(vars(sample))
    try:
        return await _generate_custom(function, sample, generation, continues)
    except GenerateFunctionError as error:
        if not isinstance(error.cause, InfraError):
            raise
        generation.log_failure("the infrastructure of the custom generate function", sample, str(error.cause))
        vars(sample).clear()
        vars(sample).update(origin)
        sample.metadata[REISSUED] = describe_exception(error.cause)
    return await _generate_custom(function, sample, generation, continues)


async def _generate_custom(
    function: Function, sample: Sample, generation: Generation, continues: Callable[[], bool]
) -> list[Sample]:
    group_index, params = sample.group_index, continuation(sample, generation)
    policy = policy_of_sample(sample, generation, params, continues, session=session_of(sample))
    work = call_generate_function(
        function,
        sample,
        params,
        policy,
        args=generation.args,
        evaluation=generation.evaluation,
        timer=generation.blocking,
    )
    try:
        produced = await policy.watch.run(work)
    except EpisodeLimitError:
        produced = [sample]  # with what the function has appended
    finally:
        await policy.end_session()
    if error := sample.metadata.get(AGENT_ERROR):
        generation.log_failure("the agent, whose episode is scored,", sample, str(error))
    produced = session_samples(produced, policy, generation.session_leaves)
    if policy.watch.reached is not None:
        _end_at_limit(produced, policy.watch)
    for each in produced:
        differences = check_produced(
            each,
            sample,
            policy,
            group_index=group_index,
            vocab_size=generation.vocab_size,
            max_tokens=generation.max_tokens,
        )
        if differences:
            generation.log_other_context(each, differences)
    return produced


def _end_at_limit(produced: Sequence[Sample], watch: EpisodeWatch) -> None:
    """Make the samples of an episode that a limit ended TRUNCATED. Raises GenerateFunctionError if nothing is there."""
    if not any(sample.response_length for sample in produced):
        limits = watch.limits
        seconds = {"tool_time": limits.tool_s, "turn_time": limits.turn_s}.get(watch.reached or "", limits.episode_s)
        raise GenerateFunctionError(TimeoutError(f"nothing was sampled within {seconds:g} s ({watch.reached})"))
    for sample in produced:
        sample.metadata[LIMIT] = watch.reached
        if sample.status in (Status.PENDING, Status.COMPLETED):
            sample.status = Status.TRUNCATED


async def _run_hooks(sample: Sample, generation: Generation, rollout_id: int) -> Sample:
    """Run the hooks on a sample; returns the sample, or the replacement returned by a hook."""
    if sample.status in (Status.FAILED, Status.ABORTED):
        return sample
    group_index, flag = sample.group_index, "--rollout-sample-hook-path"
    for hook in generation.hooks.rollout_sample_hook:
        values = {"rollout_id": rollout_id, "evaluation": generation.evaluation}
        names = accepted_keywords(hook, tuple(values))
        result = hook(generation.args, sample, **{name: values[name] for name in names})
        if inspect.isawaitable(result):
            result = await result
        if not isinstance(result, Sample | None):
            raise RolloutError(
                f"{flag} returned {type(result).__name__} for sample {sample.index}; it must "
                "return None to keep the sample, or the Sample to use instead"
            )
        if result is not None and result is not sample:
            copy_identity(result, sample)
            sample = result
        check_sample(sample, flag, generation.vocab_size)
        check_group(sample, group_index, flag)
    return sample


def _failed(sample: Sample, prompt: list[int], outcome: Outcome) -> Sample:
    """Make the sample FAILED and discard its partial response."""
    reset_response(sample, prompt or [0])  # a row needs a token; it is not trained on
    sample.status, sample.outcome = Status.FAILED, outcome
    return sample


def reset_response(sample: Sample, prompt: list[int]) -> None:
    """Reset the sample to its prompt, discarding everything generated."""
    sample.tokens = list(prompt)
    sample.response, sample.response_length, sample.loss_mask = "", 0, None
    sample.rollout_log_probs, sample.teacher_log_probs, sample.rollout_routed_experts = None, None, None
    sample.token_versions, sample.weight_versions, sample.metadata = [], [], sample.metadata or {}
    sample.reward, sample.outcome, sample.status = None, None, Status.PENDING


async def run_group(
    group: Group,
    generation: Generation,
    *,
    rollout_id: int,
    continues: Callable[[], bool],
    wait: RewardWait,
    cuts: Mapping[int, int] | None = None,
    began: Callable[[], object] | None = None,
) -> Group:
    """Generate and score all samples of a group; fanned-out samples replace their origin.

    An aborted group is returned unscored with ABORTED samples (`is_finished`). continues: whether requests aborted by a
    weight update are continued. cuts: sample index -> response length at which the sample is left aborted. began: is
    called when an episode begins.
    """
    with wait.phase(generating=1):
        produced = await gather_or_cancel(
            generate_sample(
                sample,
                generation,
                rollout_id=rollout_id,
                continues=continues,
                cut_at=None if cuts is None or sample.index is None else cuts.get(sample.index),
                began=began,
            )
            for sample in group.samples
        )
    group.samples = [sample for samples in produced for sample in samples]
    if is_finished(group):
        with wait.phase(scoring=1):
            await score(group.samples, generation)
    return group


async def score(samples: Sequence[Sample], generation: Generation) -> None:
    """Compute the rewards that user code has not set, and check those that it has.

    A failed or timed-out call, or an invalid reward, makes the sample FAILED and is logged. The leaves of a session
    share the reward of the last one, of which each role takes its value if it is a dict by role.
    """
    unscored: list[Sample] = []
    for sample in samples:
        if sample.status is Status.FAILED:
            continue
        if sample.reward is None:
            unscored.append(sample)
        elif (outcome := outcome_from_value(sample.reward)).kind == "scored":
            sample.reward = outcome.reward
        else:
            sample.status, sample.outcome, sample.reward = Status.FAILED, outcome, None
            generation.log_failure("the reward", sample, outcome.reason)
    leaves = [sample for sample in unscored if LEAF in sample.metadata]
    decisive = [sample for sample in unscored if LEAF not in sample.metadata] if leaves else unscored
    if decisive:
        await _score(decisive, generation)
    if leaves:
        by_index = {sample.index: sample for sample in samples if LEAF not in sample.metadata}
        for leaf in leaves:
            last = by_index[leaf.index]
            leaf.outcome, leaf.reward = last.outcome, last.reward
            leaf.status = Status.FAILED if last.status is Status.FAILED else leaf.status
    pick_rewards_of_roles(samples)


async def _score(unscored: list[Sample], generation: Generation) -> None:
    """Call the reward function on samples, and record its outcomes."""
    before = [_watched(vars(sample)) for sample in unscored]
    with tracer.flight("reward", group=unscored[0].group_index, samples=len(unscored)):
        outcomes = await generation.reward(unscored)
    after = [_watched(vars(sample)) for sample in unscored]
    is_untouched = all(map(is_, chain.from_iterable(before), chain.from_iterable(after)))
    for sample, outcome, fields in zip(unscored, outcomes, before, strict=True):
        if not is_untouched or sample.status in UNFINISHED:
            outcome = _checked_outcome(sample, fields, outcome, generation.vocab_size)
        sample.outcome = outcome
        if outcome.kind == "scored":
            sample.reward = outcome.reward
        else:
            sample.status = Status.FAILED
            generation.log_failure("the reward", sample, outcome.reason)


_COLUMNS = ("tokens", "response_length", "loss_mask", "rollout_log_probs", "token_versions")
_IDENTITY = ("group_index", "index", "rollout_id", "metadata", "train_metadata")
_watched = itemgetter(*_COLUMNS, *_IDENTITY)


def _checked_outcome(sample: Sample, watched: tuple[Any, ...], outcome: Outcome, vocab_size: int | None) -> Outcome:
    """Return the outcome of a reward call: failed if the function made its sample unusable, which is then repaired.

    watched: the fields `_watched` before the call. Objects of unchanged fields are the same.
    """
    is_same = list(map(is_, _watched(vars(sample)), watched))
    if all(is_same) and sample.status not in UNFINISHED:
        return outcome
    before = dict(zip((*_COLUMNS, *_IDENTITY), watched, strict=True))
    source = "--custom-rm-path: the reward function"
    try:
        if sample.status in UNFINISHED:
            raise RolloutError(
                f"{source} set the status of sample {sample.index} to {str(sample.status)!r}; set remove_sample to "
                "exclude a sample from training, or raise an exception if it cannot be scored"
            )
        check_group(sample, before["group_index"], source)
        check_fields(sample, source)
        if not all(is_same[: len(_COLUMNS)]):
            check_sample(sample, source, vocab_size)
    except RolloutError as error:
        num_prompt = len(before["tokens"]) - before["response_length"]
        reset_response(sample, before["tokens"][:num_prompt] or [0])
        for name in _IDENTITY:
            setattr(sample, name, before[name])
        return Outcome.failed(str(error))
    return outcome


def is_finished(group: Group) -> bool:
    """Return whether no sample of the group was aborted."""
    return all(sample.status is not Status.ABORTED for sample in group.samples)


def has_failed(group: Group) -> bool:
    """Return whether every sample of the group failed."""
    return all(sample.status is Status.FAILED for sample in group.samples)
