"""Generation and scoring of samples: one sample, a prompt group, and evaluation sets."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import inspect
import logging
import math
import re
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from furlong.chat.template_boundary import ChatFormat
from furlong.config.environment_specs import EnvironmentSpec
from furlong.config.hooks import HOOKS, Hooks, check_signature
from furlong.config.sections import RolloutFlags
from furlong.core.event_loop import finish, gather_or_cancel
from furlong.core.metric import Metrics, merge, total
from furlong.core.outcome import Outcome, outcome_from_value
from furlong.core.progress import progress
from furlong.core.routing import extend_routes
from furlong.core.sample import PER_TOKEN, ROLE, STATUS_BY_FINISH_REASON, Group, Sample, Status
from furlong.core.tracing import heartbeat, tracer
from furlong.core.user_code import describe_exception, is_raised_by_user
from furlong.core.user_functions import Function, accepted_keywords, load_function
from furlong.environments.protocol import AGENT_ERROR, ENVIRONMENT
from furlong.errors import ConfigError, InfraError, RolloutError
from furlong.interfaces import Completion, Engine, Reward, SamplingParams
from furlong.rollout.episodes import (
    LIMIT,
    REISSUED,
    EpisodeLimitError,
    EpisodeLoad,
    EpisodePermit,
    EpisodeWatch,
    RewardWait,
)
from furlong.rollout.metrics import SampleReport, eval_metrics, evaluation_data
from furlong.rollout.policy import Policy, seed_of_part
from furlong.rollout.teachers import Teachers
from furlong.rollout.train_batch import role_of
from furlong.rollout.user_samples import (
    GenerateFunctionError,
    call_generate_function,
    check_produced,
    copy_identity,
    session_samples,
)
from furlong.sessions.samples import LEAF, ROLES, Leaves
from furlong.sessions.session import Session, SessionSettings

if TYPE_CHECKING:  # imports a web server, which most runs do not need
    from furlong.sessions.session_server import SessionServer

MAX_LOGGED_FAILURES = 8  # kinds; a message that quotes the response is a new kind for each sample
UNFINISHED = (Status.PENDING, Status.ABORTED)
CLOSE_S = 60.0  # for `close` of an environment

logger = logging.getLogger(__name__)


def kind_of(reason: str) -> str:
    """Return a reason without numbers and ids, which differ between samples."""
    return re.sub(r"[0-9a-f]{8,}|\d+", "0", reason)


def ignored(event: str, **fields: Any) -> None:
    """Ignore an event."""


@dataclass(frozen=True)
class Generation:
    """How samples of one kind (of training, or of one evaluation set) are generated and scored.

    flags: of the rollout, with the limit of prompt + response and the limits of episodes, which an environment may
    replace. timeout_s: limit of one sample's generation. Tokens from custom functions must be below `vocab_size` and at
    most `max_tokens` per sample, the model's context. logged_failures: kinds of failures of user code already logged.
    chat_format: renders messages for `policy().chat`. teachers: are asked about finished samples. on_event: gets
    `sample_failed` for each of those kinds.
    """

    engine: Engine
    tokenizer: Any
    reward: Reward
    params: SamplingParams
    flags: RolloutFlags = field(default_factory=RolloutFlags)
    environments: Sequence[EnvironmentSpec] = ()
    hooks: Hooks = field(default_factory=Hooks)
    timeout_s: float | None = None
    evaluation: bool = False
    args: Any = None
    vocab_size: int | None = None
    max_tokens: int | None = None
    load: EpisodeLoad = field(default_factory=EpisodeLoad)
    logged_failures: set[str] = field(default_factory=set[str])
    chat_format: ChatFormat | None = None
    session_settings: SessionSettings = field(default_factory=SessionSettings)
    session_leaves: Leaves = "all"
    session_server: SessionServer | None = None
    teachers: Teachers | None = None
    on_event: Callable[..., object] = ignored

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

    def limits_of(self, sample: Sample) -> RolloutFlags:
        """Return the flags with the limits of the sample's environment."""
        specs = self.environments
        if len(specs) > 1:
            specs = [spec for spec in specs if spec.name == sample.metadata.get(ENVIRONMENT)]
        limits: Any = specs[0].limits if specs else {}
        return dataclasses.replace(self.flags, **limits)

    def log_failure(self, what: str, sample: Sample, reason: str) -> None:
        """Log that user code failed on a sample: each of the first kinds of failure once. Metrics count all."""
        kind = kind_of(reason)
        is_new = kind not in self.logged_failures and len(self.logged_failures) < MAX_LOGGED_FAILURES
        if is_new:
            self.logged_failures.add(kind)
            self.on_event("sample_failed", stage="reward" if what == "the reward" else "generate", reason=reason)
        level = logging.WARNING if is_new else logging.DEBUG
        logger.log(level, "%s failed on sample %s: %s", what, sample.index, reason)


