"""Generation of one sample: the default single turn, and custom generate functions with checks of their results."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import itertools
import logging
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from furlong.config.hooks import HOOKS, Function, Hooks, check_signature, load_function
from furlong.core.outcome import Outcome
from furlong.core.routing import extend_routes
from furlong.core.sample import STATUS_BY_FINISH_REASON, Group, Sample, Status
from furlong.core.tracing import tracer
from furlong.core.user_code import describe_exception
from furlong.errors import ConfigError, RolloutError
from furlong.interfaces import Completion, Engine, SamplingParams
from furlong.rollout.agent import Policy, dict_from_params, seed_of_part, serving
from furlong.rollout.sample_metrics import RETOKENISED, UNSAMPLED
from furlong.rollout.timers import BlockingTimer

logger = logging.getLogger(__name__)

MAX_LOGGED_FAILURES = 8  # kinds; a message that quotes the response is a new kind for each sample


@functools.cache
def load_generate_function(path: str) -> Function:
    """Load the generate function named by a sample. Raises ConfigError if it is missing or has a wrong signature."""
    function = load_function(path)
    if problem := check_signature(HOOKS["custom_generate_function"], function):
        raise ConfigError(f"Sample.generate_function_path {path!r} cannot be called. {problem}")
    return function


@dataclass(frozen=True)
class Generation:
    """Settings for generating samples of one kind (training, or one evaluation set).

    max_context_len: limit of prompt + response; timeout_s: limit of one sample's generation. Tokens from custom
    functions must be below `vocab_size` and at most `max_tokens` per sample, the model's context. logged_failures:
    kinds of failures of user code already logged; blocking: time that custom functions blocked the event loop.
    """

    params: SamplingParams
    max_context_len: int | None = None
    hooks: Hooks = field(default_factory=Hooks)
    timeout_s: float | None = None
    evaluation: bool = False
    args: Any = None
    vocab_size: int | None = None
    max_tokens: int | None = None
    logged_failures: set[str] = field(default_factory=set[str])
    blocking: BlockingTimer = field(default_factory=BlockingTimer)

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

    def log_failure(self, what: str, sample: Sample, reason: str) -> None:
        """Log that user code failed on a sample: each of the first kinds of failure once. Metrics count all."""
        kind = re.sub(r"\d+", "0", reason)  # lengths and ids differ between samples
        is_new = kind not in self.logged_failures and len(self.logged_failures) < MAX_LOGGED_FAILURES
        if is_new:
            self.logged_failures.add(kind)
        level = logging.WARNING if is_new else logging.DEBUG
        logger.log(level, "%s failed on sample %s: %s", what, sample.index, reason)


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
    return dataclasses.replace(generation.params, max_new_tokens=max(room, 0), sampling_seed=seed)


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
    engine: Engine,
    sample: Sample,
    generation: Generation,
    continues: Callable[[], bool],
    cut_at: int | None = None,
) -> Sample:
    """Generate the response of `sample`, or continue it.

    A request that was aborted by a weight update is continued from its tokens while `continues()`. A response that is
    complete already, in a partial group, stays unchanged. `cut_at`: response length at which the sample is left
    aborted, as if the engine had aborted it.
    """
    while sample.status in (Status.PENDING, Status.ABORTED):
        params = continuation(sample, generation)
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
        if not continues():
            break
    return sample


def _shortened(params: SamplingParams, limit: int) -> SamplingParams:
    """Limit the number of new tokens to `limit`."""
    new, least = min(params.max_new_tokens, limit), min(params.min_new_tokens, limit)
    return dataclasses.replace(params, max_new_tokens=new, min_new_tokens=least)


def session_of(sample: Sample) -> str:
    """Return the session of the sample's requests, for routing affinity and aborts."""
    return sample.session_id or f"sample-{sample.index}"


