"""One sample's response: the default single-turn generation, and the call of a custom one."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import itertools
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from furlong.core.outcome import Outcome
from furlong.core.routing import extend_routes
from furlong.core.sample import STATUS_BY_FINISH_REASON, Group, Sample, Status
from furlong.core.trace import tracer
from furlong.core.user_code import describe_exception
from furlong.errors import RolloutError
from furlong.interfaces import Completion, Engine, SamplingParams
from furlong.rollout.agent import Policy, dict_from_params, seed_of_part, serving
from furlong.rollout.loop_blocking import Held
from furlong.rollout.sample_checks import check_made
from furlong.rollout.sample_metrics import RETOKENISED, UNSAMPLED

logger = logging.getLogger(__name__)

TOLD_FAILURES = 8  # kinds; a message that quotes the response is a kind of its own for each sample

CustomGenerate = Callable[..., Awaitable[Sample | list[Sample]]]


@dataclass(frozen=True)
class Generation:
    """How samples of one kind (training, or one evaluation set) are generated.

    `max_context_len` bounds prompt + response; `custom` replaces the single turn, and `named` finds the function that a
    sample names for itself instead (`Sample.generate_function_path`); `hooks` run after generation and before the
    reward; `timeout_s` bounds one sample's generation, None for no bound. Tokens that come from `custom`
    have to be below `vocab_size`, and no more than `most_tokens`, which the model's positions allow. `told`: the
    failures of user code that were logged already, with 0 for every number. `held`: how long `custom` kept the event
    loop.
    """

    params: SamplingParams
    max_context_len: int | None = None
    custom: CustomGenerate | None = None
    named: Callable[[str], CustomGenerate] | None = None
    hooks: tuple[Callable[..., Any], ...] = ()
    timeout_s: float | None = None
    evaluation: bool = False
    args: Any = None
    vocab_size: int | None = None
    most_tokens: int | None = None
    told: set[str] = field(default_factory=set[str])
    held: Held = field(default_factory=Held)

    def function_of(self, sample: Sample) -> CustomGenerate | None:
        """What generates the sample in place of the single turn. Raises ConfigError for a path that is no function."""
        if (path := sample.generate_function_path) is None:
            return self.custom
        if self.named is None:
            raise RolloutError(f"sample {sample.index} names its generate function, {path}, and nothing here finds it")
        return self.named(path)

    def is_custom(self, group: Group) -> bool:
        """Whether a user's function generates samples of the group; it may change them as it likes."""
        return self.custom is not None or any(sample.generate_function_path is not None for sample in group.samples)


def tell_failure(how: Generation, what: str, sample: Sample, reason: str) -> None:
    """Log that user code failed on a sample: the first few kinds of failure, each once. Metrics count them all."""
    kind = re.sub(r"\d+", "0", reason)  # lengths and ids differ from sample to sample
    is_new = kind not in how.told and len(how.told) < TOLD_FAILURES
    if is_new:
        how.told.add(kind)
    logger.log(logging.WARNING if is_new else logging.DEBUG, "%s failed on sample %s: %s", what, sample.index, reason)


def continuation(sample: Sample, how: Generation) -> SamplingParams:
    """Sampling parameters for what is left of `sample`'s response, seeded for this position.

    Raises RolloutError if the prompt leaves no room for a response.
    """
    room = how.params.max_new_tokens - sample.response_length
    if how.max_context_len is not None:
        room = min(room, how.max_context_len - len(sample.tokens))
    if room <= 0 and sample.response_length == 0:
        raise RolloutError(
            f"sample {sample.index}: a prompt of {len(sample.tokens)} tokens leaves no room in a context of "
            f"{how.max_context_len}; raise --rollout-max-context-len or filter with --rollout-max-prompt-len"
        )
    seed = None if sample.seed is None else seed_of_part(sample.seed, sample.response_length)
    return dataclasses.replace(how.params, max_new_tokens=max(room, 0), sampling_seed=seed)