@functools.cache
def load_generate_function(path: str) -> Function:
    """Load the generate function named by a sample. Raises ConfigError if it is missing or has a wrong signature."""
    function = load_function(path)
    if problem := check_signature(HOOKS["custom_generate_function"], function):
        raise ConfigError(f"Sample.generate_function_path {path!r} cannot be called. {problem}")
    return function


def continuation(sample: Sample, generation: Generation) -> SamplingParams:
    """Return sampling parameters for the rest of a sample's response, seeded for this position.

    Raises RolloutError if the prompt leaves no room for a response.
    """
    context_len = generation.flags.rollout_max_context_len
    room = generation.params.max_new_tokens - sample.response_length
    if context_len is not None:
        room = min(room, context_len - len(sample.tokens))
    if room <= 0 and sample.response_length == 0:
        flag = "--eval" if generation.evaluation else "--rollout"
        raise RolloutError(
            f"sample {sample.index}: a prompt of {len(sample.tokens)} tokens leaves no room in a context of "
            f"{context_len}; raise {flag}-max-context-len or filter with {flag}-max-prompt-len"
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


async def generate_turn(sample: Sample, generation: Generation, continues: Callable[[], bool]) -> Sample:
    """Generate the response of `sample`, or continue it.

    A request that was aborted by a weight update is continued from its tokens while `continues()`. A response that is
    complete already, in a partial group, stays unchanged.
    """
    while sample.status in UNFINISHED:
        params = continuation(sample, generation)
        if params.max_new_tokens == 0:
            sample.status = Status.TRUNCATED
            return sample
        with tracer.flight("generate", sample=sample.index, group=sample.group_index):
            completion = await generation.load.complete(
                generation.engine, list(sample.tokens), params, session=session_of(sample)
            )
        heartbeat.note("request")
        progress.advance(0, tokens=len(completion.tokens))
        append_completion(sample, completion)
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
    began: Callable[[], object] | None = None,
) -> list[Sample]:
    """Run generation and hooks for one sample, when an episode may start; a custom function may fan it out.

    A custom function that raises, and generation longer than `timeout_s`, make the sample FAILED with the reason; a
    TimeoutError of the function counts as timed out, too. Engine errors propagate. A finished sample stays unchanged.
    """
    if sample.status not in UNFINISHED:
        return [sample]
    permit = EpisodePermit(generation.load)
    await permit.begin()
    try:
        if began is not None:
            began()
        produced = await _produce(sample, generation, continues, permit)
        progress.advance()
        return [await _run_hooks(each, generation, rollout_id) for each in produced]
    finally:
        permit.end()