async def generate_sample(
    engine: Engine,
    tokenizer: Any,
    sample: Sample,
    generation: Generation,
    *,
    rollout_id: int,
    continues: Callable[[], bool],
    cut_at: int | None = None,
) -> list[Sample]:
    """Run generation and hooks for one sample; a custom function may fan it out into several.

    A custom function that raises, and generation longer than `timeout_s`, make the sample FAILED with the reason;
    engine errors propagate. A finished sample stays unchanged.
    """
    if sample.status not in (Status.PENDING, Status.ABORTED):
        return [sample]
    prompt, started = sample.tokens[: sample.prompt_length], time.monotonic()
    try:
        async with asyncio.timeout(generation.timeout_s):
            if (custom := generation.function_of(sample)) is None:
                produced = [await generate_turn(engine, sample, generation, continues, cut_at)]
            else:
                produced = await _call_custom(custom, engine, tokenizer, sample, generation)
    except TimeoutError:
        seconds = min(time.monotonic() - started, generation.timeout_s or math.inf)
        return [_failed(sample, prompt, Outcome.timed_out(seconds, stage="generate"))]
    except _CustomGenerateError as error:
        reason = describe_exception(error.cause)
        generation.log_failure("custom generate function", sample, reason)
        return [_failed(sample, prompt, Outcome.failed(f"generate raised {reason}", stage="generate"))]
    return [await _run_hooks(each, generation, rollout_id) for each in produced]


async def _run_hooks(sample: Sample, generation: Generation, rollout_id: int) -> Sample:
    """Run the hooks on a sample; returns the sample, or the replacement returned by a hook."""
    if sample.status in (Status.FAILED, Status.ABORTED):
        return sample
    for hook in generation.hooks.rollout_sample_hook:
        result = hook(generation.args, sample, rollout_id=rollout_id, evaluation=generation.evaluation)
        if inspect.isawaitable(result):
            result = await result
        if not isinstance(result, Sample | None):
            raise RolloutError(
                f"--rollout-sample-hook-path returned {type(result).__name__} for sample {sample.index}; it must "
                "return None to keep the sample, or the Sample to use instead"
            )
        if result is not None and result is not sample:
            _copy_identity(result, sample)
            check_sample(result, "--rollout-sample-hook-path", generation.vocab_size)
            sample = result
    return sample


async def _call_custom(
    custom: Function, engine: Engine, tokenizer: Any, sample: Sample, generation: Generation
) -> list[Sample]:
    params = dict_from_params(continuation(sample, generation))
    extra = {"evaluation": generation.evaluation} if "evaluation" in inspect.signature(custom).parameters else {}
    policy = Policy(engine, tokenizer, session_of(sample), generation.params.return_routed_experts)
    with serving(policy):
        try:
            result = await generation.blocking.timed(lambda: custom(generation.args, sample, params, **extra))
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise _CustomGenerateError(error) from error  # raised by the function, not a cancellation
        except (Exception, SystemExit) as error:
            raise _CustomGenerateError(error) from error
    produced: list[Any] = list(result) if isinstance(result, list | tuple) else [result]
    if not produced or not all(isinstance(each, Sample) for each in produced):
        raise RolloutError(
            f"--custom-generate-function-path returned {type(result).__name__} for sample {sample.index}; "
            "it must return a Sample or a non-empty list of Sample"
        )
    for each in produced:
        _copy_identity(each, sample)
        check_sample(each, "custom generate function", generation.vocab_size)
        _check_length(each, generation.max_tokens)
        _set_routes(each, policy)
        unsampled = each.effective_response_length - sum(map(len, policy.sampled))
        if policy.sampled and unsampled > 0:  # the origin of tokens not sampled through policy() is unknown
            each.metadata[UNSAMPLED] = unsampled
        elif (position := _first_unsampled(each, policy.sampled)) is not None:
            each.metadata[RETOKENISED] = position
    return produced


def _set_routes(sample: Sample, policy: Policy) -> None:
    """Set the routed experts from the completions whose prompt and tokens are a prefix of the sample."""
    for tokens, routes in policy.routed:
        if sample.tokens[: len(tokens)] == tokens:
            sample.rollout_routed_experts = extend_routes(sample.rollout_routed_experts, routes)