def append_completion(sample: Sample, completion: Completion) -> None:
    """Add one engine answer to the sample's response and take over its finish reason."""
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
    engine: Engine, sample: Sample, how: Generation, is_wanted: Callable[[], bool], cut_at: int | None = None
) -> Sample:
    """Generate, or go on generating, the response of `sample` with one engine call.

    A request that a weight update aborted is continued from its tokens as long as `is_wanted()`. A response that ended
    in an earlier rollout, in a group that was cut off, is left as it is. `cut_at`: response length at which the sample
    is left aborted, as if the engine had been told to.
    """
    while sample.status in (Status.PENDING, Status.ABORTED):
        params = continuation(sample, how)
        if cut_at is not None and sample.response_length >= cut_at:
            sample.status = Status.ABORTED
            return sample
        if cut_at is not None:
            params = _shortened(params, cut_at - sample.response_length)
        if params.max_new_tokens == 0:
            sample.status = Status.TRUNCATED
            return sample
        with tracer.flight("generate", sample=sample.index, group=sample.group_index):
            completion = await engine.generate(list(sample.tokens), params, session=session_of(sample))
        append_completion(sample, completion)
        if sample.response_length == cut_at and completion.finish_reason == "length":
            sample.status = Status.ABORTED
        if not is_wanted():
            break
    return sample


def _shortened(params: SamplingParams, most: int) -> SamplingParams:
    """The same tokens, but at most so many."""
    new, least = min(params.max_new_tokens, most), min(params.min_new_tokens, most)
    return dataclasses.replace(params, max_new_tokens=new, min_new_tokens=least)


def session_of(sample: Sample) -> str:
    """The name under which the engine knows the sample's requests, for affinity and for aborting them."""
    return sample.session_id or f"sample-{sample.index}"


async def generate_sample(
    engine: Engine,
    tokenizer: Any,
    sample: Sample,
    how: Generation,
    *,
    rollout_id: int,
    is_wanted: Callable[[], bool],
    cut_at: int | None = None,
) -> list[Sample]:
    """Run generation and hooks for one sample; a custom function may fan it out into several.

    A custom function that raises, and generation that takes longer than `how.timeout_s`, make the sample FAILED with
    the reason; errors of the engine propagate. A sample that is finished already is left as it is.
    """
    if sample.status not in (Status.PENDING, Status.ABORTED):
        return [sample]
    prompt, started = sample.tokens[: sample.prompt_length], time.monotonic()
    try:
        async with asyncio.timeout(how.timeout_s):
            if (custom := how.function_of(sample)) is None:
                produced = [await generate_turn(engine, sample, how, is_wanted, cut_at)]
            else:
                produced = await _call_custom(custom, engine, tokenizer, sample, how)
    except TimeoutError:
        seconds = min(time.monotonic() - started, how.timeout_s or math.inf)
        return [_failed(sample, prompt, Outcome.timed_out(seconds, stage="generate"))]
    except _CustomGenerateError as error:
        reason = describe_exception(error.cause)
        tell_failure(how, "custom generate function", sample, reason)
        return [_failed(sample, prompt, Outcome.failed(f"generate raised {reason}", stage="generate"))]
    return [await _hooked(each, how, rollout_id) for each in produced]


async def _hooked(sample: Sample, how: Generation, rollout_id: int) -> Sample:
    """Return what the hooks make of a sample: itself, or the one that they return in its place."""
    if sample.status in (Status.FAILED, Status.ABORTED):
        return sample
    for hook in how.hooks:
        result = hook(how.args, sample, rollout_id=rollout_id, evaluation=how.evaluation)
        if inspect.isawaitable(result):
            result = await result
        if not isinstance(result, Sample | None):
            raise RolloutError(
                f"--rollout-sample-hook-path returned {type(result).__name__} for sample {sample.index}; it must "
                "return None, which keeps the sample, or the Sample to go on with"
            )
        if result is not None and result is not sample:
            _complete_identity(result, sample)
            check_made(result, "--rollout-sample-hook-path", how.vocab_size)
            sample = result
    return sample