async def _produce(
    sample: Sample, generation: Generation, continues: Callable[[], bool], permit: EpisodePermit
) -> list[Sample]:
    prompt, started = sample.tokens[: sample.prompt_length], monotonic()
    try:
        if (function := generation.function_of(sample)) is not None:
            return await _generate_reissued(function, sample, generation, continues, permit)
        async with asyncio.timeout(generation.timeout_s):
            return [await generate_turn(sample, generation, continues)]
    except TimeoutError:
        seconds = min(monotonic() - started, generation.timeout_s or math.inf)
        outcome = Outcome.timed_out(seconds, stage="generate")
    except GenerateFunctionError as error:
        reason = describe_exception(error.cause)
        generation.log_failure("custom generate function", sample, reason)
        kind = "timed_out" if isinstance(error.cause, TimeoutError) else "failed"
        kind = "infra" if isinstance(error.cause, InfraError) else kind
        outcome = Outcome(kind, reason=f"generate raised {reason}", stage="generate")
    reset_response(sample, prompt or [0])  # a row needs a token; it is not trained on
    sample.status, sample.outcome = Status.FAILED, outcome
    return [sample]


async def _generate_reissued(
    function: Function, sample: Sample, generation: Generation, continues: Callable[[], bool], permit: EpisodePermit
) -> list[Sample]:
    """Run the generate function; once more, from the sample as it was issued, if it raises InfraError."""
    origin = copy.deepcopy(vars(sample))
    try:
        return await _generate_custom(function, sample, generation, continues, permit)
    except GenerateFunctionError as error:
        if not isinstance(error.cause, InfraError):
            raise
        generation.log_failure("the infrastructure of the custom generate function", sample, str(error.cause))
        vars(sample).clear()
        vars(sample).update(origin)
        sample.metadata[REISSUED] = describe_exception(error.cause)
    await permit.begin()
    return await _generate_custom(function, sample, generation, continues, permit)


async def _generate_custom(
    function: Function, sample: Sample, generation: Generation, continues: Callable[[], bool], permit: EpisodePermit
) -> list[Sample]:
    """Call the function, score its samples in the environment that it has opened, if any, and close that."""
    params = continuation(sample, generation)
    policy = policy_of_sample(sample, generation, params, continues)
    work = call_generate_function(
        function, sample, params, policy, args=generation.args, evaluation=generation.evaluation
    )
    try:
        produced = await _checked_samples(work, sample, policy, generation)
        judged = [
            each
            for each in produced
            if LEAF not in each.metadata and each.status in (Status.COMPLETED, Status.TRUNCATED)
        ]
        if policy.judge is not None and judged and sample.reward is None:
            async with generation.load.scoring:
                permit.end()
                try:
                    await policy.judge(judged)
                except InfraError as error:
                    raise GenerateFunctionError(error) from error
    finally:
        try:
            await finish(policy.closing.aclose(), CLOSE_S)
        except BaseException as error:
            if not is_raised_by_user(error):
                raise
            raise GenerateFunctionError(error) from error
    return produced


async def _checked_samples(
    work: Coroutine[Any, Any, list[Sample]], sample: Sample, policy: Policy, generation: Generation
) -> list[Sample]:
    try:
        produced = await policy.watch.run(work)
    except EpisodeLimitError:
        if policy.watch.is_overdue and AGENT_ERROR not in sample.metadata:
            raise TimeoutError from None
        produced = [sample]  # with what the function has appended
    finally:
        await policy.end_session()
    if error := sample.metadata.get(AGENT_ERROR):
        generation.log_failure("the agent, whose episode is scored,", sample, str(error))
    produced = session_samples(produced, policy, generation.session_leaves)
    if policy.watch.reached is not None:
        _end_at_limit(produced, policy.watch)
    for each in produced:
        check_produced(each, sample, policy, vocab_size=generation.vocab_size, max_tokens=generation.max_tokens)
    return produced


def policy_of_sample(
    sample: Sample, generation: Generation, params: SamplingParams, continues: Callable[[], bool]
) -> Policy:
    """Return the policy that the generate function of a sample calls."""
    session = session_of(sample)
    context_len = generation.flags.rollout_max_context_len or generation.max_tokens
    conversation = None
    if generation.chat_format is not None:
        conversation = Session(
            generation.chat_format,
            lambda ids, params, part, stream=None: policy.complete(ids, params, part, stream),
            name=session,
            params=params,
            settings=generation.session_settings,
            context_len=context_len,
            limit=lambda: policy.watch.reached or "" if policy.watch.has_ended else "",
        )
    policy = Policy(
        generation.engine,
        generation.tokenizer,
        session,
        generation.params.return_routed_experts,
        context_len,
        continues,
        generation.reward,
        generation.load,
        EpisodeWatch(generation.limits_of(sample), generation.timeout_s),
        conversation,
        generation.session_server,
        is_trained=not generation.evaluation,
    )
    return policy