def _first_unsampled(sample: Sample, sampled: list[list[int]]) -> int | None:
    """Return the response position of the first trained token that the engine did not sample, None if there is none.

    Each run of trained tokens must be a prefix of one completion, or of all completions concatenated.
    """
    if not sampled:
        return None
    response = sample.tokens[sample.prompt_length :]
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * len(response)
    concatenated = [token for completion in sampled for token in completion]
    position = 0
    for is_trained, run in itertools.groupby(mask):
        size = len(list(run))
        tokens = response[position : position + size]
        if is_trained and not any(completion[:size] == tokens for completion in (*sampled, concatenated)):
            return position
        position += size
    return None


class _CustomGenerateError(Exception):
    """Wraps an exception raised by user code, to tell it from errors of the engine."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


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
    sample.token_versions, sample.weight_versions = [], []
    sample.reward, sample.outcome, sample.status = None, None, Status.PENDING


def _check_length(produced: Sample, max_tokens: int | None) -> None:
    """Raise _CustomGenerateError for a sample that exceeds the model's context and cannot be trained."""
    if max_tokens is not None and (count := len(produced.tokens)) > max_tokens:
        raise _CustomGenerateError(
            RolloutError(
                f"the function returned a sample of {count} tokens (prompt {produced.prompt_length}, response "
                f"{produced.response_length}), but the model's context has {max_tokens}: end its last turn earlier, "
                "truncate tool output, or raise --rollout-max-context-len if the model supports it"
            )
        )


def _copy_identity(produced: Sample, origin: Sample) -> None:
    """Fill in missing ids and label of a sample built by user code from its origin."""
    for name in ("group_index", "index", "rollout_id", "label"):
        if getattr(produced, name) is None:
            setattr(produced, name, getattr(origin, name))


def check_sample(sample: Sample, source: str, vocab_size: int | None) -> None:
    """Check tokens and per-token lists of a sample from user code; a PENDING one becomes COMPLETED.

    `source` names the function in messages. Tokens must be below `vocab_size` if it is known. Raises RolloutError.
    """
    n = sample.response_length
    if sample.status is Status.PENDING and not n:
        raise RolloutError(
            f"{source}: sample {sample.index} came back without a response; add one with "
            "Sample.append_response_tokens, or set its status to ABORTED or FAILED"
        )
    if sample.status is Status.PENDING:
        sample.status = Status.COMPLETED
    for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs", "token_versions"):
        column = getattr(sample, name)
        if column is not None and len(column) not in (0, n):
            raise RolloutError(
                f"{source}: sample {sample.index} has response_length {n} but {name} has {len(column)} entries; use "
                "Sample.append_response_tokens, which keeps them consistent"
            )
    log_probs = [] if sample.rollout_log_probs is None else sample.rollout_log_probs
    if not all(issubclass(kind, Real) for kind in set(map(type, log_probs))) or not all(map(math.isfinite, log_probs)):
        raise RolloutError(
            f"{source}: sample {sample.index} has rollout_log_probs that are not finite numbers; "
            "set them to None if they are unknown, and to 0.0 for tokens that the policy did not generate"
        )
    if len(sample.tokens) <= n:
        raise RolloutError(
            f"{source}: sample {sample.index} has {len(sample.tokens)} tokens and response_length {n}; "
            "`tokens` must contain prompt + response"
        )
    _check_token_ids(sample, source, vocab_size)


def _check_token_ids(sample: Sample, source: str, vocab_size: int | None) -> None:
    """Raise RolloutError for token ids outside the model's vocabulary, which no engine has checked."""
    if wrong := [kind.__name__ for kind in set(map(type, sample.tokens)) if not issubclass(kind, Integral)]:
        raise RolloutError(
            f"{source}: sample {sample.index} has {', '.join(wrong)} among its tokens; give token ids, for example "
            "from policy().encode in a generate function"
        )
    if vocab_size is not None and (min(sample.tokens) < 0 or max(sample.tokens) >= vocab_size):
        raise RolloutError(
            f"{source}: sample {sample.index} has token ids from {min(sample.tokens)} to {max(sample.tokens)}, but the "
            f"model has ids 0 to {vocab_size - 1}; encode text with its tokenizer"
        )