async def _call_custom(
    custom: CustomGenerate, engine: Engine, tokenizer: Any, sample: Sample, how: Generation
) -> list[Sample]:
    params = dict_from_params(continuation(sample, how))
    extra = {"evaluation": how.evaluation} if "evaluation" in inspect.signature(custom).parameters else {}
    policy = Policy(engine, tokenizer, session_of(sample), how.params.return_routed_experts)
    with serving(policy):
        try:
            result = await how.held.timed(lambda: custom(how.args, sample, params, **extra))
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise _CustomGenerateError(error) from error  # nobody cancelled it: the function raised it
        except (Exception, SystemExit) as error:
            raise _CustomGenerateError(error) from error
    produced: list[Any] = list(result) if isinstance(result, list | tuple) else [result]
    if not produced or not all(isinstance(each, Sample) for each in produced):
        raise RolloutError(
            f"--custom-generate-function-path returned {type(result).__name__} for sample {sample.index}; "
            "it must return a Sample or a non-empty list of Sample"
        )
    for each in produced:
        _complete_identity(each, sample)
        check_made(each, "custom generate function", how.vocab_size)
        _check_length(each, how.most_tokens)
        _take_routes(each, policy)
        unsampled = each.effective_response_length - sum(map(len, policy.sampled))
        if policy.sampled and unsampled > 0:  # what it got from elsewhere than policy() is not known
            each.metadata[UNSAMPLED] = unsampled
        elif (position := _first_other_token(each, policy.sampled)) is not None:
            each.metadata[RETOKENISED] = position
    return produced


def _take_routes(sample: Sample, policy: Policy) -> None:
    """Add the experts of each answer whose tokens, with those it answers, are what the sample begins with."""
    for tokens, routes in policy.routed:
        if sample.tokens[: len(tokens)] == tokens:
            sample.rollout_routed_experts = extend_routes(sample.rollout_routed_experts, routes)


def _first_other_token(sample: Sample, sampled: list[list[int]]) -> int | None:
    """Where in the response the first trained token is that no answer of the engine has there; None if all are its own.

    Each stretch of trained tokens has to be the begin of an answer, or of all answers one after the other.
    """
    if not sampled:
        return None
    response = sample.tokens[sample.prompt_length :]
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * len(response)
    everything = [token for answer in sampled for token in answer]
    position = 0
    for is_trained, stretch in itertools.groupby(mask):
        size = len(list(stretch))
        tokens = response[position : position + size]
        if is_trained and not any(answer[:size] == tokens for answer in (*sampled, everything)):
            return position
        position += size
    return None


class _CustomGenerateError(Exception):
    """What a user's function raised, apart from the errors of everything around it."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _failed(sample: Sample, prompt: list[int], outcome: Outcome) -> Sample:
    """Make the sample FAILED, without what was generated or half written until then."""
    forget_response(sample, prompt or [0])  # a row needs a token, and messages may have none yet; none is trained on
    sample.status, sample.outcome = Status.FAILED, outcome
    return sample


def forget_response(sample: Sample, prompt: list[int]) -> None:
    """Bring the sample back to its prompt, as if nothing had been generated."""
    sample.tokens = list(prompt)
    sample.response, sample.response_length, sample.loss_mask = "", 0, None
    sample.rollout_log_probs, sample.teacher_log_probs, sample.rollout_routed_experts = None, None, None
    sample.token_versions, sample.weight_versions = [], []
    sample.reward, sample.outcome, sample.status = None, None, Status.PENDING


def _check_length(produced: Sample, most_tokens: int | None) -> None:
    """Fail a sample that is longer than the model's positions, which no engine has seen and none could train."""
    if most_tokens is not None and (count := len(produced.tokens)) > most_tokens:
        raise _CustomGenerateError(
            RolloutError(
                f"a sample came back with {count} tokens, a prompt of {produced.prompt_length} and a response of "
                f"{produced.response_length}, and the model's context has {most_tokens}: end its last turn earlier, "
                "cut what tools answer, or give a larger --rollout-max-context-len if the model can take it"
            )
        )


def _complete_identity(produced: Sample, origin: Sample) -> None:
    """Give a sample that user code built the identity of the one it came from."""
    for name in ("group_index", "index", "rollout_id", "label"):
        if getattr(produced, name) is None:
            setattr(produced, name, getattr(origin, name))