def _end_at_limit(produced: Sequence[Sample], watch: EpisodeWatch) -> None:
    """Make the samples of an episode that a limit ended TRUNCATED. Raises GenerateFunctionError if nothing is there."""
    if not any(sample.response_length for sample in produced):
        flags = watch.limits
        seconds = {"tool_time": flags.tool_timeout, "turn_time": flags.turn_timeout}.get(
            watch.reached or "", flags.episode_timeout
        )
        raise GenerateFunctionError(TimeoutError(f"nothing was sampled within {seconds:g} s ({watch.reached})"))
    for sample in produced:
        sample.metadata[LIMIT] = watch.reached
        if sample.status in (Status.PENDING, Status.COMPLETED):
            sample.status = Status.TRUNCATED


async def _run_hooks(sample: Sample, generation: Generation, rollout_id: int) -> Sample:
    if sample.status in (Status.FAILED, Status.ABORTED):
        return sample
    for hook in generation.hooks.rollout_sample_hook:
        values = {"rollout_id": rollout_id, "evaluation": generation.evaluation}
        names = accepted_keywords(hook, tuple(values))
        result = hook(generation.args, sample, **{name: values[name] for name in names})
        if inspect.isawaitable(result):
            result = await result
        if not isinstance(result, Sample | None):
            raise RolloutError(
                f"--rollout-sample-hook-path returned {type(result).__name__} for sample {sample.index}; it must "
                "return None to keep the sample, or the Sample to use instead"
            )
        if result is not None and result is not sample:
            copy_identity(result, sample)
            sample = result
        for name in ("loss_mask", "rollout_log_probs", "token_versions"):
            if (column := getattr(sample, name)) and len(column) != sample.response_length:
                raise RolloutError(
                    f"--rollout-sample-hook-path leaves sample {sample.index} with {len(column)} entries of {name} for "
                    f"{sample.response_length} response tokens; a hook that changes tokens must change it with them"
                )
    return sample


def reset_response(sample: Sample, prompt: list[int]) -> None:
    """Reset the sample to its prompt, discarding everything generated."""
    sample.tokens = list(prompt)
    sample.response, sample.response_length = "", 0
    for name in PER_TOKEN:
        setattr(sample, name, None)
    sample.rollout_routed_experts = None
    sample.token_versions, sample.weight_versions, sample.metadata = [], [], sample.metadata or {}
    sample.reward, sample.outcome, sample.status = None, None, Status.PENDING


async def run_group(
    group: Group,
    generation: Generation,
    *,
    rollout_id: int,
    continues: Callable[[], bool],
    wait: RewardWait,
    began: Callable[[], object] | None = None,
) -> Group:
    """Generate and score all samples of a group; fanned-out samples replace their origin.

    An aborted group is returned unscored with ABORTED samples (`is_finished`). continues: whether requests aborted by a
    weight update are continued. began: is called when an episode begins.
    """
    with wait.phase(generating=1):
        produced = await gather_or_cancel(
            generate_sample(sample, generation, rollout_id=rollout_id, continues=continues, began=began)
            for sample in group.samples
        )
    group.samples = [sample for samples in produced for sample in samples]
    if is_finished(group):
        with wait.phase(scoring=1):
            scoring: list[Coroutine[Any, Any, dict[int, Outcome] | None]] = [score(group.samples, generation)]
            if generation.teachers is not None:
                scoring.append(generation.teachers.ask(group.samples))
            failed = (await gather_or_cancel(scoring))[-1] or {}
            for place, outcome in failed.items():
                group.samples[place].status, group.samples[place].outcome = Status.FAILED, outcome
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
        with tracer.flight("reward", group=decisive[0].group_index, samples=len(decisive)):
            outcomes = await generation.reward(decisive)
        for sample, outcome in zip(decisive, outcomes, strict=True):
            sample.outcome = outcome
            if outcome.kind == "scored":
                sample.reward = outcome.reward
            else:
                sample.status = Status.FAILED
                generation.log_failure("the reward", sample, outcome.reason)
    if leaves:
        by_index = {sample.index: sample for sample in samples if LEAF not in sample.metadata}
        for leaf in leaves:
            last = by_index[leaf.index]
            leaf.outcome, leaf.reward = last.outcome, last.reward
            leaf.status = Status.FAILED if last.status is Status.FAILED else leaf.status
    _pick_rewards_of_roles(samples)


def _pick_rewards_of_roles(samples: Sequence[Sample]) -> None:
    """Replace rewards that are a dict by role with the value of the sample's role.

    A dict is one by role if a key is a role of the sample's episode; a role that it lacks fails its samples.
    """
    if not any(isinstance(sample.reward, dict) for sample in samples):
        return
    roles: dict[int | None, set[str]] = defaultdict(set)
    for sample in samples:
        if ROLE in sample.metadata:
            roles[sample.index] |= {role_of(sample), *(sample.metadata.get(ROLES) or ())}
    for sample in samples:
        reward, own = sample.reward, role_of(sample)
        if not isinstance(reward, dict) or not roles[sample.index] & reward.keys():
            continue
        sample.reward = reward.get(own)
        if sample.reward is None:
            has = ", ".join(sorted(reward))
            sample.outcome = Outcome.failed(f"the reward has no value for the role {own}, only for {has}; return one")
            sample.status = Status.FAILED


def is_finished(group: Group) -> bool:
    """Return whether no sample of the group was aborted."""
    return all(sample.status is not Status.ABORTED for sample in group.samples)


def has_failed(group: Group) -> bool:
    """Return whether every sample of the group failed."""
    return all(sample.status is Status.FAILED for sample in group.samples)


@dataclass(frozen=True)
class EvalSet:
    """One evaluation set. `groups` builds its groups, so that every evaluation starts from clean samples."""

    name: str
    groups: Callable[[], list[Group]]
    generation: Generation
    reward_key: str | None = None
    pass_k: bool | tuple[int, ...] = True
    on_samples: Callable[[int, str, list[Sample]], None] | None = None


async def evaluate(sets: Sequence[EvalSet], rollout_id: int, *, report: SampleReport) -> Metrics:
    """Generate and score every set. Returns `eval/<name>` with lengths, truncation and pass@k."""
    started, wait = monotonic(), RewardWait()
    with progress.phase("evaluation", unit="samples") as phase:
        groups = [list(each.groups()) for each in sets]
        phase.total = sum(len(group.samples) for of_set in groups for group in of_set)
        pairs = zip(sets, groups, strict=True)
        groups_of_sets = await gather_or_cancel(_evaluate_set(*pair, rollout_id, wait) for pair in pairs)
    parts: list[Metrics] = []
    data: dict[str, dict[str, Any]] = {}
    for each, groups in zip(sets, groups_of_sets, strict=True):
        parts.append(eval_metrics(each.name, groups, reward_key=each.reward_key, pass_k=each.pass_k))
        data[each.name] = evaluation_data([s for g in groups for s in g.samples], each.reward_key)
    extra = {
        "perf/eval_time": total(monotonic() - started),
        "perf/eval_reward_wait_time": total(wait.seconds),
    }
    return report.of_evaluation(rollout_id, data, merge(parts), extra)


async def _evaluate_set(each: EvalSet, of_set: list[Group], rollout_id: int, wait: RewardWait) -> list[Group]:
    groups = await gather_or_cancel(
        run_group(group, each.generation, rollout_id=rollout_id, continues=lambda: True, wait=wait) for group in of_set
    )
    if each.on_samples is not None:
        each.on_samples(rollout_id, each.name, [s for g in groups for s in g.samples])
    return groups
